"""Loss masks token by token in plain Python: what the benchmark and the tests hold the fast ones against."""

from __future__ import annotations

from collections.abc import Sequence

from rlpipe.data.masks.boundaries import RoleBoundary
from rlpipe.data.masks.loss_mask import LossMask, TrainedEnds


def plain_mask(rules: LossMask, token_ids: Sequence[int]) -> list[bool]:
    """Which tokens of one sequence count."""
    mask = [rules.counts_all] * len(token_ids)
    in_marker = [False] * len(token_ids)
    last_end: range | None = None
    place = 0
    while place < len(token_ids):
        boundary = _longest_start(rules.boundaries, token_ids, place)
        if boundary is None:
            place += 1
            continue
        start = place + len(boundary.start)
        end = _first_end(boundary, token_ids, start)
        stop = end + (len(boundary.end) if boundary.end is not None and end < len(token_ids) else 0)
        for index in [*range(place, start), *range(end, stop)]:
            in_marker[index] = True
        counts = boundary.role in rules.roles
        if counts:
            for index in range(place if boundary.include_start else start, end):
                mask[index] = True
            last_end = range(end, stop) if boundary.include_end else range(0)
        if boundary.include_end and (rules.ends is TrainedEnds.ALL or (rules.ends is TrainedEnds.TURN and counts)):
            for index in range(end, stop):
                mask[index] = True
        place = stop if boundary.include_end else end
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


def _longest_start(boundaries: Sequence[RoleBoundary], token_ids: Sequence[int], place: int) -> RoleBoundary | None:
    found = None
    for boundary in boundaries:
        matches = tuple(token_ids[place : place + len(boundary.start)]) == boundary.start
        if matches and (found is None or len(boundary.start) >= len(found.start)):
            found = boundary
    return found


def _first_end(boundary: RoleBoundary, token_ids: Sequence[int], start: int) -> int:
    if boundary.end is None:
        return len(token_ids)
    for place in range(start, len(token_ids) - len(boundary.end) + 1):
        if tuple(token_ids[place : place + len(boundary.end)]) == boundary.end:
            return place
    return len(token_ids)
