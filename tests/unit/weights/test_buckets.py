from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn

from rlpipe.errors import ModelError
from rlpipe.models.adapter import read_adapter
from rlpipe.types import ByteArray, WeightsKind, WeightsManifest
from rlpipe.weights.buckets import (
    BucketMemory,
    BucketWriter,
    add_checksum,
    check_adapter_modules,
    check_parameters,
    checksum,
    digest_of_sums,
    encode,
    lora_digest,
    lora_scaling,
    pack_adapter,
    pack_weights,
    pair_adapter,
    unpack,
)

CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def adapter(seed: int = 0, modules: tuple[str, ...] = ("layers.0.q_proj", "layers.0.v_proj")) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(4, 6, generator=generator)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(5, 4, generator=generator)
    return tensors


def pack(
    tensors: dict[str, Tensor], kind: WeightsKind = WeightsKind.LORA, bucket_bytes: int = 64, **options: Any
) -> tuple[WeightsManifest, list[ByteArray]]:
    buckets: list[ByteArray] = []
    if kind is WeightsKind.LORA:
        options = {"adapter_config": CONFIG} | options
    manifest = pack_weights(
        version=3, kind=kind, named_tensors=tensors.items(), bucket_bytes=bucket_bytes, emit=buckets.append, **options
    )
    return manifest, buckets


def test_buckets_are_safetensors_files() -> None:
    tensors = {
        "a": torch.randn(3, 2),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.0),
        "strided": torch.randn(4, 6)[:, ::2],
    }
    encoded = encode(tensors)
    for decoded in (safetensors.torch.load(encoded.tobytes()), unpack(encoded)):
        assert decoded.keys() == tensors.keys()
        assert all(torch.equal(decoded[name], tensor) for name, tensor in tensors.items())
    theirs = np.frombuffer(safetensors.torch.save({"a": tensors["a"]}), dtype=np.uint8)
    assert torch.equal(unpack(theirs)["a"], tensors["a"])


def test_unpack_takes_read_only_memory_without_a_copy_or_a_warning() -> None:
    encoded = encode({"a": torch.ones(4)})
    writable = unpack(encoded)["a"]
    encoded.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = unpack(encoded)["a"]
    assert tensor.data_ptr() == writable.data_ptr()


def test_unpack_names_broken_bytes() -> None:
    with pytest.raises(ModelError, match="16 bytes can't be read"):
        unpack(np.full(16, 255, dtype=np.uint8))


def test_full_weights_are_split_into_bounded_buckets() -> None:
    tensors = {f"layers.{i}.weight": torch.randn(8) for i in range(5)} | {"head.weight": torch.randn(64)}
    manifest, buckets = pack(tensors, WeightsKind.FULL, bucket_bytes=64)
    assert [len(unpack(bucket)) for bucket in buckets] == [2, 2, 1, 1]
    assert (manifest.num_buckets, manifest.num_bytes) == (4, sum(bucket.nbytes for bucket in buckets))
    merged = {name: tensor for bucket in buckets for name, tensor in unpack(bucket).items()}
    assert all(torch.equal(merged[name], tensor) for name, tensor in tensors.items())


def test_full_weights_are_fetched_one_bucket_at_a_time() -> None:
    emitted: list[ByteArray] = []
    seen = []

    def named_tensors() -> Any:
        for index in range(4):
            seen.append(len(emitted))
            yield f"layers.{index}.weight", torch.randn(16)

    pack_weights(version=0, kind=WeightsKind.FULL, named_tensors=named_tensors(), bucket_bytes=64, emit=emitted.append)
    assert seen == [0, 0, 1, 2]


def test_full_weights_are_released_before_the_next_bucket_is_fetched() -> None:
    held: list[list[int]] = []

    def named_tensors() -> Iterator[tuple[str, Tensor]]:
        references: list[weakref.ref[np.ndarray]] = []
        for index in range(3):
            held.append([place for place, reference in enumerate(references) if reference() is not None])
            data = np.ones(16, np.float32)
            references.append(weakref.ref(data))
            yield f"layers.{index}.weight", torch.from_numpy(data)
            del data

    pack_weights(version=0, kind=WeightsKind.FULL, named_tensors=named_tensors(), bucket_bytes=2**10, emit=len)
    assert held == [[], [], []]


