"""Memory of a learner rank, on its device and its host, without chunks."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlpipe.common.formatting import GIB
from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, ModelError
from rlpipe.hardware.device import Device
from rlpipe.learner import row_plan
from rlpipe.learner.adapter_layers import fuse_lora
from rlpipe.learner.forward import LogprobModel, output_head
from rlpipe.learner.policy import lora_config
from rlpipe.learner.row_plan import AttentionLayout
from rlpipe.learner.strategies.fsdp2 import find_fsdp_units
from rlpipe.learner.strategies.optimizer import BLOCK as MOMENT_BLOCK
from rlpipe.learner.workload import LM_HEAD
from rlpipe.models.adapter import read_peft_config
from rlpipe.models.loading import COMPLETE, meta_reward_model
from rlpipe.models.nf4 import BLOCK as NF4_BLOCK
from rlpipe.models.nf4 import nf4_parameters
from rlpipe.offload.api import SHARE_USED
from rlpipe.offload.decision import Capacity, Mode
from rlpipe.offload.planner.cost import StageProfile, activation_peak
from rlpipe.offload.planner.profiler import DEVICES_PER_MACHINE
from rlpipe.offload.units import Unit, find_units
from rlpipe.plan.engine_memory import EngineSetup
from rlpipe.plan.model_shape import meta_described
from rlpipe.weights.dcp import MOMENTS

CUDA_CONTEXT_BYTES = 2**30
"""Bytes on a GPU outside torch's memory: CUDA's context, library workspaces, NCCL's buffers; an assumption."""
HOST_BYTES = 5 * 2**30
"""Host bytes of a rank's process: Python, torch, and CUDA's libraries; an assumption."""
CPU_HOST_BYTES = 2 * 2**30
"""Host bytes of a rank's process without CUDA; an assumption."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MemoryBudget:
    """Bytes that a rank may take; a tenth of the free memory is reserved for what a plan does not model."""

    device_bytes: int
    host_bytes: int
    """Its share of the machine's memory, including the process itself."""
    engines: int
    """Engines on the rank's GPU."""
    engine_bytes: int
    """Bytes of the GPU that these engines take."""
    capacity: Capacity
    """Memory that chunked offload may take: the config's limits, or otherwise derived from the same bytes."""


def read_memory_budget(config: Config, device: Device, setup: EngineSetup | None) -> MemoryBudget:
    """Return the memory that a rank may take; ``setup`` is the engines' setup, if there are any.

    Raises ``ConfigError`` if ranks do not run on such a device.
    """
    check_device(config, device)
    learner, num_ranks = config.learner, config.learner.num_ranks
    engines = 0 if setup is None else engines_per_rank_gpu(config)
    engine_bytes = 0 if setup is None else int(engines * _engine_share(setup) * device.memory_bytes)
    host = int(SHARE_USED * device.host_memory_bytes) // min(num_ranks, DEVICES_PER_MACHINE)
    if device.kind == "cpu":
        device_bytes = host = host // 2 if learner.offload != "none" else host
    else:
        device_bytes = int(SHARE_USED * max(0, device.memory_bytes - engine_bytes - CUDA_CONTEXT_BYTES))
    limits = learner.chunked
    chunked = Capacity(
        device_bytes=device_bytes if limits.device_memory_gib is None else int(limits.device_memory_gib * GIB),
        host_bytes=max(0, host - HOST_BYTES) if limits.host_memory_gib is None else int(limits.host_memory_gib * GIB),
    )
    return MemoryBudget(
        device_bytes=device_bytes, host_bytes=host, engines=engines, engine_bytes=engine_bytes, capacity=chunked
    )


def check_device(config: Config, device: Device) -> None:
    """Raise ``ConfigError`` if the learner of the config does not run on such a device."""
    num_gpus = config.learner.num_gpus
    if device.kind == "cuda" and num_gpus == 0:
        raise ConfigError(
            f"learner.num_gpus=0: the learner runs on the CPU, not on {device.name}; set 1, or learner=single_gpu, or "
            "give the --device of a CPU"
        )
    if device.kind == "cpu" and num_gpus > 0:
        raise ConfigError(f"learner.num_gpus={num_gpus:g}: {device.name} has no GPU; give the GPU's --device, or set 0")


