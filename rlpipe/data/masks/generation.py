"""Marks what a chat template says the assistant writes, with ``{% generation %}`` blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlpipe.data.render.messages import assistant_turns
from rlpipe.data.render.processor import Encoded
from rlpipe.data.render.template import ChatTemplate, Span
from rlpipe.errors import DataError
from rlpipe.types import BoolArray, ChatMessages, IntArray


def mark_generation(
    template: ChatTemplate, messages: ChatMessages, images: Sequence[bytes], first_message: int
) -> tuple[Encoded, BoolArray]:
    """The conversation's T tokens, and which of them the assistant writes from ``first_message`` on ``[T]``.

    An end token right behind a block counts, too. Raises ``UnusableRow`` if the template can't render these messages.
    """
    text, spans = template.generation_spans(messages)
    num_turns = len(assistant_turns(messages))
    num_earlier = len(assistant_turns(messages[:first_message]))
    if num_earlier and len(spans) != num_turns:
        raise DataError(
            f"the chat template has {len(spans)} generation blocks for {num_turns} assistant turns, so those of the "
            "prompt can't be told from those of the completion"
        )
    encoded = template.encode_with_offsets(text, images)
    assert encoded.offsets is not None
    mask = np.zeros(len(encoded.token_ids), np.bool_)
    for span in spans[num_earlier:]:
        mask |= _overlapping(encoded.offsets, span)
    return encoded, _with_end_tokens(encoded.token_ids, mask, template.tokenizer.eos_token_id)


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
