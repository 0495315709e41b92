"""Rows of a reward model: pairs of completions, each with a token after it that marks where the reward is read."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.reward_model_config import RewardModelConfig
from rlpipe.data.render.pairs import PreferenceRenderer
from rlpipe.data.render.row_renderer import RenderedRow, present
from rlpipe.data.row import Row, RowLocation, UnusableRow, require_columns
from rlpipe.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RewardRenderer(PreferenceRenderer):
    """A renderer of pairs in which one more token follows each sequence; only this one is a loss token.

    It is never run: its predecessor, where the reward is read, is the last token of the sequence. Its advantage is the
    pair's margin in the chosen sequence, 0 in the rejected one. The sequences are those that ``SequenceReward`` scores:
    texts without an end token, and none with tokens of padding at the end, which transformers skips.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, config: RewardModelConfig, *, max_tokens: int
    ) -> None:
        super().__init__(tokenizer, data, takes_pairs=True, max_tokens=max_tokens)
        self._margin_column = config.margin_column
        self._is_chat, self._prompt_column = data.chat, data.prompt_column
        self._end, self._padding = tokenizer.eos_token_id, padding_id(tokenizer)

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` if the columns hold no pair, or not the margin."""
        super().check(columns, location, nulls)
        if self._margin_column is not None:
            fix = "algorithm.reward_model.margin_column or data.transform"
            require_columns(columns, [self._margin_column], location, fix)

    def whole(self, row: Row, place: RowLocation) -> RenderedRow:
        """Return the row's sequences; raise ``DataError`` and ``UnusableRow`` as ``PreferenceRenderer.whole`` does."""
        chosen = super().whole(row, place)
        assert chosen.rejected is not None, "a row is a pair"
        self._margin(row)
        rest, completions = self._form.split(row)
        texts = [rest[self._prompt_column], *(completion for completion, _ in completions)]
        is_plain = not self._is_chat and all(isinstance(text, str) for text in texts)
        skipped = {self._padding, self._end} if is_plain else {self._padding}
        return replace(without_end(chosen, skipped), rejected=without_end(chosen.rejected, skipped))

    def fit(self, rendered: RenderedRow, place: RowLocation) -> Rollout:
        """Return the sequences to train; raise ``UnusableRow`` if they have more than ``max_tokens`` in all."""
        length = len(rendered.encoded.token_ids)
        token_ids = np.append(rendered.encoded.token_ids, np.int32(self._padding or 0))
        marked = replace(
            rendered, encoded=replace(rendered.encoded, token_ids=token_ids), loss_mask=np.arange(length + 1) == length
        )
        rollout = super().fit(marked, place)
        margin = self._margin(rendered.task) if rendered.is_good else 0.0
        rollout.advantages = (margin * rollout.loss_mask).astype(np.float32)
        return rollout

    def _margin(self, columns: Row) -> float:
        if self._margin_column is None:
            return 0.0
        value = present(columns, self._margin_column)
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not isfinite(value):
            raise UnusableRow(f"column {self._margin_column!r} is {value!r:.80}, not a number")
        return float(value)


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the token that sequences are padded with when they are scored."""
    found: Any = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return None if found is None else int(found)


def without_end(rendered: RenderedRow, skipped: Collection[int | None]) -> RenderedRow:
    """Return the sequence without the tokens at its end that are ``skipped``, but for its first token."""
    token_ids = rendered.encoded.token_ids
    length = len(token_ids)
    while length > 1 and int(token_ids[length - 1]) in skipped:
        length -= 1
    encoded = replace(rendered.encoded, token_ids=token_ids[:length])
    return replace(rendered, encoded=encoded, loss_mask=rendered.loss_mask[:length])
