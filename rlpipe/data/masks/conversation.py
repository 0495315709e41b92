"""Loss masks of conversations: which tokens of which turns are trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.configs.data_sources import ROLE_OPTION, RoleMarkers, read_role_boundaries
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.boundaries import LossMask, RoleBoundary, TrainedEnds, Turn, encode_markers, find_turns
from rlpipe.data.masks.derivation import (
    ASSISTANT,
    DIALOGUE,
    FAMILIES,
    SYSTEM,
    TOOL,
    USER,
    WORDS,
    NotDerivable,
    Probe,
    derive_markers,
)
from rlpipe.data.render.images import count_images
from rlpipe.data.render.messages import assistant_turns
from rlpipe.data.render.processor import Encoded
from rlpipe.data.render.template import ChatTemplate, Span
from rlpipe.data.row import UnusableRow
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import BoolArray, ChatMessages, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ATTRIBUTES = tuple(
    f"{name}_token"
    for name in (
        *("image", "video", "audio", "image_break", "image_end", "vision_start", "vision_end", "fake_image"),
        *("boi", "eoi", "boa", "eoa", "bov", "eov", "start_image", "end_image", "start_of_image", "end_of_image"),
    )
)
"""Attributes under which tokenizers name media tokens; each may be missing."""
KNOWN = (
    *("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image|>", "<|video|>", "<|audio|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    *("<image>", "<video>", "<audio>", "<image_soft_token>", "<audio_soft_token>", "<start_of_image>"),
    *("<end_of_image>", "<start_of_audio>", "<end_of_audio>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[AUDIO]", "[BEGIN_AUDIO]", "<fake_token_around_image>"),
)
"""Media tokens of tokenizers without such attributes: Qwen, Llama, Gemma, LLaVA, Pixtral, Voxtral, Idefics."""


def media_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of the media tokens that the tokenizer has."""
    named = (getattr(tokenizer, name, None) for name in ATTRIBUTES)
    vocabulary = tokenizer.get_vocab()
    return tuple(sorted({vocabulary[str(token)] for token in (*named, *KNOWN) if str(token) in vocabulary}))


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
            f"the chat template has {len(spans)} generation blocks for {num_turns} assistant turns, so the prompt's "
            "can't be distinguished from the completion's"
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


logger = logging.getLogger(__name__)


def resolve_mask(template: ChatTemplate, data: DataConfig) -> LossMask:
    """Choose the rules of the loss mask, and log them.

    Raises ``ConfigError`` for impossible markers, and ``DataError`` if no markers of a trained role are found and
    ``data.loss_mask`` does not ask for all tokens.
    """
    counts_all = data.train_on_inputs or data.loss_mask == "all"
    source, boundaries = ("", []) if counts_all else find_boundaries(template, data)
    roles = {boundary.role for boundary in boundaries}
    for role in data.roles_to_train:
        if not counts_all and role not in roles:
            there = ", ".join(sorted(roles))
            raise DataError(
                f"data.roles_to_train: no turns of {role!r} can be recognized ({source}); the roles are {there}"
            )
    tokenizer = template.tokenizer
    mask = LossMask(
        boundaries=boundaries,
        roles=frozenset(data.roles_to_train),
        ends=TrainedEnds(data.train_on_eos),
        counts_all=counts_all,
        media_ids=media_token_ids(tokenizer),
        pad_id=tokenizer.pad_token_id,
        end_id=tokenizer.eos_token_id,
    )
    everything = "all tokens count, except padding and those of images, audio and videos"
    logger.info("loss mask: %s", everything if counts_all else _describe(mask, source))
    return mask


