"""Imports what a config names as ``package.module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpipe.errors import ConfigError, InputError


def import_object(path: str, *, what: str = "object", error: type[InputError] = ConfigError) -> Any:
    """The named object; modules are looked for on ``sys.path`` and in the current folder.

    Raises ``error`` in one line that names ``what``, the path, the reason and the fix.
    """
    location, _, name = path.rpartition(":")
    if not location or not name:
        raise error(f"{what} {path!r} names no object; write package.module:name or path/to/file.py:name")
    try:
        module = _import_file(Path(location)) if location.endswith(".py") else _import_module(location)
    except Exception as reason:  # noqa: BLE001 - a user's module may raise anything while it is imported
        raise error(f"{what} {path!r} can't be imported: {_explain(reason)}") from reason
    try:
        target: Any = module
        for part in name.split("."):
            target = getattr(target, part)
    except AttributeError:
        raise error(f"{what} {path!r} can't be imported: {location} defines no {name!r}; check its spelling") from None
    return target


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _import_file(file: Path) -> ModuleType:
    """Runs a file as a module, once per process; its own folder can be imported from, as when Python runs it."""
    file = file.resolve()
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {file}; give its path from the current folder")
    name = f"rlpipe_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _explain(reason: Exception) -> str:
    text = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
    if isinstance(reason, ModuleNotFoundError):
        return f"{text}; install it, or run from the folder that holds it"
    return text
