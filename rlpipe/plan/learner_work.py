"""The learner's work in a step: its updates, their micro batches, and the rows that these are run as."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.learner.row_plan import AttentionLayout, Row, plan_row
from rlpipe.learner.workload import num_sequences, pack_full, reads_features, sequence_tokens


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """Work of a rank, with all sequences at full length."""

    num_sequences: int
    """Sequences of a step, on all ranks."""
    sequence_tokens: int
    num_updates: int
    """Updates of a step."""
    updates_per_pass: int
    """Updates per epoch over the step's sequences."""
    num_micro_batches: int
    """Micro batches of an update."""
    num_logprob_passes: float
    """Forward passes without gradient per micro batch, for the policy's log-probs at the step's start."""
    num_reference_passes: int
    """Forward passes of the reference per micro batch."""
    row: Row
    """Row of the micro batch with the most work."""

    @property
    def update_sequences(self) -> float:
        """Sequences of an update, on all ranks."""
        return self.num_sequences / self.updates_per_pass

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all ranks; each counts once, however often it is trained on."""
        return self.num_sequences * self.sequence_tokens


def read_work(config: Config, layout: AttentionLayout) -> Work:
    """Pack a step as the run does; raise ``ConfigError`` for sequences that fit into no micro batch."""
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
    """Return the reference passes: one for the KL, and one for features that the learner computes for EBFT."""
    if algorithm.kind != "rl":
        return 0
    return int(algorithm.loss.beta > 0) + int(reads_features(algorithm))
