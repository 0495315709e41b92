"""The protocol of rollout engines, and the choice of one for a config; imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, Protocol

from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.errors import ConfigError
from rlpipe.types import Buckets, EngineHealth, GroupRequest, RolloutGroup, WeightsManifest

DEFAULT_SEQUENCES = 256
"""Default limit on concurrent sequences of an engine, except for vLLM on a GPU."""
VLLM_GPU_SEQUENCES = 128
"""Default ``max_num_seqs`` of vLLM 0.32 on a GPU; on a CPU rlpipe sets ``DEFAULT_SEQUENCES``.

vLLM's larger defaults, which depend on the GPU's memory, apply only to its ``LLM`` class and its server. rlpipe opens
``LLMEngine``, which gets ``SchedulerConfig.DEFAULT_MAX_NUM_SEQS``.
"""


def default_sequences(rollout: RolloutConfig) -> int:
    """Return how many sequences an engine runs concurrently if ``rollout.engine_args`` does not set the limit."""
    on_gpu = rollout.engine != "hf" and rollout.num_gpus > 0
    return VLLM_GPU_SEQUENCES if on_gpu else DEFAULT_SEQUENCES


class Engine(Protocol):
    """An engine that samples groups, driven by one thread that calls ``step`` while ``has_work`` is true.

    Version 0 is the model as stored on disk, with ``model.adapter.path`` if engines serve adapters. A request waits
    inside the engine until a version of at least its ``min_version`` is loaded. With ``weights.on_update=wait`` a
    sequence finishes on the version that it began with; with ``inflight`` it continues on each newly loaded version.
    A newly loaded version may be older than the one before it.
    """

    @property
    def has_work(self) -> bool:
        """True if ``step`` can advance any request; False if all requests wait for a newer version."""
        ...

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Accept requests; a request that can't be sampled comes back as a group with its ``failure`` set."""
        ...

    def step(self) -> list[RolloutGroup]:
        """Advance generation, and return the groups that finished."""
        ...

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        """Return whether ``load`` can be called now; until then, start no sequence that would delay it further."""
        ...

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        """Load a version from buckets in memory, and return the digest of the weights that the engine now serves.

        Call it only after ``prepare_load`` returned True. Raises ``ModelError`` if the tensors do not fit the model.
        """
        ...

    def health(self) -> EngineHealth: ...

    def stop(self) -> None:
        """Free the model; the engine can't be used afterwards."""
        ...


def resolve_engine(kind: str) -> Literal["vllm", "hf"]:
    """Return the engine that ``rollout.engine`` selects here; raise ``ConfigError`` if it is vllm but not installed."""
    has_vllm = find_spec("vllm") is not None
    if kind == "hf" or (kind == "auto" and not has_vllm):
        return "hf"
    if not has_vllm:
        raise ConfigError("rollout.engine=vllm, but vllm is not installed: install rlpipe[vllm], or take auto or hf")
    return "vllm"


def num_threads(rollout: RolloutConfig) -> int:
    """Return the number of CPU threads of an engine."""
    return rollout.num_threads or max(1, int(rollout.num_cpus))