def engines_per_rank_gpu(config: Config) -> int:
    """Return the number of engines that fit on a rank's GPU, if both ask for parts of GPUs."""
    engine_share, rank_share = config.rollout.num_gpus, config.learner.num_gpus
    if config.algorithm.kind != "rl" or not 0 < engine_share < 1 or not 0 < rank_share < 1:
        return 0
    return min(config.rollout.num_engines, int((1 - rank_share) / engine_share + 1e-9))


def _engine_share(setup: EngineSetup) -> float:
    """Return the share of a GPU that each engine on it takes."""
    return setup.utilization if setup.kind == "vllm" else setup.utilization / setup.engines_per_device


NF4_SCALES = 256
"""Number of 8-bit scales that share one 32-bit scale (arXiv:2305.14314)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class MetaPolicy:
    """A policy without weights; ``nf4`` has the elements of each 4-bit parameter, by its name in ``module``."""

    module: LogprobModel
    nf4: Mapping[str, int]
    units: Sequence[Unit]
    kinds: Mapping[int, Hashable]
    """Kinds of the units that are blocks; units of one kind are alike."""
    is_mapped: bool
    """Whether its files have the dtypes in which it is loaded, so that it takes only page cache until it is moved."""

    @property
    def nf4_sizes(self) -> list[list[int]]:
        """Elements of the 4-bit parameters, by unit."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        names_by_unit = ([names[id(entry)] for entry in unit.module.parameters()] for unit in self.units)
        return [[self.nf4[name] for name in unit_names if name in self.nf4] for unit_names in names_by_unit]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.trained)

    def stored_bytes(self, module: nn.Module | None = None, *, trained_dtype: torch.dtype | None = None) -> int:
        """Return the bytes of a module's parameters as loaded, the trained ones in ``trained_dtype`` if given."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        total = 0
        for parameter in (module or self.module).parameters():
            itemsize = parameter.itemsize
            if parameter.requires_grad and trained_dtype is not None:
                itemsize = trained_dtype.itemsize
            elements = self.nf4.get(names[id(parameter)])
            total += parameter.numel() * itemsize if elements is None else nf4_bytes(elements)
        return total


def meta_policy(
    described: PreTrainedConfig, model: ModelConfig, *, frozen: bool = False, head: str = LM_HEAD
) -> MetaPolicy:
    """Make the policy on the meta device, or with ``frozen`` a copy of the initial model, which has no adapter.

    ``described`` is transformers' config of the model, ``head`` the head that is trained. Raises ``ModelError`` if the
    model or its adapter can't be described, ``ConfigError`` for a dtype that the model can't have.
    """
    is_full_training = model.adapter.kind == "none" and not frozen
    compute_dtype: torch.dtype = getattr(torch, model.dtype)
    causal = _meta_model(described, model, head)
    cast(nn.Module, causal).to(torch.float32 if is_full_training else compute_dtype)
    layout = _set_attention(causal, model.attention)
    quantized = nf4_parameters(causal) if model.adapter.kind == "qlora" else set()
    nf4 = [parameter for name, parameter in causal.named_parameters() if name in quantized]
    module = LogprobModel(causal, compute_dtype=compute_dtype, layout=layout)
    if frozen:
        module.requires_grad_(False)
    elif not is_full_training:
        module.model = _add_adapter(causal, model.adapter)
    module.train()
    ids = {id(parameter) for parameter in nf4}
    units = find_units(module)
    return MetaPolicy(
        module=module,
        nf4={name: parameter.numel() for name, parameter in module.named_parameters() if id(parameter) in ids},
        units=units,
        kinds=_kinds(causal, units),
        is_mapped=not nf4 and (described.dtype or compute_dtype) is causal.dtype,
    )


def nf4_bytes(num_elements: int) -> int:
    """Return the bytes of the 4-bit codes and of their scales, which are quantized, too."""
    scales = -(-num_elements // NF4_BLOCK)
    return -(-num_elements // 2) + scales + 4 * -(-scales // NF4_SCALES)


def _meta_model(described: PreTrainedConfig, model: ModelConfig, head: str) -> PreTrainedModel:
    if head != LM_HEAD:
        with reading_files(
            f"model.path={model.path}: its config does not describe a model", COMPLETE, error=ModelError
        ):
            return meta_reward_model(described, head=head)
    causal = meta_described(described, model)
    if causal.base_model is causal or causal.get_output_embeddings() is None:
        raise ModelError(f"model.path={model.path}: {type(causal).__name__} has no lm_head of its own")
    return causal


def _set_attention(causal: PreTrainedModel, implementation: str) -> AttentionLayout:
    """Set the attention; GPU kernels are replaced by torch's own, which keeps as much for the backward pass."""
    layout = row_plan.find_layout(causal, "eager" if implementation == "eager" else "sdpa")
    if layout is AttentionLayout.SHARED:
        row_plan.use_packed_attention(causal)
    elif implementation == "eager":
        causal.set_attn_implementation("eager")
    return layout


