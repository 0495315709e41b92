"""Code inside vLLM's workers that loads policy weights from memory, and reads back the weights that are then served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from multiprocessing import parent_process
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import ModelError, WeightsMismatch
from rlpipe.models.served_weights import EXPERTS, PREFIX, ServedWeights
from rlpipe.rollout.vllm.vllm_cpu import draw_by_counter, use_grouped_lora
from rlpipe.rollout.vllm.vllm_transfer import begin_experts, end_experts, pack_layers, refresh_sinks
from rlpipe.types import ByteArray
from rlpipe.weights.buckets import (
    add_checksum,
    check_adapter_modules,
    check_dtype,
    check_parameters,
    lora_digest,
    pair_adapter,
    unpack,
)

if parent_process() is not None and current_platform.is_cpu():
    # This is a process of an engine that is split over several. As in other engines, whose process sets it itself,
    # packed weights could neither be replaced in place nor read back.
    setattr(LinearBase, "_cpu_skip_gemm_dispatch", True)  # noqa: B010

Shape = tuple[int, ...]
_LOAD_BYTES = 2**26
"""Bytes of merged tensors after which they are loaded; vLLM takes a millisecond for each call."""


class WeightsExtension:
    """Methods that vLLM adds to its worker class, called through ``collective_rpc``."""

    device: torch.device
    model_runner: Any
    vllm_config: VllmConfig
    _layout: AdapterLayout | None = None
    _served: ServedWeights | None = None

    def prepare_serving(self, merged: ModelConfig | None) -> None:
        """Replace vLLM's LoRA and draws on CPUs by faster ones, and open the base of ``merged`` weights (None: others).

        Without LoRA, weights are replaced in place, and then packed for the CPU's matrix products.
        """
        if merged is not None:
            self._served = ServedWeights(merged)
        if self.device.type == "cpu":
            draw_by_counter(self.model_runner)
        if self.model_runner.lora_config is None:
            pack_layers(self.model_runner.model)
        elif self.device.type == "cpu":
            use_grouped_lora(self.model_runner.lora_manager._adapter_manager, self.model_runner.scheduler_config)

    def serve_adapter(self, bucket: ByteArray, adapter_config: Mapping[str, Any], adapter_id: int) -> str:
        """Load and activate an adapter, and return the digest of the weights in its slots of all layers.

        An adapter with the same id is replaced in place, and its running sequences continue with the new one.
        """
        manager: LoRAModelManager = self.model_runner.lora_manager._adapter_manager
        tensors = unpack(bucket)
        check_dtype(tensors, _lora_dtype(manager))
        if self._layout is None or not self._layout.fits(tensors, adapter_config):
            self._layout = AdapterLayout(manager, tensors, adapter_config)
        adapter = self._layout.build(tensors, adapter_id)
        manager.remove_adapter(adapter_id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter_id)
        names = self._layout.peft_names
        served = {names[module]: pair for module, pair in _served_pairs(manager, adapter_id)}
        return lora_digest(served)

    def drop_adapter(self, adapter_id: int) -> None:
        self.model_runner.lora_manager._adapter_manager.remove_adapter(adapter_id)

    def merge_adapter(self, bucket: ByteArray, adapter_config: Mapping[str, Any]) -> dict[int, int]:
        """Load the base's weights with an adapter in them, and return the checksums of all weights that are served."""
        served = self._served
        assert served is not None, "the engine was opened to serve merged weights"
        model, tensors = self.model_runner.model, unpack(bucket)
        with_experts = served.changes_experts(adapter_config, tensors)
        self._begin_load(with_experts=with_experts)
        merged: dict[str, Tensor] = {}
        for unit, parameters in served.changed(adapter_config, tensors, self.device):
            merged |= unit.to_sources(parameters)
            if sum(tensor.nbytes for tensor in merged.values()) > _LOAD_BYTES:
                self._load(merged)
                merged = {}
        self._load(merged)
        if with_experts:
            end_experts(model, self.vllm_config)
        return self.checksums(served.file_shapes)

    def begin_full_load(self) -> None:
        self._begin_load(with_experts=True)

    def _begin_load(self, *, with_experts: bool) -> None:
        model = self.model_runner.model
        self._locations = _locate_parameters(model)
        self._received: dict[str, Shape] = {}
        if with_experts:
            begin_experts(model, self.vllm_config)

    def load_full_bucket(self, bucket: ByteArray) -> None:
        """Load the tensors of one bucket into the model, and compare them with the model's parameters afterwards."""
        self._load({name: tensor.to(self.device) for name, tensor in unpack(bucket).items()})

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        model = self.model_runner.model
        check_dtype(tensors, self.model_runner.model_config.dtype)
        names = _vllm_names(model, tensors)
        renamed = {names[name]: tensor for name, tensor in tensors.items()}
        unfused = {name for name in renamed if EXPERTS not in name}
        buffers = {name: (name, 0) for name, _ in model.named_buffers()}
        locations: dict[str, tuple[str, int]] = self._locations | buffers
        check_parameters(unfused, locations.keys(), complete=False)
        with set_current_vllm_config(self.vllm_config):
            model.load_weights(iter(tensors.items()))
        for name in unfused:
            _check_slice(model, *locations[name], renamed[name])
        self._received |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def finish_full_load(self) -> dict[int, int]:
        """Return the checksums of the served weights; raise ``ModelError`` if a parameter was not published."""
        model = self.model_runner.model
        end_experts(model, self.vllm_config)
        received = set(_vllm_names(model, self._received).values())
        check_parameters(received & self._locations.keys(), self._locations.keys())
        return self.checksums(self._received)

    def checksums(self, published: Mapping[str, Shape]) -> dict[int, int]:
        """Return the checksums, by layer, of this rank's part of the published tensors, and lay them out for kernels.

        Tensors that several ranks hold are counted by one of them. ``published`` has the whole tensors' shapes.
        """
        model, sums = self.model_runner.model, dict[int, int]()
        refresh_sinks(model, self.model_runner.model_config.dtype)
        pack_layers(model)
        shapes = {served: published[name] for name, served in _vllm_names(model, published).items()}
        for name, tensor in _owned_shards(model, shapes):
            add_checksum(sums, name, tensor, self.model_runner.model_config.dtype)
        return sums


