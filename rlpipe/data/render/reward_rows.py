"""Rows of reward models: pairs of completions, and completions whose steps are labelled.

A loss token marks where a value is read, which is at the token before it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.configs.schema.algorithm_config import ProcessRewardConfig, RewardModelConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.pairs import PreferenceRenderer
from rlpipe.data.render.processor import Encoded
from rlpipe.data.render.row_renderer import PromptRenderer, RenderedRow, SequenceRenderer, present
from rlpipe.data.render.template import token_ids_of
from rlpipe.data.row import Row, RowLocation, UnusableRow, require_columns
from rlpipe.types import Prompt, Rollout

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
        last = replace(rendered, loss_mask=np.arange(length) == length - 1)
        rollout = super().fit(marked_after(last, self._padding), place)
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


def _list(row: Row, column: str) -> list[Any]:
    value = present(row, column)
    if not isinstance(value, list | tuple | np.ndarray):
        raise UnusableRow(f"column {column!r} holds a {type(value).__name__}, not a list")
    return list(value)


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


def marked_after(rendered: RenderedRow, padding: int | None) -> RenderedRow:
    """Return the sequence with one more token and with its loss tokens moved to the ones after them."""
    token_ids = np.append(rendered.encoded.token_ids, np.int32(padding or 0))
    loss_mask = np.append(False, rendered.loss_mask)
    return replace(rendered, encoded=replace(rendered.encoded, token_ids=token_ids), loss_mask=loss_mask)


class StepRenderer:
    """A renderer of rows with labelled steps to the tokens that ``StepReward`` scores.

    The prompt is rendered as that of a rollout; each step is followed by the separator or the step token, at whose last
    token the step's value is read. The token after that is a loss token, with the label as its advantage.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, config: ProcessRewardConfig, *, max_tokens: int
    ) -> None:
        self._tokenizer, self._config, self._padding = tokenizer, config, padding_id(tokenizer)
        self._prompts = PromptRenderer(tokenizer, data)
        self._sequences = SequenceRenderer(tokenizer, replace(data, text_column=None), max_tokens=max_tokens)

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` if a column is missing."""
        self._prompts.check(columns, location, nulls)
        names, section = [self._config.steps_column, self._config.labels_column], "algorithm.process_reward_model"
        require_columns(columns, names, location, f"{section}.steps_column and labels_column, or data.transform")

    def prompt(self, row: Row, place: RowLocation) -> Prompt:
        """Render the row's prompt; raise ``DataError`` and ``UnusableRow`` as ``PromptRenderer.render`` does."""
        self.check(row.keys(), place.location)
        return self._prompts.render(row, place)

    def whole(self, row: Row, place: RowLocation) -> RenderedRow:
        """Return the row's sequence, in whose loss mask the ends of the steps are true.

        Raises ``DataError`` and ``UnusableRow`` as ``prompt`` does, and for steps without text or label.
        """
        prompt = self.prompt(row, place)
        steps, labels = self._steps(row)
        token_ids, ends = prompt.token_ids.tolist(), []
        for step in steps:
            token_ids += self._tokens(step) + self._tokens(self._config.mark)
            ends.append(len(token_ids) - 1)
        loss_mask = np.zeros(len(token_ids), np.bool_)
        loss_mask[ends] = True
        encoded = Encoded(token_ids=np.array(token_ids, np.int32))
        return RenderedRow(
            encoded=encoded, loss_mask=loss_mask, task={**prompt.task, self._config.labels_column: labels}
        )

    def fit(self, rendered: RenderedRow, place: RowLocation) -> Rollout:
        """Return the sequence to train; raise ``UnusableRow`` if it has more than ``max_tokens`` tokens."""
        rollout = self._sequences.fit(marked_after(rendered, self._padding), place)
        assert rollout.advantages is not None
        rollout.advantages[rollout.loss_mask] = rendered.task[self._config.labels_column]
        return rollout

    def _steps(self, row: Row) -> tuple[list[str], list[bool]]:
        names = self._config.steps_column, self._config.labels_column
        steps, labels = (_list(row, name) for name in names)
        if not steps or len(steps) != len(labels):
            raise UnusableRow(f"{len(steps)} steps in column {names[0]!r}, and {len(labels)} labels in {names[1]!r}")
        for step in steps:
            if not isinstance(step, str) or not step.strip():
                raise UnusableRow(f"column {names[0]!r} has the step {step!r:.80}, which is not a text with words")
        for label in labels:
            if not isinstance(label, bool | np.bool_) and label not in (0, 1):
                raise UnusableRow(f"column {names[1]!r} has the label {label!r:.80}, neither true nor false")
        return steps, [bool(label) for label in labels]

    def _tokens(self, text: str) -> list[int]:
        return token_ids_of(self._tokenizer, text, add_special_tokens=False).tolist()
