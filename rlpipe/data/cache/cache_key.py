"""File names for prepared rows: digests of everything the rows depend on, so that any change leads to another file.

The folder's name is a digest of how rows are rendered, the file's name a digest of their source. A run without prepared
rows finds no such folder, and so does not read its data a second time.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache, cached_property
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlpipe.common.atomic_io import python_files, user_cache
from rlpipe.common.imports import describe_error, import_object
from rlpipe.configs.data_paths import cache_folder, data_files
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.processor import ImageProcessor
from rlpipe.data.sources.open_rows import load_split
from rlpipe.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
"""Version of the file format."""
ORDER_OPTIONS = ("shuffle", "shuffle_rows", "streaming", "sources", "held_out")
"""Options of ``data`` that determine the choice and order of rows, not their contents."""
LOADING_KEYS = ("is_local", "local_files_only", "name_or_path")
"""Keys of a tokenizer's config that record where it was loaded from."""
CHUNK = 2**20

Settings = Mapping[str, Any]
"""Settings outside of ``data`` that determine what a row is rendered to."""


def cache_root(data: DataConfig) -> Path:
    """Return the folder of all prepared rows; raise ``ConfigError`` if ``data.cache`` can't be a folder."""
    return user_cache() / "rows" if data.cache is None else cache_folder(data.cache)


@dataclass(kw_only=True, frozen=True)
class Rendering:
    """Everything that determines how a run's rows are rendered, beside ``data``."""

    tokenizer: PreTrainedTokenizerBase
    processor: ImageProcessor | None
    settings: Settings

    @cached_property
    def digests(self) -> Any:
        """Digests of tokenizer and processor files; raises ``DataError`` for a tokenizer that can't be stored."""
        return [_tokenizer_digest(self.tokenizer), None if self.processor is None else _images_digest(self.processor)]


def rendering_digest(data: DataConfig, rendering: Rendering, name: str) -> str:
    """Return a digest of everything that determines how a source's rows are rendered; ``name`` is its name in a mix."""
    left_out = {"cache"} if data.transform is not None else {"cache", *ORDER_OPTIONS}
    options = {option: value for option, value in dataclasses.asdict(data).items() if option not in left_out}
    parts = {
        "format": FORMAT,
        "settings": rendering.settings,
        "name": name,
        "options": options,
        "files": rendering.digests,
        "transform": [] if data.transform is None else [*_transform_digests(data.transform)],
        "date": date.today().isoformat() if _shows_date(rendering.tokenizer, data) else None,
        "code": _own_code(),
        "libraries": {name: version(name) for name in ("transformers", "tokenizers", "jinja2")},
    }
    return _digest(parts)


def source_digest(data: DataConfig, seed: int) -> str:
    """Return a digest of the rows that ``data`` names; raise ``DataError`` if they can't be read."""
    parts: dict[str, Any] = {"source": data.source, "path": data.path}
    match data.source:
        case "jsonl" | "parquet":
            files = data_files(data.path, data.source, "data.path")
            parts["content"] = [[str(file), _file_digest(file)] for file in files]
        case "datasets":
            parts |= {"name": data.name, "split": data.split, "content": _data_set_content(data)}
        case "reasoning_gym":
            arguments = {"seed": seed, **data.task_args}
            parts |= {"task": data.task, "arguments": arguments, "version": version("reasoning-gym")}
        case _:
            raise DataError(f"data.source: rows of {data.source!r} can't be prepared")
    return _digest(parts)


def _digest(parts: Mapping[str, Any]) -> str:
    return sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]


def _file_digest(path: Path) -> str:
    digest = sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror})") from None
    return digest.hexdigest()


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
            raise DataError(f"tokenizer {tokenizer.name_or_path!r}: it can't be stored ({reason})") from error
        config = Path(folder) / "tokenizer_config.json"
        known = {key: value for key, value in json.loads(config.read_text()).items() if key not in LOADING_KEYS}
        config.write_text(json.dumps(known, sort_keys=True))
        files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        digests = [[str(path.relative_to(folder)), _file_digest(path)] for path in files]
    module = type(tokenizer).__module__
    own = [] if module.partition(".")[0] == "transformers" else [_module_digest(module), *_imported_digests(module)]
    return [type(tokenizer).__name__, *digests, *own]


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
def _own_code() -> str:
    """Return a digest of all of rlpipe's code."""
    folder = Path(__file__).parents[2]
    return _digest({name: _file_digest(folder / name) for name in python_files(folder)})
