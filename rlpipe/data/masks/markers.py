"""Markers of roles as token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.configs.role_boundaries import END_TOKEN, OPTION, RoleMarkers
from rlpipe.data.masks.boundaries import RoleBoundary
from rlpipe.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


def encode_markers(markers: Sequence[RoleMarkers], tokenizer: PreTrainedTokenizerBase) -> list[RoleBoundary]:
    """Raises ``ConfigError`` if a marker has no tokens, with its place among the ``markers``."""
    return [_encode(one, tokenizer, f"{OPTION}[{index}]") for index, one in enumerate(markers)]


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
    return ids
