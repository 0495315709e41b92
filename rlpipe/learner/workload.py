"""The learner's workload in a run, from which the memory and seconds of an update are predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.root_config import Config, longest_conversation, max_sampled_tokens
from rlpipe.data.packing import pack_fullest
from rlpipe.types import MicroBatch, Rollout

if TYPE_CHECKING:  # the driver, which reads the workload, needs no model
    from torch import Tensor

    from rlpipe.learner.forward import LogprobModel
    from rlpipe.learner.row_plan import Row


LM_HEAD = "lm_head"
REWARD_HEADS = ("reward_model", "process_reward_model")
"""Kinds of algorithms that train a reward head in place of the lm_head."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Workload:
    """The work of an update on a rank; by default, the log-probs of one micro batch."""

    num_micro_batches: int = 1
    """Micro batches of an update, with all sequences at full length."""
    temperature: float = 1.0
    with_entropy: bool = False
    trains_entropy: bool = False
    """True if the loss depends on the entropy."""
    takes_masks: bool = False
    """True if each row has an attention mask of its own."""
    head: str = LM_HEAD
    """Head of the model: ``LM_HEAD``, or one of ``REWARD_HEADS``."""
    copied_for: AlgorithmConfig | None = None
    """The algorithm that reads a frozen copy of the model beside the policy; None if there is no copy."""

    def loss_of(self, module: LogprobModel, row: Row, chunk_tokens: int) -> Tensor:
        """Compute a loss of the same cost as the run's, with the logits of ``chunk_tokens`` tokens at a time."""
        if self.head != LM_HEAD:
            return module.head_outputs(row).sum()
        logprobs, entropy = module.logprobs(row, self.temperature, chunk_tokens, self.with_entropy, self.trains_entropy)
        if entropy is not None and self.trains_entropy:
            logprobs = logprobs + entropy
        return logprobs.sum()


def read_workload(config: Config) -> Workload:
    algorithm, is_rl = config.algorithm, config.algorithm.kind == "rl"
    return Workload(
        num_micro_batches=pack_full(config)[0],
        temperature=config.rollout.sampling.temperature if is_rl else 1.0,
        with_entropy=is_rl,
        trains_entropy=is_rl and algorithm.loss.trains_entropy,
        takes_masks=algorithm.kind == "ebft_strided",
        head=head_of(algorithm),
        copied_for=algorithm if needs_copy(config.model, algorithm) else None,
    )


def head_of(algorithm: AlgorithmConfig) -> str:
    """Return the head of the model that the algorithm trains."""
    return algorithm.kind if algorithm.kind in REWARD_HEADS else LM_HEAD


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    if algorithm.kind == "rl":
        return reads_logprobs(algorithm) or reads_features(algorithm)
    return algorithm.kind == "ebft_strided" or reads_logprobs(algorithm)


def reads_logprobs(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss or the rewards need log-probs of the reference, and not its hidden states alone."""
    if algorithm.kind == "preference" or algorithm.samples_pairs:
        return algorithm.preference.runs_reference
    in_reward = algorithm.kind == "rl" and algorithm.reward_kl.coef > 0
    return in_reward or (algorithm.kind not in ("sft", *REWARD_HEADS) and algorithm.loss.beta > 0)


def reads_features(algorithm: AlgorithmConfig) -> bool:
    """Return whether ranks compute the run's rewards with the reference."""
    return algorithm.ebft.reward and algorithm.ebft.features.weights == "learner"


def needs_copy(model: ModelConfig, algorithm: AlgorithmConfig) -> bool:
    """Return whether the reference is a separate copy of the whole model."""
    return model.adapter.kind == "none" and needs_reference(algorithm)


def pack_full(config: Config) -> tuple[int, MicroBatch]:
    """Return the number of micro batches of an update on a rank, and the costliest one, packed as in the run.

    Raises ``ConfigError`` for sequences that fit into no micro batch.
    """
    algorithm, learner = config.algorithm, config.learner
    return pack_fullest(
        [*full_rollouts(config)],
        num_ranks=learner.num_ranks,
        max_tokens=learner.max_tokens_per_microbatch,
        num_minibatches=algorithm.num_minibatches,
        num_epochs=algorithm.num_epochs_per_step,
    )


def num_sequences(algorithm: AlgorithmConfig) -> int:
    """Return the number of sequences of a step, on all ranks."""
    return algorithm.groups_per_step * sequences_of_group(algorithm)


def sequences_of_group(algorithm: AlgorithmConfig) -> int:
    """Return the sequences that belong together: of a prompt, or of a row.

    A row of KTO counts as one, because the config does not say whether rows are pairs, which make two.
    """
    if takes_pairs(algorithm):
        return 2
    return algorithm.group_size if algorithm.kind == "rl" else 1


def takes_pairs(algorithm: AlgorithmConfig) -> bool:
    """Return whether the loss needs two sequences at once."""
    return algorithm.compares_pairs or algorithm.kind == "reward_model"


def sequence_tokens(config: Config) -> int:
    """Return the most tokens of a prompt with its completion, or of an episode; rows may fill a micro batch."""
    if config.algorithm.kind != "rl":
        return config.learner.max_tokens_per_microbatch // sequences_of_group(config.algorithm)
    if config.environment.is_used:
        return longest_conversation(config)
    return config.data.max_prompt_tokens + config.rollout.sampling.max_tokens


def full_rollouts(config: Config) -> Iterator[Rollout]:
    """Yield the rollouts of a step at full length, with a different prompt for each group."""
    is_rl, length = config.algorithm.kind == "rl", sequence_tokens(config)
    is_completion = np.arange(length) >= (config.data.max_prompt_tokens if is_rl else 1)
    mask = is_completion & _are_sampled(config, is_completion) if is_rl else is_completion
    versions, ones = np.zeros(length, np.int32), np.ones(length, np.float32)
    group_size = sequences_of_group(config.algorithm)
    sequences = [
        Rollout(
            group_id=index // group_size,
            sample_index=index % group_size,
            prompt_id=index // group_size,
            task={},
            # Rollouts of a group share only their prompt.
            token_ids=np.where(is_completion, index, index // group_size).astype(np.int32),
            loss_mask=mask,
            logprobs=ones,
            policy_versions=versions,
            advantages=ones,
        )
        for index in range(num_sequences(config.algorithm))
    ]
    if takes_pairs(config.algorithm):
        for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True):
            yield replace(chosen, rejected=rejected)
        return
    yield from sequences


def _are_sampled(config: Config, is_completion: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which tokens the policy samples: evenly as many as it may, the last one among them."""
    counts, total = np.cumsum(is_completion), int(is_completion.sum())
    sampled = counts * max_sampled_tokens(config) // max(total, 1)
    return np.diff(sampled, prepend=0) > 0
