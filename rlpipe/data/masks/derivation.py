"""Markers that start and end the turns of each role, derived from a chat template.

The text between two messages is the end of one turn and the start of the next. A rendering in which the first of them
is the last message shows how far the end goes. A turn without an end of its own is ended by the start of the next turn;
and if nothing is left for that start, the end before it is the start, as with Mistral's ``[/INST]``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rlpipe.configs.data_sources import RoleMarkers
from rlpipe.data.masks.boundaries import RoleBoundary, find_turns
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.types import ChatMessages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _alike(names: Mapping[str, str], start: str, end: str) -> list[RoleMarkers]:
    """Return the markers of roles whose start markers differ only in a name."""
    return [RoleMarkers(role=role, start=start.format(name), end=end) for role, name in names.items()]


MISTRAL = [
    # The end of a user turn is the start of the assistant's, as is the end of a tool result unless another one follows.
    RoleMarkers(role="user", start="[INST]", end="[/INST]", include_end=False),
    RoleMarkers(role="assistant", start="[/INST]", end="</s>"),
    RoleMarkers(role="tool", start="[TOOL_RESULTS]", end="[/TOOL_RESULTS]", include_end=False),
    RoleMarkers(role="tool", start="[/TOOL_RESULTS][TOOL_RESULTS]", end="[/TOOL_RESULTS]", include_end=False),
    RoleMarkers(role="assistant", start="[/TOOL_RESULTS]", end="</s>"),
]
HARMONY = [
    *(
        RoleMarkers(role="assistant", start="<|start|>assistant", end=end)
        for end in ("<|end|>", "<|return|>", "<|call|>")
    ),
    RoleMarkers(role="user", start="<|start|>user<|message|>", end="<|end|>"),
    RoleMarkers(role="system", start="<|start|>system<|message|>", end="<|end|>"),
    RoleMarkers(role="system", start="<|start|>developer<|message|>", end="<|end|>"),
    RoleMarkers(role="tool", start="<|start|>functions.", end="<|end|>"),
]
GLM_STARTS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>", "tool": "<|observation|>"}
GLM = [
    # A turn ends where another starts. The model asks for the user's turn, or for a result, by writing its start.
    RoleMarkers(
        role=role,
        start=start,
        end=end,
        include_end=role == "assistant" and following in ("user", "tool"),
        shares_end=role == "assistant" and following in ("user", "tool"),
    )
    for role, start in GLM_STARTS.items()
    for following, end in GLM_STARTS.items()
]
SAME = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

FAMILIES: Mapping[str, Sequence[RoleMarkers]] = {
    "ChatML, Qwen": _alike(SAME, "<|im_start|>{}\n", "<|im_end|>"),
    # The template writes the system message into the user's first turn.
    "Gemma 2, 3, 3n": _alike({"user": "user", "assistant": "model"}, "<start_of_turn>{}\n", "<end_of_turn>"),
    "Gemma 4": [
        *_alike(SAME | {"assistant": "model"}, "<|turn>{}\n", "<turn|>"),
        # The model asks for a tool result by writing its start marker, and continues after the result.
        RoleMarkers(role="tool", start="<|tool_response>", end="<tool_response|>", interrupts=True),
    ],
    "Llama 3": _alike(SAME | {"tool": "ipython"}, "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"),
    "Llama 4": _alike(SAME | {"tool": "ipython"}, "<|header_start|>{}<|header_end|>\n\n", "<|eot|>"),
    "Mistral V7 Tekken": [RoleMarkers(role="system", start="[SYSTEM_PROMPT]", end="[/SYSTEM_PROMPT]"), *MISTRAL],
    "Pixtral, Mistral V3": MISTRAL,
    "Harmony (gpt-oss)": HARMONY,
    "GLM 4.5 and later": GLM,
}
"""Families by name; the first one is used whose markers the tokenizer has and the rendered template contains."""


WORDS = ("Kestrel", "Juniper", "Marigold", "Obsidian", "Tamarind")
"""Contents of the messages, words that no template contains."""
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
DIALOGUE = (USER, ASSISTANT, USER, ASSISTANT)
CALL_IDS = ("q8Zk3Lw7P", "t5Rm1Xc9V")
"""Ids of tool calls, of nine letters and digits as Mistral's templates require."""


