"""Weights as buckets of bytes: filling, checking, reading and broadcasting them.

The digest of a version is computed twice: by the sender from the tensors that it publishes, and by every engine from
the tensors that it reads back out of the model it serves.

LoRA beside its base: XXH3-128 over all adapted modules in order of name: the module's name, A, and B times its
scaling, in the type that they are served in. A missing module, a changed element or type, or a wrong scaling changes
the digest.

Whole models, and adapters that engines merge into the base (``rlpipe.models.served_weights``): engines fuse, pad and
shard tensors, so the digest is independent of the layout: every element's bits are mixed to 64 bits and added up modulo
2^64, separately for every layer, and XXH3-128 is taken over these sums. A missing or altered element, a wrong type, or
two swapped layers change the digest. A permutation of elements within one layer does not, which is why the engines also
compare fused parameters with the tensors they came from. Elements whose bits are all zero add nothing, so padding does
not count. A tied tensor is published, and counted, once. Some models keep a few parameters in float32, whatever type
they are served in; these count as they are after a cast to that type.

Between GPUs, vLLM's NCCL transfer is used instead (``rlpipe.learner.nccl_broadcast``). In both cases a ``Transfer``
gives both sides the address and the tensors to expect.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from rlpipe.errors import ModelError
from rlpipe.types import Buckets, ByteArray, Transfer, WeightsKind, WeightsManifest

if TYPE_CHECKING:
    from peft import PeftConfig

MERGEABLE = ("use_dora", "lora_bias", "modules_to_save", "target_parameters")
"""Features of adapters that engines can't apply on top of a base, but that a merge captures."""
UNMERGEABLE = ("use_qalora", "layer_replication", "alora_invocation_tokens", "kasa_config")
"""Features of adapters that neither a merge nor an engine's LoRA captures."""
MAGNITUDE = "lora_magnitude_vector"
"""Part of the names of DoRA's norms, which the learner computes with in float32, and which keep that type."""
BASE_DIGEST = "base"
"""The digest of an engine that serves the model as it was loaded from disk."""

LoraPairs = dict[str, tuple[Tensor, Tensor]]
"""A ``[r, in]`` and B ``[out, r]`` of every adapted module, by the module's name in the base model."""
T = TypeVar("T")

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_BIT_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LORA_NAME = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<matrix>[AB])(?:\.[^.]+)?\.weight")
_MASK = 2**64 - 1


class BucketMemory:
    """Memory that is reused for one bucket after another, because fresh pages cost more time than the copy itself."""

    def __init__(self) -> None:
        self._memory = np.empty(0, dtype=np.uint8)

    def take(self, size: int) -> ByteArray:
        """Return the first ``size`` bytes, to be overwritten; the memory grows if needed."""
        if len(self._memory) < size:
            self._memory = np.empty(size, dtype=np.uint8)
        return self._memory[:size]


