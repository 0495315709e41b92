"""The entries of ``data.sources``: the sources of a mix, each with options of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpipe.configs.option_list import describe_type
from rlpipe.configs.schema.data_config import DataConfig, HeldOutConfig
from rlpipe.errors import ConfigError

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
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{OPTION}: {name!r} is no name of a source; write {EXAMPLE}")
    return [_read(name, data.sources[name], data) for name in sorted(data.sources)]


def _read(name: str, entry: Any, data: DataConfig) -> MixedSource:
    option = f"{OPTION}.{name}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{option}: {entry!r} is no dictionary of options; write {EXAMPLE}")
    own = {str(key): value for key, value in entry.items() if key != "weight"}
    for key in own:
        _check_key(option, key)
    if "source" not in own:
        raise ConfigError(f"{option}.source is missing: where its rows come from")
    weight = entry.get("weight", 1)
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        limits = f"a number above 0, from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        raise ConfigError(f"{option}.weight: {weight!r:.40} is not {limits}; leave the source out to take none of it")
    values = {key: _typed(f"{option}.{key}", key, value) for key, value in own.items()}
    if isinstance(values.get("path"), str):
        values["path"] = str(Path(values["path"]).expanduser())
    own_data = replace(data, path=None, sources={}, held_out=HeldOutConfig())
    return MixedSource(name=name, weight=float(weight), data=replace(own_data, **values))


def _check_key(option: str, key: str) -> None:
    if key in WHOLE:
        raise ConfigError(f"{option}.{key}: holds for all sources together; set data.{key}")
    known = [entry.name for entry in fields(DataConfig) if entry.name not in WHOLE] + ["weight"]
    if key not in known:
        nearest = get_close_matches(key, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else "a source has a weight, and the options of data"
        raise ConfigError(f"{option}: no such key {key!r}; {hint}")


def _typed(option: str, key: str, value: Any) -> Any:
    tree = OmegaConf.structured(DataConfig)
    try:
        OmegaConf.update(tree, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        shown = "null" if value is None else repr(value)
        raise ConfigError(f"{option}: {shown} is not {describe_type(get_type_hints(DataConfig)[key])}") from error
    return OmegaConf.to_container(tree, throw_on_missing=False)[key]  # type: ignore[call-overload,index]
