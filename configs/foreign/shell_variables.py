"""Expansion of variables, arrays and arithmetic in the words of a shell script; commands are never run."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.configs.foreign.shell_words import with_grammar
from rlpipe.errors import ConfigError

MAX_CHARACTERS = 4_000_000
"""Characters that all expansions of a script may make together."""
MAX_NESTING = 40
MAX_NUMBER = 2**63
MAX_FORMULA = 300
DOLLAR = r"""\$(?P<variable>[A-Za-z_]\w*+|[@*]) | \$\(\((?P<formula>(?&inside))\)\) | \$\{(?P<braces>(?&braced))\}
    | (?P<other>(?&parameter)|.)"""
UNQUOTED = with_grammar(rf"""(?P<plain>[^\\'"$`]++) | '(?P<literal>[^']*+)' | \$?"(?P<text>(?&quoted))"
    | \$'(?P<ansi>(?:[^'\\]++|\\.)*+)'
    | \\(?P<escaped>.?) | {DOLLAR}""")
QUOTED = with_grammar(rf"""(?P<plain>[^\\$`]++|\\(?![\\"$`\n]).?) | \\(?P<escaped>.) | {DOLLAR}""")
BRACED = re.compile(
    r"(?P<name>[A-Za-z_]\w*|[@*])(?:\[(?P<index>[@*]|\d+)\])?(?:(?P<test>:?[-=?+])(?P<word>.*))?", re.DOTALL
)
ESCAPE = re.compile(r"\\(?:x(?P<hex>[0-9a-fA-F]{1,2})|(?P<octal>[0-7]{1,3})|(?P<letter>.))", re.DOTALL)
CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}
"""Characters that a backslash and a letter stand for in ``$'...'``."""
BREAK, WORD = "\0", "\1"
"""Positions at which a word ends, and at which there is one even if it is empty."""
OPERATORS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


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

    def assign(self, name: str, values: Sequence[str], *, appends: bool = False) -> None:
        """Set a variable, or add to it: elements to an array."""
        before = self.values.get(name, [])
        if name in self.unused and not appends and any(before):
            self.replaced.append((name, " ".join(before)))
        self.unused.add(name)
        self.values[name] = [*before, *values] if appends else list(values)

    def text(self, raw: str, depth: int = 0) -> str:
        """Return a word as one text, as an assignment takes it."""
        return self._expand(raw, depth, splits=False).replace(BREAK, " ").replace(WORD, "")

    def words(self, raw: str) -> list[str]:
        """Return the words that a word with quotes makes; variables that are not set stay as they are."""
        return [word.replace(WORD, "") for word in self._expand(raw, 0, splits=True).split(BREAK) if word]

    def heredoc(self, body: str) -> str:
        """Return the text of a here-document, in which quotes are nothing special."""
        return self._expand(body.replace("\\\n", " "), 0, is_quoted=True, splits=False).replace(WORD, "")

    def _expand(self, raw: str, depth: int, *, splits: bool, is_quoted: bool = False) -> str:
        """Return a word with its expansions replaced; with ``splits``, spaces in a value separate words."""
        if depth > MAX_NESTING:
            raise ConfigError(f"variables are nested more than {MAX_NESTING} levels deep; simplify them")
        if raw.startswith("~/") and not is_quoted:
            raw = f"$HOME{raw[1:]}"
        expanded = []
        for piece in (QUOTED if is_quoted else UNQUOTED).finditer(raw):
            literal, inside, ansi = (None,) * 3 if is_quoted else piece.group("literal", "text", "ansi")
            if inside is not None:
                expanded.append(self._expand(inside, depth + 1, is_quoted=True, splits=False) if inside else WORD)
            elif piece["variable"] or piece["formula"] or piece["braces"]:
                expanded.append(self._value(piece, depth, splits=splits, is_quoted=is_quoted))
            elif literal is not None or ansi is not None:
                expanded.append(WORD + (literal or ESCAPE.sub(_unescaped, ansi or "")))
            else:
                expanded.append(piece["plain"] or piece["other"] or (piece["escaped"] or "").replace("\n", ""))
        text = "".join(expanded)
        self._spent += len(text)
        if self._spent > MAX_CHARACTERS:
            raise ConfigError(f"its variables make more than {MAX_CHARACTERS:,} characters; write the command out")
        return text

    def _value(self, piece: Any, depth: int, *, splits: bool, is_quoted: bool) -> str:
        """Return what a variable or a formula stands for, or the piece itself if that is not known."""
        values, keeps_words = self._words_of(piece, depth)
        if values is None:
            return str(piece[0])
        if splits and not any("$(" in value or "`" in value for value in values):
            return re.sub(r"\s+", BREAK, BREAK.join(values))
        start = WORD if is_quoted else ""
        return BREAK.join(start + value for value in values) if keeps_words else start + " ".join(values)

    def _words_of(self, piece: Any, depth: int) -> tuple[list[str] | None, bool]:
        """Return the words that a piece stands for, or None if they are not known, and whether each stays a word."""
        if piece["formula"] is not None:
            number = self.compute(piece["formula"])
            return (None if number is None else [str(number)]), False
        match = BRACED.fullmatch(piece["braces"] or piece["variable"])
        if match is None:
            return None, False
        values, keeps_words = self._get(match["name"], match["index"])
        if not (test := match["test"]):
            return values, keeps_words
        is_set = values is not None and (any(values) or ":" not in test)
        if test.endswith("?"):
            return (values if is_set else None), keeps_words
        if is_set != test.endswith("+"):
            return (values if is_set else []), keeps_words
        return [self.text(match["word"], depth + 1)], keeps_words

    def _get(self, name: str, index: str | None = None) -> tuple[list[str] | None, bool]:
        if name in ("@", "*"):
            return [], True
        if self.counts_uses:
            self.unused.discard(name)
        values, keeps_words = self.values.get(name), index in ("@", "*")
        if values is None or keeps_words:
            return values, keeps_words
        return values[int(index or 0) :][:1] or [""], False

    def compute(self, formula: str) -> int | None:
        """Return the value of an arithmetic expression; None if it is not known."""
        text = self.text(formula) if "$" in formula else formula
        named = re.sub(r"[A-Za-z_]\w*", lambda name: " ".join(self._get(name[0])[0] or [name[0]]), text)
        if len(named) > MAX_FORMULA:
            return None
        try:
            return _number(ast.parse(named.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _unescaped(escape: re.Match[str]) -> str:
    """Return the character that an escape in ``$'...'`` stands for; the escape itself if none is known."""
    digits = escape["hex"] or escape["octal"]
    if digits:
        number = int(digits, 16 if escape["hex"] else 8)
        return chr(number) if number > ord(WORD) else ""
    letter = escape["letter"]
    return letter if letter in "\\'\"?" else CONTROLS.get(letter, escape[0])


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
