"""The settings of a learner rank; imports neither torch nor Ray Train, because the driver creates them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import SamplingConfig
from rlpipe.configs.schema.root_config import CheckpointConfig, WeightsConfig
from rlpipe.learner.workload import Workload


@dataclass(kw_only=True, frozen=True)
class LearnerSetup:
    """Settings of a learner rank for a run; ``weights_actor`` is None if the run has no engines, as in SFT."""

    model: ModelConfig
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    workload: Workload
    sampling: SamplingConfig
    served_dtype: str | None
    """Dtype that engines compute in: ``rollout.dtype``."""
    weights: WeightsConfig
    checkpoint: CheckpointConfig
    output: Path
    seed: int
    evaluate_every: int
    """Steps between the learner's evaluations on held-out rows; 0: only at the start and the end."""
    resume_from: Path | None
    resolved_config: Mapping[str, Any]
    batches: ActorHandle
    weights_actor: ActorHandle | None
    call_timeout_s: float
    start_timeout_s: float
    """Seconds allowed for the engines to start, which a batch may have to wait for."""
    step_timeout_s: float