def test_tensors_of_several_types_begin_at_multiples_of_their_elements() -> None:
    tensors = {
        "layers.0.flags": torch.tensor([True, False, True]),
        "layers.0.weight": torch.randn(3),
        "layers.0.scale": torch.randn(2, dtype=torch.float64),
        "layers.0.steps": torch.arange(3),
    }
    _, buckets = pack(tensors, WeightsKind.FULL, bucket_bytes=2**10)
    assert [list(unpack(bucket)) for bucket in buckets] == [
        ["layers.0.flags"],
        ["layers.0.weight"],
        ["layers.0.scale", "layers.0.steps"],
    ]
    for bucket in buckets:
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in safetensors.torch.load(bytes(bucket)).items())


def test_a_bucket_is_full_when_its_header_is() -> None:
    tensors = {f"layers.{index}.weight": torch.ones(()) for index in range(10)}
    room = 2 + 3 * BucketWriter.entry_bytes("layers.0.weight")
    writer = BucketWriter(2**10, room)
    added = [name for name, tensor in tensors.items() if writer.fits(name, tensor) and not writer.add(name, tensor)]
    assert list(unpack(writer.finish())) == added == list(tensors)[:3]


def test_buckets_share_memory_where_there_is_one() -> None:
    tensors = {f"layers.{index}.weight": torch.randn(16 - index) for index in range(4)}
    copies: list[ByteArray] = []
    starts = set()

    def emit(bucket: ByteArray) -> None:
        copies.append(bucket.copy())
        starts.add(bucket.ctypes.data)

    memory = BucketMemory()
    for _ in range(2):
        pack_weights(
            version=0, kind=WeightsKind.FULL, named_tensors=tensors.items(), bucket_bytes=64, emit=emit, memory=memory
        )
    assert len(starts) == 1, "the first bucket is the largest"
    for published in (copies[:4], copies[4:]):
        unpacked = {name: tensor for bucket in published for name, tensor in unpack(bucket).items()}
        assert all(torch.equal(unpacked[name], tensor) for name, tensor in tensors.items())


def test_an_adapter_is_one_bucket_in_the_served_type() -> None:
    manifest, buckets = pack(adapter(), bucket_bytes=1, dtype=torch.bfloat16)
    assert manifest.num_buckets == len(buckets) == 1
    assert {tensor.dtype for tensor in unpack(buckets[0]).values()} == {torch.bfloat16}
    assert (
        manifest.digest == pack({n: t.bfloat16() for n, t in adapter().items()})[0].digest != pack(adapter())[0].digest
    )


def test_lora_digest_is_independent_of_the_order() -> None:
    assert pack(dict(reversed(adapter().items())))[0].digest == pack(adapter())[0].digest


def corrupt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    next(iter(tensors.values()))[1, 2] += 1e-6
    return tensors


def swap(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(tensors, [*tensors.values()][2:] + [*tensors.values()][:2], strict=True))


@pytest.mark.parametrize(
    "change", [corrupt, swap, lambda tensors: dict(list(tensors.items())[:2]), lambda tensors: adapter(1)]
)
def test_lora_digest_sees_every_change(change: Any) -> None:
    assert pack(change(adapter()))[0].digest != pack(adapter())[0].digest


def test_lora_digest_sees_a_wrong_scaling() -> None:
    assert pack(adapter(), adapter_config=CONFIG | {"lora_alpha": 4})[0].digest != pack(adapter())[0].digest


