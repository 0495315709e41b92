"""Reads the commands of a shell script without running it: variables, arrays, arithmetic, and simple conditions."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping

ASSIGNMENT = re.compile(
    r"\s*(?:export\s+|declare\s+(?:-\w+\s+)?|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL
)
WHOLE_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
ARITHMETIC = re.compile(r"\$\(\((.*?)\)\)")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")
CONDITION = re.compile(r"\[\[?\s+(.*?)\s+(==|=|!=)\s+(.*?)\s+\]\]?")
ENDS = re.compile(r"\|\|?|&&?|;|[0-9]*[<>]{1,2}&?[\w./-]*")
"""Words after which a command's arguments are over."""
MAX_DEPTH = 8
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def read_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command, with variables replaced by what the script assigns to them.

    Variables that it does not assign stay as they are, such as ``$HOME``. Branches of conditions that can't be
    evaluated count as taken; their ``else`` does not.
    """
    variables: dict[str, str] = {}
    branches: list[bool | None] = []
    """Whether each open ``if`` is in a branch that runs; None if an earlier branch of it has run."""
    for line in logical_lines(text):
        word = line.split(maxsplit=1)[0].rstrip(";") if line.split() else ""
        if word == "if":
            branches.append(_holds(line, variables))
        elif word in ("elif", "else") and branches:
            is_over = branches[-1] is not False
            branches[-1] = None if is_over else word == "else" or _holds(line, variables)
        elif word == "fi" and branches:
            branches.pop()
        elif all(branches):
            if (found := ASSIGNMENT.fullmatch(line)) is not None and not _has_command(found[3]):
                _assign(variables, found[1], bool(found[2]), found[3].strip())
            else:
                yield _words(expand(line, variables))


def logical_lines(text: str) -> Iterator[str]:
    """Yield the lines without comments, joined where a backslash, quotes or an array's parentheses go on."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = ""
    for line in lines:
        joined += line
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
        elif _is_open(joined):
            joined += "\n"
        else:
            yield joined
            joined = ""
    if joined.strip():
        yield joined


def _is_open(text: str) -> bool:
    """Return whether quotes, or an array's parentheses, are still open."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    found = ASSIGNMENT.fullmatch(text)
    return found is not None and found[3].lstrip().startswith("(") and not found[3].rstrip().endswith(")")


def _has_command(value: str) -> bool:
    """Return whether words follow an assignment's value, as in ``NAME=value command``."""
    if value.lstrip().startswith(("(", "$((", '"$((')):
        return False
    try:
        return len(shlex.split(value, comments=True)) > 1
    except ValueError:
        return False


def _assign(variables: dict[str, str], name: str, appends: bool, value: str) -> None:
    is_array = value.startswith("(") and value.endswith(")")
    if is_array:
        value = expand(value[1:-1], variables)
    else:
        try:
            value = " ".join(shlex.split(expand(value, variables), comments=True))
        except ValueError:
            return
    variables[name] = f"{variables.get(name, '')} {value}" if appends else value


def expand(text: str, variables: Mapping[str, str], depth: int = 0) -> str:
    """Replace variables and arithmetic, except between single quotes."""
    if depth == MAX_DEPTH:
        return text
    parts = re.split(r"('[^']*')", WHOLE_ARRAY.sub(lambda found: variables.get(found[1], found[0]), text))
    return "".join(part if part.startswith("'") else _expand(part, variables) for part in parts)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        name, default = found[1] or found[3], found[2]
        return variables.get(name, found[0] if default is None else expand(default, variables))

    def compute(found: re.Match[str]) -> str:
        # Names in arithmetic need no dollar.
        named = VARIABLE.sub(lambda name: name[1] or name[3], found[1])
        number = _compute(re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), named))
        return found[0] if number is None else str(number)

    return VARIABLE.sub(value, ARITHMETIC.sub(compute, text))


def _compute(text: str) -> int | None:
    try:
        return _number(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _number(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError(ast.dump(node))


def _holds(line: str, variables: Mapping[str, str]) -> bool:
    """Return whether a condition is true; one that is no comparison of texts counts as true."""
    found = CONDITION.search(expand(line, variables))
    if found is None:
        return True
    left, right = (text.strip("\"'") for text in (found[1], found[3]))
    return (left == right) == (found[2] != "!=")


def _words(text: str) -> list[str]:
    """Return the words of a command up to a pipe, a redirection or the next command."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return []
    ends = (index for index, word in enumerate(words) if ENDS.fullmatch(word))
    return words[: next(ends, len(words))]
