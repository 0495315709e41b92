"""What the learner has to do in a step: its updates, their micro batches, and the rows that those are run as."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.learner.row_plan import AttentionLayout, Row, plan_row
from rlpipe.learner.workload import num_sequences, pack_full, reads_features, sequence_tokens


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


def read_work(config: Config, layout: AttentionLayout) -> Work:
    """Packs a step as the run does. Raises ``ConfigError`` for sequences that fit into no micro batch."""
    algorithm, sequences = config.algorithm, num_sequences(config.algorithm)
    num_micro_batches, fullest = pack_full(config)
    updates_per_pass = min(algorithm.num_minibatches, sequences)
    num_updates = updates_per_pass * algorithm.num_epochs_per_step
    return Work(
        num_sequences=sequences,
        sequence_tokens=sequence_tokens(config),
        num_updates=num_updates,
        updates_per_pass=updates_per_pass,
        num_micro_batches=num_micro_batches,
        num_logprob_passes=(num_updates - 1) / num_updates if algorithm.kind == "rl" else 0,
        num_reference_passes=_reference_passes(algorithm),
        row=plan_row(fullest, layout=layout, device=torch.device("cpu")),
    )


def _reference_passes(algorithm: AlgorithmConfig) -> int:
    """For the KL, and for rewards that the learner computes as EBFT's features."""
    if algorithm.kind != "rl":
        return 0
    return int(algorithm.loss.beta > 0) + int(reads_features(algorithm))
