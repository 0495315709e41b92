"""Data as a config names it: files, sources of a mix, markers of roles, and checks that files exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpipe.configs.options import default_tree, describe_type, escaped_tree, find_out_of_range
from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.option import NAME
from rlpipe.configs.schema.rollout_config import ScoringConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, DataError, InputError, ModelError, RewardImportError, did_you_mean

SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".jsonl.zst"), "parquet": (".parquet",)}
"""Suffixes of the files that are read from a folder, by source."""


def data_files(path: str | None, source: str, option: str) -> list[Path]:
    """Return the sorted files of a path, which is a file, a pattern such as ``rows/*.jsonl``, or a folder.

    In a folder, all files with the source's suffixes are taken, at any depth, without hidden ones. Raises
    ``DataError``, which names the option, if there is no file.
    """
    if path is None:
        raise DataError(f"{option} is not set; source {source} needs a file")
    location = Path(path).expanduser()
    if location.is_file():
        return [location]
    if location.is_dir():
        named = (file for file in location.rglob("*") if file.name.endswith(SUFFIXES[source]) and not file.is_dir())
        files = sorted(file for file in named if not is_hidden(file.relative_to(location)))
        if not files:
            raise DataError(
                f"{option}: no file in the folder {location.absolute()} ends with {' or '.join(SUFFIXES[source])}"
            )
        return files
    if not has_magic(str(location)):
        raise DataError(f"{option}: there is no file {location.absolute()}")
    files = sorted(file for file in map(Path, glob(str(location), recursive=True)) if file.is_file())
    if not files:
        raise DataError(f"{option}: no file matches {location.absolute()}")
    return files


def is_hidden(path: Path) -> bool:
    """Return whether a relative path is a program's own, such as a copy in ``.ipynb_checkpoints``."""
    return any(component.startswith(".") for component in path.parts)


def cache_folder(path: str) -> Path:
    """Return the folder of ``data.cache``, which need not exist; raise ``ConfigError`` if it can't be created."""
    folder = Path(path).expanduser().absolute()
    existing = next(candidate for candidate in (folder, *folder.parents) if candidate.exists())
    if not existing.is_dir():
        raise ConfigError(f"data.cache: {existing} is a file; name a folder")
    return folder


ROLE_OPTION = "data.role_boundaries"
END_TOKEN = "eos_token"
"""End marker that stands for the tokenizer's end token, whatever its text is."""


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleMarkers:
    """Texts around each turn of a role, as the chat template renders them."""

    role: str
    start: str
    end: str | None
    """End marker; None if the turn goes to the end of the sequence."""
    include_start: bool = False
    """True if the start marker belongs to the turn."""
    include_end: bool = True
    """True if the end marker belongs to the turn; if False, it may also be the start marker of the next turn."""
    interrupts: bool = False
    """True if the turn may also stand within a turn of another role, which continues after it."""
    shares_end: bool = False
    """True if the end marker belongs to the turn, and may also be the start marker of the next turn."""


def read_role_boundaries(entries: Sequence[Any]) -> list[RoleMarkers]:
    """Read the entries of ``data.role_boundaries``; raise ``ConfigError`` with the entry and the key that is wrong."""
    markers = [_read_markers(entry, f"{ROLE_OPTION}[{index}]") for index, entry in enumerate(entries)]
    first_indices: dict[str, int] = {}
    for index, marker in enumerate(markers):
        first = first_indices.setdefault(marker.start, index)
        role = markers[first].role
        ends = [earlier.end for earlier in markers[:index] if earlier.start == marker.start]
        if first != index and (role != marker.role or None in ends or marker.end in (None, *ends)):
            raise ConfigError(
                f"{ROLE_OPTION}[{index}].start: {marker.start!r:.200} starts turns of {role} already, in [{first}]"
            )
    return markers


def _read_markers(entry: Any, name: str) -> RoleMarkers:
    keys = {field.name: field for field in fields(RoleMarkers)}
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{name}: {entry!r:.200} is not a mapping with the keys {', '.join(keys)}")
    for key in entry:
        if key not in keys:
            hint = did_you_mean(str(key), keys, f"there are {', '.join(keys)}")
            raise ConfigError(f"{name}: no such key {key!r:.200}{hint}")
    for key, field in keys.items():
        if key not in entry:
            if field.default is MISSING:
                raise ConfigError(f"{name}: {key} is missing{'; null if there is no marker' if key == 'end' else ''}")
            continue
        value, is_flag = entry[key], field.default is False or field.default is True
        if is_flag and not isinstance(value, bool):
            raise ConfigError(f"{name}.{key}: {value!r:.200} is not true or false")
        if not is_flag and not (isinstance(value, str) and value) and (key, value) != ("end", None):
            raise ConfigError(f"{name}.{key}: {value!r:.200} is not a non-empty string")
    return RoleMarkers(**{str(key): value for key, value in entry.items()})


OPTION = "data.sources"
WHOLE = ("sources", "held_out", "max_prompt_tokens", "cache")
"""Options of ``data`` that apply to a mix as a whole."""
MIN_WEIGHT, MAX_WEIGHT = 1e-100, 1e100
"""Range of weights for which the shares of a mix can be computed."""
EXAMPLE = "such as data.sources.math={source: jsonl, path: math.jsonl, weight: 2}"


@dataclass(kw_only=True, slots=True, frozen=True)
class MixedSource:
    """A source of a mix."""

    name: str
    weight: float
    """Weight of the source; its share of all rows is its weight over the sum of all weights."""
    data: DataConfig
    """Options of ``data``, overridden by the source's own."""


def all_sources(data: DataConfig) -> list[MixedSource]:
    """Return the sources of a mix, or the only source with an empty name."""
    return mixed_sources(data) if data.source == "mix" else [MixedSource(name="", weight=1.0, data=data)]


def mixed_sources(data: DataConfig) -> list[MixedSource]:
    """Return the sources of a mix, sorted by name; raise ``ConfigError`` with the entry and the key that is wrong."""
    for name in data.sources:
        if not isinstance(name, str) or not NAME.accepts(name):
            raise ConfigError(f"{OPTION}: {name!r:.80} is not {NAME.words}; write {EXAMPLE}")
    return [_read(name, data.sources[name], data) for name in sorted(data.sources)]


def _read(name: str, entry: Any, data: DataConfig) -> MixedSource:
    option = f"{OPTION}.{name}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{option}: {entry!r:.200} is not a dictionary of options; write {EXAMPLE}")
    options = {str(key): value for key, value in entry.items() if key != "weight"}
    for key in options:
        _check_key(option, key)
    if "source" not in options:
        raise ConfigError(f"{option}.source is missing: where its rows come from")
    weight = entry.get("weight", 1)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        limits = f"a number above 0, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise ConfigError(f"{option}.weight: {weight!r:.40} is not {limits}; leave the source out to use none of it")
    values = _typed(option, options)
    if isinstance(values.get("path"), str):
        values["path"] = str(Path(values["path"]).expanduser())
    base = replace(data, path=None, sources={}, held_out=HeldOutConfig())
    return MixedSource(name=name, weight=float(weight), data=replace(base, **values))


def _check_key(option: str, key: str) -> None:
    if key in WHOLE:
        raise ConfigError(f"{option}.{key}: applies to all sources together; set data.{key}")
    valid_keys = [entry.name for entry in fields(DataConfig) if entry.name not in WHOLE] + ["weight"]
    if key not in valid_keys:
        hint = did_you_mean(key, valid_keys, "a source has a weight, and the options of data")
        raise ConfigError(f"{option}: no such key {key!r:.200}{hint}")


def _typed(option: str, values: Mapping[str, Any]) -> dict[str, Any]:
    tree = default_tree(DataConfig)
    for key, value in values.items():
        try:
            OmegaConf.update(tree, key, escaped_tree(value), merge=True, force_add=True)
        except (OmegaConfBaseException, OverflowError) as error:
            shown, expected = "null" if value is None else repr(value), get_type_hints(DataConfig)[key]
            raise ConfigError(f"{option}.{key}: {shown} is not {describe_type(expected)}") from error
    container = OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
    return {key: container[key] for key in values}  # type: ignore[call-overload,index]


def find_wrong_sources(data: DataConfig) -> Iterator[ConfigError]:
    """Yield errors for entries of ``data.sources`` that are unknown, of the wrong type, or out of range."""
    if not isinstance(data.sources, Mapping):  # an interpolation may name a section; ``find_out_of_range`` tells
        return
    try:
        sources = mixed_sources(data)
    except ConfigError as error:
        yield error
        return
    for source in sources:
        yield from find_out_of_range(source.data, f"{OPTION}.{source.name}.")


HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def find_missing_files(config: Config) -> Iterator[InputError]:
    yield from check_model_files(config.model)
    if config.model.adapter.kind != "none":
        yield from check_adapter(config.model.adapter)
    yield from check_data_files(config.data)
    yield from check_reward_files(config.scoring)
    yield from check_run_folder(config)


def looks_local(path: str) -> bool:
    """Return whether a path can only be a local folder: it is no hub id, or its parent folder exists here."""
    return HUB_ID.fullmatch(path) is None or ("/" in path and Path(path).parent.is_dir())


def absolute(path: str) -> Path:
    return Path(path).absolute()


def check_model_files(model: ModelConfig) -> Iterator[InputError]:
    if model.prepare is None and looks_local(model.path):
        yield from check_model_path(absolute(model.path))
    if model.tokenizer is not None and looks_local(model.tokenizer) and not absolute(model.tokenizer).exists():
        yield ModelError(f"model.tokenizer: there is no folder {absolute(model.tokenizer)}; give a folder or hub id")
    if model.chat_template is not None and not absolute(model.chat_template).is_file():
        yield ModelError(f"model.chat_template: there is no file {absolute(model.chat_template)}; give a Jinja file")


def check_model_path(path: Path) -> Iterator[InputError]:
    if path.suffix == ".gguf":
        if not path.is_file():
            yield ModelError(f"model.path: there is no file {path}; give a GGUF file, or a model's folder or hub id")
    elif not path.is_dir():
        yield ModelError(f"model.path: there is no folder {path}; give a model's folder or hub id")
    elif not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        yield ModelError(f"model.path: {path} contains only GGUF files; name one of them, such as {files[0]}")


def check_adapter(adapter: AdapterConfig) -> Iterator[InputError]:
    if adapter.path is None or not (looks_local(adapter.path) or absolute(adapter.path).exists()):
        return
    if not (absolute(adapter.path) / "adapter_config.json").is_file():
        yield ModelError(
            f"model.adapter.path: there is no PEFT adapter in {absolute(adapter.path)}; it needs adapter_config.json"
        )


def check_data_files(data: DataConfig) -> Iterator[InputError]:
    yield from check_source_files(data)
    for source in mixed_sources(data):
        yield from check_source_files(source.data, at=f"data.sources.{source.name}")
    if data.held_out.path is not None and not absolute(data.held_out.path).is_file():
        yield DataError(f"data.held_out.path: there is no file {absolute(data.held_out.path)}")
    if data.cache is not None:
        try:
            cache_folder(data.cache)
        except ConfigError as error:
            yield error


def check_source_files(data: DataConfig, at: str = "data") -> Iterator[InputError]:
    if data.path is None:
        return
    path = absolute(data.path)
    if data.source in ("jsonl", "parquet"):
        try:
            data_files(data.path, data.source, f"{at}.path")
        except DataError as error:
            yield error
    if data.source == "datasets" and looks_local(data.path) and not path.exists():
        yield DataError(f"{at}.path: there is no folder {path}; give a folder or hub id")


def check_reward_files(scoring: ScoringConfig) -> Iterator[InputError]:
    for name, reward in scoring.rewards.items():
        file = reward.path.rpartition(":")[0]
        if file.endswith(".py") and not absolute(file).is_file():
            yield RewardImportError(f"scoring.rewards.{name}.path: there is no file {absolute(file)}")


def check_run_folder(config: Config) -> Iterator[InputError]:
    if absolute(config.output).is_file():
        yield ConfigError(f"output: {absolute(config.output)} is a file; name a folder")
    if config.resume not in ("auto", "never") and not absolute(config.resume).exists():
        yield ConfigError(f"resume: there is no checkpoint {absolute(config.resume)}; give auto, never or a checkpoint")
