"""Cache of rendered rows on disk, keyed by everything that determines them.

The folder's name is a digest of how rows are rendered, the file's name a digest of their source. A run without prepared
rows finds no such folder, and so does not read its data a second time.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import cache, cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rlpipe.common.atomic_io import file_digest, python_files, user_cache
from rlpipe.common.imports import describe_error, import_object
from rlpipe.configs.data_sources import cache_folder, data_files
from rlpipe.configs.schema.algorithm_config import EbftConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.preference_config import RowOptions
from rlpipe.data.render.images import file_state
from rlpipe.data.render.processor import Encoded, ImageProcessor
from rlpipe.data.row import RowLocation, SkipKind, UnusableRow, find_part, load_values
from rlpipe.data.row_renderer import RenderedRow
from rlpipe.data.sources.open_rows import load_split
from rlpipe.errors import DataError
from rlpipe.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FORMAT = 7
"""Version of the file format."""
ORDER_OPTIONS = ("shuffle", "shuffle_rows", "streaming", "sources", "held_out")
"""Options of ``data`` that determine the choice and order of rows, not their contents."""
LOADING_KEYS = ("is_local", "local_files_only", "name_or_path")
"""Keys of a tokenizer's config that record where it was loaded from."""

Settings = Mapping[str, Any]
"""Settings outside of ``data`` that determine what a row is rendered to."""


def cache_root(data: DataConfig) -> Path:
    """Return the folder of all prepared rows; raise ``ConfigError`` if ``data.cache`` can't be a folder."""
    return user_cache() / "rows" if data.cache is None else cache_folder(data.cache)


@dataclass(kw_only=True, frozen=True)
class Rendering:
    """Everything that determines how a run's rows are rendered, in addition to ``data``."""

    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor | None
    settings: Settings

    @cached_property
    def digests(self) -> Any:
        """Digests of tokenizer and processor files; raises ``DataError`` for a tokenizer that can't be stored."""
        return [_tokenizer_digest(self.tokenizer), None if self.processor is None else _images_digest(self.processor)]


def rendering_digest(data: DataConfig, rendering: Rendering, name: str) -> str:
    """Return a digest of everything that determines how a source's rows are rendered; ``name`` is its name in a mix."""
    ignored = {"cache"} if data.transform is not None else {"cache", *ORDER_OPTIONS}
    options = {option: value for option, value in dataclasses.asdict(data).items() if option not in ignored}
    inputs = {
        "format": FORMAT,
        "settings": rendering.settings,
        "name": name,
        "options": options,
        "files": rendering.digests,
        "transform": [] if data.transform is None else [*_transform_digests(data.transform)],
        "date": date.today().isoformat() if _shows_date(rendering.tokenizer, data) else None,
        "code": _code_digest(),
        "libraries": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
    }
    return _digest(inputs)


def source_digest(data: DataConfig, seed: int) -> str:
    """Return a digest of the rows that ``data`` names; raise ``DataError`` if they can't be read."""
    inputs: dict[str, Any] = {"source": data.source, "path": data.path}
    match data.source:
        case "jsonl" | "parquet":
            files = data_files(data.path, data.source, "data.path")
            inputs["content"] = [[str(file), _file_digest(file)] for file in files]
        case "datasets":
            inputs |= {"name": data.name, "split": data.split, "content": _data_set_content(data)}
        case "reasoning_gym":
            arguments = {"seed": seed, **data.task_args}
            inputs |= {"task": data.task, "arguments": arguments, "version": version("reasoning-gym")}
        case _:
            raise DataError(f"data.source: rows of {data.source!r} can't be prepared")
    return _digest(inputs)


def _digest(inputs: Mapping[str, Any]) -> str:
    return sha256(json.dumps(inputs, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _file_digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror})") from None


def _data_set_content(data: DataConfig) -> Any:
    """Return digests of the files of a folder, or the fingerprint of a hub data set."""
    folder = Path(str(data.path)).expanduser()
    if folder.exists():
        files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
        return [[str(path.relative_to(folder)), _file_digest(path)] for path in files]
    return load_split(data)._fingerprint


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return digests of the files that the tokenizer is saved to, and of its class's code if not from transformers."""
    with TemporaryDirectory() as folder:
        try:
            tokenizer.save_pretrained(folder)
        except Exception as error:  # a tokenizer may be a user's class
            reason = describe_error(error)
            raise DataError(f"tokenizer {tokenizer.name_or_path!r} can't be stored ({reason})") from error
        config = Path(folder) / "tokenizer_config.json"
        settings = {key: value for key, value in json.loads(config.read_text()).items() if key not in LOADING_KEYS}
        config.write_text(json.dumps(settings, sort_keys=True))
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        digests = [[str(path.relative_to(folder)), _file_digest(path)] for path in files]
    module = type(tokenizer).__module__
    code_digests = (
        [] if module.partition(".")[0] == "transformers" else [_module_digest(module), *_imported_digests(module)]
    )
    return [type(tokenizer).__name__, *digests, *code_digests]


def _images_digest(processor: ImageProcessor) -> Any:
    files = {name: _file_digest(path) for name, path in processor.files.items()}
    return [files, processor.commit, processor.options, processor.feature_id]