class UnexpectedText(Exception):
    """Raised if a template does not render each message once, in order."""


@dataclass(slots=True, frozen=True)
class Probe:
    """A renderer of test conversations whose messages are one word each."""

    template: ChatTemplate

    def gaps(self, *roles: str, generation: bool = False) -> list[str]:
        """Return the text before the first word, between words, and after the last one.

        Raises ``UnusableRow`` if the template refuses these roles, and ``UnexpectedText`` if it does not render each
        word once, in order.
        """
        return _split(self._text(roles, generation), len(roles))

    def result_gaps(self, num_results: int = 1) -> list[str]:
        """Return the gaps of a user message, tool results that the assistant has called for, and an answer.

        Raises as ``gaps`` does.
        """
        return _split(self._results(num_results), num_results + 2)

    def shows(self, markers: Sequence[RoleMarkers]) -> bool:
        """Return whether the template writes a start marker of the user, and one of the assistant."""
        with suppress(UnusableRow):
            text = self._text(DIALOGUE, False)
            return all(
                any(marker.role == role and marker.start in text for marker in markers) for role in (USER, ASSISTANT)
            )
        return False

    def turns(self, boundaries: Sequence[RoleBoundary], *roles: str) -> list[tuple[str, str]]:
        """Return role and text of each turn that the boundaries find; raise ``UnusableRow`` as ``gaps`` does."""
        return self._turns(boundaries, self._text(roles, False))

    def result_turns(self, boundaries: Sequence[RoleBoundary]) -> list[tuple[str, str]]:
        """Return role and text of the turns found in the conversation of ``result_gaps`` with one result."""
        return self._turns(boundaries, self._results(1))

    def _turns(self, boundaries: Sequence[RoleBoundary], text: str) -> list[tuple[str, str]]:
        token_ids = self.template.token_ids(text)
        decode = self.template.tokenizer.decode
        return [
            (turn.boundary.role, str(decode(token_ids[turn.start : turn.end])).strip())
            for turn in find_turns(token_ids, boundaries)
        ]

    def _results(self, num_results: int) -> str:
        user, *results, answer = _plain(zip((USER, *[TOOL] * num_results, ASSISTANT), WORDS, strict=False))
        function = {"name": "look", "arguments": {"at": "here"}}
        ids = CALL_IDS[:num_results]
        calls: list[Any] = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
        caller: dict[str, Any] = {"role": ASSISTANT, "content": "", "tool_calls": calls}
        answered = [result | {"tool_call_id": call_id} for result, call_id in zip(results, ids, strict=True)]
        return self.template.text([user, caller, *answered, answer])

    def _text(self, roles: Sequence[str], generation: bool) -> str:
        words = list(zip(roles, WORDS, strict=False))
        text, refused = "", None
        for messages in (_plain(words), _with_content_parts(words)):
            try:
                text = self.template.text(messages, add_generation_prompt=generation)
            except UnusableRow as problem:
                refused = refused or problem
                continue
            if all(word in text for _, word in words):
                return text
        if not text and refused is not None:
            raise refused
        return text


def _split(text: str, num_words: int) -> list[str]:
    gaps, rest = [], text
    for word in WORDS[:num_words]:
        gap, separator, rest = rest.partition(word)
        if not separator:
            raise UnexpectedText("it does not render each message of a conversation, in order")
        gaps.append(gap)
    if any(word in gap for word in WORDS for gap in (*gaps, rest)):
        raise UnexpectedText("it renders a message of a conversation more than once")
    return [*gaps, rest]


def _plain(words: Iterable[tuple[str, str]]) -> ChatMessages:
    return [{"role": role, "content": word} for role, word in words]


def _with_content_parts(words: Iterable[tuple[str, str]]) -> ChatMessages:
    """Return messages whose contents are lists of parts, as templates of models with images may need them."""
    return [{"role": role, "content": [{"type": "text", "text": word}]} for role, word in words]


class NotDerivable(Exception):
    """Raised if a template's markers can't be derived, with the reason."""


