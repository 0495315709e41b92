"""Loss masks of conversations: which tokens of which turns are trained."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, takewhile

import numpy as np

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.boundaries import LossMask, Turn, fill, find_turns
from rlpipe.data.masks.derivation import ASSISTANT
from rlpipe.data.masks.row_check import RowCheck, find_origins, tokens_with
from rlpipe.data.masks.rules import TrainedParts, media_token_ids, resolve_mask
from rlpipe.data.render.images import count_images
from rlpipe.data.render.messages import assistant_turns
from rlpipe.data.render.processor import Encoded
from rlpipe.data.render.template import ChatTemplate, Span
from rlpipe.data.row import UnusableRow
from rlpipe.types import BoolArray, ChatMessages, IntArray

logger = logging.getLogger(__name__)

OPENED_REASONING = re.compile(r"(\s|</?think(ing)?>)*$")
"""The beginning of a thought, which may follow the start of the assistant's turn in a prompt."""


class ConversationMask:
    """The loss mask of a run's conversations.

    If the template has ``{% generation %}`` blocks, and the config asks for exactly what the assistant writes, the
    blocks make the mask; otherwise the markers of turns do. Markers of the config are encoded at once; others are
    looked for when the first conversation comes.

    Either mask is checked on each row: a row in which it would leave out text that is to be trained, or train other
    text, is unusable.
    """

    def __init__(self, template: ChatTemplate, data: DataConfig) -> None:
        """Raise ``ConfigError`` if the data config's markers are impossible."""
        self._template = template
        self._data = data
        self._prompts: dict[str, str] = {}
        self._warnings: set[str] = set()
        if data.role_boundaries and data.text_column is None:
            _ = self.rules

    @cached_property
    def _by_generation(self) -> bool:
        data = self._data
        is_plain = data.loss_mask == "roles" and not data.train_on_inputs and data.train_on_eos == "turn"
        only_assistant = list(data.roles_to_train) == [ASSISTANT] and data.role_boundaries is None
        uses_blocks = is_plain and only_assistant and self._template.marks_generation
        if uses_blocks:
            logger.info("loss mask: generation blocks of the chat template, with the end tokens right after them")
        return uses_blocks

    @cached_property
    def rules(self) -> LossMask:
        """Rules of the mask; raises ``InputError`` if the config's markers are impossible or the template's unknown."""
        return resolve_mask(self._template, self._data)

    def _never_counted(self, token_ids: IntArray, spans: Sequence[Span]) -> BoolArray:
        """Return which tokens are of images, audio and videos, or padding; a turn may end with the padding's token."""
        tokenizer = self._template.tokenizer
        never = np.isin(token_ids, self._media_ids)
        if self._by_generation and tokenizer.pad_token_id not in (None, tokenizer.eos_token_id):
            is_padding = token_ids == tokenizer.pad_token_id
            is_padding[[stop - 1 for _, stop in spans]] = False
            never |= is_padding
        return never

    @cached_property
    def _media_ids(self) -> tuple[int, ...]:
        return media_token_ids(self._template.tokenizer)

    @cached_property
    def _roles(self) -> frozenset[str]:
        return frozenset({ASSISTANT}) if self._by_generation else self.rules.roles

    def tokens(
        self,
        messages: ChatMessages,
        images: Sequence[bytes] = (),
        *,
        first_message: int = 0,
        template: ChatTemplate | None = None,
    ) -> tuple[Encoded, BoolArray]:
        """Return the conversation's T tokens, and its loss mask ``[T]``: by roles, False before ``first_message``.

        ``template`` has the row's own tools and options; None: those of the config.

        Raises ``UnusableRow`` if the template can't render these messages, if no token counts, or if the mask would
        leave out a text that is to be trained, or train another.
        """
        template = template or self._template
        normalized = template.as_taken(messages)
        if self._by_generation:
            text, blocks = template.generation_spans(normalized)
            encoded = template.encode_with_offsets(text, images)
            mask, spans = self._block_mask(encoded, text, blocks, template)
        else:
            text = template.render(normalized)
            encoded = template.encode_with_offsets(text, images)
            mask, spans = self._turn_mask(encoded, normalized, first_message, template)
        mask = self._checked_mask(
            mask, spans, _Row(messages, normalized, first_message, template, text, encoded.offsets)
        )
        mask &= ~self._never_counted(encoded.token_ids, spans)
        for image in encoded.images:
            mask[image.start : image.start + image.num_tokens] = False
        mask[:1] = False  # the first token has no predecessor
        if not mask.any():
            raise UnusableRow(f"it has no token in a turn of {' or '.join(self._data.roles_to_train) or 'any role'}")
        return encoded, mask

    def _generation_prompt(self, template: ChatTemplate) -> str:
        """Return the generation prompt, the text after a user's turn; empty if a template writes none.

        It is found once for rows with equal options of the template.
        """
        options = repr(sorted(template.options.items()))
        if options not in self._prompts:
            self._prompts[options] = _find_prompt(template)
        return self._prompts[options]

    def _block_mask(
        self, encoded: Encoded, text: str, blocks: Sequence[Span], template: ChatTemplate
    ) -> tuple[BoolArray, list[Span]]:
        """Return the mask of a template's generation blocks, and the tokens of each.

        A start of the turn in a block does not count, since the policy does not write it; an end token right after a
        block does.
        """
        assert encoded.offsets is not None
        prompted = self._generation_prompt(template)
        header = OPENED_REASONING.sub("", prompted)
        written = [(_after_prompt(prompted, header, text, start, stop), stop) for start, stop in blocks]
        mask = tokens_with(fill(written, len(text)), encoded.offsets)
        end_id = self._template.tokenizer.eos_token_id
        if end_id is not None:
            mask[1:] |= mask[:-1] & (encoded.token_ids[1:] == end_id)
        runs = _runs(mask)
        if not any(self._is_ended(encoded, text, run) for run in runs):
            self._warn(
                "the chat template's generation blocks have no end token, in them or right after them, so that the end "
                "of a turn is not learned; move the end marker into the blocks (model.chat_template)"
            )
        return mask, runs

    def _is_ended(self, encoded: Encoded, text: str, run: Span) -> bool:
        """Return whether the last token of a block that is no blank is one that was added to the vocabulary."""
        assert encoded.offsets is not None
        offsets = encoded.offsets
        last = next((index for index in reversed(range(*run)) if text[slice(*offsets[index])].strip()), None)
        return last is not None and int(encoded.token_ids[last]) in self._added_ids

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._template.tokenizer.added_tokens_decoder)

    def _turn_mask(
        self, encoded: Encoded, normalized: ChatMessages, first_message: int, template: ChatTemplate
    ) -> tuple[BoolArray, list[Span]]:
        """Return the mask by the markers of turns, and the tokens of each turn of a role that counts."""
        rules, token_ids = self.rules, encoded.token_ids
        turns = find_turns(token_ids, rules.boundaries)
        mask = rules.mark_turns(token_ids, turns)
        if rules.counts_all:
            return mask, []
        if first_message:
            answers = [turn for turn in turns if turn.boundary.role == ASSISTANT]
            mask[: _num_prompt_tokens(encoded, normalized, first_message, answers, template)] = False
        return mask, [(turn.start, turn.stop) for turn in turns if turn.boundary.role in rules.roles]

    def _checked_mask(self, mask: BoolArray, spans: Sequence[Span], row: _Row) -> BoolArray:
        """Return the mask without messages that are not to be trained; raise ``UnusableRow`` if it is wrong."""
        counts_all = not self._by_generation and self.rules.counts_all
        roles = frozenset(message["role"] for message in row.messages) if counts_all else self._roles
        parts = TrainedParts.of(row.messages, roles, first_message=0 if counts_all else row.first_message)
        if counts_all and parts.is_everything:
            return mask
        if row.offsets is None:
            if parts.spans or any(index >= row.first_message for index in parts.untrained):
                raise UnusableRow("messages that are excluded from the loss need a fast tokenizer, with tokenizer.json")
            _check_number(spans, row.messages, roles)
            return mask
        origins = find_origins(row.template.render, row.normalized, row.text)
        if origins is None:
            raise UnusableRow(
                "the chat template writes other text of its own around other contents, so the mask can't be checked"
            )
        has_endless = not self._by_generation and any(
            boundary.end is None and boundary.role in roles for boundary in self.rules.boundaries
        )
        check = RowCheck(origins, row.text, row.offsets, row.normalized, parts, has_endless)
        mask = check.without_untrained(mask, spans)
        if not counts_all:
            check.require_right(mask, spans)
        for text in check.omissions():
            self._warn(f"the chat template leaves out {text}, so that it is not trained (model.chat_template)")
        return mask

    def _warn(self, text: str) -> None:
        """Log a warning that holds for the template, once."""
        if text not in self._warnings:
            self._warnings.add(text)
            logger.warning("%s", text)


