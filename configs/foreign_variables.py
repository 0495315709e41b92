"""Replaces the variables, arrays and arithmetic in the words of a shell script; commands are never run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.configs.foreign_shell import MAX_NESTING, end_of_parameter, end_of_quotes, end_of_single
from rlpipe.errors import ConfigError

MAX_CHARACTERS = 4_000_000
"""Characters that all expansions of a script may make together."""
MAX_NUMBER = 2**63
MAX_FORMULA = 300
PLAIN = re.compile(r"[^\\'\"$`]+")
QUOTED = re.compile(r"[^\\$`]+")
NAMED = re.compile(r"\$([A-Za-z_]\w*)")
POSITIONAL = re.compile(r"\$[@*]")
BRACED = re.compile(
    r"(?P<name>[A-Za-z_]\w*|\d+|[@*])(?P<index>\[(?:[@*]|\d+)\])?"
    r"(?:(?P<test>:?[-=?+])(?P<word>.*)|(?P<slashes>//?)(?P<old>[^/]+)(?:/(?P<new>.*))?)?",
    re.DOTALL,
)
OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


class Fields:
    """Words that an expansion makes, of which the last may go on."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self._is_open = False

    def add(self, text: str) -> None:
        if self._is_open:
            self.words[-1] += text
        else:
            self.words.append(text)
        self._is_open = True

    def add_split(self, text: str) -> None:
        """Add text whose spaces separate words."""
        for index, part in enumerate(re.split(r"\s+", text)):
            self._is_open = self._is_open and index == 0
            if part:
                self.add(part)

    def add_each(self, texts: Sequence[str]) -> None:
        """Add the elements of an array, each as a word of its own."""
        for index, text in enumerate(texts):
            self._is_open = self._is_open and index == 0
            self.add(text)


