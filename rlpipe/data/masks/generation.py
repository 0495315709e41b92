"""Masks of what the assistant writes, from the ``{% generation %}`` blocks of a chat template."""

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
    """Return the conversation's T tokens, and a mask ``[T]`` of those the assistant writes from ``first_message`` on.

    An end token right after a block counts, too. Raises ``UnusableRow`` if the template can't render these messages.
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
    """Return which tokens lie in the span; a token of no width (some tokenizers trim white space) lies at its end."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    return (ends > span[0]) & ((starts < span[1]) | ((starts == ends) & (ends <= span[1])))


def _with_end_tokens(token_ids: IntArray, mask: BoolArray, end_token_id: int | None) -> BoolArray:
    """Mark end tokens right after marked tokens, so that a turn's end is learned even if the block closes before it."""
    if end_token_id is None:
        return mask
    follows = np.zeros_like(mask)
    follows[1:] = mask[:-1]
    return mask | (follows & (token_ids == end_token_id))
