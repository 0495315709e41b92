"""Checks for local files and folders that a config names but that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rlpipe.configs.data_paths import cache_folder, data_files
from rlpipe.configs.data_sources import mixed_sources
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.configs.schema.scoring_config import ScoringConfig
from rlpipe.errors import ConfigError, DataError, InputError, ModelError, RewardImportError

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
        yield ModelError(f"model.path: {path} holds GGUF files alone; name one of them, such as {files[0]}")


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
