"""Tests that a model is offloaded entirely or not at all, by one owner at a time, and restored to where it was."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from offload_cases import CPU, arrange_all, late_queues, make_nf4, make_qwen, token_loss, with_lora
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.hardware import host_memory
from rlpipe.hardware.host_memory import HostBuffer
from rlpipe.offload.api import OffloadedAdamW
from rlpipe.offload.decision import Arrangement, Mode
from rlpipe.offload.runtime import chunk as chunk_module
from rlpipe.offload.runtime import runtime
from rlpipe.offload.runtime.activations import InlineStream, StreamEvent, Streams, Work
from rlpipe.offload.runtime.chunk import OneRank
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision

pytestmark = pytest.mark.covering(1)

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
SIZES = [100 * 1024]


def offload(model: nn.Module, *cycle: Mode, num_persistent: int = 0, **options: Any) -> OffloadedModel:
    arrangement = arrange_all(model, *(cycle or (Mode.KEEP,)), num_persistent=num_persistent, num_slots=9)
    options = {"device": CPU, "optimizer": CONFIG, "sizes": SIZES} | options
    return OffloadedModel(model, arrangement, **options)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all tensors, including the scales of 4-bit weights."""
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, parameter in model.named_parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            found |= {f"{name}.absmax": state.absmax, f"{name}.code": state.code}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def assert_same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = tensors_of(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes(), name  # as codes may be NaN


def assert_no_worker() -> None:
    """Check that no worker thread is left; one that was told to end may take a moment."""
    for thread in threading.enumerate():
        if thread.name.startswith("offload"):
            thread.join(timeout=10)
            assert not thread.is_alive()


class Refused(RuntimeError):
    pass


def refuse_buffer(patch: pytest.MonkeyPatch, number: int) -> list[HostBuffer]:
    """Refuse the host buffer with the given number, and return the list of those made before it."""
    made: list[HostBuffer] = []

    class Scarce(HostBuffer):
        def __init__(self, num_bytes: int, *, pin: bool) -> None:
            if len(made) + 1 == number:
                raise Refused("CUDA could not lock")
            super().__init__(num_bytes, pin=pin)
            made.append(self)

    patch.setattr(chunk_module, "HostBuffer", Scarce)
    return made


@pytest.mark.parametrize(("kind", "number"), [*product(["full", "half"], [1, 2, 4]), ("qlora", 1), ("qlora", 2)])
def test_a_model_that_cannot_be_taken_over_stays_as_it_was(kind: str, number: int) -> None:
    model = with_lora(make_nf4()) if kind == "qlora" else make_qwen()
    precision = Precision(compute=torch.bfloat16, state=torch.float32) if kind == "half" else Precision()
    expected = tensors_of(model)
    with pytest.MonkeyPatch.context() as patch:
        made = refuse_buffer(patch, number)
        with pytest.raises(Refused):
            offload(model, precision=precision)
    assert len(made) == number - 1
    for buffer in made:
        with pytest.raises(RuntimeError, match="closed"):
            _ = buffer.bytes
    assert_no_worker()
    assert_same(model, expected)
    token_loss(model, 0).backward()
    model.zero_grad()
    with offload(model, precision=precision):
        pass
    assert_same(model, expected)


def test_a_chunk_that_fails_half_way_takes_nothing() -> None:
    """Check a model on the meta device, where the third value of a later chunk is missing."""
    real = make_qwen()
    values = {name: parameter.detach().clone() for name, parameter in real.named_parameters()}
    with torch.device("meta"):
        model = make_qwen()
    for path, module in model.named_modules():
        for name in list(module._buffers):
            module._buffers[name] = dict(real.named_buffers())[f"{path}.{name}"].clone()
    missing = "model.layers.1.mlp.up_proj.weight"

    def fill(name: str, tensor: Tensor) -> None:
        if name == missing:
            raise KeyError(name)
        tensor.copy_(values[name])

    with pytest.raises(KeyError):
        offload(model, fill=fill)
    found = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert missing not in found
    for name in found:
        assert torch.equal(model.get_parameter(name), values[name]), name
    with offload(model, fill=lambda name, tensor: tensor.copy_(values[name])):
        pass
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())


def test_what_fails_after_the_chunks_gives_them_back() -> None:
    model = make_qwen()
    with torch.device("meta"):
        model.register_buffer("table", torch.zeros(3))
    with pytest.raises(ValueError, match="table is on the meta device"):
        offload(model)
    assert all(map(torch.equal, model.parameters(), make_qwen().parameters()))