@dataclass(slots=True, frozen=True)
class _Row:
    """A rendered conversation."""

    messages: ChatMessages
    normalized: ChatMessages
    """The messages as the template renders them."""
    first_message: int
    """The first message that may be trained."""
    template: ChatTemplate
    text: str
    offsets: IntArray | None


def _num_alike(prefix: str, text: str) -> int:
    """Return the number of characters that both texts have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix, text, strict=False)))


def _find_prompt(template: ChatTemplate) -> str:
    question = template.as_taken([{"role": "user", "content": "hi"}])
    try:
        plain, prompt = (template.render(question, add_generation_prompt=adds) for adds in (False, True))
    except UnusableRow:
        return ""
    return prompt.removeprefix(plain) if prompt.startswith(plain) else ""


def _after_prompt(prompt: str, header: str, text: str, start: int, stop: int) -> int:
    """Return the start of a block's text, after the part of the generation prompt that it may begin with."""
    for before in range(1, len(prompt)):  # the characters of the prompt that stand before the block
        if text.startswith(prompt[before:], start, stop) and text.endswith(prompt[:before], 0, start):
            return start + len(prompt) - before
    return start + _num_alike(prompt, text[start:stop]) * text.startswith(header, start, stop)


def _runs(mask: BoolArray) -> list[Span]:
    """Return the first token of each run of marked tokens, and the one after its last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _check_number(spans: Sequence[Span], messages: ChatMessages, roles: frozenset[str]) -> None:
    """Raise ``UnusableRow`` unless there are as many turns as messages; some templates join consecutive messages."""
    if roles != {ASSISTANT}:
        return
    most = len(assistant_turns(messages))
    least = sum(role == ASSISTANT for role, _ in groupby(message["role"] for message in messages))
    if not least <= len(spans) <= most:
        raise UnusableRow(f"{len(spans)} turns of the assistant are found in its tokens, which has {most} messages")


def _num_prompt_tokens(
    encoded: Encoded, normalized: ChatMessages, first_message: int, answers: Sequence[Turn], template: ChatTemplate
) -> int:
    """Return the length of the prompt as the policy gets it, which may open its reasoning.

    If the tokens do not begin with that prompt, return the position of the start marker of the policy's turn.
    """
    token_ids = encoded.token_ids
    earlier = len(assistant_turns(normalized[:first_message]))
    if normalized[first_message - 1]["role"] == ASSISTANT and earlier < len(answers):
        return answers[earlier].marker  # the prompt's last turn has an end here, but not in the resumed prompt
    images = [image.content for image in encoded.images[: count_images(normalized[:first_message])]]
    prompt = template.encode(template.prompt_text(normalized[:first_message]), images).token_ids
    if np.array_equal(token_ids[: len(prompt)], prompt):
        return len(prompt)
    return answers[earlier].marker if earlier < len(answers) else len(token_ids)