def _add_adapter(causal: PreTrainedModel, config: AdapterConfig) -> PeftModel:
    with (
        reading_files("model.adapter can't be created", "give one that fits the model", error=ModelError),
        torch.device("meta"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # the run itself logs it
        adapted = cast(PeftModel, get_peft_model(causal, _lora_config(config, causal)))
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # as the learner trains it
            parameter.data = parameter.data.float()
    fuse_lora(causal)
    return adapted


def _lora_config(config: AdapterConfig, causal: PreTrainedModel) -> LoraConfig:
    """Return the LoRA config in ``adapter.path`` if that folder exists, otherwise that of the adapter's options."""
    folder = Path(config.path).expanduser() if config.path is not None else None
    if folder is None or not folder.exists():
        return lora_config(config, causal)
    saved = read_peft_config(str(folder), f"model.adapter.path={config.path}")
    if not isinstance(saved, LoraConfig):
        raise ConfigError(f"model.adapter.path={config.path} holds no LoRA adapter; give another folder, or null")
    saved.inference_mode = False
    return saved


def _kinds(causal: PreTrainedModel, units: Sequence[Unit]) -> dict[int, Hashable]:
    """Return the kind of each block, from its parameters and, if the model names it, its kind of attention."""
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    types = getattr(causal.config.get_text_config(), "layer_types", None) or []
    named = types if len(types) == len(blocks) else [None] * len(blocks)
    return {index: (kind, _signature(units[index].module)) for index, kind in zip(blocks, named, strict=True)}


def _signature(block: nn.Module) -> Hashable:
    parameters = tuple(
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    )
    return parameters, tuple(type(module) for module in block.modules())


SMALLEST_IN_8_BIT = 4096
"""Elements; bitsandbytes keeps the moments of smaller parameters in float32."""
UNITS_GATHERED = 3
"""Units that FSDP2 keeps gathered at the same time: the running one, the next one, and the next one's gather buffer."""
ZERO3_LIVE = 1_000_000_000
"""DeepSpeed's ``stage3_max_live_parameters``: elements that stay gathered."""
ZERO3_BUCKETS = 50_000_000 + 500_000_000
"""Elements of DeepSpeed's buffers for prefetched parameters, and for gradients that are reduced."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceBytes:
    """Device bytes of a rank, at the peak."""

    weights: int
    gathered: int = 0
    """Weights of other ranks, or of the host, while they are used."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    slots: int = 0
    """Slots for chunks."""
    reference: int = 0
    """The frozen copy of the initial model."""

    @property
    def total(self) -> int:
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(kw_only=True, slots=True, frozen=True)
class HostBytes:
    """Host bytes of a rank."""

    process: int = HOST_BYTES
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    reference: int = 0
    loading: int = 0
    """The model, or later its frozen copy, while it is loaded, if its files have another dtype."""

    @property
    def total(self) -> int:
        """Bytes at the peak: while the model is loaded, or later."""
        steady = self.weights + self.gradients + self.optimizer + self.activations + self.reference
        return self.process + max(self.loading, steady)


@dataclass(kw_only=True, slots=True, frozen=True)
class LearnerMemory:
    """Bytes of one learner rank on its device and on its host."""

    device: DeviceBytes
    host: HostBytes


def checkpoint_modes(stages: Sequence[StageProfile], config: Config) -> list[Mode]:
    """Return the mode of each stage's activations without offload: kept, or checkpointed."""
    block_mode = Mode.CHECKPOINT if config.model.gradient_checkpointing else Mode.KEEP
    return [block_mode if stage.is_block else Mode.KEEP for stage in stages]


def activation_bytes(stages: Sequence[StageProfile], shared_bytes: int, config: Config) -> int:
    shared = shared_bytes if config.model.gradient_checkpointing else 0
    return activation_peak(stages, checkpoint_modes(stages, config)) + shared


def moment_bytes(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> int:
    """Return the bytes of both AdamW moments; in 8 bit with a float32 scale per block (arXiv:2110.02861)."""
    in_8_bit = config.name != "adamw"
    return len(MOMENTS) * sum(
        size + torch.float32.itemsize * -(-size // MOMENT_BLOCK)
        if in_8_bit and size >= SMALLEST_IN_8_BIT
        else torch.float32.itemsize * size
        for size in (parameter.numel() for parameter in parameters)
    )


def plain_memory(
    policy: MetaPolicy, stages: Sequence[StageProfile], shared_bytes: int, config: Config, copy: LogprobModel | None
) -> LearnerMemory:
    """Return the memory of a rank without chunked offload, for any strategy; ``copy`` is that of the reference."""
    activations = activation_bytes(stages, shared_bytes, config)
    spread = {"single": _single, "fsdp2": _fsdp2, "zero3": _zero3}[config.learner.strategy]
    memory = spread(policy, config, copy)
    loading = 0 if policy.is_mapped else policy.stored_bytes()
    if copy is not None and (copy.causal_model.config.dtype or copy.compute_dtype) is not copy.causal_model.dtype:
        # It is loaded after the policy, which is by then on its device.
        policy_bytes = memory.host.weights + (0 if config.learner.num_gpus else memory.device.weights)
        loading = max(loading, policy_bytes + weight_bytes(copy))
    return LearnerMemory(
        device=replace(memory.device, activations=activations), host=replace(memory.host, loading=loading)
    )


def weight_bytes(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.nbytes for parameter in module.parameters())


def _single(policy: MetaPolicy, config: Config, copy: LogprobModel | None) -> LearnerMemory:
    weights, moments = policy.stored_bytes(), moment_bytes(policy.trained, config.learner.optimizer)
    is_paged = config.learner.optimizer.name == "paged_adamw_8bit"
    return LearnerMemory(
        device=DeviceBytes(
            weights=weights,
            gradients=policy.num_trained * torch.float32.itemsize,
            optimizer=0 if is_paged else moments,
            reference=weight_bytes(copy),
        ),
        host=HostBytes(optimizer=moments * is_paged),
    )


def _fsdp2(policy: MetaPolicy, config: Config, copy: LogprobModel | None) -> LearnerMemory:
    """Return the memory with FSDP2.

    Gradients of a whole model are reduced after each backward pass; those of an adapter once per update, and are
    unsharded until then.
    """
    num_ranks, on_host = config.learner.num_ranks, config.learner.offload == "policy"
    is_paged = config.learner.optimizer.name == "paged_adamw_8bit"
    weights = _per_rank(policy.stored_bytes(), num_ranks)
    gradient_bytes = policy.num_trained * torch.float32.itemsize
    gradients = _per_rank(gradient_bytes, num_ranks)
    moments = _per_rank(moment_bytes(policy.trained, config.learner.optimizer), num_ranks)
    gathered = gathered_units(policy, config)
    in_flight = gathered.gradient_bytes if config.model.adapter.kind == "none" else gradient_bytes
    reference = _per_rank(weight_bytes(copy), num_ranks)
    root = 0 if copy is None else gathered_root(copy, config)
    return LearnerMemory(
        device=DeviceBytes(
            weights=0 if on_host else weights,
            gathered=gathered.num_bytes,
            gradients=in_flight + (0 if on_host else gradients),
            optimizer=0 if on_host or is_paged else moments,
            reference=(0 if on_host else reference) + root,
        ),
        host=HostBytes(
            weights=weights * on_host,
            gradients=gradients * on_host,
            optimizer=moments * (on_host or is_paged),
            reference=reference * on_host,
        ),
    )


def _zero3(policy: MetaPolicy, config: Config, copy: LogprobModel | None) -> LearnerMemory:
    """Return the memory with ZeRO-3; trained weights are in the compute dtype and, for the optimizer, in float32."""
    num_ranks, options = config.learner.num_ranks, config.learner.zero3
    dtype = torch.bfloat16 if policy.module.compute_dtype is torch.bfloat16 else torch.float32
    weights = _per_rank(policy.stored_bytes(trained_dtype=dtype), num_ranks)
    gradients = _per_rank(policy.num_trained * torch.float32.itemsize, num_ranks)
    states = gradients + _per_rank(moment_bytes(policy.trained, config.learner.optimizer), num_ranks)
    elements = policy.num_parameters
    buffers = min(elements, ZERO3_LIVE) + min(elements, ZERO3_BUCKETS)
    copied = 0 if copy is None else sum(parameter.numel() for parameter in copy.parameters())
    reference = _per_rank(dtype.itemsize * copied, num_ranks)
    return LearnerMemory(
        device=DeviceBytes(
            weights=0 if options.offload_parameters else weights,
            gathered=dtype.itemsize * buffers,
            gradients=0 if options.offload_optimizer else gradients,
            optimizer=0 if options.offload_optimizer else states,
            reference=0 if options.offload_parameters else reference,
        ),
        host=HostBytes(
            weights=weights * options.offload_parameters,
            gradients=gradients * options.offload_optimizer,
            optimizer=states * options.offload_optimizer,
            reference=reference * options.offload_parameters,
        ),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Gathered:
    """Weights that FSDP2 gathers, in the compute dtype."""

    root_bytes: int
    """Weights in no unit, which stay gathered from the forward to the end of the backward pass."""
    num_units: int
    num_bytes: int
    """Most bytes that are gathered at the same time."""
    gradient_bytes: int
    """Unsharded gradients of a whole model: of the output layer, and of the unit being reduced, also in float32."""


def gathered_root(copy: LogprobModel, config: Config) -> int:
    """Return the bytes of a copy's weights in no unit of FSDP2, which stay gathered in its forward pass."""
    units = find_fsdp_units(copy, copy.causal_model, config.learner.fsdp)
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    outside = (parameter.numel() for parameter in copy.parameters() if id(parameter) not in inside)
    return copy.compute_dtype.itemsize * sum(outside)


def gathered_units(policy: MetaPolicy, config: Config) -> Gathered:
    module = policy.module
    dtype = module.compute_dtype
    units = find_fsdp_units(module, module.causal_model, config.learner.fsdp)
    sizes = [policy.stored_bytes(unit, trained_dtype=dtype) for unit in units]
    total, largest = policy.stored_bytes(trained_dtype=dtype), max(sizes, default=0)
    root = max(0, total - sum(sizes))
    reshards = config.learner.fsdp.reshard_after_forward
    head = sum(parameter.numel() for parameter in output_head(module.causal_model).parameters())
    reduced = largest + largest // dtype.itemsize * torch.float32.itemsize
    return Gathered(
        root_bytes=root,
        num_units=len(units),
        num_bytes=min(total, root + UNITS_GATHERED * largest) if reshards else total + largest,
        gradient_bytes=head * dtype.itemsize + reduced,
    )


def _per_rank(num_bytes: int, num_ranks: int) -> int:
    return -(-num_bytes // num_ranks)
