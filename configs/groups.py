"""The folder of the config groups, and a list of their choices."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

PRIMARY = "config"
"""Name of the file with the defaults of all groups."""


@cache
def config_folder() -> Path:
    return Path(next(iter(importlib.import_module("rlpipe.configs").__path__))).absolute()


def list_groups() -> dict[str, list[str]]:
    """Return every config group with its choices, both sorted."""
    folders = sorted(path for path in config_folder().iterdir() if path.is_dir())
    choices = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}
    return {group: names for group, names in choices.items() if names}


def describe_choice(group: str, choice: str) -> str:
    """Return the first comment in the choice's file, without the ``#``; empty if there is none."""
    lines = (config_folder() / group / f"{choice}.yaml").read_text().splitlines()
    comments = [line for line in lines if line.startswith("# ") and "@package" not in line]
    return comments[0].removeprefix("# ") if comments else ""
