"""What to change of a scorer so that it fits; each change is planned before it is proposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlpipe.hardware.devices import DEVICES
from rlpipe.plan.scorer_case import ScorerCase


@dataclass(kw_only=True, slots=True, frozen=True)
class ScorerChange:
    """What could be changed, and what it does."""

    change: str
    seconds: float | None
    """Of a step with it."""
    num_bytes: int
    """Of a process with it, where it computes."""


def remedies(case: ScorerCase) -> list[ScorerChange]:
    """The changes with which the scorer fits, each alone."""
    return [
        ScorerChange(change=text, seconds=changed.seconds, num_bytes=changed.memory.total)
        for text, changed in (*_smaller_batch(case), *_own_gpu(case), *_larger_device(case))
        if changed.problem is None
    ]


def _smaller_batch(case: ScorerCase) -> Iterator[tuple[str, ScorerCase]]:
    """The largest half, quarter and so on that fits, if one sequence does."""
    tokens, least = case.setup.batch_tokens, case.setup.sequence_tokens
    if replace(case, setup=replace(case.setup, batch_tokens=least)).problem is not None:
        return
    while tokens > least:
        tokens = max(least, tokens // 2)
        changed = replace(case, setup=replace(case.setup, batch_tokens=tokens))
        if changed.problem is None:
            yield f"{case.setup.batch_option}={tokens}", changed
            return


def _own_gpu(case: ScorerCase) -> Iterator[tuple[str, ScorerCase]]:
    if 0 < case.setup.num_gpus < 1:
        yield f"{case.setup.option}.num_gpus=1", replace(case, setup=replace(case.setup, num_gpus=1))


def _larger_device(case: ScorerCase) -> Iterator[tuple[str, ScorerCase]]:
    """The smallest of the table that is large enough; with neighbours, which take a share of it, that is not known."""
    if case.neighbours or not case.is_on_gpu:
        return
    for device in reversed(DEVICES.values()):
        changed = replace(case, device=device)
        if device.memory_bytes > 1.1 * case.device.memory_bytes and changed.problem is None:
            yield f"--device {device.name}", changed
            return
