"""Rendering of a dataset's row to the tokens of a prompt or of a sequence to train."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from glob import has_magic
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.configs.schema.algorithm_config import EbftConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.render.control_tokens import ControlTokens, scored_ids
from rlpipe.data.render.formats import SupervisedForm
from rlpipe.data.render.images import count_images, take_images
from rlpipe.data.render.messages import TEMPLATE_OPTIONS, column_messages
from rlpipe.data.render.processor import Encoded, ImageProcessor
from rlpipe.data.render.template import ChatTemplate, plain_token_ids, token_ids_of
from rlpipe.data.row import Row, RowLocation, SkipKind, UnusableRow, require_columns
from rlpipe.errors import DataError
from rlpipe.types import NO_VERSION, BoolArray, ChatMessages, GroundTruth, IntArray, Prompt, Rollout, RolloutStatus

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedTokenizerBase


MIN_TOKENS = 64
"""Lower bound of a completion limit that is derived from the length of the ground truth."""
REMAINING_TURNS = "remaining_turns"
"""The column with the messages after the first answer, the last of which is the assistant's."""


class GroundTruthRenderer:
    """A renderer of ``ebft.truth_column``, and ``remaining_turns`` if there is one, as the answer to a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, ebft: EbftConfig) -> None:
        self._column, self._prompt_column, self._tools_column = ebft.truth_column, data.prompt_column, data.tools_column
        self._factor = ebft.gt_length_multiplier if ebft.adaptive_max_tokens else None
        # source="jsonl": with reasoning_gym, the completion would be read from its "answer" column, which may not be
        # the ground truth. Whatever SFT would train on, the policy has to write the assistant's turns with their ends.
        source = replace(
            data,
            source="jsonl",
            completion_column=self._column,
            text_column=None,
            loss_mask="roles",
            roles_to_train=["assistant"],
            train_on_inputs=False,
            train_on_eos="turn",
        )
        self._renderer = SequenceRenderer(tokenizer, source, max_tokens=2**31)

    def render(self, prompt: Prompt) -> GroundTruth:
        """Render the ground truth of a prompt's row; raise ``UnusableRow`` if it has none that can be rendered."""
        row = {**self._options(prompt), self._prompt_column: prompt.prompt, self._column: self._answer(prompt)}
        encoded, loss_mask = self._renderer.encode(row)
        first = int(np.argmax(loss_mask))
        return GroundTruth(token_ids=encoded.token_ids[first:], is_assistant=loss_mask[first:])

    def prepare(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its ground truth, the turns between its answers, and a limit for completions.

        The limit, if ``ebft.adaptive_max_tokens``, is ``ebft.gt_length_multiplier`` times the longest turn, and at
        least ``MIN_TOKENS``. Raises ``UnusableRow`` as ``render`` does.
        """
        truth = self.render(prompt)
        spans = truth.turns()
        limit = None
        if self._factor is not None:
            longest = max(end - start for start, end in spans)
            limit = max(int(self._factor * longest), MIN_TOKENS)
        gaps = [truth.token_ids[end:start] for (_, end), (start, _) in pairwise(spans)]
        return replace(prompt, max_tokens=limit, turns=gaps, truth=truth)

    def _options(self, prompt: Prompt) -> Row:
        """Return the columns by which the prompt was rendered."""
        return {name: value for name, value in prompt.task.items() if name in (self._tools_column, TEMPLATE_OPTIONS)}

    def _answer(self, prompt: Prompt) -> Any:
        truth, remaining = prompt.task.get(self._column), prompt.task.get(REMAINING_TURNS)
        if truth is None:
            raise UnusableRow(f"no ground truth in the column {self._column!r} (algorithm.ebft.truth_column)")
        if not remaining:
            return truth
        if not prompt.is_chat:
            raise UnusableRow(f"{REMAINING_TURNS} needs a prompt that is a conversation")
        if remaining[-1].get("role") != "assistant":
            raise UnusableRow(f"{REMAINING_TURNS} does not end with an assistant turn")
        first = [{"role": "assistant", "content": truth}] if isinstance(truth, str) else list(truth)
        return [*first, *remaining]


NEED_CHAT = "rows with images need data.chat=true, and no data.text_column"
NO_IMAGES = "rows with images are for SFT, preferences and RL with rewards, not for EBFT, strided rows or reward models"


class PromptRenderer:
    """A renderer of rows to prompts; rows with images need the model's ``processor``.

    Messages always go through the chat template; a text does, as a user turn, if ``data.chat``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, processor: ImageProcessor | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._processor = processor
        self._template = ChatTemplate(tokenizer, data, processor)
        if data.chat and data.text_column is None:
            self._template.require()

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` if the prompt column is missing."""
        require_columns(columns, [self._data.prompt_column], location, "data.prompt_column or data.transform")

    def render(self, row: Row, at: RowLocation) -> Prompt:
        """Render the row's prompt, with the row's other columns in ``task``.

        Raises ``DataError`` if the prompt column is missing, ``UnusableRow`` if its value can't be rendered or has
        more than ``max_prompt_tokens`` tokens.
        """
        self.check(row.keys(), at.location)
        task = {name: value for name, value in row.items() if name != self._data.prompt_column}
        return self.render_value(present(row, self._data.prompt_column), task, at)

    def render_value(self, value: Any, task: Mapping[str, Any], at: RowLocation) -> Prompt:
        """Render the prompt of ``value``, a text or chat messages."""
        images = task.get(self._data.images_column)
        if isinstance(value, str) and not value.strip() and not images:
            raise UnusableRow("the prompt is empty")
        if isinstance(value, str) and not self._data.chat:
            if images:
                raise DataError(f"{at.location}: {NEED_CHAT}")
            encoded = Encoded(token_ids=token_ids_of(self._tokenizer, value, begins=True))
            return self._prompt(value, encoded, task, at)
        messages = column_messages(value, self._data.prompt_column, "user")
        messages, contents = take_images(messages, images, images_folder(self._data))
        return self.render_taken(messages, contents, task, at, row=task)

    def render_taken(
        self, messages: ChatMessages, contents: Sequence[bytes], task: Mapping[str, Any], at: RowLocation, *, row: Row
    ) -> Prompt:
        """Render the prompt of messages and images from ``take_images``, as the options of a ``row`` say."""
        if contents and self._processor is None:
            raise DataError(f"{at.location}: {NO_IMAGES}")
        messages = self._template.with_system_prompt(messages)
        if not messages:
            raise UnusableRow("the prompt is empty")
        if contents:
            task = {**task, self._data.images_column: list(contents)}
        template = self._template.for_row(row)
        encoded = template.encode(template.prompt_text(messages), contents)
        return self._prompt(messages, encoded, task, at)

    def _prompt(self, prompt: str | ChatMessages, encoded: Encoded, task: Mapping[str, Any], at: RowLocation) -> Prompt:
        check_prompt_length(len(encoded.token_ids), self._data.max_prompt_tokens)
        if self._processor is not None:
            self._processor.check(encoded)
        return Prompt(
            prompt_id=at.row,
            epoch=at.epoch,
            token_ids=encoded.token_ids,
            prompt=prompt,
            task=task,
            images=encoded.images,
            folded_ids=encoded.folded_ids,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class RenderedRow:
    """The uncut training sequence of a row."""

    encoded: Encoded
    loss_mask: BoolArray  # [T]
    task: dict[str, Any]
    """The columns that are not rendered."""
    is_good: bool = True
    """Whether the policy should learn the completion, or to avoid it."""
    rejected: RenderedRow | None = None
    """The worse completion, with the same prompt."""


class SequenceRenderer:
    """A renderer of SFT rows to training sequences with loss on the assistant's turns, or on what the config selects.

    In a conversation, every assistant turn counts in the loss. Any other row has a prompt and a completion, and only
    the completion counts: with ``data.chat`` an assistant turn (or messages), else text and the end token.
    ``SupervisedForm`` decides which of the two a row is. With ``data.text_column`` a row is a text that counts as a
    whole; of a text that is too long a sequence has a window, a different one in each epoch, or a chunk.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        max_tokens: int,
        processor: ImageProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._max_tokens = max_tokens
        self._processor = processor
        self._template = ChatTemplate(tokenizer, data, processor)
        self._prompts = PromptRenderer(tokenizer, data, processor)
        self._mask = ConversationMask(self._template, data)
        answers = data.source == "reasoning_gym" and data.transform is None
        self._completion_column = "answer" if answers else data.completion_column
        self._form = SupervisedForm(data, self._completion_column)

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` if the row has neither a text, a conversation, nor a prompt and a completion."""
        if self._data.text_column is not None:
            require_columns(columns, [self._data.text_column], location, "data.text_column or data.transform")
        else:
            self._form.check(columns, location, nulls)

    def prompt(self, row: Row, at: RowLocation) -> Prompt:
        """Render the row's prompt: the messages before a conversation's first assistant turn, or all of a text."""
        self.check(row.keys(), at.location)
        if self._data.text_column is not None:
            text = self._text(row)
            token_ids = self._text_tokens(text)
            return Prompt(prompt_id=at.row, epoch=at.epoch, token_ids=token_ids, prompt=text, task={})
        row = self._form.normal(row)
        if self._data.messages_column not in row and self._is_plain(row):
            task = {name: value for name, value in row.items() if name != self._data.prompt_column}
            return self._prompts.render_value(present(row, self._data.prompt_column), task, at)
        messages, contents, end = self._conversation(row)
        task = {name: value for name, value in row.items() if name not in self._rendered_columns}
        if self._data.messages_column in row:
            roles = [message["role"] for message in messages]
            end = roles.index("assistant") if "assistant" in roles else len(roles)
        contents = contents[: count_images(messages[:end])]
        return self._prompts.render_taken(messages[:end], contents, task, at, row=row)

    def render(self, row: Row, at: RowLocation) -> Rollout:
        """Render the row's training sequence; raise ``DataError`` and ``UnusableRow`` as ``whole`` and ``fit`` do."""
        return self.fit(self.whole(row, at), at)

    def whole(self, row: Row, at: RowLocation) -> RenderedRow:
        """Return the row's sequence before it is cut.

        Raises ``DataError`` and ``UnusableRow`` as ``PromptRenderer.render`` does.
        """
        self.check(row.keys(), at.location)
        try:
            if self._data.text_column is not None:
                self._refuse_images(row)
                encoded, loss_mask = self._all_tokens(row)
            else:
                row = self._form.normal(row)
                encoded, loss_mask = self.encode(row)
        except DataError as error:
            raise DataError(f"{at.location}: {error}") from None
        if self._processor is not None:
            self._processor.check(encoded)
        if self._data.text_column is None:
            if not loss_mask.any():
                raise UnusableRow("it has no tokens to train: its completion is empty")
            check_prompt_length(int(np.argmax(loss_mask)), self._data.max_prompt_tokens)
        task = {name: value for name, value in row.items() if name not in self._rendered_columns}
        return RenderedRow(encoded=encoded, loss_mask=loss_mask, task=task)

    def fit(self, rendered: RenderedRow, at: RowLocation) -> Rollout:
        """Return the training sequence of a whole row, cut to a window if it is a text that is too long.

        Its loss tokens have advantage 1 and no policy version; ``group_id`` is the row and ``sample_index`` the epoch.
        Raises ``UnusableRow`` for any other sequence of more than ``max_tokens`` tokens.
        """
        token_ids, loss_mask, status = rendered.encoded.token_ids, rendered.loss_mask, RolloutStatus.COMPLETED
        if self._data.text_column is not None and len(token_ids) > self._max_tokens:
            start = self._first_token(len(token_ids), at)
            token_ids = token_ids[start : start + self._max_tokens]
            loss_mask = loss_mask[: len(token_ids)]
            status = RolloutStatus.TRUNCATED
        if len(token_ids) > self._max_tokens:
            reason = f"{len(token_ids)} tokens, more than learner.max_tokens_per_microbatch={self._max_tokens}"
            raise UnusableRow(reason, SkipKind.TOO_LONG)
        return Rollout(
            status=status,
            group_id=at.row,
            sample_index=at.epoch,
            prompt_id=at.row,
            task=rendered.task,
            token_ids=token_ids,
            loss_mask=loss_mask,
            logprobs=np.zeros(len(token_ids), np.float32),
            policy_versions=np.full(len(token_ids), NO_VERSION, np.int32),
            advantages=loss_mask.astype(np.float32),
            images=rendered.encoded.images,
        )

    def _first_token(self, length: int, at: RowLocation) -> int:
        """Return the first token of a sequence from a long text. The last token of a chunk begins the next one."""
        if self._data.long_texts == "chunks":
            return at.chunk * (self._max_tokens - 1)
        return int(np.random.default_rng([at.row, at.epoch]).integers(length - self._max_tokens + 1))

    def encoded_text(self, row: Row) -> Encoded:
        """Return the T tokens of a row's text; raise ``UnusableRow`` if it has none."""
        return Encoded(token_ids=self._text_tokens(self._text(row)))

    def encode(self, row: Row) -> tuple[Encoded, BoolArray]:
        """Return the T tokens of a row with a completion or a conversation, and its loss mask ``[T]``."""
        if self._data.messages_column not in row and self._is_plain(row):
            self._refuse_images(row)
            return self._plain_tokens(present(row, self._data.prompt_column), present(row, self._completion_column))
        messages, images, first = self._conversation(row)
        if images and self._processor is None:
            raise DataError(NO_IMAGES)
        with_system = self._template.with_system_prompt(messages)
        num_earlier = first + len(with_system) - len(messages) if first else 0
        template = self._template.for_row(row)
        return self._mask.tokens(with_system, images, first_message=num_earlier, template=template)

    def scored_ids(self, row: Row) -> IntArray | None:
        """Return the T tokens of a row as answers are scored: with special tokens of its completion as plain text.

        None for a conversation whose completion spells none, which has the tokens of ``encode``.
        """
        row = self._form.normal(row)
        if self._is_plain(row):
            prompt, completion = present(row, self._data.prompt_column), present(row, self._completion_column)
            ends = "|".join(re.escape(end) for end in (self._tokenizer.eos_token, self._tokenizer.pad_token) if end)
            completion = re.sub(f"(?:{ends})+$", "", completion)  # which mark the end in some data sets
            prompt_ids = token_ids_of(self._tokenizer, prompt, begins=True)
            return np.array([*prompt_ids, *plain_token_ids(self._tokenizer, completion)], np.int32)
        messages, _, first = self._conversation(row)
        with_system = self._template.with_system_prompt(messages)
        num_trusted = first + len(with_system) - len(messages)
        texts = ControlTokens(self._template)
        texts.hidden(with_system, num_trusted=num_trusted)
        if not texts.hide_any:
            return None
        template = self._template.for_row(row)
        return scored_ids(template, with_system, template.text, num_trusted=num_trusted)

    def _is_plain(self, row: Row) -> bool:
        """Return whether a pair of prompt and completion is rendered without the chat template."""
        pair = present(row, self._data.prompt_column), present(row, self._completion_column)
        return not self._data.chat and all(isinstance(text, str) for text in pair)

    def _conversation(self, row: Row) -> tuple[ChatMessages, list[bytes], int]:
        """Return the row's messages, its images, and the index of the completion's first message.

        The index is 0 for a row whose messages are all in one column.
        """
        if self._data.messages_column in row:
            messages, first = self._messages(row, self._data.messages_column), 0
        else:
            prompt = self._messages(row, self._data.prompt_column, "user")
            answer = self._messages(row, self._completion_column, "assistant")
            messages, first = [*prompt, *answer], len(prompt)
        images = row.get(self._data.images_column)
        return *take_images(messages, images, images_folder(self._data)), first

    def _messages(self, row: Row, column: str, role: str | None = None) -> ChatMessages:
        return column_messages(present(row, column), column, role)

    def _refuse_images(self, row: Row) -> None:
        if row.get(self._data.images_column):
            raise DataError(NEED_CHAT)

    @property
    def _rendered_columns(self) -> set[str | None]:
        return {
            *(self._data.messages_column, self._data.prompt_column, self._data.images_column),
            *(self._completion_column, self._data.text_column, self._data.tools_column),
        }

    def _text(self, row: Row) -> str:
        text = present(row, str(self._data.text_column))
        if not isinstance(text, str):
            raise UnusableRow(f"column {self._data.text_column!r} holds a {type(text).__name__}, not a string")
        return text

    def _text_tokens(self, text: str) -> IntArray:
        end = self._tokenizer.eos_token_id
        token_ids = np.append(
            token_ids_of(self._tokenizer, text, begins=True), np.array([] if end is None else [end], np.int32)
        )
        if len(token_ids) < 2:
            raise UnusableRow("the text is empty")
        return token_ids

    def _all_tokens(self, row: Row) -> tuple[Encoded, BoolArray]:
        encoded = self.encoded_text(row)
        return encoded, np.arange(len(encoded.token_ids)) > 0

    def _plain_tokens(self, prompt: str, completion: str) -> tuple[Encoded, BoolArray]:
        if self._tokenizer.eos_token_id is None:
            raise DataError(f"tokenizer {self._tokenizer.name_or_path!r} has no end token; plain SFT rows need one")
        prompt_ids = token_ids_of(self._tokenizer, prompt, begins=True)
        completion_ids = token_ids_of(self._tokenizer, completion)
        token_ids = np.array([*prompt_ids, *completion_ids, self._tokenizer.eos_token_id], np.int32)
        counts_all = self._data.train_on_inputs or self._data.loss_mask == "all"
        if not counts_all and (list(self._data.roles_to_train) != ["assistant"] or self._data.role_boundaries):
            raise DataError(
                "data.roles_to_train and data.role_boundaries have no effect on a prompt and a completion without a "
                "chat template; remove them, or set data.chat=true"
            )
        first = 1 if counts_all else max(len(prompt_ids), 1)  # the first token has no predecessor
        loss_mask = np.arange(len(token_ids)) >= first
        if self._data.train_on_eos == "none" and not counts_all:
            loss_mask[-1] = False
        return Encoded(token_ids=token_ids), loss_mask


def num_chunks(encoded: Encoded, max_tokens: int) -> int:
    """Return the number of chunks of ``max_tokens`` tokens in which all tokens but the first are predicted once."""
    return max(math.ceil((len(encoded.token_ids) - 1) / max(max_tokens - 1, 1)), 1)


def images_folder(data: DataConfig) -> Path:
    """Return the folder that relative image paths start at."""
    if data.images_folder is not None:
        return Path(data.images_folder).expanduser()
    source = Path(data.path or "").expanduser()
    while has_magic(str(source)):
        source = source.parent
    return source if source.is_dir() else source.parent


def present(row: Row, column: str) -> Any:
    """Return the column's value; raise ``UnusableRow`` if it is null."""
    if row.get(column) is None:
        raise UnusableRow(f"column {column!r} is null")
    return row[column]


def check_prompt_length(length: int, limit: int) -> None:
    """Raise ``UnusableRow`` if a prompt has no tokens or more than ``limit``."""
    if length == 0:
        raise UnusableRow("the prompt is empty")
    if length > limit:
        raise UnusableRow(f"{length} prompt tokens, more than data.max_prompt_tokens={limit}", SkipKind.TOO_LONG)
