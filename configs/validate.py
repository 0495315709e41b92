"""Validation of a composed config: first the ranges of all options, then contradictions, then missing files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from itertools import chain
from typing import Any

from rlpipe.configs.constraints.constraints import find_contradictions
from rlpipe.configs.constraints.missing_files import find_missing_files
from rlpipe.configs.data_sources import OPTION, mixed_sources
from rlpipe.configs.option_list import describe_range
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.option import Freezable
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, InputError


def validate(config: Config, *, need_files: bool = True) -> None:
    """Raise the first problem of the config, an ``InputError`` of one line that names the option and the fix.

    Rewards may still be missing, because Python callers pass them to ``rlpipe.train``; see ``require_rewards``.
    """
    for problem in find_problems(config, need_files=need_files):
        raise problem


def find_problems(config: Config, *, need_files: bool) -> Iterator[InputError]:
    yield from chain(find_out_of_range(config), find_wrong_sources(config.data), find_contradictions(config))
    if need_files:
        yield from find_missing_files(config)


def find_wrong_sources(data: DataConfig) -> Iterator[ConfigError]:
    """Yield errors for entries of ``data.sources`` that are unknown, of the wrong type, or out of range."""
    try:
        sources = mixed_sources(data)
    except ConfigError as error:
        yield error
        return
    for source in sources:
        yield from find_out_of_range(source.data, f"{OPTION}.{source.name}.")


def require_rewards(config: Config, rewards: Sequence[Any] = ()) -> None:
    """Raise ``ConfigError`` if an RL run has no reward, neither in the config nor among ``rewards``."""
    rewarded = config.algorithm.ebft.reward or config.scoring.rewards or rewards
    if config.algorithm.kind == "rl" and not rewarded:
        raise ConfigError(
            "scoring.rewards: reinforcement learning needs a reward; set "
            "scoring.rewards.<name>.path=package.module:function (or file.py:function)"
        )


def find_out_of_range(section: Freezable, prefix: str = "") -> Iterator[ConfigError]:
    """Yield an error for every option of a section outside its choices or range; null is always valid."""
    for entry in fields(section):  # type: ignore[arg-type]
        value, name = getattr(section, entry.name), prefix + entry.name
        if isinstance(value, Freezable):
            yield from find_out_of_range(value, f"{name}.")
        elif not entry.metadata:
            for key, child in value.items():
                yield from find_out_of_range(child, f"{name}.{key}.")
        elif value is not None:
            yield from check_range(name, value, entry.metadata)


def check_range(name: str, value: Any, metadata: Mapping[str, Any]) -> Iterator[ConfigError]:
    choices, minimum, above, maximum = (metadata[key] for key in ("choices", "minimum", "above", "maximum"))
    if choices is not None and value not in choices:
        nearest = get_close_matches(value, choices, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        yield ConfigError(f"{name}: {value!r} is not {describe_range(metadata)}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        yield ConfigError(f"{name}: {value} is not a finite number")
    elif (
        (minimum is not None and value < minimum)
        or (above is not None and value <= above)
        or (maximum is not None and value > maximum)
    ):
        yield ConfigError(f"{name}: {value} is out of range; it must be {describe_range(metadata)}")