@dataclass(frozen=True)
class AdaptedModule:
    """A module of vLLM, with the names of its A and B in a published adapter, its rank and its scaling."""

    name: str
    a: str
    b: str
    rank: int
    scaling: float


class AdapterLayout:
    """The modules and scalings that all adapters of a run share, determined once.

    Raises ``ModelError`` if vLLM can't serve such adapters.
    """

    def __init__(
        self, manager: LoRAModelManager, tensors: Mapping[str, Tensor], adapter_config: Mapping[str, Any]
    ) -> None:
        self._names, self._config = list(tensors), dict(adapter_config)
        helper = _validated_helper(manager, adapter_config)
        mapper = _rename_mapper(manager.model)
        self.peft_names: dict[str, str] = {}
        """PEFT's names of the adapted modules, by vLLM's names."""
        self._modules: list[AdaptedModule] = []
        for module, (a, b) in pair_adapter({name: name for name in tensors}).items():
            vllm_name = parse_fine_tuned_lora_name(f"{PREFIX}{module}.lora_A.weight", mapper)[0]
            self.peft_names[vllm_name] = module
            self._modules.append(AdaptedModule(vllm_name, a, b, *helper.get_rank_and_scaling(module)))
        available = [self.peft_names.get(module, module) for module in _linear_modules(manager)]
        check_adapter_modules(list(self.peft_names.values()), available, adapter_config)
        self._rank = helper.r

    def fits(self, tensors: Mapping[str, Tensor], adapter_config: Mapping[str, Any]) -> bool:
        return self._config == adapter_config and self._names == list(tensors)

    def build(self, tensors: Mapping[str, Tensor], adapter_id: int) -> LoRAModel:
        """Return the adapter in vLLM's form, with B scaled in a copy because the bucket's memory is read-only."""
        weights = {
            module.name: LoRALayerWeights(
                module.name, module.rank, module.rank, tensors[module.a], tensors[module.b] * module.scaling, scaling=1
            )
            for module in self._modules
        }
        return LoRAModel(adapter_id, self._rank, weights)


def _lora_dtype(manager: LoRAModelManager) -> torch.dtype:
    dtype = manager.lora_config.lora_dtype
    assert isinstance(dtype, torch.dtype), "vLLM resolves auto when it checks its config"
    return dtype


def _rename_mapper(model: nn.Module) -> Any:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return None if mapper is None else mapper.get_rename_mapper()


def _vllm_names(model: nn.Module, published: Iterable[str]) -> dict[str, str]:
    """Map the names of published tensors to vLLM's names before fusing."""
    mapper = _rename_mapper(model)
    return {name: (mapper.map_name(name) or name) if mapper else name for name in published}


def _linear_modules(manager: LoRAModelManager) -> Iterator[str]:
    """Yield the names of the linear modules that can take an adapter; for a fused one, the names of its parts."""
    for name, layer in manager.modules.items():
        if isinstance(layer, BaseLinearLayerWithLoRA | LogitsProcessorWithLoRA):
            yield from manager.packed_modules.get(name, [name])


def _validated_helper(manager: LoRAModelManager, adapter_config: Mapping[str, Any]) -> PEFTHelper:
    try:
        helper = PEFTHelper.from_dict(dict(adapter_config))
        helper.validate_legal(manager.lora_config)
    except ValueError as error:
        raise ModelError(f"vllm can't serve the adapter: {error}") from error
    return helper


