"""Finds the markers of roles from what a chat template writes around messages.

What stands between two messages is the end of one turn and the start of the next. How far the end goes shows where the
first of them is the last message. A turn that has no end of its own is ended by the start of the next one; and where
nothing is left for that start, it is the end before it, as Mistral's ``[/INST]``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from rlpipe.configs.role_boundaries import RoleMarkers
from rlpipe.data.masks.probe import ASSISTANT, DIALOGUE, SYSTEM, TOOL, USER, Probe, UnexpectedText
from rlpipe.data.rows import UnusableRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class NotDerivable(Exception):
    """Says what about the template leaves its markers open."""


def derive_markers(probe: Probe) -> list[RoleMarkers]:
    """Those of user and assistant, and of system and tool where they have turns of their own.

    Raises ``NotDerivable`` if there is not just one reading of what the template writes.
    """
    try:
        user, assistant = _dialogue(probe)
    except (UnexpectedText, UnusableRow) as problem:
        raise NotDerivable(str(problem)) from problem
    return [*_system(probe, user), user, assistant, *_tool(probe, user, assistant)]


def _dialogue(probe: Probe) -> tuple[RoleMarkers, RoleMarkers]:
    """Of user and assistant."""
    cut = _Cutter(probe.template.tokenizer)
    before, first, between, second, last = probe.gaps(*DIALOGUE)
    asked, answered = probe.gaps(USER)[-1], probe.gaps(USER, ASSISTANT)[-1]
    user_end = cut.common([asked, first, second])
    assistant_end = cut.common([answered, between, last])
    prompted = probe.gaps(USER, generation=True)[-1]
    answers = [first, second] if prompted == asked else [first, second, prompted]
    assistant_start = cut.start(cut.common([answer.removeprefix(user_end) for answer in answers]))
    user_start = cut.start(cut.common([before, between.removeprefix(assistant_end)], from_right=True))
    user = _turn(USER, user_start, user_end.strip(), following=assistant_start)
    assistant = _turn(ASSISTANT, assistant_start or user_end.strip(), assistant_end.strip(), following=user_start)
    if not assistant_start:
        user = replace(user, include_end=False)
    if user.start == assistant.start:
        raise NotDerivable(f"turns of user and assistant start alike, with {user.start!r}")
    return user, assistant


def _turn(role: str, start: str, end: str, *, following: str) -> RoleMarkers:
    """One that has no end of its own goes to the ``following`` start."""
    if not start:
        raise NotDerivable(f"nothing stands before turns of {role}")
    if not end and not following:
        raise NotDerivable(f"nothing stands behind turns of {role}")
    return RoleMarkers(role=role, start=start, end=end or following, include_end=bool(end))


def _system(probe: Probe, user: RoleMarkers) -> list[RoleMarkers]:
    """None where the template has no system messages, or writes them into the turn of the user."""
    try:
        before, between, _, _ = probe.gaps(SYSTEM, USER, ASSISTANT)
    except (UnexpectedText, UnusableRow):
        return []
    start = _like(user.start, USER, _Cutter(probe.template.tokenizer).start(before))
    end = between.partition(user.start)[0].strip()
    if not start or user.start in before or user.start not in between:
        return []
    return [_turn(SYSTEM, start, end, following=user.start)]


def _tool(probe: Probe, user: RoleMarkers, assistant: RoleMarkers) -> list[RoleMarkers]:
    """Where the end of a result is what the answer to it starts with, also those of that, and of one more result."""
    before = behind = None
    for gaps in (probe.result_gaps, lambda: probe.gaps(USER, ASSISTANT, TOOL, ASSISTANT)[1:]):
        with suppress(UnexpectedText, UnusableRow):
            _, before, behind, _ = gaps()
            break
    if before is None or behind is None or str(assistant.end) not in before:
        return []
    start = before.rpartition(str(assistant.end))[2] if assistant.include_end else before
    cut = _Cutter(probe.template.tokenizer)
    start = _like(user.start, USER, cut.start(start))
    if not start or start.startswith((user.start, assistant.start)):
        return []  # it is a part of that turn
    if assistant.start in behind:
        end = behind.partition(assistant.start)[0].strip()
        known = str(user.end)  # what else is there belongs to the result, such as the quotes of JSON
        return [
            _turn(TOOL, start, known if user.include_end and end.endswith(known) else end, following=assistant.start)
        ]
    start, shared = cut.special(start), cut.special(behind.strip(), from_right=True)
    if not shared:
        return []
    result = RoleMarkers(role=TOOL, start=start, end=shared, include_end=False)
    return [result, replace(result, start=shared + start), replace(assistant, start=shared)]


def _like(known: str, role: str, raw: str) -> str:
    """A start that is built as the known one, but for the name of the role, of what ``raw`` begins with."""
    left, _, right = known.partition(role)
    if not right or not raw.startswith(left):
        return raw
    name, found, _ = raw.removeprefix(left).partition(right)
    return left + name + found if found else raw


class _Cutter:
    """Cuts what a template writes, and no special token in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pieces = re.compile("|".join([*map(re.escape, longest_first), r"[\s\S]"]))
        self._begin = tokenizer.bos_token or ""

    def common(self, texts: Sequence[str], *, from_right: bool = False) -> str:
        """What all begin with, or end with."""
        step = -1 if from_right else 1
        pieces = [self._pieces.findall(text)[::step] for text in texts]
        shared = [own[0] for own in takewhile(lambda own: len(set(own)) == 1, zip(*pieces, strict=False))]
        return "".join(shared[::step])

    def special(self, text: str, *, from_right: bool = False) -> str:
        """The special tokens that it begins or ends with, or all of it if it does not."""
        step = -1 if from_right else 1
        pieces = takewhile(self._special.__contains__, self._pieces.findall(text)[::step])
        return "".join([*pieces][::step]) or text

    def start(self, text: str) -> str:
        """A start marker: without the begin of the sequence, and without what words are joined with."""
        return text.strip().removeprefix(self._begin).lstrip() + _line_end(text)


def _line_end(text: str) -> str:
    """Line breaks behind a marker are its own; blanks are merged with the word behind it."""
    end = text[len(text.rstrip()) :]
    return end.rstrip(" ") if text.strip() else ""
