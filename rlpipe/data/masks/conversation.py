"""The rendering of a conversation to tokens and their loss mask."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.boundaries import Turn, find_turns
from rlpipe.data.masks.generation import mark_generation
from rlpipe.data.masks.loss_mask import LossMask
from rlpipe.data.masks.media import media_token_ids
from rlpipe.data.masks.probe import ASSISTANT, Probe
from rlpipe.data.masks.resolve import resolve_mask, taken_for_assistant
from rlpipe.data.render.images import count_images
from rlpipe.data.render.messages import assistant_turns
from rlpipe.data.render.processor import Encoded
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.types import BoolArray, ChatMessages

logger = logging.getLogger(__name__)


class ConversationMask:
    """The loss mask of a run's conversations.

    If the template has ``{% generation %}`` blocks, and the config asks for exactly what the assistant writes, the
    blocks make the mask; otherwise the markers of turns do. Markers of the config are encoded at once; others are
    looked for when the first conversation comes.
    """

    def __init__(self, template: ChatTemplate, data: DataConfig) -> None:
        """Raise ``ConfigError`` if the data config's markers are impossible."""
        self._template = template
        self._data = data
        if data.role_boundaries and data.text_column is None:
            _ = self.rules

    @cached_property
    def _by_generation(self) -> bool:
        data = self._data
        is_plain = data.loss_mask == "roles" and not data.train_on_inputs and data.train_on_eos == "turn"
        only_assistant = list(data.roles_to_train) == [ASSISTANT] and data.role_boundaries is None
        found = is_plain and only_assistant and self._template.marks_generation
        if found:
            logger.info("loss mask: generation blocks of the chat template, with the end tokens right behind them")
        return found

    @cached_property
    def rules(self) -> LossMask:
        """Rules of the mask; raises ``InputError`` if the config's markers are impossible or the template's unknown."""
        return resolve_mask(self._template, self._data)

    @cached_property
    def _taken_for_assistant(self) -> set[str]:
        return taken_for_assistant(self.rules.boundaries, Probe(self._template))

    @cached_property
    def _never_counted(self) -> list[int]:
        """Tokens of images, audio and videos, and of padding unless that is the end token."""
        tokenizer = self._template.tokenizer
        pads = {tokenizer.pad_token_id} - {None, tokenizer.eos_token_id}
        return [*media_token_ids(tokenizer), *pads]

    def tokens(
        self,
        messages: ChatMessages,
        images: Sequence[bytes] = (),
        *,
        first_message: int = 0,
        tools: Sequence[Any] | None = None,
    ) -> tuple[Encoded, BoolArray]:
        """Return the conversation's T tokens, and its loss mask ``[T]``: by roles, False before ``first_message``.

        ``tools`` are the row's own, in place of the config's.

        Raises ``UnusableRow`` if the template can't render these messages, if no token counts, or if an assistant turn
        is not found in the tokens because its markers merge with the text beside them.
        """
        template = self._template.with_tools(tools)
        if self._by_generation:
            encoded, mask = mark_generation(template, messages, images, first_message)
            mask &= ~np.isin(encoded.token_ids, self._never_counted)
        else:
            encoded = template.encode(template.text(messages), images)
            mask = self._mark(encoded, messages, first_message, template)
        for image in encoded.images:
            mask[image.place : image.place + image.num_tokens] = False
        mask[:1] = False  # the first token has no predecessor
        if not mask.any():
            raise UnusableRow(f"no token of a turn of {' or '.join(self._data.roles_to_train) or 'any role'}")
        return encoded, mask

    def _mark(self, encoded: Encoded, messages: ChatMessages, first_message: int, template: ChatTemplate) -> BoolArray:
        rules, token_ids = self.rules, encoded.token_ids
        turns = find_turns(token_ids, rules.boundaries)
        mask = rules.mark_turns(token_ids, turns)
        if rules.counts_all:
            return mask
        taken = self._taken_for_assistant & {message["role"] for message in messages[first_message:]}
        if taken and ASSISTANT in rules.roles:
            raise UnusableRow(
                f"its turns of {' and '.join(sorted(taken))} would count as the assistant's: the chat template writes "
                "them alike"
            )
        answers = [turn for turn in turns if turn.boundary.role == ASSISTANT]
        expected = _num_blocks(messages)
        if len(answers) < expected and ASSISTANT in rules.roles:
            raise UnusableRow(
                f"{len(answers)} of the assistant's {expected} turns are found in its tokens: their markers merge with "
                "what stands beside them, or the chat template leaves turns out"
            )
        if first_message:
            mask[: _num_prompt_tokens(encoded, messages, first_message, answers, template)] = False
        return mask


def _num_prompt_tokens(
    encoded: Encoded, messages: ChatMessages, first_message: int, answers: Sequence[Turn], template: ChatTemplate
) -> int:
    """Return the length of the prompt as the policy gets it, which may open its reasoning.

    If the tokens do not begin with that prompt, return the place of the start marker of the policy's turn.
    """
    token_ids = encoded.token_ids
    earlier = len(assistant_turns(messages[:first_message]))
    if messages[first_message - 1]["role"] == ASSISTANT and earlier < len(answers):
        return answers[earlier].marker  # the prompt's last turn has an end here, but not in the resumed prompt
    images = [image.content for image in encoded.images[: count_images(messages[:first_message])]]
    prompt = template.encode(template.prompt_text(messages[:first_message]), images).token_ids
    if np.array_equal(token_ids[: len(prompt)], prompt):
        return len(prompt)
    return answers[earlier].marker if earlier < len(answers) else len(token_ids)


def _num_blocks(messages: ChatMessages) -> int:
    """Count the assistant's messages, consecutive ones once, because some templates join them."""
    return sum(role == ASSISTANT for role, _ in groupby(message["role"] for message in messages))