def test_lora_scaling_is_that_of_peft() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 5)

    for use_rslora in (False, True):
        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["first", "second", "third"],
            use_rslora=use_rslora,
            rank_pattern={"second": 2},
            alpha_pattern={"second|third": 3},
        )
        model = get_peft_model(Net(), config)
        pairs = pair_adapter(get_peft_model_state_dict(model))
        assert pairs.keys() == {"first", "second", "third"}
        for name in pairs:
            expected = model.get_submodule(f"base_model.model.{name}").scaling["default"]
            assert lora_scaling(config.to_dict(), name) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({"base_model.model.head.weight": torch.ones(2)}, {}, "head.weight is not A or B"),
        (dict(list(adapter().items())[:1]), {}, "layers.0.q_proj has only lora_A"),
        ({}, {}, "no tensors"),
        (adapter(), {"use_dora": True}, "use_dora"),
        (adapter(), {"bias": "all"}, "bias=all"),
    ],
)
def test_adapters_that_no_engine_can_serve_are_refused(tensors: Any, config: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        pack(tensors, adapter_config=CONFIG | config)


def test_adapter_modules_must_be_those_that_the_config_targets() -> None:
    linear = ["layers.0.q_proj", "layers.0.v_proj", "layers.0.o_proj", "lm_head"]
    check_adapter_modules(linear[:2], linear, CONFIG)
    check_adapter_modules(linear[:3], linear, {"target_modules": "all-linear"})
    check_adapter_modules(linear[2:3], linear, {"target_modules": r".*\.o_proj"})
    with pytest.raises(ModelError, match=r"match no module of the model: layers\.7\.q_proj"):
        check_adapter_modules(["layers.7.q_proj", *linear[:2]], linear, CONFIG)
    with pytest.raises(ModelError, match=r"no tensors for modules that its config targets: layers\.0\.v_proj"):
        check_adapter_modules(linear[:1], linear, CONFIG)


def full_digest(tensors: dict[str, Tensor]) -> str:
    sums: dict[int, int] = {}
    for name, tensor in tensors.items():
        add_checksum(sums, name, tensor)
    return digest_of_sums(sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full_digest_is_that_of_fused_padded_and_sharded_parameters(dtype: torch.dtype) -> None:
    q, k = torch.randn(4, 6).to(dtype), torch.randn(2, 6).to(dtype)
    fused = torch.cat([q, k])
    parts = {"model.layers.1.q.weight": q, "model.layers.1.k.weight": k}
    manifest, _ = pack(parts, WeightsKind.FULL)
    assert full_digest({"model.layers.1.qk.weight": fused}) == manifest.digest
    assert full_digest({"x.1.qk.weight": torch.cat([fused, torch.zeros(2, 6, dtype=dtype)])}) == manifest.digest
    assert full_digest({"a.1.w": fused[:, :3], "b.1.w": fused[:, 3:]}) == manifest.digest


def test_full_digest_sees_every_change() -> None:
    tensors = {f"layers.{i}.weight": torch.randn(3, 4) for i in range(2)}
    digest = full_digest(tensors)
    corrupted = {name: tensor.clone() for name, tensor in tensors.items()}
    corrupted["layers.1.weight"].view(torch.int32)[2, 3] ^= 1
    swapped = dict(zip(tensors, reversed(tensors.values()), strict=True))
    missing = {"layers.0.weight": tensors["layers.0.weight"]}
    cast = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert len({digest, *map(full_digest, (corrupted, swapped, missing, cast))}) == 5


def test_checksum_counts_every_chunk_and_every_bit_of_the_result() -> None:
    tensor = torch.randn(200_000)
    parts = sum(checksum(part) for part in tensor.split(70_000)) % 2**64
    assert checksum(tensor) == parts > 2**32
    assert checksum(torch.zeros(5)) == 0


def test_checksum_sees_changes_that_cancel_in_a_sum_of_bits() -> None:
    bits = torch.tensor([100, 200, 300], dtype=torch.int32)
    moved = bits + torch.tensor([1, -1, 0], dtype=torch.int32)
    assert checksum(bits) != checksum(moved)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_checksum_leaves_the_tensor_as_it_was(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 6).to(dtype)
    checksum(tensor)
    assert torch.equal(tensor, torch.arange(1, 6).to(dtype))


def test_parameters_must_be_published_once_and_all() -> None:
    check_parameters(["a", "b"], ["b", "a"])
    check_parameters(["a"], ["a", "b"], complete=False)
    with pytest.raises(ModelError, match="match no parameter of the model: c"):
        check_parameters(["a", "c"], ["a", "b"])
    with pytest.raises(ModelError, match="were not published: b"):
        check_parameters(["a"], ["a", "b"])


def test_a_peft_folder_becomes_version_0(tmp_path: Path) -> None:
    model = get_peft_model(nn.Sequential(nn.Linear(6, 5)), LoraConfig(r=4, target_modules=["0"]))
    model.save_pretrained(tmp_path)
    manifest, buckets = pack_adapter(*read_adapter(str(tmp_path), "it"), torch.float32)
    assert (manifest.version, manifest.kind) == (0, WeightsKind.LORA)
    config = model.peft_config["default"].to_dict()
    assert manifest.digest == lora_digest(pair_adapter(unpack(buckets[0])), lambda module: lora_scaling(config, module))
    with pytest.raises(ModelError, match=r"^model.adapter.path: there is no folder .*nowhere"):
        read_adapter(str(tmp_path / "nowhere"), "it")
