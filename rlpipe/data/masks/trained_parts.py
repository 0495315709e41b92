"""Messages of a row, and spans of their texts, that the row itself includes in training or excludes from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.data.render.template import Span
from rlpipe.data.row import UnusableRow
from rlpipe.types import ChatMessages

FLAGS = ("weight", "train", "training", "loss")
"""Keys with which data sets exclude a message: OpenAI's and Mistral's, axolotl's, ms-swift's."""
DETAILS = ("train_detail", "training_detail")
"""Keys with axolotl's spans: dictionaries with ``begin_offset``, ``end_offset``, which is included, and ``train``."""


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
            own = _spans(message, name)
            if message["role"] not in roles:
                if asks or any(own or ()):
                    raise UnusableRow(
                        f"{name} ({message['role']}) is marked as trained, but its role is not in data.roles_to_train"
                    )
                continue
            if index < first_message or asks is False or own == []:
                untrained.append(index)
                continue
            trained.append(index)
            if own is not None:
                spans[index] = own
        folded = frozenset({"system", "tool"}) if "user" in roles else frozenset()
        return cls(trained, untrained, spans, folded)

    @property
    def is_everything(self) -> bool:
        """Whether all messages of the roles are trained as a whole."""
        return not self.untrained and not self.spans


def _flag(message: Mapping[str, Any], name: str) -> bool | None:
    """Return whether the message asks to be trained; None if it does not say."""
    found = {key: message[key] for key in FLAGS if message.get(key) is not None}
    for key, value in found.items():
        if value not in (0, 1):  # of which False and True are equal
            raise UnusableRow(
                f"{name}: its key {key!r} is {value!r:.80}; a message can count (1, true) or not (0, false)"
            )
    if not found:
        return None
    if len(set(map(bool, found.values()))) > 1:
        raise UnusableRow(f"{name}: its keys {' and '.join(map(repr, found))} contradict each other")
    asks = bool(next(iter(found.values())))
    return None if asks and set(found) == {"weight"} else asks  # a weight of 1 only leaves it to the config


def _spans(message: Mapping[str, Any], name: str) -> list[Span] | None:
    """Return the trained spans of the message's content; None if it names none."""
    key = next((key for key in DETAILS if message.get(key) is not None), None)
    if key is None:
        return None
    entries = message[key]
    wanted = f"{name}: its key {key!r}: expected a list of begin_offset, end_offset and train"
    if not isinstance(entries, list | tuple):
        raise UnusableRow(f"{wanted}, found {entries!r:.80}")
    length = len(message["content"]) if isinstance(message.get("content"), str) else 0
    spans = []
    for entry in entries:
        given = entry if isinstance(entry, Mapping) else {}
        start, last, trains = given.get("begin_offset"), given.get("end_offset"), given.get("train")
        if not isinstance(start, int) or not isinstance(last, int) or not isinstance(trains, bool):
            raise UnusableRow(f"{wanted}, found {entry!r:.80}")
        if not 0 <= start <= last < length:
            raise UnusableRow(f"{name}: its key {key!r} has {entry!r:.80}, which is not within its {length} characters")
        if trains:
            spans.append((start, last + 1))
    return spans