class Variables:
    """The variables of a script, each a list of words, and those that nothing uses."""

    def __init__(self) -> None:
        self.values: dict[str, list[str]] = {}
        self.unused: set[str] = set()
        """Variables that nothing has used since they were set."""
        self.replaced: list[tuple[str, str]] = []
        """Variables with values that were replaced before anything used them."""
        self.counts_uses = True
        self._spent = 0

    def assign(self, name: str, values: Sequence[str], *, appends: bool = False, joins: bool = False) -> None:
        """Set a variable; ``appends`` adds to an array, and with ``joins`` to the text of its first element."""
        before = self.values.get(name, [])
        if name in self.unused and not appends and any(before):
            self.replaced.append((name, " ".join(before)))
        self.unused.add(name)
        if appends and joins:
            values, before = ["".join([*before[:1], *values])], before[1:]
            self.values[name] = [*values, *before]
        else:
            self.values[name] = [*before, *values] if appends else list(values)

    def text(self, raw: str) -> str:
        """Return a word as one text, as an assignment takes it."""
        return " ".join(self.expand(raw, splits=False))

    def expand(self, raw: str, *, splits: bool = True, depth: int = 0) -> list[str]:
        """Return the words that a word with quotes makes; variables that are not set stay as they are."""
        if depth > MAX_NESTING:
            raise ConfigError(f"variables are nested more than {MAX_NESTING} levels deep; simplify them")
        if raw.startswith("~/"):
            raw = f"$HOME{raw[1:]}"
        fields, at = Fields(), 0
        while at < len(raw):
            if (plain := PLAIN.match(raw, at)) is not None:
                fields.add(plain[0])
                at = plain.end()
            elif raw[at] == "'":
                end = end_of_single(raw, at)
                fields.add(raw[at + 1 : end - 1])
                at = end
            elif raw[at] == '"':
                end = end_of_quotes(raw, at)
                self._expand_quoted(raw[at + 1 : end - 1], fields, depth)
                at = end
            elif raw[at] == "\\":
                fields.add(raw[at + 1 : at + 2])
                at += 2
            else:
                at = self._expand_parameter(raw, at, fields, depth, splits=splits)
        self._spend(sum(map(len, fields.words)))
        return fields.words

    def _spend(self, characters: int) -> None:
        self._spent += characters
        if self._spent > MAX_CHARACTERS:
            raise ConfigError(f"its variables make more than {MAX_CHARACTERS:,} characters; write the command out")

    def _expand_quoted(self, text: str, fields: Fields, depth: int) -> None:
        at = 0
        if not text:
            fields.add("")
        while at < len(text):
            if (plain := QUOTED.match(text, at)) is not None:
                fields.add(plain[0])
                at = plain.end()
            elif text[at] == "\\":
                follows = text[at + 1 : at + 2]
                fields.add({"\n": "", **{char: char for char in '$`"\\'}}.get(follows, f"\\{follows}"))
                at += 2
            else:
                at = self._expand_parameter(text, at, fields, depth, splits=False)

    def _expand_parameter(self, text: str, at: int, fields: Fields, depth: int, *, splits: bool) -> int:
        """Add what a parameter stands for to the fields; return the place after it."""
        if POSITIONAL.match(text, at) is not None:
            return at + 2
        named = NAMED.match(text, at)
        end = named.end() if named is not None else end_of_parameter(text, at, depth)
        shown = text[at:end]
        values, is_each = self._values_of(shown, named[1] if named is not None else None, depth)
        if values is None:
            fields.add(shown)
        elif splits and not any("$(" in value or "`" in value for value in values):
            fields.add_split(" ".join(values))
        elif is_each:
            fields.add_each(values)
        else:
            fields.add(" ".join(values))
        self._spend(sum(map(len, values or ())))
        return end

    def _values_of(self, shown: str, name: str | None, depth: int) -> tuple[list[str] | None, bool]:
        """Return the words of a parameter, or None if they are not known, and whether each stays a word."""
        if name is not None:
            return self._get(name, None)
        if shown.startswith("$(("):
            number = self.compute(shown[3:-2])
            return (None if number is None else [str(number)]), False
        found = BRACED.fullmatch(shown[2:-1]) if shown.startswith("${") else None
        if found is None:
            return None, False
        values, is_each = self._get(found["name"], found["index"])
        if found["test"]:
            return self._tested(values, found["test"], found["word"], depth), is_each
        if found["slashes"] and values is not None:
            old, new = (
                " ".join(self.expand(part or "", splits=False, depth=depth + 1))
                for part in (found["old"], found["new"])
            )
            if set(old) & set("*?["):
                return None, False
            values = [value.replace(old, new, -1 if found["slashes"] == "//" else 1) for value in values]
        return values, is_each

    def _get(self, name: str, index: str | None) -> tuple[list[str] | None, bool]:
        if name in ("@", "*"):
            return [], True
        if self.counts_uses:
            self.unused.discard(name)
        values, is_each = self.values.get(name), index in ("[@]", "[*]")
        if values is None or is_each:
            return values, is_each
        return (values[:1] or [""] if index is None else values[int(index[1:-1]) :][:1]), False

    def _tested(self, values: list[str] | None, test: str, word: str, depth: int) -> list[str] | None:
        """Return the words of ``${name:-word}`` and the like."""
        is_set = values is not None and (any(values) or ":" not in test)
        if test.endswith("?"):
            return values if is_set else None
        if is_set != test.endswith("+"):
            return values if is_set else []
        return self.expand(word, splits=False, depth=depth + 1)

    def compute(self, text: str) -> int | None:
        """Return the value of an arithmetic expression; None if it is not known."""
        words = " ".join(self.expand(text, splits=False)) if "$" in text else text
        named = re.sub(r"[A-Za-z_]\w*", lambda name: " ".join(self._get(name[0], None)[0] or [name[0]]), words)
        if len(named) > MAX_FORMULA:
            return None
        try:
            return _number(ast.parse(named.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _number(node: Any) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
            type(op) in OPERATORS
        ):
            number = int(OPERATORS[type(op)](_number(left), _number(right)))
            if abs(number) < MAX_NUMBER:
                return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
    raise ValueError(ast.dump(node))
