"""Commands of a shell script, with variables replaced; its statements are followed but not run."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from rlpipe.configs.foreign.shell_variables import Variables
from rlpipe.configs.foreign.shell_words import ArrayWord, Statement, read_statements

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
DECLARING = ("export", "declare", "local", "readonly", "typeset")
PREFIXES = ("do", "{", "}", "!", "time")
LOOPS = ("for", "select", "while", "until")
TESTS = ("[", "[[", "test")
UNSET = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
"""A variable that the script does not set, which stays as it is and is empty in conditions."""
PLACED = re.compile(r"\$\{?(?:\d+|[#?!$])\}?")
"""Arguments of the script, which are empty in conditions."""
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
LOOP = "a loop: what is in it is read once, and a variable of it has its first value"


@dataclass(kw_only=True)
class Branches:
    """An ``if`` or a ``case`` that is open."""

    subject: str | None = None
    """The text that a ``case`` compares with its patterns."""
    runs: bool = True
    """Whether its current branch runs."""
    has_run: bool = False
    is_condition: bool = True
    """Whether the condition, or the patterns, of its next branch are being read."""
    conditions: list[bool] = field(default_factory=list)
    joined_by: str = ""

    def choose(self, holds: bool) -> None:
        self.runs, self.has_run = holds and not self.has_run, self.has_run or holds
        self.is_condition, self.conditions, self.joined_by = False, [], ""


@dataclass(kw_only=True, frozen=True)
class ShellCommand:
    """The words of a command."""

    words: Sequence[str]
    runs: bool
    """False in a branch that is not taken, where variables may have other values."""


class Script:
    """The commands of a script, its variables, and those that it exports.

    Variables that it does not set stay as they are, such as ``$HOME``. Branches of conditions that can't be evaluated
    count as taken, and their ``else`` does not; a loop and a function are read once, where they are.
    """

    def __init__(self, text: str) -> None:
        self.commands: list[ShellCommand] = []
        self.exported: list[str] = []
        self.notes: list[tuple[str, str]] = []
        """Statements that are not followed as a shell does, each with what is done instead."""
        self.variables = Variables()
        self._open: list[Branches] = []
        self._joined_by = ""
        """End of the statement before."""
        self._status: bool | None = None
        """Whether the statement before succeeded, if that is known."""
        for statement in read_statements(text):
            self._follow(statement)

    def _follow(self, statement: Statement) -> None:
        words = list(statement.words)
        while words and (rest := self._keyword(words)) is not None:
            words = rest
        top = self._open[-1] if self._open else None
        if top is not None and top.is_condition and words:
            self.variables.counts_uses = True
            self._read_condition(top, words, statement.end)
        elif words and statement.end != "()":
            self._run_joined(words, statement)
        if top is not None and top.subject is not None and statement.end in (";;", ";&", ";;&"):
            top.is_condition = True

    def _run_joined(self, words: list[str | ArrayWord], statement: Statement) -> None:
        """Run a statement, unless it follows a condition, or an assignment, that says otherwise by ``&&`` or ``||``."""
        runs = self._status is None or self._status is {"&&": True, "||": False}.get(self._joined_by, self._status)
        self._run(words, statement.heredoc, runs=runs)
        if runs:
            is_condition = words[0] in TESTS or str(words[0]).startswith("((")
            assigns = all(isinstance(word, ArrayWord) or ASSIGNMENT.fullmatch(word) for word in words)
            self._status = self._holds(words) if is_condition else True if assigns else None
        self._joined_by = statement.end

    def _read_condition(self, top: Branches, words: Sequence[str | ArrayWord], end: str) -> None:
        if top.subject is None:
            top.conditions.append(self._holds(words))
            top.joined_by = top.joined_by or end
            return
        patterns = [self.variables.text(word) for word in words if isinstance(word, str)]
        top.conditions += [fnmatchcase(top.subject, pattern) for pattern in patterns]
        if end == ")":
            top.choose(any(top.conditions))

    def _keyword(self, words: list[str | ArrayWord]) -> list[str | ArrayWord] | None:
        """Follow the keyword that begins a statement, and return the words after it; None if there is no keyword."""
        match words[0]:
            case "if":
                self._open.append(Branches())
            case "elif" if self._open:
                self._open[-1].is_condition = True
            case "then" if self._open:
                top = self._open[-1]
                top.choose(any(top.conditions) if top.joined_by == "||" else all(top.conditions))
            case "else" if self._open:
                self._open[-1].choose(True)
            case "fi" | "esac":
                self._open = self._open[:-1]
            case "case" if len(words) > 1 and isinstance(words[1], str):
                self._open.append(Branches(subject=PLACED.sub("", self.variables.text(words[1]))))
                return words[3:]
            case "function" | "done":
                return []
            case str(name) if name in LOOPS:
                self.notes.append((_shown(words), LOOP))
                if len(words) > 3 and words[2] == "in" and isinstance(words[1], str) and isinstance(words[3], str):
                    self.variables.assign(words[1], self.variables.words(words[3])[:1])
                return []
            case str(name) if name in PREFIXES:
                pass
            case _:
                return None
        return words[1:]

    def _run(self, words: list[str | ArrayWord], heredoc: str | None, *, runs: bool = True) -> None:
        """Assign variables, or list a command."""
        runs = self.variables.counts_uses = runs and all(branches.runs for branches in self._open)
        declares = words[0] in DECLARING
        rest = words[1:] if declares else words
        keeps = declares or all(isinstance(word, ArrayWord) or ASSIGNMENT.fullmatch(word) for word in rest)
        while rest and self._assign(rest[0], runs=runs, exports=words[0] == "export", keeps=keeps):
            rest = rest[1:]
        if declares or not rest:
            return
        spread = [text for word in rest if isinstance(word, str) for text in self.variables.words(word)]
        if spread[:1] == ["read"] and heredoc is not None:
            self.variables.assign(spread[-1], [self.variables.heredoc(heredoc)])
        elif spread:
            self.commands.append(ShellCommand(words=spread, runs=runs))

    def _assign(self, word: str | ArrayWord, *, runs: bool, exports: bool, keeps: bool) -> bool:
        """Set a variable if the word assigns one; an assignment before a command holds for that command alone."""
        if isinstance(word, ArrayWord):
            name, appends = word.name, word.appends
            values = [text for item in word.items for text in self.variables.words(item)]
        elif (match := ASSIGNMENT.fullmatch(word)) is not None:
            name, appends = match[1], False
            values = [self.variables.text(match[3])]
            if match[2] and keeps:
                first, *rest = self.variables.values.get(name, [""])
                values = [first + values[0], *rest]
                self.variables.unused.discard(name)
            if exports or not keeps:
                self.exported.append(f"{name}={values[0]}")
        else:
            return False
        if runs and keeps:
            self.variables.assign(name, values, appends=appends)
        return True

    def _holds(self, raw: Sequence[str | ArrayWord]) -> bool:
        words = [PLACED.sub("", self.variables.text(word)) for word in raw if isinstance(word, str)]
        if len(words) == 1 and words[0].startswith("((") and words[0].endswith("))"):
            number = self.variables.compute(words[0][2:-2])
            return number is None or bool(number)
        words = [word for word in words if word not in (*TESTS, "]", "]]")]
        if words[-2:-1] in (["-z"], ["-n"]):
            words[-1] = UNSET.sub("", words[-1])
        return holds(words)


def holds(words: Sequence[str]) -> bool:
    """Return whether a condition is true; one that can't be evaluated counts as true."""
    match words:
        case ["!", *rest]:
            return not holds(rest)
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [left, "==" | "=", right]:
            return fnmatchcase(left, right)
        case [left, "!=", right]:
            return not fnmatchcase(left, right)
        case [left, name, right] if name in COMPARISONS and left.isdigit() and right.isdigit():
            return COMPARISONS[name](int(left), int(right))
    return True


def _shown(words: Sequence[str | ArrayWord]) -> str:
    return " ".join(word if isinstance(word, str) else f"{word.name}=(...)" for word in words)
