"""Lookup of prepared rows, which are read through a memory map."""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.ebft_config import EbftConfig
from rlpipe.data.cache.cache_key import Rendering, Settings, cache_root, rendering_digest, source_digest
from rlpipe.data.cache.row_values import load
from rlpipe.data.render.images import file_state
from rlpipe.data.render.processor import Encoded
from rlpipe.data.row import RowLocation, SkipKind, UnusableRow
from rlpipe.errors import DataError
from rlpipe.types import BoolArray, Prompt

logger = logging.getLogger(__name__)
mask_logger = logging.getLogger("rlpipe.data.masks")
"""Logger that repeats the messages on how the loss mask was made when the rows were prepared."""

SCHEMA = pa.schema(
    {
        "location": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "values": pa.large_binary(),
        "kind": pa.string(),
        "reason": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "prompt_kind": pa.string(),
        "prompt_reason": pa.string(),
        "files": pa.list_(pa.struct({"path": pa.string(), "size": pa.int64(), "changed": pa.int64()})),
    }
)
"""Columns of a prepared row: its rendering (for sequences also its prompt's) or why it is skipped, and image files."""
READ = [name for name in SCHEMA.names if name not in ("location", "files")]
NAME, NOTES = b"name", b"notes"
"""Metadata keys: the source's name in messages, and each batch's messages on how the loss mask was made."""


class PreparedRow(dict[str, Any]):
    """A prepared row with the columns of ``SCHEMA``."""

    def prompt(self, place: RowLocation) -> Prompt:
        """Return the prompt for an RL run; raise ``UnusableRow`` if the row was skipped."""
        _raise_if_skipped(self["kind"], self["reason"])
        return Prompt(prompt_id=place.row, epoch=place.epoch, token_ids=self["token_ids"], **self._values)

    def sequence(self) -> tuple[Encoded, BoolArray, Any]:
        """Return the T tokens before the row is cut, its loss mask ``[T]``, and the task's columns.

        Raises ``UnusableRow`` if the row was skipped.
        """
        _raise_if_skipped(self["kind"], self["reason"])
        encoded = Encoded(token_ids=self["token_ids"], images=self._values["images"])
        return encoded, self["loss_mask"], self._values["task"]

    def sequence_prompt(self, place: RowLocation) -> Prompt:
        """Return the prompt of a sequence, only its tokens and images, to compare with held-out prompts.

        Raises ``UnusableRow`` if the prompt could not be rendered.
        """
        _raise_if_skipped(self["prompt_kind"], self["prompt_reason"])
        images = self._values["prompt_images"]
        return Prompt(
            prompt_id=place.row, epoch=place.epoch, token_ids=self["prompt_ids"], prompt="", task={}, images=images
        )

    @cached_property
    def _values(self) -> Any:
        return load(self["values"])


class PreparedRows:
    """The rows of a file of ``SCHEMA``; raises ``OSError`` or ``pyarrow.ArrowException`` if it can't be read."""

    def __init__(self, file: Path) -> None:
        reader = pa.ipc.open_file(pa.memory_map(str(file)))
        self.name = reader.schema.metadata[NAME].decode()
        read = [reader.get_batch_with_custom_metadata(number) for number in range(reader.num_record_batches)]
        self._batches = [batch for batch, _ in read]
        notes = [line for _, metadata in read for line in metadata[NOTES].decode().split("\n") if line]
        self.notes = [*dict.fromkeys(notes)]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def num_skipped(self) -> int:
        return sum(batch.num_rows - batch.column("kind").null_count for batch in self._batches)

    def __getitem__(self, index: int) -> PreparedRow:
        batch, row = self._find(index)
        return PreparedRow({name: _value(batch.column(name)[row]) for name in READ})

    def location(self, index: int) -> str:
        batch, row = self._find(index)
        return str(batch.column("location")[row])

    def changed_file(self) -> str | None:
        """Return an image file whose size or modification time has changed since it was read, or None."""
        files = (file for batch in self._batches for file in batch.column("files").flatten().to_pylist())
        return next((file["path"] for file in files if file != file_state(file["path"])), None)

    def _find(self, index: int) -> tuple[pa.RecordBatch, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[number]
        return batch, int(index - self._ends[number] + batch.num_rows)


def prompt_settings(ebft: EbftConfig | None) -> Settings:
    """Return the settings by which an RL run renders rows."""
    names = ("truth_column", "adaptive_max_tokens", "gt_length_multiplier")
    return {"kind": "prompts", "truth": None if ebft is None else [getattr(ebft, name) for name in names]}


def sequence_settings(data: DataConfig) -> Settings:
    """Return the settings by which a run that trains on rows renders them; held-out rows are matched by prompt."""
    held_out = data.held_out
    holds_out = held_out.size > 0 or held_out.path is not None or held_out.split is not None
    return {"kind": "sequences", "prompts": holds_out}


def find_prepared(
    data: DataConfig, rows: DataConfig, rendering: Rendering, *, name: str, seed: int
) -> PreparedRows | None:
    """Return the prepared rows of the source that ``rows`` names, rendered by ``data`` and ``rendering``, or None.

    ``name`` is the source's name in a mix. A stream's rows are not prepared.
    """
    root = cache_root(data)
    if data.streaming or not root.is_dir() or not any(root.iterdir()):
        return None
    try:
        folder = root / rendering_digest(data, rendering, name)
        if not folder.is_dir():
            return None
        file = folder / f"{source_digest(rows, seed)}.arrow"
    except DataError as error:
        logger.info("prepared rows are not looked for: %s", error)
        return None
    if not file.is_file():
        return None
    try:
        prepared = PreparedRows(file)
    except (OSError, pa.ArrowException, LookupError) as error:
        logger.warning("prepared rows are not used, as %s can't be read (%s)", file, describe_error(error))
        return None
    if (changed := prepared.changed_file()) is not None:
        logger.warning("%s: prepared rows are not used, as the image %s is another now", prepared.name, changed)
        return None
    logger.info("%s: %d prepared rows are read from %s", prepared.name, len(prepared), file)
    for note in prepared.notes:
        mask_logger.info("%s", note)
    return prepared


def _raise_if_skipped(kind: str | None, reason: str) -> None:
    if kind is not None:
        raise UnusableRow(reason, SkipKind(kind))


def _value(scalar: pa.Scalar) -> Any:
    """Return the Python value of a scalar; lists become arrays, copied because a memory map's are read-only."""
    if not scalar.is_valid or not isinstance(scalar, pa.ListScalar):
        return scalar.as_py()
    return np.array(scalar.values.to_numpy(zero_copy_only=False))
