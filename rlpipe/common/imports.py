"""Import of objects that a config names as ``package.module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from rlpipe.common.formatting import printable
from rlpipe.errors import InputError, RlpipeError, did_you_mean


def import_object(path: str, *, what: str = "object", error: type[InputError] = InputError) -> Any:
    """Return the object at ``package.module:name`` or ``path/to/file.py:name``; the name may be dotted.

    Modules in the working directory can be imported. Raises ``error``, whose message calls the object ``what``, if the
    path has another form, its module can't be imported, or the module lacks the name.
    """
    module_path, separator, name = path.rpartition(":")
    if not (separator and module_path and name):
        raise error(f"{what} {path!r} is not of the form package.module:name or path/to/file.py:name")
    target: Any = _import_module(module_path, f"{what} {path!r}", error)
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            hint = did_you_mean(attribute, dir(target))
            raise error(f"{what} {path!r} can't be imported: {module_path} has no {attribute!r}{hint}")
        target = getattr(target, attribute)
    return target


class RelayedError(Exception):
    """Error of another process, whose message says all, its type included."""


def describe_error(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, with the second if the first announces it."""
    lines = message_of(error).splitlines()
    text = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1]) if lines else ""
    if isinstance(error, RelayedError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line; of one that crossed Ray, that of its cause."""
    return " ".join(str(getattr(error, "cause", None) or error).split())


def message_of(error: BaseException) -> str:
    """Return an exception's message, safe to print; an empty string if its class, which may be a user's, has none."""
    try:
        return printable(str(error).strip())
    except Exception:  # noqa: BLE001 - the exception's class is user code too
        return ""


@contextmanager
def reading_files(subject: str, fix: str, *, error: type[InputError]) -> Iterator[None]:
    """Raise ``error`` in one line, with the cause and the ``fix``, for whatever a library raises on a user's files.

    Libraries raise anything on damaged files; the tokenizers library even a ``BaseException``, which is Rust's panic.
    """
    try:
        yield
    except (RlpipeError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as cause:
        raise error(f"{subject}: {describe_error(cause)}; {fix}") from cause


def _import_module(path: str, subject: str, error: type[InputError]) -> ModuleType:
    if path.endswith(".py") and not Path(path).expanduser().is_file():
        raise error(f"{subject} can't be imported: there is no file {Path(path).expanduser().absolute()}")
    try:
        _make_working_directory_importable(last=path.endswith(".py"))
        if path.endswith(".py"):
            return _load_file(Path(path).expanduser().resolve())
        return importlib.import_module(path)
    except RlpipeError:
        raise
    except (Exception, SystemExit) as cause:
        raise error(f"{subject} can't be imported: {describe_error(cause)}; {_import_fix(cause, path)}") from cause


def _import_fix(cause: BaseException, path: str) -> str:
    if isinstance(cause, ModuleNotFoundError):
        return "install the package that has it, or start in the folder that does"
    return f"{'python' if path.endswith('.py') else 'python -m'} {path} shows where"


def _make_working_directory_importable(*, last: bool) -> None:
    folder = str(Path.cwd())
    if not {"", folder} & set(sys.path):
        sys.path.insert(len(sys.path) if last else 0, folder)
    importlib.invalidate_caches()


def _load_file(file: Path) -> ModuleType:
    """Load a Python file as a module, once; a digest of the path in its name avoids shadowing other modules."""
    name = f"{file.stem}_{sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
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


def enter_folder(folder: str) -> None:
    """Change to the driver's working directory, so that the user's own files are found.

    On a machine that does not have the folder, the job's working directory is kept.
    """
    if Path(folder).is_dir():
        os.chdir(folder)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection: it takes a sixth of the time of large imports, which create almost no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