def find_boundaries(template: ChatTemplate, data: DataConfig) -> tuple[str, list[RoleBoundary]]:
    """Return the origin of the boundaries, and the boundaries; raise as ``resolve_mask`` does."""
    if data.role_boundaries is not None:
        if not data.role_boundaries:
            raise DataError(
                f"{ROLE_OPTION}: empty, so that no token would count; add entries, or set data.loss_mask=all"
            )
        given = encode_markers(read_role_boundaries(data.role_boundaries), template.tokenizer)
        roles: dict[tuple[int, ...], str] = {}
        for index, boundary in enumerate(given):
            if (role := roles.setdefault(boundary.start, boundary.role)) != boundary.role:
                raise ConfigError(f"{ROLE_OPTION}[{index}].start: has the same tokens as the start of {role}")
        return ROLE_OPTION, given
    template.require()
    probe = Probe(template)
    for family, markers in FAMILIES.items():
        with suppress(ConfigError):
            if _are_known(markers, template) and are_found(own := encode_markers(markers, template.tokenizer), probe):
                return f"built in for {family}", own
    try:
        derived = encode_markers(derive_markers(probe), template.tokenizer, "its markers")
        if not are_found(derived, probe):
            raise NotDerivable("its apparent markers do not enclose the messages")
    except (NotDerivable, ConfigError) as problem:
        raise DataError(
            f"the chat template of {template.tokenizer.name_or_path!r} does not show where turns begin and end "
            f"({problem}): set {ROLE_OPTION} to its markers, or data.loss_mask=all to train all tokens"
        ) from None
    return "derived from the chat template", derived


def are_found(boundaries: Sequence[RoleBoundary], probe: Probe) -> bool:
    """Return whether the boundaries find exactly the user and assistant turns of a conversation."""
    try:
        turns = [(role, text) for role, text in probe.turns(boundaries, *DIALOGUE) if role in (USER, ASSISTANT)]
    except UnusableRow:
        return False
    expected = list(zip(DIALOGUE, WORDS, strict=False))
    return len(turns) == len(expected) and all(
        role == own and text.endswith(word) and sum(text.count(any_word) for any_word in WORDS) == 1
        for (role, text), (own, word) in zip(turns, expected, strict=True)
    )


def taken_for_assistant(boundaries: Sequence[RoleBoundary], probe: Probe) -> set[str]:
    """Return other roles whose messages are taken for the assistant's, because the template writes them alike."""
    renderings = {
        SYSTEM: lambda: probe.turns(boundaries, SYSTEM, USER, ASSISTANT),
        TOOL: lambda: probe.result_turns(boundaries),
    }
    found = set()
    for role, render in renderings.items():
        with suppress(UnusableRow):
            answers = [text for own, text in render() if own == ASSISTANT]
            word = WORDS[0 if role == SYSTEM else 1]
            found |= {role} if any(word in text for text in answers) else set()
    return found


def _are_known(markers: Sequence[RoleMarkers], template: ChatTemplate) -> bool:
    """Return whether every end marker is one token, a quicker test than rendering the template."""
    vocabulary = template.tokenizer.get_vocab()
    return all(marker.end in vocabulary for marker in markers)


def _describe(mask: LossMask, source: str) -> str:
    markers = [_describe_boundary(boundary) for boundary in mask.boundaries]
    endless = mask.roles - {boundary.role for boundary in mask.boundaries if boundary.include_end and boundary.end}
    if endless:
        markers.append(
            f"turns of {', '.join(sorted(endless))} have no end marker of their own, so their end is not learned"
        )
    roles = ", ".join(sorted(mask.roles)) or "none"
    return f"{source}; trained roles {roles}, end markers {mask.ends.value}; {'; '.join(markers)}"


def _describe_boundary(boundary: RoleBoundary) -> str:
    flags = f"{', with start' * boundary.include_start}{', without end' * (not boundary.include_end)}"
    flags += ", also within turns" * boundary.interrupts
    end = "the end" if boundary.end is None else f"{list(boundary.end)}"
    return f"{boundary.role} {list(boundary.start)} to {end}{flags}"


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
            logger.info("loss mask: generation blocks of the chat template, with the end tokens right after them")
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
            raise UnusableRow(f"it has no token in a turn of {' or '.join(self._data.roles_to_train) or 'any role'}")
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
                f"its turns of {' and '.join(sorted(taken))} would count as the assistant's: the chat template renders "
                "both the same way"
            )
        answers = [turn for turn in turns if turn.boundary.role == ASSISTANT]
        expected = _num_blocks(messages)
        if len(answers) < expected and ASSISTANT in rules.roles:
            raise UnusableRow(
                f"{len(answers)} of the assistant's {expected} turns are found in its tokens: their markers merge with "
                "adjacent text, or the chat template leaves turns out"
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
