"""Tests that parameters are packed into chunks in the order of their use, with whole blocks if they fit."""

from __future__ import annotations

import numpy as np
import pytest

from rlpipe.offload.layout import ALIGNMENT, ChunkLayout, TensorInfo, make_layout

K = 1024


def block(index: int | None, *sizes: int, is_trained: bool = True) -> list[TensorInfo]:
    return [
        TensorInfo(name=f"{index}.{place}", num_bytes=size, block=index, is_trained=is_trained)
        for place, size in enumerate(sizes)
    ]


def names(layout: ChunkLayout) -> list[list[str]]:
    return [[span.name for span in chunk.spans] for chunk in layout.chunks]


def test_a_block_that_fits_is_not_split() -> None:
    tensors = [*block(0, 3 * K, 3 * K), *block(1, 3 * K, 3 * K), *block(2, 2 * K)]
    layout = make_layout(tensors, sizes=[8 * K])
    assert names(layout) == [["0.0", "0.1"], ["1.0", "1.1", "2.0"]]
    assert [chunk.blocks for chunk in layout.chunks] == [[0], [1, 2]]
    assert layout.slot_bytes == 8 * K


def test_a_block_larger_than_a_chunk_fills_several() -> None:
    layout = make_layout([*block(0, 5 * K, 5 * K, 5 * K)], sizes=[10 * K])
    assert names(layout) == [["0.0", "0.1"], ["0.2"]]


def test_a_tensor_larger_than_a_chunk_takes_several_slots() -> None:
    layout = make_layout([*block(None, 100 * K), *block(0, 7 * K)], sizes=[8 * K])
    assert names(layout) == [["None.0"], ["0.0"]]
    assert layout.slot_bytes == 7 * K
    assert [layout.slots_of(chunk) for chunk in layout.chunks] == [15, 1]
    assert layout.slack == 5 * K
    assert make_layout(block(0, 100 * K), sizes=[8 * K]).slot_bytes == 8 * K


def test_trained_tensors_of_a_chunk_have_one_type() -> None:
    tensors = [
        TensorInfo(name=str(index), num_bytes=K, block=0, is_trained=index < 4, dtype="ab"[index % 2])
        for index in range(6)
    ]
    assert names(make_layout(tensors, sizes=[8 * K])) == [["0", "2"], ["1", "3"], ["4", "5"]]


def test_frozen_and_trained_tensors_have_chunks_of_their_own() -> None:
    tensors = [*block(0, K), *block(0, 2 * K, is_trained=False), *block(1, K), *block(1, 2 * K, is_trained=False)]
    layout = make_layout(tensors, sizes=[8 * K])
    assert [(chunk.is_trained, chunk.blocks) for chunk in layout.chunks] == [(True, [0, 1]), (False, [0, 1])]


def test_the_size_with_the_least_slack_is_taken() -> None:
    tensors = [tensor for index in range(4) for tensor in block(index, 5 * K)] + block(4, K)
    layout = make_layout(tensors, sizes=[8 * K, 12 * K])
    assert [len(chunk) for chunk in names(layout)] == [2, 3]
    assert (layout.slot_bytes, layout.slack) == (11 * K, K)
    equal = [tensor for index in range(4) for tensor in block(index, 4 * K)]
    assert len(make_layout(equal, sizes=[16 * K, 8 * K]).chunks) == 2


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="without parameters"):
        make_layout([])


@pytest.mark.parametrize("seed", range(20))
def test_every_tensor_has_an_offset_of_its_own(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = []
    for index in range(int(rng.integers(1, 12))):
        sizes = rng.integers(1, 6 * K, int(rng.integers(1, 5))).tolist()
        tensors += block(index, *sizes, is_trained=bool(rng.integers(2)))
    layout = make_layout(tensors, sizes=[4 * K, 8 * K, 16 * K])
    assert sorted(name for chunk in names(layout) for name in chunk) == sorted(tensor.name for tensor in tensors)
    order = {tensor.name: index for index, tensor in enumerate(tensors)}
    for chunk in layout.chunks:
        ends = 0
        for span in chunk.spans:
            assert span.offset >= ends
            assert span.offset % ALIGNMENT == 0
            ends = span.offset + span.num_bytes
        assert ends <= chunk.num_bytes <= layout.slots_of(chunk) * layout.slot_bytes
        assert [order[span.name] for span in chunk.spans] == sorted(order[span.name] for span in chunk.spans)
