"""Runs on prepared rows, and everything that such a run sees of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlpipe import cli
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import PromptSource, SequenceSource, open_run_prompts, open_run_sequences
from rlpipe.data.render.processor import load_tokenizer


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in rows))


def config_of(options: Sequence[str]) -> Config:
    return load_config(options, need_files=False)


def open_run(config: Config) -> tuple[PromptSource | SequenceSource, Sequence[Any]]:
    tokenizer = load_tokenizer(config.model)
    if config.algorithm.kind == "rl":
        return open_run_prompts(config, config.model, tokenizer)
    return open_run_sequences(
        config.data, config.model, tokenizer, algorithm=config.algorithm, learner=config.learner, seed=config.seed
    )


def prepare(options: Sequence[str], workers: int = 1) -> None:
    assert cli.main(["data", "prepare", *options, "--workers", str(workers)]) == 0


def plain(value: Any) -> Any:
    """Convert a value to nested lists that include types and dtypes, so that equal values of different types differ."""
    if is_dataclass(value):
        return [type(value).__name__, *(plain(getattr(value, field.name)) for field in fields(value))]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, dict):
        return {name: plain(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(plain, value)]
    return (type(value).__name__, value)


def story(config: Config) -> list[Any]:
    """Return all that a run sees of its rows in more than two epochs."""
    source, held_out = open_run(config)
    count = 2 * (source.num_rows or 200) + 5
    items = [(plain(source.next()), source.cursor, list(source.skip_records)) for _ in range(count)]
    return [
        source.num_rows,
        items,
        source.metrics,
        source.skipped,
        source.skip_counts,
        [plain(item) for item in held_out],
    ]


def is_found(options: Sequence[str], caplog: pytest.LogCaptureFixture) -> bool:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        open_run(config_of(options))
    found = [line for line in caplog.messages if "prepared rows are read from" in line]
    assert len(found) < 2
    return bool(found)
