"""Tests of a completion's program, which runs in another process (``program_host``).

A test's code runs in this process. Each name that the program defines stands for an object of the program there: a call
sends the arguments and returns a plain value. Comparisons are made here, with Python's own functions, so the program
sees neither expected values nor whether it passed.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rlpipe.scoring import program_host
from rlpipe.scoring.program_host import MAX_ITEMS, MUTABLE, decode, encode
from rlpipe.scoring.sandbox.confinement import confine_program

MAX_ANSWER_BYTES = 2**24
"""Longest answer of a program to one request."""
GRACE_S = 2.0
"""Seconds beyond a test's time in which its program can be ended before the test's own process is killed."""
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8:surrogatepass"}


TEST_MODULES = (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "operator", "random", "re", "statistics", "string", "sys"),
)
"""Modules that a test may use without an import of its own, because programs often import them."""


HIDDEN_TYPES = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)
"""Types of objects that a test never passes to a program, because the whole test can be reached from them."""
CLOSED_NAMES = ("_", "gi_", "cr_", "ag_", "f_", "tb_", "co_")
"""Beginnings of attributes from which the whole test can be reached."""


def is_open(*name: Any) -> bool:
    """Return whether a program may read and set the attribute of this name of an object of the test."""
    return len(name) == 1 and isinstance(name[0], str) and not name[0].startswith(CLOSED_NAMES)


LITERALS = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.UnaryOp, ast.unaryop, ast.expr_context)


class ProgramFailed(Exception):
    """Error for a program that ended, sent an invalid answer, or took too long."""


class ProgramError(Exception):
    """Exception of the program that is not one of Python's own."""


