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

    Reasoning without an end is a text: some models call tools without closing it.
    """
    if is_in_channels(text):
        return join_messages(split_channels(text))
    ends = [(position, marks) for marks in MARKS if (position := text.find(marks[1])) >= 0]
    if not ends:
        return text, None
    position, (start, end) = min(ends)
    return text[position + len(end) :].lstrip(), text[:position].strip().removeprefix(start).strip()


def close_reasoning(text: str, before: str) -> str:
    """Return the text of a turn that was cut off, with its reasoning closed; it may begin at the prompt's end."""
    for start, end in MARKS:
        if end in text:
            return text
        if text.lstrip().startswith(start) or before.rstrip().endswith(start):
            return f"{text}{end}"
    return text


@dataclass(kw_only=True, slots=True, frozen=True)
class ChannelMessage:
    """One of the messages of a turn of gpt-oss."""

    channel: str
    recipient: str | None
    """Name of the tool that it calls, or None."""
    text: str


def is_in_channels(text: str) -> bool:
    """Return whether a turn is in OpenAI's Harmony format, as gpt-oss writes it."""
    return HEADER.match(text.lstrip()) is not None


def split_channels(text: str) -> list[ChannelMessage]:
    """Return the messages of a turn of gpt-oss: analysis, calls and the final answer; the last one may be cut off."""
    messages = []
    for part in text.split(START):
        header, mark, body = part.partition(MESSAGE)
        if not mark:
            continue  # nothing is ahead of the first start, or the turn was cut off within a header
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        messages.append(
            ChannelMessage(
                channel=channel.group(1) if channel else FINAL,
                recipient=recipient.group(1) if recipient else None,
                text=MESSAGE_ENDS.sub("", body),
            )
        )
    return messages


def join_messages(messages: Sequence[ChannelMessage]) -> tuple[str, str | None]:
    """Return the text of the messages but the analysis, and the analysis, if there is any."""
    analysis = [message.text for message in messages if message.channel == ANALYSIS]
    content = [message.text for message in messages if message.channel != ANALYSIS]
    return "\n".join(content), "\n".join(analysis) if analysis else None
