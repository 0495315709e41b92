"""The encoding of role markers to token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.configs.role_boundaries import END_TOKEN, OPTION, RoleMarkers
from rlpipe.data.masks.boundaries import RoleBoundary
from rlpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


def encode_markers(
    markers: Sequence[RoleMarkers], tokenizer: PreTrainedTokenizerBase, name: str = OPTION
) -> list[RoleBoundary]:
    """Encode the ``markers``, which messages call ``name``, to token ids.

    Raises ``ConfigError`` with a marker's place in the list if it has no tokens, or an unknown one.
    """
    return [_encode(one, tokenizer, f"{name}[{index}]") for index, one in enumerate(markers)]


def _encode(markers: RoleMarkers, tokenizer: PreTrainedTokenizerBase, name: str) -> RoleBoundary:
    return RoleBoundary(
        role=markers.role,
        start=_ids(markers.start, tokenizer, f"{name}.start"),
        end=None if markers.end is None else _ids(markers.end, tokenizer, f"{name}.end"),
        include_start=markers.include_start,
        include_end=markers.include_end,
        interrupts=markers.interrupts,
    )


def _ids(marker: str, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[int, ...]:
    if marker == END_TOKEN:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{name}: the tokenizer {tokenizer.name_or_path!r} has no end token; write the marker out"
            )
        return (int(tokenizer.eos_token_id),)
    ids = tuple(tokenizer(marker, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ConfigError(f"{name}: {marker!r} has no tokens in the tokenizer {tokenizer.name_or_path!r}")
    unknown = tokenizer.unk_token
    if unknown is not None and tokenizer.unk_token_id in ids and unknown not in marker:  # GPT-2's is its end token
        raise ConfigError(
            f"{name}: {marker!r} has text that the tokenizer {tokenizer.name_or_path!r} does not know ({unknown}), so "
            "that any other such text would match it; take a marker of known tokens"
        )
    return ids
