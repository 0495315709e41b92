"""Check of one row's loss mask against the messages that its characters come from.

Shapes: C characters of the rendered text, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlpipe.data.masks.origins import TEMPLATE, Origins, tokens_with
from rlpipe.data.masks.trained_parts import TrainedParts
from rlpipe.data.render.messages import CALLS
from rlpipe.data.render.template import Span
from rlpipe.data.row import UnusableRow
from rlpipe.types import BoolArray, ChatMessages, IntArray


@dataclass(frozen=True)
class RowCheck:
    """The origins of a row's tokens, and what its messages want of them."""

    origins: Origins
    text: str
    offsets: IntArray
    """First character of each token and the one after its last ``[T, 2]``."""
    messages: ChatMessages
    """The messages as the template renders them."""
    parts: TrainedParts
    has_endless: bool = False
    """Whether turns of a trained role have no end marker, so that they go to the end of the sequence."""

    @cached_property
    def _excluded(self) -> BoolArray:
        """Characters of messages, and of parts of messages, that are not to be trained, though their roles are."""
        excluded = np.isin(self.origins.messages, self.parts.untrained)
        for index, spans in self.parts.spans.items():
            first, stop, offset = self._place(index)
            excluded[first:stop] = True
            for start, end in spans:
                excluded[max(start + offset, first) : max(end + offset, first)] = False
        return excluded

    def _place(self, index: int) -> tuple[int, int, int]:
        """Return where a message's content is in the text: first character, the one after its last, and its offset.

        Raises ``UnusableRow`` if the template does not write the content as it is.
        """
        content, found = self.messages[index]["content"], self.origins.span(index)
        if isinstance(content, list) and len(content) == 1:
            content = content[0].get("text")
        shown = [hit.span() for hit in self.origins.replaced.finditer(content or "") if not hit[1]]
        if found is None or not shown or self.text[slice(*found)] != content[shown[0][0] : shown[-1][1]]:
            raise UnusableRow(
                f"message {index + 1}: the chat template rewrites its content, so its trained spans can't be found"
            )
        return *found, found[0] - shown[0][0]

    def without_untrained(self, mask: BoolArray, spans: Sequence[Span]) -> BoolArray:
        """Return the mask ``[T]`` without what the messages exclude, and without the ends of turns that are excluded.

        ``spans`` are the turns that it is made of: first token and the one after the last, which may be an end marker.
        """
        if self.parts.is_everything:
            return mask
        mask = mask.copy()
        excluded = tokens_with(self._excluded, self.offsets)
        mask[excluded] = False
        for start, stop in spans:
            owned = start + np.flatnonzero((excluded | self._wanted)[start:stop])
            if not len(owned):
                continue
            if not self._wanted[start:stop].any():
                mask[start:stop] = False
            elif excluded[owned[-1]]:
                mask[owned[-1] : stop] = False  # whether to end there is not trained either
            for gap in np.flatnonzero(np.diff(owned) > 1):  # blanks within what is excluded
                first, last = owned[gap], owned[gap + 1]
                mask[first:last] &= not (excluded[first] and excluded[last])
        both = sorted([*self.parts.trained, *self.parts.untrained])
        if len(spans) == len(both):
            for index, span in zip(both, spans, strict=True):
                if index in self.parts.untrained:
                    mask[slice(*span)] = False
        return mask

    @cached_property
    def _wanted(self) -> BoolArray:
        """Tokens that are to be trained."""
        wanted = tokens_with(np.isin(self.origins.messages, self.parts.trained), self.offsets)
        return wanted & ~tokens_with(self._excluded, self.offsets)

    def require_right(self, mask: BoolArray, spans: Sequence[Span]) -> None:
        """Raise ``UnusableRow`` if the mask ``[T]`` trains a message of another role, or leaves one out."""
        roles = [message["role"] for message in self.messages]
        known = {*self.parts.trained, *self.parts.untrained}
        others = [index for index in range(len(roles)) if index not in known and roles[index] not in self.parts.folded]
        wrong = tokens_with(np.isin(self.origins.messages, others), self.offsets) & mask
        if wrong.any():
            why = "its text looks like a turn to train, or the chat template writes it within one"
            if self.has_endless:
                why = "with end: null (data.role_boundaries), a turn before it goes to the end of the row"
            raise UnusableRow(f"message {self._message_at(wrong, others)} would be trained: {why}")
        missing = self._wanted & ~mask
        missing[:1] = False
        if missing.any():
            raise UnusableRow(
                f"message {self._message_at(missing, self.parts.trained)} would not be trained: the markers of its "
                "turn merge with adjacent text, or the chat template writes none before it"
            )
        for index in self.parts.trained:
            if self.origins.span(index) is None and self._has_text(index):
                raise UnusableRow(
                    f"message {index + 1} ({roles[index]}) would not be trained: the chat template leaves it out"
                )
        silent = sum(self.origins.span(index) is None for index in self.parts.trained)
        empty = sum(mask[start:stop].any() and not self._wanted[start:stop].any() for start, stop in spans)
        if empty > silent:
            raise UnusableRow(
                f"{empty} turns without text would be trained, but {silent} messages have none: a text of another "
                "message looks like such a turn"
            )

    def _message_at(self, tokens: BoolArray, candidates: Sequence[int]) -> str:
        """Return number and role of the first candidate in a marked token."""
        for start, stop in self.offsets[tokens]:
            for index in self.origins.messages[max(min(start, stop - 1), 0) : stop]:
                if index != TEMPLATE and index in candidates:
                    return f"{index + 1} ({self.messages[index]['role']})"
        raise AssertionError("a token of no candidate")

    def _has_text(self, index: int) -> bool:
        message = self.messages[index]
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content or []]
        return any(hit[1] is None for text in texts for hit in self.origins.replaced.finditer(text)) and not any(
            message.get(key) for key in CALLS
        )
