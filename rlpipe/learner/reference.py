"""The reference model, for the policy's KL and for EBFT's features: the model without adapter, or a frozen copy.

Shapes: M tokens of a row, K targets, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from peft import PeftModel
from torch import Tensor, nn

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, ReferenceConfig
from rlpipe.errors import ConfigError
from rlpipe.learner.policy import Policy, load_scorer
from rlpipe.learner.row_plan import Row
from rlpipe.learner.workload import needs_reference


class Reference(Protocol):
    def logprobs(self, row: Row, *, temperature: float, chunk_tokens: int) -> Tensor:
        """Return the log-probs ``[K]`` of the row's targets, without gradient."""

    def depths(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        """Return the hidden states of all tokens at some depths, each ``[M, H]``, no gradient; 0 is the embedding."""

    def end_step(self, num_steps_done: int) -> None:
        """Update the reference if it is due; called after every step."""

    def moving(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by name; a checkpoint must hold them."""


class AdapterOff:
    """The policy's model with its LoRA adapter disabled, which takes no extra memory."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, row: Row, *, temperature: float, chunk_tokens: int) -> Tensor:
        with self._policy.adapter_off(), self._policy.inference():
            return self._policy.scorer.logprobs(row, temperature, chunk_tokens)[0]

    def depths(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        with self._policy.adapter_off(), self._policy.inference():
            return self._policy.scorer.depths(row, indices)

    def end_step(self, num_steps_done: int) -> None:
        pass

    def moving(self) -> dict[str, nn.Parameter]:
        return {}


class FrozenCopy:
    """A copy of the whole model, fixed or updated by an exponential average (as TRL's sync_ref_model).

    Every ``sync_steps`` steps, reference = mixup · policy + (1 - mixup) · reference. The copy is loaded from
    ``model.path`` and sharded over the ranks as the policy is.
    """

    def __init__(self, policy: Policy, config: ReferenceConfig) -> None:
        self._policy = policy
        self._config = config
        self.scorer = load_scorer(policy.config, "cpu" if policy.sharding.loads_on_cpu else policy.device)
        self.scorer.requires_grad_(False).eval()
        policy.sharding.shard(self.scorer, trained=False)

    @torch.no_grad()
    def logprobs(self, row: Row, *, temperature: float, chunk_tokens: int) -> Tensor:
        logprobs = self.scorer.logprobs(row, temperature, chunk_tokens)[0]
        self._policy.sharding.end_inference(self.scorer)
        return logprobs

    @torch.no_grad()
    def depths(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        found = self.scorer.depths(row, indices)
        self._policy.sharding.end_inference(self.scorer)
        return found

    @torch.no_grad()
    def end_step(self, num_steps_done: int) -> None:
        if not self._config.sync_steps or num_steps_done % self._config.sync_steps:
            return
        own = dict(self.scorer.model.named_parameters())
        for name, parameter in self._policy.model.named_parameters():
            self._policy.sharding.move(own[name], parameter, self._config.mixup)

    def moving(self) -> dict[str, nn.Parameter]:
        """Return nothing if the copy is fixed, because ``model.path`` holds it then."""
        return dict(self.scorer.model.named_parameters()) if self._config.sync_steps else {}


def make_reference(policy: Policy, algorithm: AlgorithmConfig) -> Reference | None:
    """Make the reference that the config needs, or None; raise ``ConfigError`` if ``sync_steps`` is set with LoRA."""
    if not needs_reference(algorithm):
        return None
    if not isinstance(policy.model, PeftModel):
        copy = FrozenCopy(policy, algorithm.reference)
        if algorithm.kind == "ebft_strided":
            copy.scorer.take_masks(policy.config.attention)
        return copy
    if algorithm.reference.sync_steps:
        raise ConfigError(
            "algorithm.reference.sync_steps moves the frozen copy of full training; "
            "with a LoRA adapter the reference is the model below it: set it to 0"
        )
    return AdapterOff(policy)