class BucketWriter:
    """A safetensors file in memory, to which tensors are added one by one with a single copy of their bytes.

    The header's length is only known at the end, so room for the longest header is left before the data, and the header
    is written directly before the data. Room that is never written to costs no memory.

    Args:
        data_bytes: most bytes of tensors; a larger first tensor still fits, but none after it.
        header_bytes: most bytes of the header; ``entry_bytes`` gives those of one tensor.
        memory: memory that the file is written to; None: new memory.
    """

    def __init__(self, data_bytes: int, header_bytes: int = 2**20, memory: BucketMemory | None = None) -> None:
        self._data_bytes, self._memory = data_bytes, memory or BucketMemory()
        self._data_start = 8 + header_bytes + -header_bytes % 8
        self._header: dict[str, Any] = {}
        self._header_room, self._end = header_bytes - len("{}"), 0
        self._file = self._memory.take(self._data_start + data_bytes)

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Return whether there is room for the tensor, at a multiple of its element size."""
        return not self._header or (
            self._end + tensor.nbytes <= self._data_bytes
            and self._end % tensor.element_size() == 0
            and self.entry_bytes(name) <= self._header_room
        )

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor that ``fits``; raise ``ModelError`` if its type can't be published."""
        dtype_name = _dtype_name(name, tensor)
        if not self._header and tensor.nbytes > self._data_bytes:
            self._file = self._memory.take(self._data_start + tensor.nbytes)
        start, self._end = self._end, self._end + tensor.nbytes
        self._header[name] = {"dtype": dtype_name, "shape": list(tensor.shape), "data_offsets": [start, self._end]}
        self._header_room -= self.entry_bytes(name)
        data = torch.from_numpy(self._file)[self._data_start :]
        data[start : self._end].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def finish(self) -> ByteArray:
        """Write the header, and return the file, which is valid until another one begins in the same memory."""
        text = json.dumps(self._header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        file = self._file[self._data_start - len(text) - 8 : self._data_start + self._end]
        file[:8] = np.frombuffer(len(text).to_bytes(8, "little"), dtype=np.uint8)
        file[8 : 8 + len(text)] = np.frombuffer(text, dtype=np.uint8)
        return file

    @staticmethod
    def entry_bytes(name: str) -> int:
        """Return an upper bound on the header's bytes for a tensor of at most 8 dimensions."""
        return len(json.dumps(name)) + 256


def pack_weights(
    *,
    version: int,
    kind: WeightsKind,
    named_tensors: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    emit: Callable[[ByteArray], None],
    adapter_config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    memory: BucketMemory | None = None,
    merged_digest: Callable[[Mapping[str, Any], Mapping[str, Tensor]], str] | None = None,
) -> WeightsManifest:
    """Encode one version, pass every bucket to ``emit`` as soon as it is full, and return the manifest.

    Args:
        named_tensors: names and tensors; for LoRA with PEFT's state dict names, all in one bucket; for full weights
            with transformers' parameter names, tied tensors once, and iterated lazily with one tensor held at a time.
        bucket_bytes: most tensor bytes of a bucket of full weights; a larger tensor gets its own.
        adapter_config: PEFT's adapter config, which gives the scaling of B.
        dtype: the type that the engines serve; floating point tensors are cast to it. None: no cast.
        memory: memory of the buckets, each then valid only until ``emit`` returns. None: each has its own.
        merged_digest: function from config and tensors of an adapter that is served merged to the served digest.

    Raises:
        ModelError: a LoRA tensor is not A or B of a linear module, lacks its partner, or uses an unsupported feature.
    """
    if kind is not WeightsKind.FULL:
        tensors = {name: _cast(tensor.detach(), None if MAGNITUDE in name else dtype) for name, tensor in named_tensors}
        config = adapter_config or {}
        if kind is WeightsKind.LORA:
            _check_features(config)
            digest = lora_digest(pair_adapter(tensors), lambda module: lora_scaling(config, module))
        else:
            assert merged_digest is not None, "whoever packs a merged version can compute its digest"
            digest = merged_digest(config, tensors)
        sizes = [_emit(encode(tensors, memory), emit)]
    else:
        sums: dict[int, int] = {}
        sizes = [_emit(bucket, emit) for bucket in _fill_buckets(named_tensors, dtype, bucket_bytes, sums, memory)]
        digest = digest_of_sums(sums)
    return WeightsManifest(
        version=version,
        kind=kind,
        digest=digest,
        num_buckets=len(sizes),
        num_bytes=sum(sizes),
        adapter_config=adapter_config,
    )


def encode(tensors: Mapping[str, Tensor], memory: BucketMemory | None = None) -> ByteArray:
    """Write tensors as one safetensors file to ``memory`` (new memory if None), with a single copy of their bytes."""
    writer = BucketWriter(
        sum(tensor.nbytes for tensor in tensors.values()),
        2 + sum(BucketWriter.entry_bytes(name) for name in tensors),
        memory,
    )
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        writer.add(name, tensor)
    return writer.finish()


def unpack(bucket: ByteArray) -> dict[str, Tensor]:
    """Return the tensors of one bucket as views of its memory, which must not be written to.

    Raises ``ModelError`` if the bytes are not a safetensors file.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")
        data = torch.from_numpy(bucket)
    try:
        data_start = 8 + int.from_bytes(bucket[:8].tobytes(), "little")
        header = json.loads(bucket[8:data_start].tobytes())
        return {
            name: _view(data[data_start:], entry["data_offsets"], entry["dtype"]).view(entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"a bucket of {len(bucket)} bytes can't be read as safetensors: {error}") from error


def adapter_bucket(manifest: WeightsManifest, buckets: Buckets) -> ByteArray:
    """Return the only bucket of an adapter; raise ``ModelError`` if there are others, or no adapter config."""
    if len(buckets) != 1 or manifest.adapter_config is None:
        raise ModelError(f"LoRA version {manifest.version} needs one bucket and its adapter config, got {len(buckets)}")
    return buckets[0]


def pack_adapter(
    config: PeftConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    merged_digest: Callable[[Mapping[str, Any], Mapping[str, Tensor]], str] | None = None,
) -> tuple[WeightsManifest, list[ByteArray]]:
    """Pack a PEFT adapter as version 0, to be served merged if there is a ``merged_digest``."""
    buckets: list[ByteArray] = []
    manifest = pack_weights(
        version=0,
        kind=WeightsKind.LORA if merged_digest is None else WeightsKind.MERGED,
        named_tensors=tensors.items(),
        bucket_bytes=0,
        emit=buckets.append,
        adapter_config=config.to_dict(),
        dtype=dtype,
        merged_digest=merged_digest,
    )
    return manifest, buckets


def pair_adapter(tensors: Mapping[str, T]) -> dict[str, tuple[T, T]]:
    """Pair PEFT's A and B by module; raise ``ModelError`` if a tensor is neither or lacks its partner.

    The values may be tensors, or anything that stands for them.
    """
    halves: dict[str, dict[str, T]] = {}
    for name, tensor in tensors.items():
        match = _LORA_NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"adapter tensor {name} is not A or B of a linear module, and can't be served")
        halves.setdefault(match["module"], {})[match["matrix"]] = tensor
    for module, half in halves.items():
        if len(half) != 2:
            raise ModelError(f"adapter module {module} has only lora_{next(iter(half))}")
    if not halves:
        raise ModelError("the adapter has no tensors")
    return {module: (half["A"], half["B"]) for module, half in halves.items()}


def lora_scaling(adapter_config: Mapping[str, Any], module: str) -> float:
    """Return PEFT's factor of B·A: alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv:2312.03732)."""
    rank = _pattern(adapter_config.get("rank_pattern"), module, adapter_config["r"])
    alpha = _pattern(adapter_config.get("alpha_pattern"), module, adapter_config["lora_alpha"])
    return alpha / (math.sqrt(rank) if adapter_config.get("use_rslora") else rank)


def lora_digest(pairs: LoraPairs, scaling: Callable[[str], float] | None = None) -> str:
    """Compute the digest of adapted modules from A and scaled B; see the top of the file.

    ``scaling`` returns the factor of a module's B; None if B is already scaled.
    """
    digest = xxhash.xxh3_128()
    for module in sorted(pairs):
        a, b = pairs[module]
        for tensor in (a, b if scaling is None else b.detach() * scaling(module)):
            digest.update(f"{module} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return f"lora:{digest.hexdigest()}"


def checksum(tensor: Tensor) -> int:
    """Return the sum of the mixed bits of all elements, modulo 2^64, which does not depend on their order."""
    bits = tensor.detach().contiguous().reshape(-1).view(_BIT_VIEWS[tensor.element_size()])
    total = 0
    for chunk in bits.split(2**16 if bits.device.type == "cpu" else 2**26):
        mixed = chunk.to(torch.int64, copy=True).mul_(-7046029254386353131)
        mixed ^= mixed >> 29
        total += int(mixed.mul_(-4417276706812531889).sum())
    return total & _MASK


def add_checksum(sums: dict[int, int], name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> None:
    """Add a tensor's checksum to the sum of its layer, the first number in its name (-1 if there is none).

    Engines give the ``dtype`` that they serve, in which tensors count that a model keeps in a wider one.
    """
    tensor = _cast(tensor, dtype)
    layer = next((int(segment) for segment in name.split(".") if segment.isdigit()), -1)
    sums[layer] = (sums.get(layer, 0) + checksum(tensor)) & _MASK


def merge_sums(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Add up the sums of several ranks' shards."""
    merged: dict[int, int] = {}
    for rank_sums in parts:
        for layer, value in rank_sums.items():
            merged[layer] = (merged.get(layer, 0) + value) & _MASK
    return merged


def digest_of_sums(sums: Mapping[int, int]) -> str:
    """Compute the digest of full weights from the sums of their layers; see the top of the file."""
    text = ",".join(f"{layer}:{value}" for layer, value in sorted(sums.items()) if value)
    return f"full:{xxhash.xxh3_128(text.encode()).hexdigest()}"


def check_adapter_modules(
    received: Collection[str], linear_modules: Collection[str], config: Mapping[str, Any]
) -> None:
    """Raise ``ModelError`` unless the adapter's modules are exactly the model's modules that its config targets.

    Args:
        received: modules with tensors.
        linear_modules: all linear modules of the model, under the names that PEFT knows.
    """
    unknown = sorted(set(received) - set(linear_modules))
    if unknown:
        raise ModelError(f"adapter tensors match no module of the model: {_some(unknown)}")
    missing = sorted(set(_targets(config, linear_modules)) - set(received))
    if missing:
        raise ModelError(f"the adapter has no tensors for modules that its config targets: {_some(missing)}")


def check_parameters(received: Collection[str], expected: Collection[str], *, complete: bool = True) -> None:
    """Raise ``ModelError`` unless full weights have a tensor for each parameter (if ``complete``), and no other."""
    unknown, missing = sorted(set(received) - set(expected)), sorted(set(expected) - set(received))
    if unknown:
        raise ModelError(f"published tensors match no parameter of the model: {_some(unknown)}")
    if missing and complete:
        raise ModelError(f"parameters of the model were not published: {_some(missing)}")


def check_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise ``ModelError`` if a floating point tensor is not in the type that the engine serves."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dtype != dtype:
            raise ModelError(f"{name} was published in {tensor.dtype}, but the engine serves {dtype}: cast it first")


def check_shape(name: str, tensor: Tensor, expected: Tensor) -> None:
    """Raise ``ModelError`` if a tensor's shape differs from its parameter's."""
    if tensor.shape != expected.shape:
        raise ModelError(f"{name} was published as {list(tensor.shape)}, but the model has {list(expected.shape)}")


def _fill_buckets(
    named_tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    bucket_bytes: int,
    sums: dict[int, int],
    memory: BucketMemory | None,
) -> Iterator[ByteArray]:
    """Yield buckets one by one; each tensor is released before the next one is gathered."""
    bucket = None
    for name, tensor in named_tensors:
        tensor = _cast(tensor.detach(), dtype)
        if bucket and not bucket.fits(name, tensor):
            yield bucket.finish()
            bucket = None
        bucket = bucket or BucketWriter(bucket_bytes, memory=memory)
        bucket.add(name, tensor)
        add_checksum(sums, name, tensor)
        del tensor
    if bucket:
        yield bucket.finish()


def _emit(bucket: ByteArray, emit: Callable[[ByteArray], None]) -> int:
    emit(bucket)
    return bucket.nbytes


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _view(data: Tensor, offsets: tuple[int, int], dtype_name: str) -> Tensor:
    return data[offsets[0] : offsets[1]].view(_DTYPES[dtype_name])


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _DTYPE_NAMES:
        raise ModelError(f"{name} has type {tensor.dtype}, which can't be published")
    return _DTYPE_NAMES[tensor.dtype]


def _check_features(adapter_config: Mapping[str, Any]) -> None:
    for feature in (*MERGEABLE, *UNMERGEABLE):
        if adapter_config.get(feature):
            merging = "set weights.serve=merged, or merge it first (rlpipe merge)"
            raise ModelError(
                f"the adapter uses {feature}, which engines can't serve as an adapter"
                + (f": {merging}" if feature in MERGEABLE else "")
            )
    if adapter_config.get("bias", "none") != "none":
        raise ModelError(f"the adapter has bias={adapter_config['bias']}, which engines can't serve; use none")


def _pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    matches = (value for key, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({key})", module))
    return next(matches, default)


def _targets(adapter_config: Mapping[str, Any], modules: Iterable[str]) -> list[str]:
    if adapter_config["target_modules"] == "all-linear":
        return [module for module in modules if not module.endswith("lm_head")]
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    keys = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
    chosen: dict[str, Any] = {key: adapter_config.get(key) for key in keys}
    config = LoraConfig(**chosen)
    return [module for module in modules if check_target_module_exists(config, module)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def listen(address: str) -> dist.TCPStore:
    """Open the store on the learner that the other processes connect to."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)


@dataclass(slots=True)
class GlooGroup:
    """A process group separate from torch's default one; the learner is rank 0."""

    group: Any

    @staticmethod
    def join(transfer: Transfer, rank: int, timeout_s: float, store: dist.TCPStore | None = None) -> GlooGroup:
        """Join the group of a transfer; the learner passes its own ``store``, which already listens."""
        limit = timedelta(seconds=timeout_s)
        if store is None:
            store = dist.TCPStore(transfer.address, transfer.port, is_master=False, timeout=limit)
        return GlooGroup(dist.ProcessGroupGloo(store, rank, transfer.num_processes, limit))

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            self._broadcast(tensor.cpu().contiguous())

    def receive(self, transfer: Transfer) -> Iterator[tuple[str, Tensor]]:
        for spec in transfer.specs:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            self._broadcast(tensor)
            yield spec.name, tensor

    def _broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()
