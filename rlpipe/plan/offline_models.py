"""Configs of models without their weights, and of well-known models without network access."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from rlpipe.common.hub import hub_has
from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.root_config import ModelConfig
from rlpipe.errors import ModelError
from rlpipe.models.gguf import model_folder
from rlpipe.models.loading import describe_model

HUB_TIMEOUT_S = 2.0


def describe_offline(path: str, config: ModelConfig, option: str = "model.path") -> PreTrainedConfig:
    """Return transformers' config of a model, from the first source that has it.

    The sources are the folder, the hub's cache, ``offline_models.yaml`` if no revision is asked for, and the hub.
    Raises ``ModelError``, which names the ``option`` with the path, if none has it or if the config can't be read.
    """
    folder = Path(model_folder(path)).expanduser()
    if folder.exists():
        return _describe(str(folder), path, config, option)
    cached = _cached_folder(path, config, option)
    if cached is not None:
        return _describe(cached, path, config, option)
    if config.revision is None and path in known_models():
        return _make_config(known_models()[path])
    if hub_has(path, kind="model", option=option, error=ModelError, revision=config.revision, timeout_s=HUB_TIMEOUT_S):
        return _describe(path, path, config, option)
    raise ModelError(
        f"{option}={path}: there is no such folder, the hub can't be reached, and the model is not among those that "
        f"a plan knows: {_fix(option)}"
    )


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return, by repository, the fields of ``config.json`` that determine a model's shape."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return {name: entry["config"] for entry in content for name in entry["repositories"]}


def _make_config(known: dict[str, Any]) -> PreTrainedConfig:
    shape = dict(known)
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def _cached_folder(path: str, config: ModelConfig, option: str) -> str | None:
    try:
        found = try_to_load_from_cache(path, "config.json", revision=config.revision)
    except HFValidationError:
        remedy = _remedy(config, option)
        raise ModelError(f"{option}: there is no folder {path!r}, and it is no hub id: {remedy}") from None
    return str(Path(found).parent) if isinstance(found, str) else None


def _remedy(config: ModelConfig, option: str) -> str:
    if config.prepare is not None:
        return f"{config.prepare} makes it when a run starts; begin one, or {_fix(option)}"
    return _fix(option)


def _fix(option: str) -> str:
    return f"give {option} a folder with a config.json"


def _describe(source: str, path: str, config: ModelConfig, option: str) -> PreTrainedConfig:
    try:
        return describe_model(source, config)
    except (OSError, ValueError, LookupError, TypeError, ImportError, StrictDataclassError) as error:
        raise ModelError(f"{option}={path} can't be read: {describe_error(error)}") from None