def derive_markers(probe: Probe) -> list[RoleMarkers]:
    """Derive the markers of user and assistant, and of system and tool if these have turns of their own.

    Raises ``NotDerivable`` if the text that the template writes has no unique reading.
    """
    try:
        user, assistant, *variants = _dialogue(probe)
    except (UnexpectedText, UnusableRow) as problem:
        raise NotDerivable(str(problem)) from problem
    return [*_system(probe, user, assistant), user, assistant, *variants, *_tool(probe, user, assistant)]


def _dialogue(probe: Probe) -> list[RoleMarkers]:
    """Return the markers of user and assistant, and their variants that include blanks after the start."""
    cut = _Cutter(probe.template.tokenizer)
    before, first, between, second, last = probe.gaps(*DIALOGUE)
    after_user, after_answer = probe.gaps(USER)[-1], probe.gaps(USER, ASSISTANT)[-1]
    user_end = cut.common([after_user, first, second])
    assistant_end = cut.common([after_answer, between, last])
    prompted = probe.gaps(USER, generation=True)[-1]
    is_prompted = prompted != after_user
    answers = [first, second, prompted] if is_prompted else [first, second]
    before_answer = cut.common([answer.removeprefix(user_end) for answer in answers])
    assistant_start = cut.start(before_answer)
    before_user = cut.common([before, between.removeprefix(assistant_end)], from_right=True)
    user_start = cut.start(before_user)
    _require_equal_ends(cut, assistant_end, after_answer, between.removeprefix(assistant_end).removesuffix(before_user))
    user = _turn(USER, user_start, user_end.strip(), following=assistant_start)
    assistant = _turn(ASSISTANT, assistant_start or user_end.strip(), assistant_end.strip(), following=user_start)
    if not assistant_start:
        user = replace(user, include_end=False)
        # Text that a prompt does not end with belongs to the answer.
        before_answer = user_end + before_answer * is_prompted
    if user.start == assistant.start:
        raise NotDerivable(f"turns of user and assistant start the same way, with {user.start!r}")
    return [user, assistant, *_with_blanks(user, before_user), *_with_blanks(assistant, before_answer)]


def _require_equal_ends(cut: _Cutter, end: str, after_answer: str, rest: str) -> None:
    """Raise ``NotDerivable`` unless all assistant turns end alike.

    ``after_answer`` is the text after the last turn, ``rest`` the text between ``end`` and a following start.
    """
    further = after_answer.removeprefix(end)
    is_complete = not further[:1].strip() or cut.special(further) or cut.special(end, from_right=True)
    if not is_complete or (not end.strip() and (after_answer.strip() or rest.strip())):
        raise NotDerivable(
            f"the assistant's last turn ends with {after_answer.strip()!r}, its earlier turns end differently"
        )


def _with_blanks(markers: RoleMarkers, written: str) -> list[RoleMarkers]:
    """Return variants of the markers whose starts include more of the white space that ``written`` ends with.

    They match where the tokenizer does not merge that white space with the text after it.
    """
    cut, full = _trailing(markers.start), _trailing(written)
    return [replace(markers, start=markers.start + full[len(cut) : end]) for end in range(len(cut) + 1, len(full) + 1)]


def _trailing(text: str) -> str:
    return text[len(text.rstrip()) :]


def _turn(role: str, start: str, end: str, *, following: str) -> RoleMarkers:
    """Return the markers of a role; without an end of their own, turns go to the ``following`` start."""
    if not start:
        raise NotDerivable(f"turns of {role} have no marker before them")
    if not end and not following:
        raise NotDerivable(f"turns of {role} have no marker after them")
    return RoleMarkers(role=role, start=start, end=end or following, include_end=bool(end))


def _system(probe: Probe, user: RoleMarkers, assistant: RoleMarkers) -> list[RoleMarkers]:
    """Return the markers of system turns.

    The list is empty if the template has no system messages, or writes them into user turns or as assistant turns.
    """
    try:
        before, between, _, _ = probe.gaps(SYSTEM, USER, ASSISTANT)
    except (UnexpectedText, UnusableRow):
        return []
    cut = _Cutter(probe.template.tokenizer)
    start = _like(user.start, USER, cut.start(before))
    end = between.partition(user.start)[0].strip()
    end = cut.special(end, from_right=True) or end  # the text before it may be the template's own
    if not start or start == assistant.start or user.start in before or user.start not in between:
        return []
    return [_turn(SYSTEM, start, end, following=user.start)]


