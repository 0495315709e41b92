"""Rows of preferences and of reward models: pairs of completions, labelled completions, and labelled steps.

They become rows with a prompt and a completion, which ``SequenceRenderer`` renders, so that all options of loss masks
hold for them. A loss token of a reward model marks where a value is read, which is at the token before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.preference_config import ProcessRewardConfig, RewardModelConfig
from rlpipe.data.render.formats import (
    INPUT,
    INSTRUCTION,
    SYSTEM,
    conversation,
    conversation_column,
    conversation_columns,
    with_system,
)
from rlpipe.data.render.messages import INSTEAD, chat_messages, column_messages, content_text
from rlpipe.data.render.processor import Encoded, ImageProcessor
from rlpipe.data.render.template import end_token_ids, plain_token_ids, token_ids_of
from rlpipe.data.row import Row, RowLocation, SkipKind, UnusableRow, require_columns
from rlpipe.data.row_renderer import PromptRenderer, RenderedRow, SequenceRenderer, present
from rlpipe.types import ChatMessages, Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PROMPTS = ("prompt", "question", INSTRUCTION, INPUT)
"""Columns with a prompt, in addition to ``data.prompt_column``; the first one that is not null is read."""
ENDINGS = ("", "_response")
"""Endings of the columns ``chosen`` and ``rejected`` in common data sets."""
TURNS = re.compile(r"\n\n(Human|Assistant):")
"""Beginnings of turns in texts of Anthropic's HH-RLHF."""

Completion = str | ChatMessages