def start_program(
    command: list[str], folder: str, *, stderr: int = subprocess.DEVNULL, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a confined Python process in its own session, without this process's environment.

    It may write only to ``folder``.
    """
    prefix, confine = confine_program(folder, [program_host.__file__])
    return subprocess.Popen(
        [*prefix, sys.executable, "-I", *command],
        preexec_fn=confine,  # this process has one thread
        cwd=folder,
        env={**ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
        stderr=stderr,
        start_new_session=True,
        **options,
    )


def end_program(process: subprocess.Popen[bytes]) -> None:
    """Kill the program's process group and wait for the program."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


class RemoteProgram:
    """Program in a process of its own; use it as a context, which raises ``ProgramFailed`` if its source fails."""

    def __init__(self, source: str, timeout_s: float) -> None:
        self._source, self._deadline = source, time.monotonic() + timeout_s
        self._buffer = bytearray()
        self._locals: list[Any] = []
        """Objects of the test that were passed to the program."""

    def __enter__(self) -> RemoteProgram:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        child_in, self._requests = os.pipe()
        self._answers, child_out = os.pipe()
        self._process = start_program(
            [str(Path(program_host.__file__)), str(child_in), str(child_out)],
            self._folder.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[child_in, child_out],
        )
        os.close(child_in)
        os.close(child_out)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._answers, False)
        try:
            self._exchange(self._source)
        except BaseException as error:
            self.__exit__()
            if isinstance(error, Exception):
                raise ProgramFailed(f"the program failed: {error}") from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        end_program(self._process)
        os.close(self._requests)
        os.close(self._answers)
        self._folder.cleanup()

    def defined(self, names: list[str]) -> dict[str, Any]:
        """Return the program's objects of these names that it defines, without its modules."""
        objects = self._exchange({"names": names})
        return {name: objects[name] for name in names if name in objects} if isinstance(objects, dict) else {}

    def call(self, index: int, positional: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Call an object of the program; lists and the like that it changes are changed here, too."""
        arguments = [encode(list(positional), self._name), encode(dict(named), self._name)]
        answer = self._exchange({"call": index, "arguments": arguments})
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict):
            raise ProgramFailed("the program answered a call in an invalid form")
        result, changed = answer
        for index, value in changed.items():
            if type(index) is int and 0 <= index < len(positional):
                _replace(positional[index], value)
        return result

    def ask(self, kind: str, index: int, **more: Any) -> Any:
        return self._exchange({kind: index, **{name: encode(value, self._name) for name, value in more.items()}})

    def equal(self, first: int, second: int) -> bool:
        return self._exchange({"equal": [first, second]}) is True

    def _exchange(self, request: Any) -> Any:
        self._write(request)
        while True:
            match self._read():
                case {"value": tree}:
                    return self._decode(tree)
                case {"raised": [*kinds], "text": str(text)}:
                    _raise(kinds, text)
                case {"arguments": _} as question:
                    self._write(self._answer_back(question))
                case _:
                    raise ProgramFailed("the program sent an invalid answer")

    def _answer_back(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer the program's question about an object of the test."""
        arguments = self._decode(question["arguments"])
        try:
            return {"value": encode(self._look_up(question, arguments), self._name)}
        except ProgramFailed:
            raise
        except Exception as error:  # noqa: BLE001 - the program's question fails with the test's object
            return {"raised": str(error)[:1000]}

    def _look_up(self, question: dict[str, Any], arguments: list[Any]) -> Any:
        match question:
            case {"call": int(index)}:
                return self._local(index)(*arguments)
            case {"attribute": int(index)} if is_open(*arguments):
                return getattr(self._local(index), *arguments)
            case {"set": int(index)} if is_open(*arguments[:1]) and len(arguments) == 2:
                return setattr(self._local(index), *arguments)
            case {"iterate": int(index)}:
                return [value for value, _ in zip(self._local(index), range(MAX_ITEMS), strict=False)]
        raise AttributeError("a program can't ask that")

    def _local(self, index: int) -> Any:
        if not 0 <= index < len(self._locals):
            raise ProgramFailed("the program sent an invalid answer")
        return self._locals[index]

    def _decode(self, tree: Any) -> Any:
        try:
            return decode(tree, self._find)
        except (TypeError, ValueError, ArithmeticError, RecursionError, KeyError) as error:
            raise ProgramFailed(f"the program sent an invalid answer: {type(error).__name__}") from None

    def _find(self, tree: dict[str, Any]) -> Any:
        match tree:
            case {"object": int(index), "can": [*abilities]} if all(isinstance(name, str) for name in abilities):
                kind = REMOTE_TYPES[frozenset(abilities) & REMOTE_ABILITIES]
                return kind(self, index)
            case {"local": int(index)}:
                return self._local(index)
        raise ValueError("an unknown kind of value")

    def _name(self, value: Any) -> Any:
        """Return the JSON of an argument that is not plain: an object of the program, or one of the test."""
        if isinstance(value, RemoteObject):
            return {"object": object.__getattribute__(value, "_index")}
        if isinstance(value, HIDDEN_TYPES):
            raise TypeError(f"a test can't pass a {type(value).__name__} to a program")
        index = next((number for number, existing in enumerate(self._locals) if existing is value), len(self._locals))
        if index == len(self._locals):
            self._locals.append(value)
        return {"local": index}

    def _write(self, message: Any) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            self._await(self._requests, is_read=False)
            try:
                data = data[os.write(self._requests, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise ProgramFailed("the program ended") from None

    def _read(self) -> Any:
        while (end := self._buffer.find(b"\n")) < 0:
            self._await(self._answers, is_read=True)
            try:
                piece = os.read(self._answers, 2**16)
            except BlockingIOError:
                continue
            if not piece:
                raise ProgramFailed("the program ended")
            self._buffer += piece
            if len(self._buffer) > MAX_ANSWER_BYTES:
                raise ProgramFailed(f"the program answered more than {MAX_ANSWER_BYTES} bytes")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ProgramFailed("the program sent an invalid answer") from None

    def _await(self, fd: int, *, is_read: bool) -> None:
        remaining_s = self._deadline - time.monotonic()
        ready = (
            select.select([fd] if is_read else [], [] if is_read else [fd], [], max(0.0, remaining_s))
            if remaining_s > 0
            else ()
        )
        if not any(ready):
            raise ProgramFailed("the program took too long")


class RemoteObject:
    """Object of a program that is not a plain value, such as a function, a class or an instance.

    It equals itself, and other objects of the program that the program says it equals: never a plain value.
    """

    def __init__(self, program: RemoteProgram, index: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_index", index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._program.ask("attribute", self._index, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.ask("set", self._index, name=name, new=value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RemoteObject):
            return self._index == other._index or self._program.equal(self._index, other._index)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._index)

    def __str__(self) -> str:
        return str(self._program.ask("text", self._index))


def _call(self: RemoteObject, *positional: Any, **named: Any) -> Any:
    return self._program.call(self._index, positional, named)


def _iterate(self: RemoteObject) -> Iterator[Any]:
    values = self._program.ask("iterate", self._index)
    if not isinstance(values, list):
        raise ProgramFailed("the program answered an iteration in an invalid form")
    return iter(values)


def _item(self: RemoteObject, key: Any) -> Any:
    return self._program.ask("item", self._index, key=key)


def _length(self: RemoteObject) -> int:
    length = self._program.ask("length", self._index)
    if type(length) is not int or length < 0:
        raise ProgramFailed("the program answered with an invalid length")
    return length


def _truth(self: RemoteObject) -> bool:
    return self._program.ask("truth", self._index) is True


REMOTE_METHODS = {"__call__": _call, "__iter__": _iterate, "__getitem__": _item, "__len__": _length, "__bool__": _truth}
REMOTE_ABILITIES = frozenset(REMOTE_METHODS)
REMOTE_TYPES: dict[frozenset[str], type[RemoteObject]] = {}
"""A class for each set of abilities, because Python looks them up in an object's class."""
for _bits in range(2 ** len(REMOTE_METHODS)):
    _names = [name for index, name in enumerate(REMOTE_METHODS) if _bits >> index & 1]
    REMOTE_TYPES[frozenset(_names)] = type("Remote", (RemoteObject,), {name: REMOTE_METHODS[name] for name in _names})


def _replace(original: Any, value: Any) -> None:
    """Give a mutable argument the content that the program left in its copy."""
    if type(original) is not type(value) or not isinstance(original, MUTABLE):
        return
    if isinstance(original, list | bytearray):
        original[:] = value
    else:
        original.clear()
        original.extend(value) if hasattr(original, "extend") else original.update(value)


def _raise(kinds: list[Any], text: str) -> NoReturn:
    """Raise the first of Python's own exceptions among the classes of an exception of the program."""
    for name in kinds:
        error = _builtin_error(name, text)
        if error is not None:
            raise error
    raise ProgramError(text)


def _builtin_error(name: Any, text: str) -> Exception | None:
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if not isinstance(kind, type) or not issubclass(kind, Exception) or kind is Exception:
        return None
    if issubclass(kind, StopIteration | StopAsyncIteration):  # map and zip would end early, as if all passed
        return None
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError and others need more
        return None


def passes(source: str, test: ast.Module, timeout_s: float) -> bool:
    """Return whether a test's code reaches its end with the program's functions, within ``timeout_s`` seconds.

    A test that goes on for longer ends this process. Raises ``SyntaxError`` for a test that can't be compiled.
    """
    code = compile(test, "<test>", "exec")
    try:
        with _killed_after(timeout_s + GRACE_S), RemoteProgram(source, timeout_s) as program:
            exec(code, {"__name__": "test", **_resolve_names(program, test)})
    except (Exception, SystemExit):  # noqa: BLE001 - whatever a test raises, it did not pass
        return False
    return True


def runs_nothing(test: ast.Module) -> bool:
    """Return whether a test would pass with any program."""
    return all(map(_is_inert, test.body))


def _is_inert(statement: ast.stmt) -> bool:
    """Return whether a statement of a test only imports, defines, names values, or asks whether it is the main module.

    The latter is false in a test.
    """
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case (
            ast.FunctionDef(decorator_list=[], args=arguments) | ast.AsyncFunctionDef(decorator_list=[], args=arguments)
        ):
            return _are_literal([*arguments.defaults, *(value for value in arguments.kw_defaults if value is not None)])
        case ast.ClassDef(decorator_list=[], keywords=[]):
            return all(map(_is_inert, statement.body))
        case ast.If(orelse=[]):
            return ast.unparse(statement.test) == "__name__ == '__main__'"
        case ast.Expr(value=value) | ast.Assign(value=value) | ast.AnnAssign(value=value):
            return value is None or _are_literal([value])
    return False


def _are_literal(values: Iterable[ast.expr]) -> bool:
    return all(isinstance(node, LITERALS) for value in values for node in ast.walk(value))


@contextmanager
def _killed_after(limit_s: float) -> Iterator[None]:
    """Let this process be killed if the block takes longer, as C code does not stop for exceptions.

    It has no effect if the caller has a handler of alarms.
    """
    is_free = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    if is_free:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        if is_free:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _resolve_names(program: RemoteProgram, test: ast.Module) -> dict[str, Any]:
    """Return what the test's names stand for: objects of the program, or modules that the test reads attributes of.

    The program's own ``set`` or ``math`` never stand in for Python's, which tests compare with. Only if the program
    defines no other name of the test is a function called ``sum`` the one that is tested.
    """
    nodes = list(ast.walk(test))
    used_names = sorted({node.id for node in nodes if isinstance(node, ast.Name)})
    owners = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    modules = {name: importlib.import_module(name) for name in owners.intersection(TEST_MODULES)}
    objects = program.defined([name for name in used_names if name not in modules and not hasattr(builtins, name)])
    if not objects:
        shadowing = program.defined([name for name in used_names if hasattr(builtins, name)])
        objects = {name: value for name, value in shadowing.items() if isinstance(value, RemoteObject)}
    return {**modules, **objects}
