"""Makes the trace of a whole model from that of a few of its blocks, where all others are like one of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from rlpipe.offload.planner.trace import Stage


def choose_blocks(kinds: Sequence[Hashable]) -> dict[int, int]:
    """For every block, one of its kind that stands for it: for the first and the last block themselves, for others the
    first of their kind between these."""
    inner: dict[Hashable, int] = {}
    for index, kind in enumerate(kinds[1:-1], 1):
        inner.setdefault(kind, index)
    ends = {0, len(kinds) - 1}
    return {index: index if index in ends else inner[kind] for index, kind in enumerate(kinds)}


def unfold(stages: Sequence[Stage], stands_for: Mapping[int, int]) -> list[Stage]:
    """Those of all blocks, in order. ``stands_for`` names each block's unit, and the unit whose stage is as its own;
    these were traced, and the first and the last block are among them.

    A block's stage goes with those up to the next block. What is alive in a stage is moved by what blocks that are put
    in before it keep. Raises ``ValueError`` where a block was not traced, or more than once.
    """
    traced = set(stands_for.values())
    starts = [index for index, stage in enumerate(stages) if stage.unit in traced]
    if sorted(stages[index].unit or 0 for index in starts) != sorted(traced):
        raise ValueError("blocks are not traced once each")
    groups = {
        stages[start].unit: stages[start:end] for start, end in zip(starts, [*starts[1:], len(stages)], strict=True)
    }
    found = [*stages[: starts[0]]] if starts else [*stages]
    for unit, model in stands_for.items():
        group = groups[model]
        moved = (found[-1].after if found else 0) - (stages[_before(stages, group)].after if found else 0)
        found += [_moved(stage, moved, {model: unit}) for stage in group]
    return found


def _before(stages: Sequence[Stage], group: Sequence[Stage]) -> int:
    return next(index for index, stage in enumerate(stages) if stage is group[0]) - 1


def _moved(stage: Stage, num_bytes: int, units: Mapping[int, int]) -> Stage:
    return replace(
        stage,
        unit=None if stage.unit is None else units.get(stage.unit, stage.unit),
        reads={units.get(unit, unit) for unit in stage.reads},
        before=stage.before + num_bytes,
        after=stage.after + num_bytes,
        forward_peak=stage.forward_peak + num_bytes,
        backward_peak=stage.backward_peak + num_bytes,
        entering=stage.entering + num_bytes,
    )
