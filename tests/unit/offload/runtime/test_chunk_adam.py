"""Tests that parts of flattened tensors survive a checkpoint, whatever the number of ranks that save and load it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.offload.runtime.chunk_adam import FlatPart, boxes_of

SHAPES = st.lists(st.integers(1, 5), max_size=4)


@given(SHAPES, st.data())
def test_boxes_hold_what_lies_between_in_order(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    whole = torch.arange(size).view(shape)
    boxes = boxes_of(shape, begin, end)
    found = []
    for box in boxes:
        part = whole
        for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, length)
        assert part.numel() == box.num_elements
        found += part.flatten().tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("cuts", [[], [1], [20, 20], [7, 13, 59]])
def test_parts_are_read_from_what_was_written_whole(tmp_path: Path, cuts: list[int]) -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    dcp.save({"weight": FlatPart(whole.flatten(), begin=0, shape=whole.shape)}, checkpoint_id=tmp_path, no_dist=True)
    plain = {"weight": torch.zeros(3, 4, 5)}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(plain["weight"], whole)
    for begin, end in zip([0, *cuts], [*cuts, 60], strict=True):
        own = torch.zeros(end - begin)
        part = FlatPart(own, begin=begin, shape=whole.shape)
        dcp.load({"weight": part}, checkpoint_id=tmp_path, no_dist=True)
        assert own.tolist() == list(range(begin, end))


def test_another_shape_is_refused(tmp_path: Path) -> None:
    dcp.save({"weight": torch.zeros(6)}, checkpoint_id=tmp_path, no_dist=True)
    part = FlatPart(torch.zeros(6), begin=0, shape=(2, 3))
    with pytest.raises(dcp.api.CheckpointException, match="Size mismatch"):
        dcp.load({"weight": part}, checkpoint_id=tmp_path, no_dist=True)
