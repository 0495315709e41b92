"""Loss masks token by token in plain Python: the reference for the fast ones in the benchmark and the tests."""

from __future__ import annotations

from collections.abc import Sequence

from rlpipe.data.masks.boundaries import LossMask, RoleBoundary, TrainedEnds


def plain_mask(rules: LossMask, token_ids: Sequence[int]) -> list[bool]:
    """Return which tokens of one sequence are loss tokens."""
    mask = [rules.counts_all] * len(token_ids)
    in_marker = [False] * len(token_ids)
    last_end: range | None = None
    position = 0
    interrupted: RoleBoundary | None = None  # the turn that goes on here unless another one starts
    while position < len(token_ids):
        boundary, start = _longest_start(rules.boundaries, token_ids, position), position
        if boundary is not None:
            start += len(boundary.start)
            boundary = _earliest_end(boundary, interrupted, rules.boundaries, token_ids, start)
        elif interrupted is not None:
            boundary, interrupted = interrupted, None
        else:
            position += 1
            continue
        outer = interrupted if boundary.interrupts else None
        end, stop, why = _end(boundary, outer, rules.boundaries, token_ids, start)
        for index in [*range(position, start), *range(end, stop)]:
            in_marker[index] = True
        counts = boundary.role in rules.roles
        if counts:
            for index in range(position if boundary.include_start else start, end):
                mask[index] = True
            last_end = range(end, stop) if boundary.include_end else range(0)
        if boundary.include_end and (rules.ends is TrainedEnds.ALL or (rules.ends is TrainedEnds.TURN and counts)):
            for index in range(end, stop):
                mask[index] = True
        position = stop if boundary.include_end and not boundary.shares_end and why != "interrupted" else end
        interrupted = {"interrupted": boundary, "own end": outer}.get(why)
    if rules.ends is TrainedEnds.LAST and last_end is not None:
        for index in last_end:
            mask[index] = True
    for index, token_id in enumerate(token_ids):
        is_padding = token_id == rules.pad_id and not in_marker[index]
        if rules.pad_id == rules.end_id and index > 0 and token_ids[index - 1] != rules.pad_id:
            is_padding = False
        if is_padding or token_id in rules.media_ids:
            mask[index] = False
    return mask


def _longest_start(boundaries: Sequence[RoleBoundary], token_ids: Sequence[int], position: int) -> RoleBoundary | None:
    found = None
    for boundary in boundaries:
        matches = _is_at(boundary.start, token_ids, position)
        if matches and (found is None or len(boundary.start) >= len(found.start)):
            found = boundary
    return found


def _earliest_end(
    found: RoleBoundary,
    interrupted: RoleBoundary | None,
    boundaries: Sequence[RoleBoundary],
    token_ids: Sequence[int],
    start: int,
) -> RoleBoundary:
    """Return the boundary with the role and the start of the found one whose turn ends first, ends markers included."""
    alike = [own for own in boundaries if (own.role, own.start) == (found.role, found.start)]

    def own_end(boundary: RoleBoundary) -> tuple[int, int]:
        for position in range(start, len(token_ids)):
            if boundary.end is not None and _is_at(boundary.end, token_ids, position):
                return position, -len(boundary.end)
        return len(token_ids), 0

    return min(alike, key=own_end)


def _end(
    boundary: RoleBoundary,
    outer: RoleBoundary | None,
    boundaries: Sequence[RoleBoundary],
    token_ids: Sequence[int],
    start: int,
) -> tuple[int, int, str]:
    """Return where the turn ends, where its end marker ends, and the kind of end; ``outer`` is the interrupted turn."""
    for position in range(start, len(token_ids)):
        if boundary.end is not None and _is_at(boundary.end, token_ids, position):
            return position, position + len(boundary.end), "own end"
        if outer is not None and outer.end is not None and _is_at(outer.end, token_ids, position):
            return position, position, "outer end"
        following = None if boundary.interrupts else _longest_start(boundaries, token_ids, position)
        if following is not None and following.interrupts:
            return position, position + len(following.start), "interrupted"
    return len(token_ids), len(token_ids), "no end"


def _is_at(marker: Sequence[int], token_ids: Sequence[int], position: int) -> bool:
    return tuple(token_ids[position : position + len(marker)]) == tuple(marker)
