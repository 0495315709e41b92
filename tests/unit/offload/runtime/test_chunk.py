"""Tests that loading and releasing a chunk's tensors affects neither the model nor autograd's saved tensors."""

from __future__ import annotations

import pytest
import torch
from offload_cases import NarrowStream
from torch import Tensor, nn

from rlpipe.offload.layout import TensorInfo, make_layout
from rlpipe.offload.runtime.activations import InlineStream
from rlpipe.offload.runtime.chunk import ChunkMemory, OneRank
from rlpipe.offload.units import Member

CPU = torch.device("cpu")
LANE = InlineStream()


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 3))


def take_chunks(model: nn.Module) -> list[ChunkMemory]:
    """Return one chunk per layer."""
    parameters = dict(model.named_parameters())
    tensors = [
        TensorInfo(name=name, num_bytes=p.nbytes, block=int(name.split(".")[0]), is_trained=True)
        for name, p in parameters.items()
    ]
    layout = make_layout(tensors, sizes=[512])
    return [
        ChunkMemory(
            chunk, [Member.of_parameter(p.name, parameters[p.name]) for p in chunk.spans], device=CPU, ranks=OneRank()
        )
        for chunk in layout.chunks
    ]


def loss_of(model: nn.Sequential, chunks: list[ChunkMemory] | None = None) -> Tensor:
    """Return the loss; with ``chunks``, only the running layer has its weights."""
    hidden = torch.linspace(-1, 1, 16).view(2, 8)
    for index, layer in enumerate(model):
        chunk = chunks[index // 2] if chunks is not None and index % 2 == 0 else None
        if chunk is not None:
            chunk.load(LANE)
        hidden = layer(hidden)
        if chunk is not None:
            chunk.release()
    return hidden.square().sum()


@pytest.mark.parametrize("frozen", [False, True])
def test_what_autograd_remembers_is_right_once_the_chunk_is_back(frozen: bool) -> None:
    expected, model = make_model(), make_model()
    for each in (expected, model):
        each[2].weight.requires_grad_(not frozen)
    loss_of(expected).backward()
    chunks = take_chunks(model)
    assert len(chunks) == 3
    loss = loss_of(model, chunks)
    junk = [torch.full((8, 8), 7.0) for _ in range(20)]  # reuses the freed memory
    for chunk in chunks:
        chunk.load(LANE)
    loss.backward()
    assert len(junk) == 20
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert torch.equal(mine.grad, theirs.grad), name


def test_tensors_that_are_out_keep_their_shape_and_read_as_nan() -> None:
    model = make_model()
    take_chunks(model)
    assert model[0].weight.shape == (8, 8)
    assert model[0].weight.isnan().all()
    assert model[0].weight.untyped_storage().nbytes() == 4
    assert loss_of(model).isnan()


def test_what_is_written_counts_once_it_is_loaded_again() -> None:
    model = make_model()
    (chunk, *_) = take_chunks(model)
    chunk.write("0.weight", torch.full((8, 8), 3.0))
    chunk.load(LANE)
    assert (model[0].weight == 3.0).all()
    assert torch.equal(model[0].bias, make_model()[0].bias)


def test_a_closed_chunk_leaves_the_model_whole() -> None:
    expected, model = make_model(), make_model()
    chunks = take_chunks(model)
    chunks[0].load(LANE)
    chunks[0].release()
    for chunk in [*chunks, *chunks]:
        chunk.close()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="closed"):
        chunks[0].load(LANE)


def test_a_load_without_room_leaves_the_chunk_out() -> None:
    model = make_model()
    (chunk, *_) = take_chunks(model)
    chunk.load(LANE)
    weight = model[0].weight.data
    chunk.release()
    with pytest.raises(torch.OutOfMemoryError):
        chunk.load(NarrowStream(num_failures=1))
    assert weight.untyped_storage().nbytes() == 0
    assert model[0].weight.isnan().all()
    chunk.load(LANE)
    assert torch.equal(model[0].weight, make_model()[0].weight)


def test_tensors_that_belong_to_a_parameter_travel_with_it() -> None:
    class State:
        def __init__(self) -> None:
            self.scales = torch.arange(5.0)
            self.code = torch.arange(6, dtype=torch.uint8)

    state = State()
    tensors = [
        TensorInfo(name=name, num_bytes=getattr(state, name).nbytes, block=0, is_trained=False)
        for name in ("scales", "code")
    ]
    (chunk,) = make_layout(tensors, sizes=[1024]).chunks
    members = [Member.of_attribute(span.name, state, span.name) for span in chunk.spans]
    memory = ChunkMemory(chunk, members, device=CPU, ranks=OneRank())
    assert state.scales.isnan().all()
    memory.load(LANE)
    assert torch.equal(state.scales, torch.arange(5.0))
    assert torch.equal(state.code, torch.arange(6, dtype=torch.uint8))
