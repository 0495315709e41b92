"""Proposed changes of a scorer's config with which it fits; each change is planned before it is proposed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlpipe.hardware.devices import DEVICES
from rlpipe.plan.scorer_case import ScorerCase


@dataclass(kw_only=True, slots=True, frozen=True)
class ScorerChange:
    """A config change, and its effect."""

    change: str
    seconds: float | None
    """Seconds of a step with the change."""
    num_bytes: int
    """Bytes of a process with the change, on the device that it computes on."""


def remedies(case: ScorerCase) -> list[ScorerChange]:
    """Return the single changes with which the scorer fits."""
    return [
        ScorerChange(change=text, seconds=changed.seconds, num_bytes=changed.memory.total)
        for text, changed in (*_smaller_batch(case), *_own_gpu(case), *_larger_device(case))
        if changed.problem is None
    ]


def _smaller_batch(case: ScorerCase) -> Iterator[tuple[str, ScorerCase]]:
    """Yield the largest batch that fits, by halving, if a single sequence fits."""
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
    """Yield the smallest device that is large enough; nothing with neighbours, whose memory there is not known."""
    if case.neighbours or not case.is_on_gpu:
        return
    for device in reversed(DEVICES.values()):
        changed = replace(case, device=device)
        if device.memory_bytes > 1.1 * case.device.memory_bytes and changed.problem is None:
            yield f"--device {device.name}", changed
            return