class State:
    """A quantization state like the one that bitsandbytes keeps with a 4-bit weight."""

    def __init__(self) -> None:
        self.absmax, self.code = torch.ones(16), torch.ones(16)

    def to(self, device: torch.device) -> None:
        self.absmax, self.code = self.absmax.to(device), self.code.to(device)


def make_mixed() -> nn.Module:
    """Make a model with blocks, a trained vector, a buffer, and a quantization state of a frozen weight."""
    model = nn.Sequential(
        nn.Linear(32, 32), nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(2)])
    )
    model[1][0][0].weight.requires_grad_(False)
    model[1][0][0].weight.quant_state = State()
    return model


class SecondDevice(TorchFunctionMode):
    """CPU memory that poses as a GPU's: tensors created on or moved to ``cuda:0`` report that device."""

    place = torch.device("cuda", 0)

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept alive, so that no other storage gets the address

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == Tensor.device.__get__:
            return self.place if self._has(args[0]) else CPU
        wanted = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)), None)
        if wanted is None:
            return func(*args, **kwargs)
        args = [CPU if value is wanted else value for value in args]
        kwargs = {name: CPU if value is wanted else value for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if func == Tensor.to and self._has(result) != (wanted == self.place):
            result = result.clone()
        if wanted == self.place:
            self._storages[result.untyped_storage()._cdata] = result.untyped_storage()
        return result

    def _has(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages


@pytest.mark.parametrize("ends", ["well", "in an error", "early"])
def test_all_of_a_model_comes_back_from_the_device(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_module, "HostBuffer", lambda num_bytes, pin: HostBuffer(num_bytes, pin=False))
    model = make_mixed()
    state, vector, expected = model[1][0][0].weight.quant_state, model[0].bias, tensors_of(model)

    def places() -> set[torch.device]:
        tensors = *model.parameters(), *model.buffers(), vector.grad, state.absmax, state.code
        return {tensor.device for tensor in tensors if tensor is not None}

    with SecondDevice() as second:
        assert places() == {CPU}
        arrangement = Arrangement(num_persistent=1, num_slots=2, modes=[Mode.KEEP] * 3)
        queues = Streams(copies_in=InlineStream(), copies_out=InlineStream(), worker=executor())
        options = {"device": second.place, "optimizer": CONFIG, "sizes": [4096], "queues": queues}
        if ends == "early":
            monkeypatch.setattr(runtime, "ChunkOptimizer", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                OffloadedModel(model, arrangement, **options)
        else:
            offloaded = OffloadedModel(model, arrangement, **options)
            vector.grad = torch.zeros_like(vector, device=second.place)
            assert places() == {second.place}
            if ends == "well":
                offloaded.close()
            else:
                with pytest.raises(ZeroDivisionError), offloaded:
                    _ = 1 / 0
        assert places() == {CPU}
    assert_same(model, expected)


def executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1)


class WatchedStream(InlineStream):
    """A stream that counts works, and how many of them the host has waited for."""

    def __init__(self) -> None:
        self.num_queued = self.num_awaited = 0

    def submit(self, work: Work, after: StreamEvent | None = None) -> StreamEvent:
        event = super().submit(work, after)
        self.num_queued += 1
        return event

    def block_host(self) -> None:
        self.num_awaited = self.num_queued


def test_host_memory_is_freed_once_nothing_is_copied_any_more() -> None:
    streams = WatchedStream(), WatchedStream()
    freed: list[bool] = []

    class Watched(HostBuffer):
        def close(self) -> None:
            freed.append(all(stream.num_awaited == stream.num_queued > 0 for stream in streams))
            super().close()

    model = make_qwen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_module, "HostBuffer", Watched)
        queues = Streams(copies_in=streams[0], copies_out=streams[1], worker=executor())
        offloaded = offload(model, Mode.SWAP, queues=queues)
        token_loss(model, 0).backward()
        token_loss(model, 1)
        assert streams[0].num_awaited < streams[0].num_queued
        offloaded.close()
    assert freed
    assert all(freed)


def test_a_module_of_an_offloaded_model_is_not_offloaded_again() -> None:
    model = make_qwen()
    expected = tensors_of(model)
    with offload(model) as offloaded, pytest.raises(RuntimeError, match="offloaded already"):
        offload(model.model)
    assert offloaded.is_closed
    with offload(model.model), pytest.raises(RuntimeError, match="offloaded already"):
        offload(model)
    with offload(model.model), offload(make_qwen()):
        pass
    assert_same(model, expected)


def test_what_is_put_around_an_offloaded_model_is_not_offloaded_again() -> None:
    model = make_qwen()
    expected = token_loss(model, 0)
    offloaded = offload(model)
    wrapped = with_lora(model)
    with pytest.raises(RuntimeError, match="offloaded already"):
        offload(wrapped)
    offloaded.close()
    with offload(wrapped), wrapped.disable_adapter():
        torch.testing.assert_close(token_loss(wrapped, 0), expected)


@pytest.mark.parametrize("is_used", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_model_that_is_never_closed_is_collected(is_used: bool) -> None:
    model = make_qwen()
    offloaded = offload(model, Mode.SWAP, Mode.CHECKPOINT, queues=late_queues())
    if is_used:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        token_loss(model, 0).backward()
        optimizer.step()
        del optimizer
    dead = weakref.ref(model), weakref.ref(offloaded), weakref.ref(offloaded.optimizer.gradients)
    del offloaded
    gc.collect()
    assert dead[1]() is not None, "the model alone keeps it"
    with pytest.raises(RuntimeError, match="offloaded already"):
        offload(model)
    del model
    gc.collect()
    assert [entry() for entry in dead] == [None] * 3


class FakeCuda:
    """A fake CUDA runtime that records the addresses of locked pages."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Mode.SWAP, Mode.KEEP, Mode.OFFLOAD])
def test_a_pass_whose_loss_is_dropped_leaves_nothing(mode: Mode) -> None:
    model = make_qwen()

    def count_tensors() -> int:
        token_loss(model, 0)
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    with offload(model, mode):
        count_tensors()  # lets one-time allocations happen first
        assert count_tensors() == count_tensors()


def test_a_buffer_that_is_never_closed_unlocks_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, waits = FakeCuda(), []
    monkeypatch.setattr(host_memory.torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(host_memory.torch.cuda, "synchronize", lambda: waits.append(len(cuda.locked)))
    buffer, closed = HostBuffer(64, pin=True), HostBuffer(64, pin=True)
    closed.close()
    closed.close()
    assert len(cuda.locked) == 1
    assert not waits
    del buffer, closed
    gc.collect()
    assert not cuda.locked
    assert waits == [1]


class Half(OneRank):
    """The first of two ranks, without the other one."""

    num_parts = 2

    def part(self, length: int) -> slice:
        return slice(0, length // 2)

    def gather(self, whole: Tensor) -> None:
        raise AssertionError("the other rank is elsewhere")


def test_an_error_where_ranks_share_chunks_waits_for_nobody() -> None:
    model = make_qwen()
    offloaded = offload(model, ranks=Half())
    offloaded._queues.worker.submit(int)
    with pytest.raises(ZeroDivisionError) as caught, offloaded:
        _ = 1 / 0
    assert any("load the model again" in note for note in caught.value.__notes__)
    assert_no_worker()
    offloaded.close()
    with pytest.raises(RuntimeError, match="load the model again"):
        token_loss(model, 0)
    with pytest.raises(RuntimeError, match="load the model again"):
        offloaded.values(model.lm_head.weight)
    with pytest.raises(RuntimeError, match="load the model again"):
        offload(model)
    with pytest.raises(RuntimeError, match="load the model again"):
        offload(model.model)
    with pytest.raises(RuntimeError, match="closed"):
        model.model(input_ids=torch.zeros(1, 4, dtype=torch.long))


def test_a_model_whose_shares_cannot_be_taken_is_lost() -> None:
    model = make_qwen()
    with pytest.MonkeyPatch.context() as patch:
        refuse_buffer(patch, 1)
        with pytest.raises(Refused):
            offload(model, ranks=Half())
        assert all(map(torch.equal, model.parameters(), make_qwen().parameters()))
        refuse_buffer(patch, 3)
        with pytest.raises(Refused) as caught:
            offload(model, ranks=Half())
    assert any("load the model again" in note for note in caught.value.__notes__)
    with pytest.raises(RuntimeError, match="load the model again"):
        token_loss(model, 0)
    with pytest.raises(RuntimeError, match="load the model again"):
        offload(model)
