"""Options of the learner: its ranks, optimizer, schedule and sharding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.option import (
    MAX_GIB,
    MAX_PROCESSES,
    MAX_SECONDS,
    MAX_STEPS,
    MAX_TOKENS,
    MAX_WEIGHT,
    Freezable,
    option,
)

FULL_LR = 1e-6
"""Peak learning rate of reinforcement learning that trains all weights."""
ADAPTER_FACTOR, SUPERVISED_FACTOR = 10, 10


@dataclass(kw_only=True)
class OptimizerConfig(Freezable):
    """Options of the optimizer."""

    name: str = option(
        "adamw",
        "AdamW with moments in float32, in 8 bit, or in 8 bit and paged out to the CPU if the GPU is full.",
        choices=("adamw", "adamw_8bit", "paged_adamw_8bit"),
    )
    lr: float | None = option(
        None,
        "Peak learning rate; null: 1e-6 to train all weights and 1e-5 for an adapter, ten times that in SFT and for "
        "reward models.",
        minimum=0,
        maximum=10,
    )
    betas: list[float] = option([0.9, 0.999], "Decay of the moments.")
    eps: float = option(1e-8, "Added to the denominator.", above=0, maximum=1)
    weight_decay: float = option(0.0, "Decoupled weight decay.", minimum=0, maximum=10)

    @property
    def peak_lr(self) -> float:
        """The learning rate; ``load_config`` has replaced null by the one that fits the run."""
        return FULL_LR if self.lr is None else self.lr


@dataclass(kw_only=True)
class ScheduleConfig(Freezable):
    """Options of the learning rate's schedule."""

    name: str = option(
        "constant", "Shape of the learning rate after the warm-up.", choices=("constant", "linear", "cosine")
    )
    warmup_steps: int = option(0, "Steps of linear warm-up.", minimum=0, maximum=MAX_STEPS)
    min_ratio: float = option(0.0, "Lowest learning rate, as a share of the peak.", minimum=0, maximum=1)


@dataclass(kw_only=True)
class FsdpConfig(Freezable):
    """Options of torch's FSDP2."""

    wrap: Any = option(
        "blocks",
        "Modules that are gathered as a unit: blocks (the model's layers), size, none, or the names of classes.",
    )
    min_num_params: int = option(
        100_000_000,
        "wrap=size: least number of parameters of a unit, without those of units in it; lists are split into layers.",
        minimum=1,
        maximum=10**12,
    )
    reshard_after_forward: bool = option(True, "Free a block's gathered parameters after its forward pass.")


@dataclass(kw_only=True)
class Zero3Config(Freezable):
    """Options of DeepSpeed's ZeRO-3."""

    offload_optimizer: bool = option(False, "Keep the optimizer's state on the CPU, and update there.")
    offload_parameters: bool = option(False, "Keep the parameters on the CPU while no module needs them.")


@dataclass(kw_only=True)
class ChunkedConfig(Freezable):
    """Options of chunked offload; rlpipe searches for the values of those that are null."""

    num_persistent: int | None = option(None, "First chunks that stay on the device.", minimum=0, maximum=1_000_000)
    num_slots: int | None = option(None, "Slots on the device for the other chunks.", minimum=0, maximum=1_000_000)
    num_swapped: int | None = option(
        None, "Layers whose activations are swapped to the host.", minimum=0, maximum=10_000
    )
    num_checkpointed: int | None = option(None, "Layers whose activations are recomputed.", minimum=0, maximum=10_000)
    num_offloaded: int | None = option(
        None,
        "Layers whose activations stay on the device, while their weights are evicted and loaded again.",
        minimum=0,
        maximum=10_000,
    )
    sharing: str = option(
        "auto",
        "Every rank has all chunks on its host, or a share of each; auto: the faster one that fits.",
        choices=("auto", "replicated", "sharded"),
    )
    state_dtype: str = option(
        "float32",
        "Type of the trained weights and moments that the optimizer updates.",
        choices=("float32", "bfloat16"),
    )
    gradient_dtype: str = option(
        "float32", "Type in which the gradients of an update are summed.", choices=("float32", "bfloat16")
    )
    device_memory_gib: float | None = option(
        None, "Device memory to use; null: what is free, less a tenth.", above=0, maximum=MAX_GIB
    )
    host_memory_gib: float | None = option(
        None,
        "Host memory to use for each rank; null: its share of what is free, less a tenth.",
        above=0,
        maximum=MAX_GIB,
    )
    chunk_mib: float | None = option(
        None,
        "Size of a chunk; null: 32, 64, 128 or 256, whichever leaves the least memory unused.",
        above=0,
        maximum=1_000_000,
    )


