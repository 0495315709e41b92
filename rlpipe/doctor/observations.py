"""Lines of `rlpipe doctor`: what was checked, the result, and the fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlpipe.common.imports import describe_error, one_line
from rlpipe.errors import RlpipeError


class Status(StrEnum):
    """Results of a check."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "PROBLEM"


@dataclass(kw_only=True, frozen=True)
class Observation:
    """A checked subject, with the result and the fix."""

    subject: str
    status: Status
    text: str
    fix: str = ""

    def line(self) -> str:
        fix = f"; {self.fix}" if self.fix else ""
        return f"{self.status:<9}{self.subject:<13}{self.text}{fix}"


def ok(subject: str, text: str) -> Observation:
    return Observation(subject=subject, status=Status.OK, text=text)


def skipped(subject: str, text: str) -> Observation:
    return Observation(subject=subject, status=Status.SKIPPED, text=text)


def warning(subject: str, text: str, fix: str = "") -> Observation:
    return Observation(subject=subject, status=Status.WARNING, text=text, fix=fix)


def problem(subject: str, text: str, fix: str = "") -> Observation:
    return Observation(subject=subject, status=Status.PROBLEM, text=text, fix=fix)


Check = Callable[[], Iterable[Observation]]


def examine(checks: Mapping[str, Check]) -> Iterator[Observation]:
    """Yield what the checks find; one that raises is a problem of its subject, and the others go on."""
    for subject, check in checks.items():
        try:
            yield from check()
        except RlpipeError as error:
            yield problem(subject, one_line(error))
        except Exception as error:  # noqa: BLE001 - own rewards and models of others may raise anything
            yield problem(subject, describe_error(error))