class PreferenceForm:
    """A converter of preference rows, whose format it detects, into a prompt and one or two completions.

    Completions are texts, messages, or a single message; without a prompt of their own, what chosen and rejected begin
    with is the prompt. The formats are those of TRL's and axolotl's data sets.
    """

    def __init__(self, data: DataConfig, *, takes_pairs: bool) -> None:
        self._data, self._takes_pairs = data, takes_pairs
        self._prompts = tuple(dict.fromkeys((data.prompt_column, *PROMPTS)))

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` if the columns hold neither a pair nor, where that counts, a labelled completion."""
        if self._pair_columns(columns) is not None:
            return
        names = [self._data.chosen_column, self._data.rejected_column]
        options = "data.chosen_column and data.rejected_column, or data.transform"
        if not self._takes_pairs:
            names = [self._data.completion_column, self._data.label_column]
            options = "data.completion_column and data.label_column, or data.transform"
        require_columns(columns, names, location, options)

    def split(self, row: Row) -> tuple[dict[str, Any], list[tuple[Completion, bool]]]:
        """Return the row's prompt and other columns, and its completions, each with whether it is good.

        Raises ``UnusableRow`` for a row that matches no format.
        """
        names = self._pair_columns(row.keys())
        has_label = {self._data.completion_column, self._data.label_column} <= row.keys() and not self._takes_pairs
        if names is None or (has_label and any(row[name] is None for name in names)):
            return self._labelled(row)
        chosen, rejected = (_completion(present(row, name), name) for name in names)
        prompt, used = self._prompt(row)
        if prompt is None or _begin_with_prompt(chosen, rejected):
            prompt, chosen, rejected = self._take_prompt_off(chosen, rejected)
            system = row.get(SYSTEM)
            if system and not isinstance(prompt, str) and prompt[0]["role"] != SYSTEM:
                prompt, used = [*_turns((SYSTEM, system)), *prompt], (*used, SYSTEM)
        for name, completion in zip(names, (chosen, rejected), strict=True):
            _require_content(completion, name)
        if chosen == rejected:
            raise UnusableRow("chosen and rejected are the same")
        return self._rest(row, prompt, *names, *used), [(chosen, True), (rejected, False)]

    def _labelled(self, row: Row) -> tuple[dict[str, Any], list[tuple[Completion, bool]]]:
        name = self._data.completion_column
        completion = _completion(present(row, name), name)
        prompt, used = self._prompt(row)
        if not isinstance(completion, str) and completion[0]["role"] in ("system", "user"):
            prompt, completion = _split_conversation(completion, name)
        if prompt is None:
            raise UnusableRow(f"column {self._data.prompt_column!r} is missing or null")
        _require_content(completion, name)
        column = self._data.label_column
        label = _truth_value(present(row, column), f"column {column!r} is")
        return self._rest(row, prompt, name, column, *used), [(completion, label)]

    def _pair_columns(self, columns: Collection[str]) -> tuple[str, str] | None:
        """Return the columns of the chosen and the rejected completion, or None if there are none."""
        for ending in ENDINGS:
            names = self._data.chosen_column + ending, self._data.rejected_column + ending
            if set(names) <= set(columns):
                return names
        return None

    def _prompt(self, row: Row) -> tuple[Completion | None, tuple[str, ...]]:
        """Return the row's prompt, or None if it has none, and the columns that it is made from."""
        system = row.get(SYSTEM)
        given = [name for name in self._prompts if row.get(name) is not None]
        if (name := next((name for name in given if not self._is_empty(row, row[name])), None)) is not None:
            prompt, used = row[name], (name, INPUT, SYSTEM)
            if name == INSTRUCTION and row.get(INPUT):
                prompt = f"{prompt}\n{row[INPUT]}"
            if not system:
                return prompt, used
            if not isinstance(prompt, str):
                return with_system(column_messages(prompt, name), system), used
            if not self._data.chat:
                raise UnusableRow(f"column {SYSTEM!r} needs data.chat=true")
            return [*_turns((SYSTEM, system), ("user", prompt))], used
        if (name := conversation_column(row, self._data.messages_column)) is not None:
            messages = with_system(conversation(row, name), system)
            return messages, (*conversation_columns(self._data.messages_column), SYSTEM)
        return (row[given[0]], (given[0],)) if given else (None, ())

    def _is_empty(self, row: Row, prompt: Any) -> bool:
        """Return whether a prompt is a text without visible characters, in a row without images."""
        return isinstance(prompt, str) and not prompt.strip() and not row.get(self._data.images_column)

    def _take_prompt_off(self, chosen: Completion, rejected: Completion) -> tuple[Completion, Completion, Completion]:
        """Return what two completions begin with, and the rest of each; texts of HH-RLHF become messages."""
        if isinstance(chosen, str) and isinstance(rejected, str):
            if self._data.chat and TURNS.match(chosen) and TURNS.match(rejected):
                chosen, rejected = _hh_messages(chosen), _hh_messages(rejected)
            else:
                shared = _num_shared(chosen, rejected)
                shared -= chosen[:shared].endswith(" ")  # the blank belongs to the completions' first words
                if not 0 < shared < min(len(chosen), len(rejected)):
                    raise UnusableRow(_no_prompt("texts", shared))
                return chosen[:shared], chosen[shared:], rejected[shared:]
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise UnusableRow("one of chosen and rejected is a string, the other one messages")
        shared = _num_shared(chosen, rejected)
        if shared in (0, len(chosen), len(rejected)):
            raise UnusableRow(_no_prompt("messages", shared))
        return chosen[:shared], chosen[shared:], rejected[shared:]

    def _rest(self, row: Row, prompt: Completion, *used: str) -> dict[str, Any]:
        if self._is_empty(row, prompt):
            raise UnusableRow("the prompt is empty")
        removed = {*used, *conversation_columns(self._data.messages_column)}  # which would be rendered instead
        remaining = {name: value for name, value in row.items() if name not in removed}
        return {**remaining, self._data.prompt_column: prompt}


def _completion(value: Any, column: str) -> Completion:
    """Return a text as it is, and anything else as messages; raise ``UnusableRow`` if it is neither."""
    if isinstance(value, str):
        if not value:
            raise UnusableRow(f"column {column!r} is an empty text")
        return value
    return column_messages([value] if isinstance(value, Mapping) else value, column, "assistant")


def _require_content(completion: Completion, column: str) -> None:
    """Raise ``UnusableRow`` for a completion without text, calls or reasoning."""
    messages = _turns(("assistant", completion)) if isinstance(completion, str) else completion
    if not any(content_text(turn["content"]).strip() or any(turn.get(key) for key in INSTEAD) for turn in messages):
        raise UnusableRow(f"the completion in column {column!r} is empty")


def _split_conversation(messages: ChatMessages, column: str) -> tuple[ChatMessages, ChatMessages]:
    """Split a conversation before its last assistant turn; raise ``UnusableRow`` if nothing would be before it."""
    last = max((index for index, turn in enumerate(messages) if turn["role"] == "assistant"), default=0)
    if not last:
        raise UnusableRow(f"column {column!r} holds a conversation without an answer of the assistant")
    return messages[:last], messages[last:]


def _truth_value(value: Any, prefix: str) -> bool:
    """Return a label as bool; raise ``UnusableRow``, whose message begins with ``prefix``, if it is neither."""
    if not isinstance(value, bool | np.bool_) and value not in (0, 1):
        raise UnusableRow(f"{prefix} {value!r:.80}, neither true nor false")
    return bool(value)


def _begin_with_prompt(chosen: Completion, rejected: Completion) -> bool:
    """Return whether both are conversations that begin with their prompt, whatever other columns there are."""
    return all(not isinstance(value, str) and value[0]["role"] in ("system", "user") for value in (chosen, rejected))


def _no_prompt(kind: str, num_shared: int) -> str:
    problem = "are the same, or one is the beginning of the other" if num_shared else f"begin with different {kind}"
    return f"chosen and rejected {problem}, so they hold no prompt"


def _num_shared(first: Sequence[Any], second: Sequence[Any]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(first), len(second)))


def _hh_messages(text: str) -> ChatMessages:
    pieces = TURNS.split(text)[1:]
    roles = ("user" if name == "Human" else "assistant" for name in pieces[::2])
    return _turns(*zip(roles, (content.strip() for content in pieces[1::2]), strict=True))


def _turns(*turns: tuple[str, str]) -> ChatMessages:
    return chat_messages([{"role": role, "content": content} for role, content in turns])


class PreferenceRenderer:
    """A renderer of preference rows to a sequence, with its worse sibling in ``rejected`` if the row is a pair.

    A sequence has the advantage 1 on its loss tokens, a rejected or bad one -1. Unless pairs are wanted, a pair is
    rendered, too. ``pads_pairs`` tells whether the model runs both sequences of a pair at the length of the longer one;
    it is only called for a pair that depends on it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        takes_pairs: bool,
        max_tokens: int,
        processor: ImageProcessor | None = None,
        pads_pairs: Callable[[], bool] = lambda: False,
    ) -> None:
        self._form, self._takes_pairs = PreferenceForm(data, takes_pairs=takes_pairs), takes_pairs
        self._pads_pairs = pads_pairs
        self._column = data.completion_column
        self._max_tokens = max_tokens
        plain = replace(data, source="jsonl", text_column=None)
        self._renderer = SequenceRenderer(tokenizer, plain, max_tokens=max_tokens, processor=processor)

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` as ``PreferenceForm.check`` does."""
        self._form.check(columns, location, nulls)

    def prompt(self, row: Row, at: RowLocation) -> Prompt:
        """Render the row's prompt; raise ``DataError`` and ``UnusableRow`` as ``whole`` does."""
        self.check(row.keys(), at.location)
        rest, completions = self._form.split(row)
        return self._renderer.prompt({**rest, self._column: completions[0][0]}, at)

    def whole(self, row: Row, at: RowLocation) -> RenderedRow:
        """Return the row's sequences, which may be longer than a micro batch.

        Raises ``DataError`` and ``UnusableRow`` as ``SequenceRenderer.whole`` does.
        """
        self.check(row.keys(), at.location)
        return self._render(*self._form.split(row), at)

    def _render(self, rest: dict[str, Any], completions: list[tuple[Completion, bool]], at: RowLocation) -> RenderedRow:
        rendered = [
            replace(self._renderer.whole({**rest, self._column: completion}, at), is_good=is_good)
            for completion, is_good in completions
        ]
        if not all(sequence.loss_mask.any() for sequence in rendered):
            raise UnusableRow("a completion has no token that is trained")
        if len(rendered) == 1:
            return rendered[0]
        return _paired(*rendered)

    def fit(self, rendered: RenderedRow, at: RowLocation) -> Rollout:
        """Return the sequences to train; raise ``UnusableRow`` if they have more than ``max_tokens`` in all."""
        rollout = self._renderer.fit(rendered, at)
        if not rendered.is_good and rollout.advantages is not None:
            rollout.advantages = -rollout.advantages
        if rendered.rejected is not None:
            rollout.rejected = self.fit(rendered.rejected, at)
            if self._takes_pairs:
                self._check_length([len(sequence.token_ids) for sequence in rollout.sequences])
        return rollout

    def _check_length(self, lengths: Sequence[int]) -> None:
        """Raise ``UnusableRow`` if a pair's sequences have more than ``max_tokens`` together."""
        length, padded, padding = sum(lengths), 2 * max(lengths), ""
        if length <= self._max_tokens < padded and self._pads_pairs():
            length, padding = padded, ", padding included"
        if length > self._max_tokens:
            limit = f"learner.max_tokens_per_microbatch={self._max_tokens}"
            reason = f"chosen and rejected have {length} tokens together{padding}, more than {limit}"
            raise UnusableRow(reason, SkipKind.TOO_LONG)


