"""The protocol of rollout engines, and which of them a config means; imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, Protocol

from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.errors import ConfigError
from rlpipe.types import Buckets, EngineHealth, GroupRequest, RolloutGroup, WeightsManifest

DEFAULT_SEQUENCES = 256
"""Sequences that an engine runs at one time, where ``rollout.engine_args`` does not say; not so vLLM on a GPU."""
VLLM_GPU_SEQUENCES = 128
"""The ``max_num_seqs`` that vLLM 0.32 takes there by itself; on a CPU rlpipe sets ``DEFAULT_SEQUENCES``.

vLLM has larger defaults, by the GPU's memory, for its ``LLM`` class and its server alone. ``LLMEngine``, which rlpipe
opens, is neither of them, and gets ``SchedulerConfig.DEFAULT_MAX_NUM_SEQS``.
"""


def default_sequences(rollout: RolloutConfig) -> int:
    """Those that an engine runs at one time, where ``rollout.engine_args`` does not say."""
    on_gpu = rollout.engine != "hf" and rollout.num_gpus > 0
    return VLLM_GPU_SEQUENCES if on_gpu else DEFAULT_SEQUENCES


class Engine(Protocol):
    """Samples groups; driven by one thread, which calls ``step`` as long as ``has_work``.

    Version 0 is the model as it lies on the disk, with ``model.adapter.path`` where engines serve adapters. A request
    waits inside the engine until a version of at least its ``min_version`` is loaded. With ``weights.on_update=wait`` a
    sequence finishes on the version that it began with, with ``inflight`` it goes on with every version that is
    loaded. A version may be older than the one before it.
    """

    @property
    def has_work(self) -> bool:
        """Whether ``step`` can advance anything: False if all requests wait for a newer version."""
        ...

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Takes requests; a request that can't be sampled comes back as a group with its ``failure``."""
        ...

    def step(self) -> list[RolloutGroup]:
        """Advances generation, and returns the groups that finished."""
        ...

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        """Whether ``load`` can be called now. Until it can, no new sequence starts that would delay it further."""
        ...

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        """Loads a version in memory, and answers the digest of what the engine now serves.

        Raises ``ModelError`` if the tensors do not fit the model. Only after ``prepare_load`` answered True.
        """
        ...

    def health(self) -> EngineHealth: ...

    def stop(self) -> None:
        """Frees the model; the engine can't be used after."""
        ...


def resolve_engine(kind: str) -> Literal["vllm", "hf"]:
    """The engine that ``rollout.engine`` stands for here; ``ConfigError`` if vllm is asked for and not installed."""
    has_vllm = find_spec("vllm") is not None
    if kind == "hf" or (kind == "auto" and not has_vllm):
        return "hf"
    if not has_vllm:
        raise ConfigError("rollout.engine=vllm, but vllm is not installed: install rlpipe[vllm], or take auto or hf")
    return "vllm"


def num_threads(rollout: RolloutConfig) -> int:
    """CPU threads of an engine."""
    return rollout.num_threads or max(1, int(rollout.num_cpus))
