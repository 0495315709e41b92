"""Lines of `rlpipe doctor`: what was looked at, whether it is well, and how to mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rlpipe.common.imports import describe_error, one_line
from rlpipe.errors import RlpipeError


class Status(StrEnum):
    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    PROBLEM = "PROBLEM"


@dataclass(kw_only=True, frozen=True)
class Observation:
    subject: str
    status: Status
    text: str
    mend: str = ""

    def line(self) -> str:
        mend = f"; {self.mend}" if self.mend else ""
        return f"{self.status:<9}{self.subject:<13}{self.text}{mend}"


def ok(subject: str, text: str) -> Observation:
    return Observation(subject=subject, status=Status.OK, text=text)


def skipped(subject: str, text: str) -> Observation:
    return Observation(subject=subject, status=Status.SKIPPED, text=text)


def warning(subject: str, text: str, mend: str = "") -> Observation:
    return Observation(subject=subject, status=Status.WARNING, text=text, mend=mend)


def problem(subject: str, text: str, mend: str = "") -> Observation:
    return Observation(subject=subject, status=Status.PROBLEM, text=text, mend=mend)


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
