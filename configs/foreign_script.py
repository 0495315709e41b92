"""Follows the statements of a shell script without running them, and lists its commands with variables replaced."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from rlpipe.configs.foreign_shell import ArrayWord, Statement, Word, read_statements
from rlpipe.configs.foreign_variables import Variables

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
DECLARING = ("export", "declare", "local", "readonly", "typeset")
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


@dataclass(kw_only=True)
class Block:
    """An ``if``, a ``case`` or a loop that is open."""

    kind: str
    runs: bool = True
    """Whether its current branch runs."""
    has_run: bool = False
    subject: str = ""
    """The text that a ``case`` compares with its patterns."""
    conditions: list[bool] = field(default_factory=list)
    joined_by: str = ""
    patterns: list[str] | None = None
    """Patterns of a branch of a ``case`` that has not begun yet."""

    def decide(self) -> None:
        """Begin the branch that the conditions guard."""
        holds = any(self.conditions) if self.joined_by == "||" else all(self.conditions)
        self.choose(holds)
        self.conditions, self.joined_by = [], ""

    def choose(self, holds: bool) -> None:
        self.runs = holds and not self.has_run
        self.has_run = self.has_run or holds


@dataclass(kw_only=True, frozen=True)
class ShellCommand:
    """The words of a command."""

    words: Sequence[str]
    runs: bool
    """False in a branch that is not taken, where variables may have other values."""


class Script:
    """The commands of a script, its variables, and those that it exports.

    Variables that it does not set stay as they are, such as ``$HOME``. Branches of conditions that can't be evaluated
    count as taken, and their ``else`` does not; a loop and a function run once.
    """

    def __init__(self, text: str) -> None:
        self.commands: list[ShellCommand] = []
        self.exported: list[str] = []
        self.variables = Variables()
        self._blocks: list[Block] = []
        self._guarded: Block | None = None
        """The ``if`` or loop whose condition is being read."""
        for statement in read_statements(text):
            self._follow(statement)

    def _follow(self, statement: Statement) -> None:
        words = list(statement.words)
        top = self._blocks[-1] if self._blocks else None
        if top is not None and top.patterns is not None and words[:1] != ["esac"]:
            self._read_pattern(top, words, statement.end)
            return
        while words and (rest := self._keyword(words, statement)) is not None:
            words = rest
        if words and self._guarded is not None:
            self.variables.counts_uses = True
            self._guarded.conditions.append(self._holds([word for word in words if isinstance(word, str)]))
            self._guarded.joined_by = self._guarded.joined_by or statement.end
        elif words and statement.end != "()":
            self._run(words, statement.heredoc)
        if statement.end in (";;", ";&", ";;&") and self._blocks and self._blocks[-1].kind == "case":
            self._blocks[-1].patterns = []

    def _read_pattern(self, block: Block, words: Sequence[Word], end: str) -> None:
        assert block.patterns is not None
        block.patterns += [self.variables.text(word) for word in words if isinstance(word, str)]
        if end == ")":
            block.choose(any(fnmatchcase(block.subject, pattern) for pattern in block.patterns))
            block.patterns = None

    def _keyword(self, words: list[Word], statement: Statement) -> list[Word] | None:
        """Follow the keyword that begins a statement, and return the words after it; None if there is no keyword."""
        match words[0]:
            case "if" | "while" | "until":
                self._guarded = Block(kind="if" if words[0] == "if" else "loop")
                self._blocks.append(self._guarded)
            case "elif" if self._blocks:
                self._guarded = self._blocks[-1]
            case "then" | "do":
                if self._guarded is not None and self._guarded.kind == "if":
                    self._guarded.decide()
                self._guarded = None
            case "else" if self._blocks:
                self._blocks[-1].choose(True)
            case "fi" | "done" | "esac":
                self._blocks = self._blocks[:-1]
                return []
            case "for" | "select":
                self._blocks.append(Block(kind="loop"))
                self._set_loop_variable(words)
                return []
            case "case":
                subject = self.variables.text(words[1]) if len(words) > 1 and isinstance(words[1], str) else ""
                self._blocks.append(Block(kind="case", subject=PLACED.sub("", subject), runs=False, patterns=[]))
                if len(words) > 3:
                    self._read_pattern(self._blocks[-1], words[3:], statement.end)
                return []
            case "function":
                return []
            case "{" | "}" | "!" | "time":
                pass
            case _:
                return None
        return words[1:]

    def _set_loop_variable(self, words: Sequence[Word]) -> None:
        if len(words) > 3 and words[2] == "in" and isinstance(words[1], str) and isinstance(words[3], str):
            self.variables.assign(words[1], self.variables.expand(words[3])[:1])

    def _run(self, words: Sequence[Word], heredoc: str | None) -> None:
        """Assign variables, or list a command."""
        runs = self.variables.counts_uses = all(block.runs for block in self._blocks)
        declares = words[0] in DECLARING
        rest = list(words[1:] if declares else words)
        keeps = declares or all(isinstance(word, ArrayWord) or ASSIGNMENT.fullmatch(word) for word in rest)
        while rest and self._assign(rest[0], runs=runs, exports=words[0] == "export", keeps=keeps):
            rest = rest[1:]
        if declares or not rest:
            return
        spread = [text for word in rest if isinstance(word, str) for text in self.variables.expand(word)]
        if spread[:1] == ["read"] and heredoc is not None:
            # A body with "$VARIABLE" is expanded as between double quotes, and later split where it is used.
            body = self.variables.expand('"' + heredoc.replace("\\\n", " ").replace('"', '\\"') + '"', splits=False)
            self.variables.assign(spread[-1], [" ".join(body)])
        elif spread:
            self.commands.append(ShellCommand(words=spread, runs=runs))

    def _assign(self, word: Word, *, runs: bool, exports: bool, keeps: bool) -> bool:
        """Set a variable if a word does; one before a command is of that command alone."""
        if isinstance(word, ArrayWord):
            values = [text for item in word.items for text in self.variables.expand(item)]
            if runs:
                self.variables.assign(word.name, values, appends=word.appends)
            return True
        found = ASSIGNMENT.fullmatch(word)
        if found is None:
            return False
        value = self.variables.text(found[3])
        if exports or not keeps:
            self.exported.append(f"{found[1]}={value}")
        if runs and keeps:
            self.variables.assign(found[1], [value], appends=bool(found[2]), joins=True)
        return True

    def _holds(self, raw: Sequence[str]) -> bool:
        """Return whether a condition is true; one that can't be evaluated counts as true."""
        words = [PLACED.sub("", " ".join(self.variables.expand(word, splits=False))) for word in raw]
        if len(words) == 1 and words[0].startswith("((") and words[0].endswith("))"):
            number = self.variables.compute(words[0][2:-2])
            return number is None or bool(number)
        if words and words[0] in ("[", "[[", "test"):
            words = [word for word in words[1:] if word not in ("]", "]]")]
        match words:
            case ["!", *rest]:
                return not self._holds(["[", *map(_quoted, rest), "]"])
            case ["-z", text]:
                return not text or "$" not in text
            case ["-n", text]:
                return bool(text)
            case [left, "==" | "=", right]:
                return fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatchcase(left, right)
            case [left, name, right] if name in COMPARISONS and left.isdigit() and right.isdigit():
                return COMPARISONS[name](int(left), int(right))
        return True


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