def _paired(chosen: RenderedRow, rejected: RenderedRow) -> RenderedRow:
    if np.array_equal(chosen.encoded.token_ids, rejected.encoded.token_ids):
        raise UnusableRow("chosen and rejected are rendered to the same tokens")
    return replace(chosen, rejected=rejected)


class RewardRenderer(PreferenceRenderer):
    """A renderer of pairs in which one more token follows each sequence; only this one is a loss token.

    It is never run: its predecessor, where the reward is read, is the last token of the sequence. Its advantage is the
    pair's margin in the chosen sequence, 0 in the rejected one. The sequences are those that ``SequenceReward`` scores:
    texts without an end token, unless the tokenizer adds one, and none with tokens of padding at the end, which
    transformers skips. Special tokens that an answer spells are plain text, as in scoring. In rows that a policy learns
    they stay what they are: only there can a data set teach it tokens that the chat template never writes.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        config: RewardModelConfig,
        *,
        max_tokens: int,
        pads_pairs: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(tokenizer, data, takes_pairs=True, max_tokens=max_tokens, pads_pairs=pads_pairs)
        self._margin_column = config.margin_column
        self._may_lack_margin = config.margin_column in (None, RewardModelConfig().margin_column)
        self._is_chat, self._prompt_column = data.chat, data.prompt_column
        self._end, self._padding = tokenizer.eos_token_id, padding_id(tokenizer)
        self._added = end_token_ids(tokenizer)

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` if the columns hold no pair, or not the margin."""
        super().check(columns, location, nulls)
        if self._margin_column is not None and not self._may_lack_margin:
            fix = "algorithm.reward_model.margin_column or data.transform"
            require_columns(columns, [self._margin_column], location, fix)

    def whole(self, row: Row, at: RowLocation) -> RenderedRow:
        """Return the row's sequences; raise ``DataError`` and ``UnusableRow`` as ``PreferenceRenderer.whole`` does."""
        self.check(row.keys(), at.location)
        rest, completions = self._form.split(row)
        chosen = self._render(rest, completions, at)
        assert chosen.rejected is not None, "a row is a pair"
        self._margin(row)
        texts = [rest[self._prompt_column], *(completion for completion, _ in completions)]
        is_plain = not self._is_chat and all(isinstance(text, str) for text in texts)
        better, worse = ({**rest, self._column: completion} for completion, _ in completions)
        return _paired(self._as_scored(chosen, better, is_plain), self._as_scored(chosen.rejected, worse, is_plain))

    def _as_scored(self, rendered: RenderedRow, row: Row, is_plain: bool) -> RenderedRow:
        token_ids = self._renderer.scored_ids(row)
        if token_ids is not None:
            encoded = replace(rendered.encoded, token_ids=token_ids)
            rendered = replace(rendered, encoded=encoded, loss_mask=np.ones(len(token_ids), np.bool_))
        if is_plain:
            rendered = without_end(rendered, {self._padding, self._end})
            for token_id in self._added:
                rendered = with_token(rendered, token_id)
        return without_end(rendered, {self._padding})

    def fit(self, rendered: RenderedRow, at: RowLocation) -> Rollout:
        """Return the sequences to train; raise ``UnusableRow`` if they have more than ``max_tokens`` in all."""
        length = len(rendered.encoded.token_ids)
        last = replace(rendered, loss_mask=np.arange(length) == length - 1)
        rollout = super().fit(marked_after(last, self._padding), at)
        margin = self._margin(rendered.task) if rendered.is_good else 0.0
        rollout.advantages = (margin * rollout.loss_mask).astype(np.float32)
        return rollout

    def _margin(self, columns: Row) -> float:
        if self._margin_column is None or (self._may_lack_margin and columns.get(self._margin_column) is None):
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
    token_id: Any = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return None if token_id is None else int(token_id)


