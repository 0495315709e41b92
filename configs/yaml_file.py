"""Reader of YAML files of options; constructs that no config needs, such as tags, are refused with their line."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from rlpipe.errors import ConfigError, DataError

MAX_BYTES = 2**20
MAX_DEPTH = 40
MAX_VALUES = 100_000
"""Most values of a file, with those that anchors repeat."""


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the options in a file; raise ``InputError`` with the file, the line and the fix if it can't be used."""
    # OmegaConf's loader reads 1e-5 as a number, and refuses a key that is there twice.
    loaded = load_yaml(path, read_text(path), get_yaml_loader())
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        kind = "list" if isinstance(loaded, list) else "single value"
        raise ConfigError(f"{path}: contains a {kind}; it must contain options such as `name: run`")
    return loaded


def load_yaml(path: Path, text: str, loader: Callable[[str], Any]) -> Any:
    """Return what a file's text holds, of any type; ``loader`` makes values of it once its limits are checked."""
    try:
        YamlLimits(path).check(text)
        return yaml.load(text, Loader=loader)  # type: ignore[arg-type]
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not a YAML file: {describe_problem(error, text)}") from error
    except ValueError as error:  # an integer of more digits than Python reads
        raise ConfigError(f"{path}: {str(error).partition(';')[0]}; write a shorter number") from error


def read_text(path: Path) -> str:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
            raise ConfigError(f"the config file {path.absolute()} is {kind}; name a YAML file")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than 1 MiB, so it is not a config; name another file")
        return path.read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"the config file {path.absolute()} does not exist") from None
    except OSError as error:
        raise DataError(f"the config file {path!s:.300} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}: line {line} is not UTF-8; save the file in UTF-8") from error


def describe_problem(error: yaml.YAMLError, text: str) -> str:
    """Return the problem in one line, with its number."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        problem = " ".join((error.problem or "unknown").split())
        hint = "; use spaces instead of tabs" if "'\\t'" in problem else ""
        return f"line {error.problem_mark.line + 1}: {problem}{hint}"
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"line {line}: the character {chr(error.character)!r} is not allowed; delete it"
    return " ".join(str(error).split())


class YamlLimits:
    """Limits of nesting and repetition, checked on YAML's events before anything is built from them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open: list[list[Any]] = []
        """Anchor, number of values and height of each collection that is not complete yet."""
        self._anchors: dict[str, tuple[int, int]] = {}
        """Number of values and height of each complete collection with an anchor."""

    def check(self, text: str) -> None:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = 0 if event.start_mark is None else event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent):
                self._add(*self._repeated(event.anchor, line), line)
            elif isinstance(event, yaml.NodeEvent):
                self._refuse_tag(event, line)
                if isinstance(event, yaml.ScalarEvent):
                    self._add(1, 0, line)
                else:
                    self._open.append([event.anchor, 1, 0])
                    self._limit_depth(len(self._open), line)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, values, height = self._open.pop()
                if anchor is not None:
                    self._anchors[anchor] = values, height + 1
                self._add(values, height + 1, line)

    def _repeated(self, anchor: str | None, line: int) -> tuple[int, int]:
        if anchor is None:
            return 1, 0
        if any(anchor == opened for opened, _, _ in self._open):
            raise self._error(line, f"*{anchor} is inside &{anchor}, so it refers to itself; write the value out")
        return self._anchors.get(anchor, (1, 0))

    def _refuse_tag(self, event: Any, line: int) -> None:
        if event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise self._error(line, f"the tag {tag:.80} is not supported; leave it out, or quote the string")

    def _add(self, values: int, height: int, line: int) -> None:
        self._limit_depth(len(self._open) + height, line)
        if not self._open:
            return
        around = self._open[-1]
        around[1], around[2] = around[1] + values, max(around[2], height)
        if sum(opened for _, opened, _ in self._open) > MAX_VALUES:
            raise self._error(line, f"more than {MAX_VALUES} values, including those that anchors repeat; use fewer")

    def _limit_depth(self, depth: int, line: int) -> None:
        if depth > MAX_DEPTH:
            raise self._error(line, f"nested more than {MAX_DEPTH} levels deep; no option needs that, use fewer")

    def _error(self, line: int, message: str) -> ConfigError:
        return ConfigError(f"{self._path}: line {line}: {message}")
