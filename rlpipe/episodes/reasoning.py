"""Reasoning in the policy's turns: the marks around it in several model families, and the channels of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlpipe.data.render.messages import END_THINK, THINK

MARKS: Sequence[tuple[str, str]] = (
    (THINK, END_THINK),
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
)
"""Marks that begin and end reasoning, by family."""
FINAL, ANALYSIS = "final", "analysis"
"""Channels of gpt-oss."""
START, MESSAGE = "<|start|>assistant", "<|message|>"
MESSAGE_ENDS = re.compile(r"(?:<\|(?:end|return|call)\|>)+\s*\Z")
HEADER = re.compile(r"(?:<\|start\|>assistant)?[^<]{0,200}<\|channel\|>")
"""The begin of a turn in channels; only the first 200 characters may name a recipient."""
CHANNEL, RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def split_reasoning(text: str) -> tuple[str, str | None]:
    """Return a turn's text without its reasoning, and the latter; a turn may begin within it, as prompts may end so.

    The marks are those with which the turn begins, or else those whose end comes first. Reasoning without an end is a
    text: some models call tools without closing it.
    """
    if is_in_channels(text):
        return join_messages(split_channels(text))
    marks = _marks_at_begin(text)
    if marks is None:
        ends = [(position, marks) for marks in MARKS if (position := text.find(marks[1])) >= 0]
        marks = min(ends)[1] if ends else None
    if marks is None or marks[1] not in text:
        return text, None
    start, end = marks
    thoughts, _, rest = text.partition(end)
    before, is_begun, inner = thoughts.partition(start)
    content, reasoning = (before, [inner]) if is_begun else ("", [thoughts])
    while (begin := rest.find(start)) >= 0 and (close := rest.find(end, begin)) >= 0:
        content += rest[:begin]
        reasoning.append(rest[begin + len(start) : close])
        rest = rest[close + len(end) :]
    return f"{content}{rest}".lstrip(), "\n".join(thought.strip() for thought in reasoning)


def close_reasoning(text: str, before: str) -> str:
    """Return the text of a turn that was cut off, with its reasoning closed; it may begin at the prompt's end."""
    marks = _marks_at_begin(text) or next((own for own in MARKS if before.rstrip().endswith(own[0])), None)
    if marks is None:
        return text
    start, end = marks
    return f"{text}{end}" if text.rfind(end) < max(0, text.rfind(start)) else text


def _marks_at_begin(text: str) -> tuple[str, str] | None:
    begin = text.lstrip()
    return next((marks for marks in MARKS if begin.startswith(marks[0])), None)


@dataclass(kw_only=True, slots=True, frozen=True)
class ChannelMessage:
    """One of the messages of a turn of gpt-oss."""

    channel: str
    recipient: str | None
    """Name of the tool that it calls, or None."""
    text: str
    written: str
    """The message with its header, as the policy wrote it."""


def is_in_channels(text: str) -> bool:
    """Return whether a turn is in OpenAI's Harmony format, as gpt-oss writes it."""
    return HEADER.match(text.lstrip()) is not None


def split_channels(text: str) -> list[ChannelMessage]:
    """Return the messages of a turn of gpt-oss: analysis, calls and the final answer; the last one may be cut off."""
    messages = []
    for part in text.split(START):
        header, mark, body = part.partition(MESSAGE)
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        if not mark and recipient is None:
            continue  # nothing is ahead of the first start, or the turn was cut off within a header
        messages.append(
            ChannelMessage(
                channel=channel.group(1) if channel else FINAL,
                recipient=recipient.group(1) if recipient else None,
                text=MESSAGE_ENDS.sub("", body),
                written=MESSAGE_ENDS.sub("", part),
            )
        )
    return messages


def join_messages(messages: Sequence[ChannelMessage]) -> tuple[str, str | None]:
    """Return the text of the messages but the analysis, and the analysis, if there is any; calls are text."""
    analysis = [message.text for message in messages if message.channel == ANALYSIS and message.recipient is None]
    content = [
        message.text if message.recipient is None else message.written
        for message in messages
        if message.channel != ANALYSIS or message.recipient is not None
    ]
    return "\n".join(content), "\n".join(analysis) if analysis else None
