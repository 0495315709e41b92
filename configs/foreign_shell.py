"""Splits a shell script into statements of words, in one pass, without running or expanding anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rlpipe.errors import ConfigError

MAX_NESTING = 40
PLAIN = re.compile(r"[^\s\\'\"$`#;&|()<>]+")
UNQUOTED = re.compile(r"[^\"\\$`]+")
ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
REDIRECTION = re.compile(r"<<<|<<-?|[<>]&|<>|>>|>\||[<>]")
DELIMITER = re.compile(r"[ \t]*(\\?)(['\"]?)([\w.+-]+)\2")
SEPARATOR = re.compile(r";;&?|;&|;|&&|&|\|\||\|&?|\)|\n")


@dataclass(kw_only=True, frozen=True)
class ArrayWord:
    """An assignment ``name=(item ...)``, whose items are words with their quotes."""

    name: str
    appends: bool
    items: tuple[str, ...]


Word = str | ArrayWord


@dataclass(kw_only=True, frozen=True)
class Statement:
    """The words of a command, with their quotes, what ended it, and the text of its here-document."""

    words: tuple[Word, ...]
    end: str
    heredoc: str | None = None


def end_of_quotes(text: str, at: int, depth: int = 0) -> int:
    """Return the place after double quotes that begin at ``at``."""
    start, at = at, at + 1
    while at < len(text):
        if (plain := UNQUOTED.match(text, at)) is not None:
            at = plain.end()
        elif text[at] == '"':
            return at + 1
        elif text[at] == "\\":
            at += 2
        else:
            at = end_of_parameter(text, at, depth + 1)
    raise unfinished(text, start, 'the quote "')


def end_of_single(text: str, at: int) -> int:
    """Return the place after single quotes that begin at ``at``."""
    end = text.find("'", at + 1)
    if end < 0:
        raise unfinished(text, at, "the quote '")
    return end + 1


def end_of_parameter(text: str, at: int, depth: int = 0) -> int:
    """Return the place after ``${...}``, ``$(...)`` or backquotes that begin at ``at``; after ``$`` if none do."""
    if depth > MAX_NESTING:
        raise ConfigError(f"line {_line(text, at)}: nested more than {MAX_NESTING} levels deep; simplify it")
    if text[at] == "`":
        end = text.find("`", at + 1)
        if end < 0:
            raise unfinished(text, at, "the backquote `")
        return end + 1
    if text.startswith("$(", at):
        return _end_of_parentheses(text, at + 1, depth)
    return _end_of_braces(text, at + 1, depth) if text.startswith("${", at) else at + 1


def _end_of_braces(text: str, at: int, depth: int) -> int:
    start, at = at, at + 1
    while at < len(text):
        if text[at] == "}":
            return at + 1
        if text[at] == '"':
            at = end_of_quotes(text, at, depth + 1)
        elif text[at] in "$`":
            at = end_of_parameter(text, at, depth + 1)
        else:
            at += 2 if text[at] == "\\" else 1
    raise unfinished(text, start, "${")


def _end_of_parentheses(text: str, at: int, depth: int) -> int:
    start, opened = at, 0
    while at < len(text):
        char = text[at]
        if char in "()":
            opened += 1 if char == "(" else -1
            at += 1
            if not opened:
                return at
        elif char == "'":
            at = end_of_single(text, at)
        elif char == '"':
            at = end_of_quotes(text, at, depth + 1)
        elif char in "$`":
            at = end_of_parameter(text, at, depth + 1)
        elif char == "#" and text[at - 1].isspace():
            at = _end_of_line(text, at)
        elif text.startswith("<<", at) and (named := DELIMITER.match(text, at + 2)) is not None:
            _, at = read_heredoc(text, _end_of_line(text, at) + 1, named[3])
        else:
            at += 2 if char == "\\" else 1
    raise unfinished(text, start, "the parenthesis (")


def read_heredoc(text: str, at: int, delimiter: str) -> tuple[str, int]:
    """Return a here-document that begins at ``at``, and the place after it."""
    end = re.compile(rf"^\t*{re.escape(delimiter)}[ \t]*$", re.MULTILINE).search(text, at)
    return (text[at:], len(text)) if end is None else (text[at : end.start()], min(end.end() + 1, len(text)))


def _end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def unfinished(text: str, at: int, what: str) -> ConfigError:
    return ConfigError(f"line {_line(text, at)}: {what} that opens here is never closed; close it")


def read_statements(text: str) -> Iterator[Statement]:
    """Yield the statements of a script; raise ``ConfigError`` with the line of a quote that is never closed."""
    return Scanner(text.replace("\r\n", "\n")).scan()


class Scanner:
    """The place in a script, and the word and the statement that have begun there."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._parts: list[str] = []
        self._words: list[Word] = []
        self._delimiters: list[str] = []
        self._drops_word = False
        """Whether the next word is the target of a redirection."""
        self._continues = False
        """Whether there was only space since a backslash at the end of a line."""

    def scan(self) -> Iterator[Statement]:
        while self._at < len(self._text):
            if (plain := PLAIN.match(self._text, self._at)) is not None:
                self._add(plain.end())
            elif (found := self._step()) is not None:
                yield found
        self._end_word()
        if self._words:
            yield Statement(words=tuple(self._words), end="\n")

    def _step(self) -> Statement | None:
        """Go past a special character; return the statement that it ends."""
        text, at = self._text, self._at
        char = text[at]
        if text.startswith("\\\n", at):
            self._at, self._continues = at + 2, True
        elif char == "\\":
            self._add(at + 2)
        elif char == "'":
            self._add(end_of_single(text, at))
        elif char == '"':
            self._add(end_of_quotes(text, at))
        elif char in "$`":
            self._add(end_of_parameter(text, at))
        elif char == "#":
            self._skip_comment()
        elif char in " \t\r\f\v":
            self._at = at + 1
            self._end_word()
        elif char == "(":
            return self._open_parenthesis()
        elif char in "<>" or text.startswith("&>", at):
            self._skip_redirection()
        elif (separator := SEPARATOR.match(text, at)) is not None:
            self._at = separator.end()
            return self._end_statement(separator[0])
        else:  # a space of another alphabet
            self._add(at + 1)
        return None

    def _add(self, end: int) -> None:
        self._parts.append(self._text[self._at : end])
        self._at, self._continues = end, False

    def _skip_comment(self) -> None:
        """Skip a comment; one between lines that a backslash joins does not end the command, as its author meant."""
        if self._parts:
            self._add(self._at + 1)
            return
        self._at = _end_of_line(self._text, self._at)
        if self._continues:
            self._at += 1

    def _skip_redirection(self) -> None:
        if "".join(self._parts).isdigit():
            self._parts = []
        self._end_word()
        at = self._at + (self._text[self._at] == "&")
        operator = REDIRECTION.match(self._text, at)
        assert operator is not None
        self._at = operator.end()
        named = DELIMITER.match(self._text, self._at) if operator[0] in ("<<", "<<-") else None
        if named is not None:
            self._delimiters.append(named[3])
            self._at = named.end()
        elif self._text.startswith("(", self._at):
            self._at = _end_of_parentheses(self._text, self._at, 0)
        else:
            self._drops_word = True

    def _open_parenthesis(self) -> Statement | None:
        """Read an array, an arithmetic command, or the parentheses of a function or a subshell."""
        name = ARRAY.fullmatch("".join(self._parts))
        if name is not None:
            self._read_array(name)
        elif not self._parts and self._text.startswith("((", self._at):
            self._add(_end_of_parentheses(self._text, self._at, 0))
        elif self._parts and self._text.startswith("()", self._at):
            self._at += 2
            return self._end_statement("()")
        else:
            self._at += 1
            return self._end_statement("(")
        return None

    def _read_array(self, name: re.Match[str]) -> None:
        end = _end_of_parentheses(self._text, self._at, 0)
        inside = read_statements(self._text[self._at + 1 : end - 1])
        items = tuple(word for statement in inside for word in statement.words if isinstance(word, str))
        self._words.append(ArrayWord(name=name[1], appends=bool(name[2]), items=items))
        self._at, self._parts = end, []

    def _end_word(self) -> None:
        if not self._parts:
            return
        if not self._drops_word:
            self._words.append("".join(self._parts))
        self._parts, self._drops_word = [], False

    def _end_statement(self, end: str) -> Statement | None:
        self._end_word()
        self._continues = False
        heredoc = None
        if end == "\n":
            for delimiter in self._delimiters:
                heredoc, self._at = read_heredoc(self._text, self._at, delimiter)
            self._delimiters = []
        words, self._words = tuple(self._words), []
        return Statement(words=words, end=end, heredoc=heredoc) if words or end not in ("\n", ";", "(") else None
