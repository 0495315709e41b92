"""Marks the tokens of a conversation that the assistant writes, the end token of each of its turns included."""

from __future__ import annotations

import numpy as np

from rlpipe.data.messages import assistant_turns
from rlpipe.data.rows import UnusableRow
from rlpipe.data.template import ChatTemplate, Span
from rlpipe.errors import DataError
from rlpipe.types import BoolArray, ChatMessages, IntArray


def assistant_tokens(
    template: ChatTemplate, messages: ChatMessages, *, first_message: int = 0
) -> tuple[IntArray, BoolArray]:
    """The conversation's tokens ``[T]``, and which of them the assistant writes from ``first_message`` on ``[T]``.

    The template's ``{% generation %}`` blocks say so where it has them. Otherwise a turn is what it adds to the
    conversation before it, rendered with a generation prompt; white space behind its end token is the template's.
    Raises ``DataError`` if the template renders a turn differently once others follow, so that no turn can be told
    apart, and ``UnusableRow`` if it can't render these messages.
    """
    mark = _mark_by_template if template.marks_generation else _mark_by_prefixes
    token_ids, mask = mark(template, messages, first_message)
    mask[:1] = False  # the first token has no predecessor
    if not mask.any():
        raise UnusableRow("no token of an assistant turn")
    return token_ids, mask


def _mark_by_template(template: ChatTemplate, messages: ChatMessages, first_message: int) -> tuple[IntArray, BoolArray]:
    text, spans = template.generation_spans(messages)
    num_turns = len(assistant_turns(messages))
    num_earlier = len(assistant_turns(messages[:first_message]))
    if num_earlier and len(spans) != num_turns:
        raise DataError(
            f"the chat template has {len(spans)} generation blocks for {num_turns} assistant turns, so those of the "
            "prompt can't be told from those of the completion"
        )
    token_ids, offsets = template.token_offsets(text)
    mask = np.zeros(len(token_ids), np.bool_)
    for span in spans[num_earlier:]:
        mask |= _overlapping(offsets, span)
    return token_ids, _with_end_tokens(token_ids, mask, template.tokenizer.eos_token_id)


def _overlapping(offsets: IntArray, span: Span) -> BoolArray:
    """Which tokens lie in the span; one without width (some tokenizers trim white space) lies where it ends."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    return (ends > span[0]) & ((starts < span[1]) | ((starts == ends) & (ends <= span[1])))


def _with_end_tokens(token_ids: IntArray, mask: BoolArray, end_token_id: int | None) -> BoolArray:
    """Adds an end token right behind a marked one: a turn's end is learned even if the block closes before it."""
    if end_token_id is None:
        return mask
    follows = np.zeros_like(mask)
    follows[1:] = mask[:-1]
    return mask | (follows & (token_ids == end_token_id))


def _mark_by_prefixes(template: ChatTemplate, messages: ChatMessages, first_message: int) -> tuple[IntArray, BoolArray]:
    text = template.text(messages)
    token_ids = template.token_ids(text)
    mask = np.zeros(len(token_ids), np.bool_)
    for turn in assistant_turns(messages):
        if turn < first_message:
            continue
        start = _prefix_length(
            template, text, token_ids, template.text(messages[:turn], add_generation_prompt=True), turn
        )
        end = _prefix_length(template, text, token_ids, template.text(messages[: turn + 1]), turn)
        mask[start : _turn_end(template, token_ids, start, end)] = True
    return token_ids, mask


def _prefix_length(template: ChatTemplate, text: str, token_ids: IntArray, prefix: str, turn: int) -> int:
    """Tokens of ``prefix``, after a check that the conversation begins with just these."""
    if not text.startswith(prefix):
        raise DataError(
            f"the chat template of {template.tokenizer.name_or_path!r} renders message {turn + 1} differently without "
            "what follows it, so the assistant's tokens can't be marked; set model.chat_template to one that marks "
            "them with {% generation %}"
        )
    prefix_ids = template.token_ids(prefix)
    if not np.array_equal(token_ids[: len(prefix_ids)], prefix_ids):
        raise UnusableRow(f"tokens at the borders of message {turn + 1} merge with those beside them")
    return len(prefix_ids)


def _turn_end(template: ChatTemplate, token_ids: IntArray, start: int, end: int) -> int:
    """``end`` without white space behind the turn's last special token."""
    special = set(template.tokenizer.all_special_ids)
    for last in range(end, start, -1):
        token = int(token_ids[last - 1])
        if token in special:
            return last
        if str(template.tokenizer.decode([token])).strip():
            break
    return end
