"""Process of a completion's program: runs the source, then calls its functions for another process.

Only inputs come in and only plain values go out, as lines of JSON: no test, no expected value and no sign of success
enters this process. Whatever it writes is the program's own answer, which ``remote_program`` on the other side does
not trust. The file uses the standard library alone, because it runs without rlpipe.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any, BinaryIO

MAX_INT_DIGITS = 1000
"""Longest decimal integer that is written as a JSON number; Python refuses to read much longer ones."""
MAX_ITEMS = 1_000_000
"""Most values that one iterator gives."""
NUMBERS: dict[str, Callable[[str], Any]] = {"decimal": Decimal, "fraction": Fraction, "complex": complex}
DATES: dict[str, Any] = {"datetime": datetime, "date": date, "time": time}
FACTORIES = {factory.__name__: factory for factory in (bool, int, float, str, list, dict, set, tuple)}
"""Functions by which a ``defaultdict`` makes values, if it stays one."""
MUTABLE = (list, dict, set, bytearray, deque)
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}


def encode(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Return a value as JSON; ``keep`` returns the JSON of an object that is not plain.

    Instances of subclasses become instances of the plain class: what ``int`` itself makes of an ``int``, and so on.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is float or isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if abs(number) < 10**MAX_INT_DIGITS else {"int": hex(number)}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return {"bytearray" if isinstance(value, bytearray) else "bytes": bytes(value).hex()}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, dict):
        entries = [[encode(key, keep), encode(entry, keep)] for key, entry in dict.items(value)]
        if isinstance(value, defaultdict) and kind is defaultdict and value.default_factory in FACTORIES.values():
            return {"defaultdict": [value.default_factory.__name__, entries]}  # type: ignore[union-attr]
        return {"counter" if kind is Counter else "dict": entries}
    for name, base_type in SEQUENCES.items():
        if isinstance(value, base_type):  # type: ignore[arg-type]
            return {name: [encode(entry, keep) for entry in base_type.__iter__(value)]}  # type: ignore[attr-defined]
    if isinstance(value, Decimal | Fraction | complex):
        name = next(name for name, base_type in NUMBERS.items() if isinstance(value, base_type))  # type: ignore[arg-type]
        return {name: str(value)}
    for name, date_type in DATES.items():
        if isinstance(value, date_type):
            return {name: date_type.isoformat(value)}
    if isinstance(value, timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), keep)
    is_number = hasattr(kind, "__index__") and not hasattr(kind, "__len__")  # an array may have both
    return operator.index(value) if is_number else keep(value)


def decode(tree: Any, find: Callable[[dict[str, Any]], Any]) -> Any:
    """Return the value of some JSON; ``find`` returns the object of JSON that is not plain."""
    if not isinstance(tree, dict):
        return tree
    if len(tree) != 1:
        return find(tree)
    ((name, content),) = tree.items()
    if name in SEQUENCES:
        return SEQUENCES[name]([decode(entry, find) for entry in content])
    if name in NUMBERS:
        return NUMBERS[name](content)
    if name in DATES:
        return DATES[name].fromisoformat(content)
    match name:
        case "dict":
            return {decode(key, find): decode(entry, find) for key, entry in content}
        case "counter":
            return Counter(decode({"dict": content}, find))
        case "defaultdict":
            return defaultdict(FACTORIES[content[0]], decode({"dict": content[1]}, find))
        case "timedelta":
            return timedelta(*content)
        case "int":
            return int(content, 16)
        case "bytes":
            return bytes.fromhex(content)
        case "bytearray":
            return bytearray.fromhex(content)
        case "range":
            return range(*content)
    return find(tree)


class ProgramHost:
    """A server of one program's objects, which answers the requests of the other side."""

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests, self._answers = requests, answers
        self._objects: list[Any] = []
        self._program = types.ModuleType("program")
        """The program's module; it is imported, not run, so what it does as the main module is left out."""

    def serve(self) -> None:
        source = json.loads(self._requests.readline())
        sys.modules["program"] = sys.modules["__main__"] = self._program
        self._answer(lambda: exec(compile(source, "<program>", "exec"), self._program.__dict__))
        while line := self._requests.readline():
            request = json.loads(line)
            self._answer(lambda: self._run(request))  # noqa: B023 - called at once

    def _run(self, request: dict[str, Any]) -> Any:
        match request:
            case {"names": names}:
                values = {name: getattr(self._program, name) for name in names if hasattr(self._program, name)}
                return {name: value for name, value in values.items() if not isinstance(value, types.ModuleType)}
            case {"call": index, "arguments": [positional, named]}:
                values, options = decode(positional, self._find), decode(named, self._find)
                result = self._objects[index](*values, **options)
                changed = {index: value for index, value in enumerate(values) if isinstance(value, MUTABLE)}
                return result, changed
            case {"attribute": index, "name": name}:
                return getattr(self._objects[index], name)
            case {"set": index, "name": name, "new": value}:
                return setattr(self._objects[index], name, decode(value, self._find))
            case {"iterate": index}:
                return [value for value, _ in zip(self._objects[index], range(MAX_ITEMS), strict=False)]
            case {"item": index, "key": key}:
                return self._objects[index][decode(key, self._find)]
            case {"truth": index}:
                return bool(self._objects[index])
            case {"length": index}:
                return len(self._objects[index])
            case {"text": index}:
                return str(self._objects[index])
            case {"equal": [first, second]}:
                return bool(self._objects[first] == self._objects[second])
        raise ValueError(f"unknown request {request}")

    def _answer(self, operation: Callable[[], Any]) -> None:
        try:
            answer = {"value": encode(operation(), self._encode_object)}
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            answer = {"raised": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:1000]}
        self._write(answer)

    def _write(self, message: Any) -> None:
        self._answers.write(json.dumps(message).encode() + b"\n")
        self._answers.flush()

    def _encode_object(self, value: Any) -> Any:
        if isinstance(value, TestObject):
            return {"local": object.__getattribute__(value, "_index")}
        self._objects.append(value)
        return {"object": len(self._objects) - 1, "can": [name for name in SHOWN if hasattr(type(value), name)]}

    def _find(self, tree: dict[str, Any]) -> Any:
        match tree:
            case {"object": int(index)}:
                return self._objects[index]
            case {"local": int(index)}:
                return TestObject(self, index)
        raise ValueError(f"unknown value {tree}")

    def ask_back(self, kind: str, index: int, *arguments: Any) -> Any:
        """Ask the other side about an object of the test, which was passed as an argument."""
        self._write({kind: index, "arguments": encode(list(arguments), self._encode_object)})
        while (answer := json.loads(self._requests.readline())).keys().isdisjoint(("value", "raised")):
            self._answer(lambda: self._run(answer))  # the test uses an object of the program meanwhile
        if "raised" in answer:
            error_type = AttributeError if kind == "attribute" else ValueError
            raise error_type(answer["raised"])
        return decode(answer["value"], self._find)


class TestObject:
    """Object of the test that is not a plain value, such as a function, or an instance of a class of the test."""

    def __init__(self, host: ProgramHost, index: int) -> None:
        object.__setattr__(self, "_host", host)
        object.__setattr__(self, "_index", index)

    def __getattr__(self, name: str) -> Any:
        return self._host.ask_back("attribute", self._index, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._host.ask_back("set", self._index, name, value)

    def __call__(self, *arguments: Any) -> Any:
        return self._host.ask_back("call", self._index, *arguments)

    def __iter__(self) -> Any:
        return iter(self._host.ask_back("iterate", self._index))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TestObject) and self._index == other._index

    def __hash__(self) -> int:
        return hash(self._index)


SHOWN = ("__call__", "__iter__", "__getitem__", "__len__", "__bool__")
"""Abilities of an object that are reported to the other side."""


def main() -> None:
    requests, answers = (int(argument) for argument in sys.argv[1:3])
    with os.fdopen(requests, "rb") as request_pipe, os.fdopen(answers, "wb") as answer_pipe:
        ProgramHost(request_pipe, answer_pipe).serve()


if __name__ == "__main__":
    main()
