"""The rows of a source, ready to render: after its transform and, in a mix, with the source's name."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.configs.data_sources import MixedSource
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.transforms import apply_transform
from rlpipe.data.row import AnyRows, CheckColumns, Row, Rows
from rlpipe.data.sources.open_rows import open_held_out_rows, open_rows, open_stream
from rlpipe.data.sources.stream import StreamRows
from rlpipe.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SOURCE_COLUMN = "data_source"
"""The column that holds the source's name in the rows of a mix, unless they have such a column already."""


def open_source_rows(
    source: MixedSource, tokenizer: PreTrainedTokenizerBase, *, seed: int, check: CheckColumns
) -> Rows:
    """Open the rows of a source; raise ``DataError`` as ``open_rows`` and ``apply_transform`` do."""
    rows = open_rows(source.data, seed=seed, check=_known(source.data, check))
    rows = apply_transform(rows, source.data, tokenizer)
    return _NamedRows(rows, source.name) if source.name else rows


def open_source_stream(
    source: MixedSource, tokenizer: PreTrainedTokenizerBase, *, check: CheckColumns
) -> tuple[StreamRows, AnyRows]:
    """Open a source as a stream; return the raw rows, and the rows after the transform.

    Raises ``DataError`` as ``open_source_rows`` does.
    """
    stream = open_stream(source.data, _known(source.data, check))
    rows = apply_transform(stream, source.data, tokenizer)
    return stream, _NamedRows(rows, source.name) if source.name else rows


def open_held_out_source(data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, check: CheckColumns) -> Rows:
    """Open the rows of ``data.held_out.path`` or ``split``; raise ``DataError`` as ``open_source_rows`` does."""
    return apply_transform(open_held_out_rows(data, _known(data, check)), data, tokenizer)


def with_own_images(data: DataConfig) -> DataConfig:
    """Return the config for rows of ``data.held_out.path``, whose relative image paths start at that file's folder."""
    if data.held_out.path is None or data.images_folder is not None:
        return data
    return replace(data, images_folder=str(Path(data.held_out.path).expanduser().parent))


@contextmanager
def named_errors(source: MixedSource) -> Iterator[None]:
    """Prefix the message of a ``DataError`` with the name of the mix's source."""
    try:
        yield
    except DataError as error:
        raise DataError(f"data.sources.{source.name}: {error}" if source.name else str(error)) from None


class _NamedRows:
    """Rows with the column ``SOURCE_COLUMN`` added where it is missing."""

    def __init__(self, rows: AnyRows, source: str) -> None:
        self.name = rows.name
        self._rows, self._source = rows, source

    def __len__(self) -> int:
        assert isinstance(self._rows, Sized), "nobody asks how long a stream is"
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return {SOURCE_COLUMN: self._source, **self._rows[index]}

    def location(self, index: int) -> str:
        return self._rows.location(index)


def _known(data: DataConfig, check: CheckColumns) -> CheckColumns | None:
    """Return the check, or None with a transform, because only that makes the needed columns."""
    return check if data.transform is None else None
