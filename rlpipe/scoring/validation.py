"""Checks of what rewards return and of JSON from elsewhere, and one-line descriptions of what rewards raise."""

from __future__ import annotations

import errno
import json
import math
import sys
import sysconfig
import traceback
from collections.abc import Mapping, Set
from itertools import islice
from pathlib import Path
from typing import Any

from rlpipe.common.formatting import shortened
from rlpipe.common.imports import message_of

MAX_REASON_CHARS = 300
MAX_INTEGER_CHARS = 300
"""Longest integer in JSON from elsewhere: longer ones do not fit a float."""
NO_LISTS = (str, bytes, bytearray, memoryview, Mapping, Set)
"""Types that can be iterated, but are no list of values."""
MACHINERY = frozenset(
    str(Path(__file__).parent / name)
    for name in ("validation.py", "processes.py", "scorer.py", "sandbox/sandbox_child.py")
)
"""Files of rlpipe whose frames may lie between an exception and the user's own code."""


def check_scores(returned: Any, group_size: int) -> list[float | None]:
    """Return a reward's values as finite floats and None; raise ``TypeError`` or ``ValueError`` for anything else."""
    is_one = getattr(returned, "ndim", None) == 0
    if is_one or not hasattr(returned, "__iter__") or isinstance(returned, NO_LISTS):
        raise TypeError(f"it returned a {type(returned).__name__}; return a list of one number per completion")
    values = list(islice(returned, group_size + 1))  # a generator may be endless
    if len(values) != group_size:
        count = len(returned) if hasattr(returned, "__len__") else len(values)
        raise ValueError(f"it returned {count} values for {group_size} completions; return one per completion")
    return [_check_value(value, index) for index, value in enumerate(values)]


def _check_value(value: Any, index: int) -> float | None:
    if value is None:
        return None
    value = unwrapped(value)
    if not isinstance(value, bool | int | float):
        raise TypeError(f"value {index} is {shortened(repr(value), 60)}, not a number")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"value {index} is a number of {value.bit_length()} bits; return one that fits in a float")
    if not math.isfinite(value):
        raise ValueError(f"value {index} is {value}; return a finite number, or None to leave the completion out")
    return float(value)


def unwrapped(value: Any) -> Any:
    """Return the number in a scalar of numpy or torch; other values as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def strict_json(text: str | bytes) -> Any:
    """Return the value of JSON as the standard defines it, with finite numbers and without repeated keys.

    Raises ``ValueError``, or ``RecursionError`` for deep nesting.
    """
    return json.loads(
        text, parse_constant=_finite, parse_float=_finite, parse_int=_integer, object_pairs_hook=_without_duplicates
    )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _integer(text: str) -> int:
    if len(text) > MAX_INTEGER_CHARS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("an object has a name twice")
    return entries


def describe_exception(error: BaseException) -> str:
    """Return an exception's type and message in one line, with the last line of the user's code in its traceback."""
    message = " ".join(message_of(error).split())
    reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frame = _user_frame(error)
    line = f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
    return shortened(reason, MAX_REASON_CHARS) + line


def is_lack_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in MACHINERY]
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    user_frames = [frame for frame in frames if not frame.filename.startswith((*libraries, "<frozen"))]
    return next(reversed(user_frames or frames), None)
