"""What the learner has to do in a step: its updates, their micro batches, and the rows that those are run as."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from rlpipe.configs.schema import Config
from rlpipe.configs.schema_algorithm import AlgorithmConfig
from rlpipe.data.packing import pack_step
from rlpipe.errors import ConfigError
from rlpipe.learner.rows import Layout, Row, plan_row
from rlpipe.types import Rollout


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """Of a rank, all sequences at full length."""

    num_sequences: int
    """Of a step, on all ranks."""
    sequence_tokens: int
    num_updates: int
    """Of a step."""
    updates_per_pass: int
    """Of one epoch over the step's sequences."""
    num_micro_batches: int
    """Of an update."""
    num_logprob_passes: float
    """Forward passes without gradient, for each micro batch: of the policy as it was at the step's start."""
    num_reference_passes: int
    """The same of the reference."""
    row: Row
    """That of the micro batch with most work."""

    @property
    def update_sequences(self) -> float:
        """Of an update, on all ranks."""
        return self.num_sequences / self.updates_per_pass

    @property
    def step_tokens(self) -> int:
        """Of a step, on all ranks; each counts once, however often it is trained."""
        return self.num_sequences * self.sequence_tokens


def read_work(config: Config, layout: Layout) -> Work:
    """Packs a step as the run does. Raises ``ConfigError`` for sequences that fit into no micro batch."""
    algorithm, learner = config.algorithm, config.learner
    length = sequence_tokens(config)
    if length > learner.max_tokens_per_microbatch:
        raise ConfigError(
            f"learner.max_tokens_per_microbatch={learner.max_tokens_per_microbatch} holds no sequence of {length:,} "
            f"tokens (data.max_prompt_tokens and rollout.sampling.max_tokens): set it to at least {length}"
        )
    rollouts = [*_rollouts(config, length)]
    batch = pack_step(
        rollouts,
        step=0,
        num_ranks=learner.num_ranks,
        max_tokens=learner.max_tokens_per_microbatch,
        num_minibatches=algorithm.num_minibatches,
        num_epochs=algorithm.num_epochs_per_step,
    )[0]
    fullest = max(batch.mini_batches, key=lambda mini_batch: len(mini_batch.micro_batches))
    num_updates = len(batch.mini_batches)
    return Work(
        num_sequences=len(rollouts),
        sequence_tokens=length,
        num_updates=num_updates,
        updates_per_pass=num_updates // algorithm.num_epochs_per_step,
        num_micro_batches=len(fullest.micro_batches),
        num_logprob_passes=(num_updates - 1) / num_updates if algorithm.kind == "rl" else 0,
        num_reference_passes=_reference_passes(algorithm),
        row=plan_row(fullest.micro_batches[0], layout=layout, device=torch.device("cpu")),
    )


def _reference_passes(algorithm: AlgorithmConfig) -> int:
    """For the KL, and for rewards that the learner computes as EBFT's features."""
    if algorithm.kind != "rl":
        return 0
    reads_features = algorithm.ebft.reward and algorithm.ebft.features.weights == "learner"
    return int(algorithm.loss.beta > 0) + int(reads_features)


def sequence_tokens(config: Config) -> int:
    """Of a prompt with a completion; rows of SFT may fill a micro batch."""
    if config.algorithm.kind != "rl":
        return config.learner.max_tokens_per_microbatch
    return config.data.max_prompt_tokens + config.rollout.sampling.max_tokens


def _rollouts(config: Config, length: int) -> Iterator[Rollout]:
    """Groups with prompts of their own."""
    algorithm, is_rl = config.algorithm, config.algorithm.kind == "rl"
    prompt = config.data.max_prompt_tokens if is_rl else 1
    for group in range(algorithm.groups_per_step):
        token_ids = np.full(length, group, np.int32)
        for sample in range(algorithm.group_size if is_rl else 1):
            yield Rollout(
                group_id=group,
                sample_index=sample,
                prompt_id=group,
                task={},
                token_ids=token_ids,
                loss_mask=np.arange(length) >= prompt,
                logprobs=np.zeros(length, np.float32),
                policy_versions=np.zeros(length, np.int32),
                advantages=np.ones(length, np.float32),
            )
