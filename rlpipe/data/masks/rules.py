"""The rules of a run's loss mask: roles, markers of turns (built in, derived or given), and parts that a row names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlpipe.configs.data_sources import ROLE_OPTION, RoleMarkers, read_role_boundaries
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.boundaries import LossMask, RoleBoundary, TrainedEnds, encode_markers
from rlpipe.data.masks.derivation import ASSISTANT, DIALOGUE, FAMILIES, USER, WORDS, NotDerivable, Probe, derive_markers
from rlpipe.data.render.template import ChatTemplate, Span
from rlpipe.data.row import UnusableRow
from rlpipe.errors import ConfigError, DataError
from rlpipe.types import ChatMessages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


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
FLAGS = ("weight", "train", "training", "loss")
"""Keys with which data sets exclude a message: OpenAI's and Mistral's, axolotl's, ms-swift's."""
DETAILS = ("train_detail", "training_detail")
"""Keys with axolotl's spans: dictionaries with ``begin_offset``, ``end_offset``, which is included, and ``train``."""


def media_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of the media tokens that the tokenizer has."""
    named = (getattr(tokenizer, name, None) for name in ATTRIBUTES)
    vocabulary = tokenizer.get_vocab()
    return tuple(sorted({vocabulary[str(token)] for token in (*named, *KNOWN) if str(token) in vocabulary}))


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
            existing = ", ".join(sorted(roles))
            raise DataError(
                f"data.roles_to_train: no turns of {role!r} can be recognized ({source}); the roles are {existing}"
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
            raise DataError(f"{ROLE_OPTION}: empty, so no token would count; add entries, or set data.loss_mask=all")
        configured = encode_markers(read_role_boundaries(data.role_boundaries), template.tokenizer)
        roles: dict[tuple[int, ...], str] = {}
        for index, boundary in enumerate(configured):
            if (role := roles.setdefault(boundary.start, boundary.role)) != boundary.role:
                raise ConfigError(f"{ROLE_OPTION}[{index}].start: has the same tokens as the start of {role}")
        return ROLE_OPTION, configured
    template.require()
    probe = Probe(template)
    for family, markers in FAMILIES.items():
        with suppress(ConfigError):
            if not _have_end_tokens(markers, template) or not probe.shows(markers):
                continue
            if are_found(built_in := encode_markers(markers, template.tokenizer), probe):
                return f"built in for {family}", built_in
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
        role == expected_role and text.endswith(word) and sum(text.count(any_word) for any_word in WORDS) == 1
        for (role, text), (expected_role, word) in zip(turns, expected, strict=True)
    )


def _have_end_tokens(markers: Sequence[RoleMarkers], template: ChatTemplate) -> bool:
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


@dataclass(slots=True, frozen=True)
class TrainedParts:
    """The messages of a conversation that are to be trained, those that are not, and the trained spans of some.

    The messages of other roles are in neither list.
    """

    trained: Sequence[int]
    untrained: Sequence[int]
    spans: Mapping[int, Sequence[Span]]
    """Characters of a message's content that are to be trained, for the trained messages that name them."""
    folded: frozenset[str]
    """Roles whose text is no mistake within trained turns, because templates write it into the user's turn."""

    @classmethod
    def of(cls, messages: ChatMessages, roles: frozenset[str], *, first_message: int) -> TrainedParts:
        """Read the messages, of which those of ``roles`` from ``first_message`` on are trained unless they refuse it.

        Raises ``UnusableRow`` if their keys are not understood, or ask for what the config excludes.
        """
        trained, untrained, spans = [], [], {}
        for index, message in enumerate(messages):
            name = f"message {index + 1}"
            asks = _flag(message, name)
            named_spans = _spans(message, name)
            if message["role"] not in roles:
                if asks or any(named_spans or ()):
                    raise UnusableRow(
                        f"{name} ({message['role']}) is marked as trained, but its role is not in data.roles_to_train"
                    )
                continue
            if index < first_message or asks is False or named_spans == []:
                untrained.append(index)
                continue
            trained.append(index)
            if named_spans is not None:
                spans[index] = named_spans
        folded = frozenset({"system", "tool"}) if "user" in roles else frozenset()
        return cls(trained, untrained, spans, folded)

    @property
    def is_everything(self) -> bool:
        """Whether all messages of the roles are trained as a whole."""
        return not self.untrained and not self.spans


def _flag(message: Mapping[str, Any], name: str) -> bool | None:
    """Return whether the message is marked as trained; None if it does not say."""
    flags = {key: message[key] for key in FLAGS if message.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):  # of which False and True are equal
            raise UnusableRow(
                f"{name}: its key {key!r} is {value!r:.80}; a message can count (1, true) or not (0, false)"
            )
    if not flags:
        return None
    if len(set(map(bool, flags.values()))) > 1:
        raise UnusableRow(f"{name}: its keys {' and '.join(map(repr, flags))} contradict each other")
    asks = bool(next(iter(flags.values())))
    return None if asks and set(flags) == {"weight"} else asks  # a weight of 1 only leaves it to the config


def _spans(message: Mapping[str, Any], name: str) -> list[Span] | None:
    """Return the trained spans of the message's content; None if it names none."""
    key = next((key for key in DETAILS if message.get(key) is not None), None)
    if key is None:
        return None
    entries = message[key]
    expectation = f"{name}: its key {key!r}: expected a list of begin_offset, end_offset and train"
    if not isinstance(entries, list | tuple):
        raise UnusableRow(f"{expectation}, found {entries!r:.80}")
    length = len(message["content"]) if isinstance(message.get("content"), str) else 0
    spans = []
    for entry in entries:
        fields = entry if isinstance(entry, Mapping) else {}
        start, last, trains = fields.get("begin_offset"), fields.get("end_offset"), fields.get("train")
        if not isinstance(start, int) or not isinstance(last, int) or not isinstance(trains, bool):
            raise UnusableRow(f"{expectation}, found {entry!r:.80}")
        if not 0 <= start <= last < length:
            raise UnusableRow(f"{name}: its key {key!r} has {entry!r:.80}, which is not within its {length} characters")
        if trains:
            spans.append((start, last + 1))
    return spans