@dataclass(kw_only=True)
class LearnerConfig(Freezable):
    """Options of the learner: its ranks, their memory, and the updates."""

    strategy: str = option(
        "single",
        "How the policy is sharded over the ranks: not at all, by torch's FSDP2, or by DeepSpeed's ZeRO-3.",
        choices=("single", "fsdp2", "zero3"),
    )
    offload: str = option(
        "none",
        "Part of the policy that is kept on the CPU: none; all of it, by FSDP2; or as much as needed, in chunks.",
        choices=("none", "policy", "chunked"),
    )
    num_ranks: int = option(1, "Learner processes.", minimum=1, maximum=MAX_PROCESSES)
    num_cpus: float = option(1.0, "CPUs that Ray reserves for a rank.", minimum=0, maximum=MAX_PROCESSES)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for a rank.", minimum=0, maximum=1)
    resources: dict[str, float] = option({}, "Custom Ray resources of a rank.", minimum=0, maximum=MAX_WEIGHT)
    num_threads: int | None = option(
        None,
        "CPU threads of a rank; null: its whole CPUs, or its share of all if a GPU's weights are updated on the host.",
        minimum=1,
        maximum=MAX_PROCESSES,
    )
    max_tokens_per_microbatch: int = option(8192, "Packed tokens of one forward pass.", minimum=1, maximum=MAX_TOKENS)
    logprob_chunk_tokens: int = option(
        1024, "Tokens whose logits are in memory at the same time.", minimum=1, maximum=MAX_TOKENS
    )
    max_grad_norm: float | None = option(1.0, "Gradients are clipped to this global norm.", above=0, maximum=MAX_WEIGHT)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    zero3: Zero3Config = field(default_factory=Zero3Config)
    chunked: ChunkedConfig = field(default_factory=ChunkedConfig)
    profile_steps: list[int] = option(
        [],
        "Steps, counted from 1, of which traces are written to profiles/ in the output.",
        minimum=1,
        maximum=MAX_STEPS,
    )
    max_bad_steps: int = option(
        3,
        "Consecutive steps with a loss or gradient that is not finite before the run stops.",
        minimum=1,
        maximum=MAX_STEPS,
    )
    collective_timeout_s: float = option(
        1800.0, "Seconds that ranks wait for each other, before the group is restarted.", above=0, maximum=MAX_SECONDS
    )
    max_failures: int = option(
        3,
        "Deaths of a rank without a new step in between, before the run stops; each restarts the group.",
        minimum=0,
        maximum=MAX_STEPS,
    )


def reentrant_checkpointing(model: ModelConfig, learner: LearnerConfig) -> bool:
    """Return whether gradient checkpointing uses torch's reentrant form."""
    if model.reentrant_checkpointing is not None:
        return model.reentrant_checkpointing
    return learner.strategy == "zero3" or model.attention == "flex_attention"


def allows_flex_attention(model: ModelConfig, learner: LearnerConfig) -> bool:
    """Return whether what is recomputed, if anything, can have flex_attention: only in the reentrant form."""
    if learner.offload == "chunked":
        return learner.chunked.num_checkpointed == 0
    if not model.gradient_checkpointing:
        return True
    return learner.strategy != "fsdp2" and model.reentrant_checkpointing is not False
