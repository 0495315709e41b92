"""Functions of the user's own in an algorithm: their import, the record of their code, and errors in one line.

A function is named by ``path``, gets ``kwargs`` as keyword arguments, and is checked before a run begins. The SHA-256
of its file is stored with the run's config, so that a run never continues with other code without notice.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from rlpipe.common.atomic_io import file_digest
from rlpipe.common.imports import describe_error, import_object
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.option import UserFunction
from rlpipe.errors import ConfigError, RlpipeError, RunError

ADVANTAGE, LOSS, PREFERENCE = "algorithm.advantage", "algorithm.loss", "algorithm.preference"
CORRECTION, REPLAY = "algorithm.correction", "algorithm.replay"
OWN_FUNCTIONS = (ADVANTAGE, LOSS, PREFERENCE, CORRECTION, REPLAY)
"""Sections that may name a function."""
MAX_SHAPES = 4
"""Different shapes of a function's inputs that an error has."""


Function = TypeVar("Function", bound=Callable[..., Any])


def registrar(functions: dict[str, Function]) -> Callable[[str], Callable[[Function], Function]]:
    """Return a function of a name that returns a decorator, which enters a function into ``functions``."""

    def register(name: str) -> Callable[[Function], Function]:
        def enter(function: Function) -> Function:
            functions[name] = function
            return function

        return enter

    return register


def record_code(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Return the config with absolute paths and digests of its own functions.

    Raises ``ConfigError`` if one can't be imported or called, or if its file is not the one of a given digest.
    """
    return replace(
        algorithm,
        advantage=_record(algorithm.advantage, ADVANTAGE, num_arguments=2),
        loss=_record(algorithm.loss, LOSS, num_arguments=1),
        correction=_record(algorithm.correction, CORRECTION, num_arguments=1),
        replay=_record(algorithm.replay, REPLAY, num_arguments=2),
        preference=_record(algorithm.preference, PREFERENCE, num_arguments=1),
    )


def load_function(config: UserFunction, section: str) -> Callable[..., Any]:
    """Return the function at ``path``; raise ``ConfigError`` if its file is not the one of ``digest``."""
    assert config.path is not None
    return _load(config.path, config.digest, section)


@cache
def _load(path: str, expected: str | None, section: str) -> Callable[..., Any]:
    """Import the function once: a file that is edited later does not end the processes that have read it."""
    function: Callable[..., Any] = import_object(path, what=f"{section}.path", error=ConfigError)
    digest = code_digest(path, section)
    if expected not in (None, digest):
        raise ConfigError(
            f"{section}.digest: the file of {path} has the digest {digest:.12}..., not {expected:.12}...: its code has "
            f"changed; put the file back, or remove {section}.digest"
        )
    return function


def call_function(config: UserFunction, section: str, *inputs: Any) -> Any:
    """Return what the user's function returns; raise ``RunError`` in one line, with the line of code, if it raises."""
    function = load_function(config, section)
    try:
        return function(*inputs, **config.kwargs)
    except RlpipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the user's code raises anything
        problem = f"raised {describe_error(error)}{_source_line(error, function)}{_shapes(inputs)}"
        raise own_error(config, section, problem) from None


def own_error(config: UserFunction, section: str, problem: str) -> RunError:
    """Return the error for a problem of the user's function."""
    return RunError(f"{section}.path: {config.path} {problem}; fix the function, or set {section}.path=null")


def _record(config: Any, section: str, *, num_arguments: int) -> Any:
    """Return a section with the absolute path and the digest of its function, if it names one."""
    if config.path is None:
        return config
    file, _, name = config.path.rpartition(":")
    if file.endswith(".py"):
        config = replace(config, path=f"{Path(file).expanduser().absolute()}:{name}")
    function = load_function(config, section)
    if not callable(function):
        raise ConfigError(
            f"{section}.path: {config.path} is no function, but of type {type(function).__name__}; name a function"
        )
    try:
        inspect.signature(function).bind(*[None] * num_arguments, **config.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{section}.kwargs: {config.path} can't be called with {num_arguments} argument{'s' * (num_arguments > 1)} "
            f"and {', '.join(config.kwargs) or 'no keywords'}: {error}; change kwargs, or the function"
        ) from None
    except ValueError:  # a built-in function, whose arguments can't be read
        pass
    return replace(config, digest=code_digest(config.path, section))


def code_digest(path: str, section: str) -> str:
    """Return the digest of the file that the path names, which may import its function from another one."""
    module, _, _ = path.rpartition(":")
    file = Path(module).expanduser() if module.endswith(".py") else Path(getattr(sys.modules[module], "__file__", ""))
    try:
        return file_digest(file)
    except OSError as error:
        raise ConfigError(f"{section}.path: the file of {path} can't be read ({error}); name a Python file") from None


def _shapes(inputs: Sequence[Any]) -> str:
    """Return the first different shapes of the tensors and arrays among a function's inputs, for an error's end."""
    values: list[Any] = []
    for argument in inputs:
        field_values = (
            [getattr(argument, field.name) for field in fields(argument)] if is_dataclass(argument) else [argument]
        )
        values += argument if isinstance(argument, list) else field_values
    shapes = [*dict.fromkeys(str(list(value.shape)) for value in values if hasattr(value, "shape"))][:MAX_SHAPES]
    return f", given the shape{'s' * (len(shapes) > 1)} {', '.join(shapes)}" if shapes else ""


def _source_line(error: BaseException, function: Callable[..., Any]) -> str:
    """Return the last line of the user's file in the traceback, such as `` (my.py, line 7)``."""
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    trace, line = error.__traceback__, None
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == file else line
        trace = trace.tb_next
    return "" if file is None or line is None else f" ({Path(file).name}, line {line})"