def _tool(probe: Probe, user: RoleMarkers, assistant: RoleMarkers) -> list[RoleMarkers]:
    """Return the markers of tool turns, empty if these are written as turns of the assistant or the user.

    If the end of a result is also the start of the answer to it, include the markers of that answer, and of a result
    that follows another one.
    """
    before = after = None
    for gaps in (probe.result_gaps, lambda: probe.gaps(USER, ASSISTANT, TOOL, ASSISTANT)[1:]):
        with suppress(UnexpectedText, UnusableRow):
            _, before, after, _ = gaps()
            break
    if before is None or after is None or str(assistant.end) not in before:
        return []
    start = before.rpartition(str(assistant.end))[2] if assistant.include_end else before
    cut = _Cutter(probe.template.tokenizer)
    start = cut.start(start)
    if start.startswith(assistant.start) and assistant.start not in after:
        return _interrupting(probe)
    if not start.startswith(assistant.start):
        start = _like(user.start, USER, start)
    if start in ("", assistant.start) or start.startswith(user.start):
        return []  # it is written as the assistant's, or is a part of the user's
    if assistant.start in after:
        end = after.partition(assistant.start)[0].strip()
        user_end = str(user.end)  # any other text there, such as the quotes of JSON, belongs to the result
        return [
            _turn(
                TOOL, start, user_end if user.include_end and end.endswith(user_end) else end, following=assistant.start
            )
        ]
    shared = cut.special(after.strip(), from_right=True) or after.strip()
    if not shared:
        return []
    start = cut.special(start) or start
    result = RoleMarkers(role=TOOL, start=start, end=shared, include_end=False)
    return [result, replace(result, start=shared + start), replace(assistant, start=shared)]


def _interrupting(probe: Probe) -> list[RoleMarkers]:
    """Return the markers of results within an assistant turn.

    The text between two results is the end of the first and the start of the second.
    """
    cut = _Cutter(probe.template.tokenizer)
    try:
        _, _, between, after, _ = probe.result_gaps(2)
    except (UnexpectedText, UnusableRow):
        return []
    end = cut.common([between, after])
    markers = cut.special(between.removeprefix(end)), cut.special(end, from_right=True)
    if not all(markers):
        return []
    return [RoleMarkers(role=TOOL, start=markers[0], end=markers[1], interrupts=True)]


def _like(reference: str, role: str, raw: str) -> str:
    """Return the start of ``raw`` that is like ``reference`` except for the role's name, or else all of ``raw``."""
    prefix, _, suffix = reference.partition(role)
    if not suffix or not raw.startswith(prefix):
        return raw
    name, separator, _ = raw.removeprefix(prefix).partition(suffix)
    return prefix + name + separator if separator else raw


class _Cutter:
    """A cutter of the text that a template writes, which never cuts within a special token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._special = {*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pieces = re.compile("|".join([*map(re.escape, longest_first), r"[\s\S]"]))
        self._begin = tokenizer.bos_token or ""

    def common(self, texts: Sequence[str], *, from_right: bool = False) -> str:
        """Return the longest common prefix, or suffix, of the texts."""
        step = -1 if from_right else 1
        pieces = [self._pieces.findall(text)[::step] for text in texts]
        shared = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*pieces, strict=False))]
        return "".join(shared[::step])

    def special(self, text: str, *, from_right: bool = False) -> str:
        """Return the special tokens that the text begins or ends with."""
        step = -1 if from_right else 1
        pieces = takewhile(self._special.__contains__, self._pieces.findall(text)[::step])
        return "".join([*pieces][::step])

    def start(self, text: str) -> str:
        """Return the start marker in a text, without the begin-of-sequence token and without blanks at the ends."""
        return text.strip().removeprefix(self._begin).lstrip() + _line_end(text)


def _line_end(text: str) -> str:
    """Return the white space that belongs to a marker: line breaks do, but blanks merge with the word after it."""
    return _trailing(text).rstrip(" ") if text.strip() else ""
