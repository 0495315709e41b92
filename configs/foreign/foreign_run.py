"""A run as a file of another system has it: its settings, what is computed in it, and what is not translated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from rlpipe.configs.options import SECRET_NAME

SYSTEMS = {"axolotl": "axolotl", "openrlhf": "OpenRLHF", "trl": "TRL", "verl": "verl"}
"""Names of the systems as they write them."""
SECRETS = ("use_wandb", "use_swanlab", "logger.wandb.key", "hub_token", "eval_hub_token")
"""Settings whose values may be secrets, although their names do not say so."""
UNKNOWN_TEXT = re.compile(r"\$\(|`|\$\{?[0-9#?!@*]|\$\{[^}]*[^\w}]")
"""Text of a shell that only running it would replace."""
PLAIN_TEXT = re.compile(r"[A-Za-z_][\w./-]*")
YAML_WORDS = ("true", "false", "yes", "no", "on", "off", "null")
HIDDEN = "(hidden)"
URL_PASSWORD = re.compile(r"(?<=://)\S+(?=@)")
MAX_VALUE = 100_000
MAX_ENTRIES = 100
"""Data sets, and rewards, that are translated; a config with more of them is too long to read."""


@dataclass(kw_only=True, frozen=True)
class Computed:
    """A value that no constant gives."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(kw_only=True, frozen=True)
class Setting:
    """An option as a foreign file has it; ``name`` is dotted, and ``value`` None if it is empty."""

    name: str
    value: Any
    default_of: str = ""
    """The system whose default it is, if the file does not have it."""

    @property
    def is_empty(self) -> bool:
        return self.value is None or self.value == ""

    def __str__(self) -> str:
        value = HIDDEN if is_secret(self.name) and isinstance(self.value, str) else self.value
        if isinstance(value, str):
            value = URL_PASSWORD.sub(HIDDEN, value)
            value = value if value == " ".join(value.split()) else repr(value)
        text = f"{self.name}: {value}" if value is not None else self.name
        return f"{text} (default of {SYSTEMS[self.default_of]})" if self.default_of else text


@dataclass(kw_only=True, frozen=True)
class ForeignRun:
    """The settings of a run of another system; ``method`` is ``rl``, or the name of one of rlpipe's algorithms."""

    system: str
    method: str
    settings: Sequence[Setting]
    notes: Sequence[tuple[str, str]] = ()
    """Lines of the file that are no settings, each with the reason why it is not translated."""
    is_shell: bool = False
    """Whether ``$NAME`` stands for a variable of the environment."""
    num_processes: int | None = None
    """Processes that its launcher starts; None if the file does not say."""


def is_secret(name: str) -> bool:
    return name in SECRETS or (SECRET_NAME.search(name) is not None and not name.endswith(("_key", "_token")))


def hide_secret(assignment: str) -> str:
    """Return ``NAME=value`` without its value if the name is one of secrets."""
    name, _, _ = assignment.partition("=")
    return f"{name}={HIDDEN}" if SECRET_NAME.search(name) else assignment


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[Setting]:
    """Yield the leaves of a tree under dotted names; lists are leaves, unless they hold mappings."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from flatten(dict(enumerate(value)), f"{name}.")
        else:
            yield Setting(name=name, value=value)


def read_value(text: str) -> Any:
    """Return a word's value as YAML reads it, or the word itself; ``Computed`` if a shell would have to run for it."""
    if PLAIN_TEXT.fullmatch(text) is not None and text.lower() not in YAML_WORDS:
        return text
    if UNKNOWN_TEXT.search(text) is not None:
        return Computed(text=text)
    is_tree = text[:1] in ("[", "{")
    is_long = len(text) > MAX_VALUE or text[:1] in ("&", "*", "!", "|", ">", "%", "@")
    if is_long or (is_tree and "&" in text) or (not is_tree and (":" in text or "#" in text)):
        return text
    value = _load(text) if is_tree else _load_scalar(text)
    is_template = isinstance(value, dict) and set(value.values()) == {None}  # such as {token}
    return text if is_template or (isinstance(value, list | dict) and not is_tree) else value


def _load(text: str) -> Any:
    try:
        value = yaml.load(text, Loader=get_yaml_loader())
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return value if value is None or isinstance(value, str | int | float | bool | list | dict) else text


_load_scalar = lru_cache(maxsize=10_000)(_load)
