"""The trace of a whole model from that of a few of its blocks, if all others are like one of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from rlpipe.offload.planner.trace import Stage


def choose_blocks(kinds: Sequence[Hashable]) -> dict[int, int]:
    """Return for every block the index of a block of its kind that stands for it.

    The first and the last block stand for themselves; other blocks have the first of their kind between these.
    """
    inner: dict[Hashable, int] = {}
    for index, kind in enumerate(kinds[1:-1], 1):
        inner.setdefault(kind, index)
    ends = {0, len(kinds) - 1}
    return {index: index if index in ends else inner[kind] for index, kind in enumerate(kinds)}


def unfold(stages: Sequence[Stage], stands_for: Mapping[int, int]) -> list[Stage]:
    """Return the stages of all blocks, in order, from those of the traced blocks.

    ``stands_for`` maps each block's unit to the traced unit whose stage is like its own; the first and the last block
    are among the traced ones. A block's group has its own stage and those up to the next block. The live bytes of a
    stage grow by what the blocks inserted before it keep. Raises ``ValueError`` if a block was not traced exactly once.
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