def without_end(rendered: RenderedRow, skipped: Collection[int | None]) -> RenderedRow:
    """Return the sequence without the tokens at its end that are ``skipped``, but for its first token."""
    token_ids = rendered.encoded.token_ids
    length = len(token_ids)
    while length > 1 and int(token_ids[length - 1]) in skipped:
        length -= 1
    encoded = replace(rendered.encoded, token_ids=token_ids[:length])
    return replace(rendered, encoded=encoded, loss_mask=rendered.loss_mask[:length])


def with_token(rendered: RenderedRow, token_id: int) -> RenderedRow:
    """Return the sequence with one more token, which is no loss token."""
    token_ids = np.append(rendered.encoded.token_ids, np.int32(token_id))
    encoded = replace(rendered.encoded, token_ids=token_ids)
    return replace(rendered, encoded=encoded, loss_mask=np.append(rendered.loss_mask, False))


def marked_after(rendered: RenderedRow, padding: int | None) -> RenderedRow:
    """Return the sequence with one more token and with its loss tokens moved to the ones after them."""
    return replace(with_token(rendered, padding or 0), loss_mask=np.append(False, rendered.loss_mask))


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
        self._end = token_ids_of(tokenizer, config.mark).tolist()

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` if a column is missing."""
        self._prompts.check(columns, location, nulls)
        names, section = [self._config.steps_column, self._config.labels_column], "algorithm.process_reward_model"
        require_columns(columns, names, location, f"{section}.steps_column and labels_column, or data.transform")

    def prompt(self, row: Row, at: RowLocation) -> Prompt:
        """Render the row's prompt; raise ``DataError`` and ``UnusableRow`` as ``PromptRenderer.render`` does."""
        self.check(row.keys(), at.location)
        return self._prompts.render(row, at)

    def whole(self, row: Row, at: RowLocation) -> RenderedRow:
        """Return the row's sequence, in whose loss mask the ends of the steps are true.

        Raises ``DataError`` and ``UnusableRow`` as ``prompt`` does, and for steps without text or label.
        """
        prompt = self.prompt(row, at)
        steps, labels = self._steps(row)
        token_ids, ends = prompt.token_ids.tolist(), []
        for step in steps:
            token_ids += plain_token_ids(self._tokenizer, step) + self._end
            ends.append(len(token_ids) - 1)
        loss_mask = np.zeros(len(token_ids), np.bool_)
        loss_mask[ends] = True
        encoded = Encoded(token_ids=np.array(token_ids, np.int32))
        return RenderedRow(
            encoded=encoded, loss_mask=loss_mask, task={**prompt.task, self._config.labels_column: labels}
        )

    def fit(self, rendered: RenderedRow, at: RowLocation) -> Rollout:
        """Return the sequence to train; raise ``UnusableRow`` if it has more than ``max_tokens`` tokens."""
        rollout = self._sequences.fit(marked_after(rendered, self._padding), at)
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
                raise UnusableRow(
                    f"column {names[0]!r} has the step {step!r:.80}, which is not a string with visible characters"
                )
            if self._config.mark in step:
                option = "step_token" if self._config.step_token else "separator"
                raise UnusableRow(
                    f"column {names[0]!r} has the step {step!r:.80}, which contains {self._config.mark!r:.40}, the end "
                    f"of a step (algorithm.process_reward_model.{option})"
                )
        return steps, [_truth_value(label, f"column {names[1]!r} has the label") for label in labels]