def _served_pairs(manager: LoRAModelManager, adapter_id: int) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    """Yield A and scaled B of every adapted module, read from the layers' slots.

    For a sharded layer, the slot is compared with its shards of the loaded tensors, and the whole tensors are yielded.
    Raises ``WeightsMismatch`` if a slot holds more than the adapter, or if a shard differs.
    """
    slot = manager.lora_index_to_id.index(adapter_id)
    adapter = manager.get_adapter(adapter_id)
    assert adapter is not None, f"adapter {adapter_id} was loaded but is not registered"
    for name, layer in manager.modules.items():
        weights = adapter.get_lora(name)
        if weights is None:
            continue
        loaded = _as_list(weights.lora_a), _as_list(weights.lora_b)
        if isinstance(layer, BaseLinearLayerWithLoRA) and layer.tp_size > 1:
            shards = _as_list(layer.slice_lora_a(weights.lora_a)), _as_list(layer.slice_lora_b(weights.lora_b))
            _check_equal(name, _read_slot(name, layer, slot, shards), shards)
            served = loaded
        else:
            served = _read_slot(name, layer, slot, loaded)
        for module, a, b in zip(manager.packed_modules.get(name, [name]), *served, strict=True):
            if a is not None:
                yield module, (a, b)


_Slices = tuple[list[Any], list[Any]]
"""A and B of every module that is fused into a layer; None for a module without an adapter."""


def _read_slot(name: str, layer: Any, slot: int, expected: _Slices) -> _Slices:
    """Read from the layer's slot the parts that have the shapes of the expected tensors."""
    lora_a, lora_b = (
        [
            _filled_slice(name, buffer[slot, 0], tensor)
            for buffer, tensor in zip(_as_list(stacked), tensors, strict=True)
        ]
        for stacked, tensors in zip((layer.lora_a_stacked, layer.lora_b_stacked), expected, strict=True)
    )
    return lora_a, lora_b


def _filled_slice(name: str, buffer: Tensor, tensor: Tensor | None) -> Tensor | None:
    """Return the part of the buffer that holds the tensor; raise ``WeightsMismatch`` if the rest is not zero."""
    if tensor is None:
        if buffer.any():
            raise WeightsMismatch(f"{name} serves an adapter that was not published")
        return None
    if buffer.shape == tensor.shape:
        return buffer
    rows, columns = tensor.shape
    if buffer[rows:].any() or buffer[:rows, columns:].any():
        raise WeightsMismatch(f"{name} serves more than the adapter that was loaded")
    return buffer[:rows, :columns]


def _check_equal(name: str, served: _Slices, loaded: _Slices) -> None:
    for piece, tensor in zip(chain(*served), chain(*loaded), strict=True):
        if piece is not None and not torch.equal(piece.cpu(), tensor.cpu()):
            raise WeightsMismatch(f"{name} does not serve the adapter that was loaded")


def _as_list(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _fused_modules(model: nn.Module, module: str) -> list[str]:
    """Return the names of the modules that vLLM fused into this one; its own name if it is not fused."""
    prefix, _, suffix = module.rpartition(".")
    names = getattr(model, "packed_modules_mapping", {}).get(suffix, [suffix])
    return [f"{prefix}.{name}" if prefix else name for name in names]


def _locate_parameters(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Map every tensor that must be published to the parameter it is loaded into, and its index among the fused parts.

    Fused experts are left out, because many names belong to one tensor there; the digest covers them.
    """
    locations = {}
    for name, _ in model.named_parameters():
        module, _, kind = name.rpartition(".")
        if EXPERTS not in name:
            for index, fused_module in enumerate(_fused_modules(model, module)):
                locations[f"{fused_module}.{kind}"] = (name, index)
    return locations


def _check_slice(model: nn.Module, parameter_name: str, index: int, tensor: Tensor) -> None:
    """Compare a published tensor with its rows of the parameter that it was fused into, unless the model is sharded."""
    if get_tensor_model_parallel_world_size() > 1:
        return
    module, _, kind = parameter_name.rpartition(".")
    layer: Any = model.get_submodule(module)
    served: Tensor = getattr(layer, kind)
    if tensor.ndim:
        start = sum(layer.output_sizes[:index]) if index else 0
        served = served[start : start + len(tensor)]
    if not torch.equal(served, tensor):
        raise WeightsMismatch(f"{parameter_name} does not serve what was published for its part {index}")


def _owned_shards(model: nn.Module, published: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's parameters and published buffers, without those that another rank also holds and counts."""
    rank = get_tensor_model_parallel_rank()
    if rank == 0:
        yield from ((name, buffer) for name, buffer in model.named_buffers() if name in published)
    for name, parameter in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        if rank == 0:
            yield name, parameter
        elif isinstance(layer, QKVParallelLinear) and rank % layer.num_kv_head_replicas:
            yield name, parameter[: layer.num_heads * layer.head_size]
        elif _is_sharded(layer, name, parameter.shape, published):
            yield name, parameter


def _is_sharded(layer: nn.Module, name: str, shape: Shape, published: Mapping[str, Shape]) -> bool:
    """Return whether a parameter of this shape is one of several shards; modules may also have some of their own."""
    if isinstance(layer, RowParallelLinear) and name.endswith(".bias"):
        return False
    if isinstance(layer, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
        return layer.tp_size > 1
    return EXPERTS in name or prod(shape) < prod(published.get(name, shape))
