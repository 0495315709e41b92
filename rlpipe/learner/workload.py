"""What a run has the learner do, as far as memory and seconds of an update depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.packing import pack_fullest
from rlpipe.types import MicroBatch, Rollout

if TYPE_CHECKING:  # the driver, which reads the workload, needs no model
    from torch import Tensor

    from rlpipe.learner.forward import TokenScorer
    from rlpipe.learner.row_plan import Row


@dataclass(kw_only=True, slots=True, frozen=True)
class Workload:
    """As it stands, that of one micro batch of which only log-probs are asked for."""

    num_micro_batches: int = 1
    """Of an update, all sequences at full length."""
    temperature: float = 1.0
    with_entropy: bool = False
    trains_entropy: bool = False
    """Whether the loss depends on it."""
    has_copy: bool = False
    """Whether a frozen copy of the whole model lies beside the policy."""

    def loss_of(self, scorer: TokenScorer, row: Row, chunk_tokens: int) -> Tensor:
        """A loss that takes as much as that of the run, with ``chunk_tokens`` of logits at one time."""
        logprobs, entropy = scorer.logprobs(row, self.temperature, chunk_tokens, self.with_entropy, self.trains_entropy)
        if entropy is not None and self.trains_entropy:
            logprobs = logprobs + entropy
        return logprobs.sum()


def read_workload(config: Config) -> Workload:
    algorithm, is_rl = config.algorithm, config.algorithm.kind == "rl"
    return Workload(
        num_micro_batches=pack_full(config)[0],
        temperature=config.rollout.sampling.temperature if is_rl else 1.0,
        with_entropy=is_rl,
        trains_entropy=is_rl and bool(algorithm.loss.entropy_coef),
        has_copy=needs_copy(config.model, algorithm),
    )


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    is_read = bool(algorithm.loss.beta) or reads_features(algorithm)
    return algorithm.kind == "ebft_strided" or (algorithm.kind == "rl" and is_read)


def reads_features(algorithm: AlgorithmConfig) -> bool:
    """Whether ranks compute the run's rewards with the reference."""
    return algorithm.ebft.reward and algorithm.ebft.features.weights == "learner"


def needs_copy(model: ModelConfig, algorithm: AlgorithmConfig) -> bool:
    """Whether the reference is a copy of the whole model, which lies beside it."""
    return model.adapter.kind == "none" and needs_reference(algorithm)


def pack_full(config: Config) -> tuple[int, MicroBatch]:
    """As the run packs a step: how many micro batches an update has on a rank, and the one with most work.

    Raises ``ConfigError`` for sequences that fit into no micro batch.
    """
    algorithm, learner = config.algorithm, config.learner
    return pack_fullest(
        [*_rollouts(config)],
        num_ranks=learner.num_ranks,
        max_tokens=learner.max_tokens_per_microbatch,
        num_minibatches=algorithm.num_minibatches,
        num_epochs=algorithm.num_epochs_per_step,
    )


def num_sequences(algorithm: AlgorithmConfig) -> int:
    """Of a step, on all ranks."""
    return algorithm.groups_per_step * (algorithm.group_size if algorithm.kind == "rl" else 1)


def sequence_tokens(config: Config) -> int:
    """Of a prompt with a completion; rows of SFT may fill a micro batch."""
    if config.algorithm.kind != "rl":
        return config.learner.max_tokens_per_microbatch
    return config.data.max_prompt_tokens + config.rollout.sampling.max_tokens


def _rollouts(config: Config) -> Iterator[Rollout]:
    """Groups with prompts of their own."""
    is_rl, length = config.algorithm.kind == "rl", sequence_tokens(config)
    mask = np.arange(length) >= (config.data.max_prompt_tokens if is_rl else 1)
    versions, numbers = np.zeros(length, np.int32), np.ones(length, np.float32)
    group_size = config.algorithm.group_size if is_rl else 1
    for index in range(num_sequences(config.algorithm)):
        group, sample = divmod(index, group_size)
        yield Rollout(
            group_id=group,
            sample_index=sample,
            prompt_id=group,
            task={},
            token_ids=np.broadcast_to(np.int32(group), length),
            loss_mask=mask,
            logprobs=numbers,
            policy_versions=versions,
            advantages=numbers,
        )