def _transform_digests(path: str) -> Iterator[str]:
    """Yield digests of the file that the config names, and of the file that defines the function."""
    function = inspect.unwrap(import_object(path, what="data.transform", error=DataError))
    module = path.rpartition(":")[0]
    yield _file_digest(Path(module).expanduser()) if module.endswith(".py") else _module_digest(module)
    yield _module_digest(getattr(function, "__module__", None) or type(function).__module__)


def _module_digest(name: str) -> str:
    file = getattr(sys.modules.get(name), "__file__", None)
    return name if file is None else _file_digest(Path(file))


def _imported_digests(name: str) -> Iterator[str]:
    """Yield digests of the files that a module imports by relative imports, as a model's own code does."""
    from transformers.dynamic_module_utils import get_relative_import_files

    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None:
        yield from (_file_digest(Path(path)) for path in sorted(get_relative_import_files(file)))


def _shows_date(tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> bool:
    """Return whether the chat template may write today's date, as Llama 3's does without ``date_string``."""
    template = str(tokenizer.chat_template)
    pinned = "date_string" in template and "date_string" in data.chat_template_kwargs
    return "strftime_now" in template and not pinned


@cache
def _code_digest() -> str:
    """Return a digest of all of rlpipe's code."""
    folder = Path(__file__).parents[1]
    return _digest({name: _file_digest(folder / name) for name in python_files(folder)})


logger = logging.getLogger(__name__)
mask_logger = logging.getLogger("rlpipe.data.masks")
"""Logger that repeats the messages on how the loss mask was made when the rows were prepared."""

SCHEMA = pa.schema(
    {
        "location": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
        "rejected_ids": pa.list_(pa.int32()),
        "rejected_loss_mask": pa.list_(pa.bool_()),
        "is_good": pa.bool_(),
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

    def prompt(self, at: RowLocation) -> Prompt:
        """Return the prompt for an RL run; raise ``UnusableRow`` if the row was skipped."""
        _raise_if_skipped(self["kind"], self["reason"])
        return Prompt(prompt_id=at.row, epoch=at.epoch, token_ids=self["token_ids"], **self._values)

    def sequence(self) -> RenderedRow:
        """Return the row's sequence before it is cut; raise ``UnusableRow`` if the row was skipped."""
        _raise_if_skipped(self["kind"], self["reason"])
        first = RenderedRow(
            encoded=Encoded(token_ids=self["token_ids"], images=self._values["images"]),
            loss_mask=self["loss_mask"],
            task=self._values["task"],
            is_good=self["is_good"],
        )
        if self["rejected_ids"] is None:
            return first
        encoded = Encoded(token_ids=self["rejected_ids"], images=self._values["rejected_images"])
        rejected = replace(first, encoded=encoded, loss_mask=self["rejected_loss_mask"], is_good=False)
        return replace(first, rejected=rejected)

    def sequence_prompt(self, at: RowLocation) -> Prompt:
        """Return the prompt of a sequence, only its tokens and images, to compare with held-out prompts.

        Raises ``UnusableRow`` if the prompt could not be rendered.
        """
        _raise_if_skipped(self["prompt_kind"], self["prompt_reason"])
        images = self._values["prompt_images"]
        return Prompt(prompt_id=at.row, epoch=at.epoch, token_ids=self["prompt_ids"], prompt="", task={}, images=images)

    @cached_property
    def _values(self) -> Any:
        return load_values(self["values"])


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
        number, row = find_part(self._ends, index)
        return self._batches[number], row


def prompt_settings(ebft: EbftConfig | None, *, as_rows: bool = False) -> Settings:
    """Return the settings by which an RL run renders rows."""
    names = ("truth_column", "adaptive_max_tokens", "gt_length_multiplier")
    if as_rows:
        return {"kind": "rows"}
    return {"kind": "prompts", "truth": None if ebft is None else [getattr(ebft, name) for name in names]}


def sequence_settings(data: DataConfig, preference: RowOptions | None = None) -> Settings:
    """Return the settings by which a run that trains on rows renders them; held-out rows are matched by prompt."""
    held_out = data.held_out
    holds_out = held_out.size > 0 or held_out.path is not None or held_out.split is not None
    return {"kind": "sequences" if preference is None else preference.rows, "prompts": holds_out}


def find_prepared(
    data: DataConfig, rows: DataConfig, rendering: Rendering, *, name: str, seed: int
) -> PreparedRows | None:
    """Return the prepared rows of the source that ``rows`` names, rendered by ``data`` and ``rendering``, or None.

    ``name`` is the source's name in a mix. A stream's rows are not prepared.
    """
    root = cache_root(data)
    try:
        if data.streaming or not root.is_dir() or not any(root.iterdir()):
            return None
        folder = root / rendering_digest(data, rendering, name)
        if not folder.is_dir():
            return None
        file = folder / f"{source_digest(rows, seed)}.arrow"
    except (DataError, PermissionError) as error:
        logger.info("prepared rows are not used: %s", error)
        return None
    if not file.is_file():
        return None
    try:
        prepared = PreparedRows(file)
    except (OSError, pa.ArrowException, LookupError) as error:
        logger.warning("prepared rows are not used, as %s can't be read (%s)", file, describe_error(error))
        return None
    if (changed := prepared.changed_file()) is not None:
        logger.warning("%s: prepared rows are not used, as the image %s has changed", prepared.name, changed)
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
