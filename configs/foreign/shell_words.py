"""Splitting of a shell script into statements of words, without running or expanding anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import regex

from rlpipe.errors import ConfigError

GRAMMAR = r"""(?(DEFINE)
    (?P<single>'[^']*+'|\$'(?:[^'\\]++|\\.)*+')
    (?P<double>"(?&quoted)")
    (?P<quoted>(?:[^"\\$`]++|\\.|(?&parameter)|\$(?![({]))*+)
    (?P<parameter>\$\{(?&braced)\}|\$\((?&inside)\)|`[^`]*+`)
    (?P<braced>(?:[^}"\\$`]++|\\.|(?&double)|(?&parameter)|\$(?![({]))*+)
    (?P<inside>(?:[^()'"\\$`\#]++|(?<=[\s(])\#[^\n]*+|(?<![\s(])\#|\\.|(?&single)|(?&double)|(?&parameter)
        |\$(?![({])|\((?&inside)\))*+)
)"""
"""Quotes, expansions and parentheses, which may be inside each other."""
TOKEN = r"""(?P<space>(?:\\\n(?:[ \t]*+\#[^\n]*+\n)*+|[ \t\r\f\v]++|\#[^\n]*+)++)
    | (?P<name>[A-Za-z_]\w*+)(?P<appends>\+?)=\((?P<items>(?&inside))\)
    | <<-?+[ \t]*+\\?(?P<quote>['"]?)(?P<delimiter>[\w.+-]++)(?P=quote)
    | [<>]\((?&inside)\)
    | (?P<redirection>(?:\d++(?=[<>])|&(?=>))?(?:<<<|<<-?|[<>]&|<>|>>|>\||[<>]))
    | (?P<end>\(\)|;;&?|;&|;|&&|&|\|\||\|&?|\((?!\()|\)|\n)
    | (?P<word>\(\((?&inside)\)\)|(?:[^\s\\'"$`;&|()<>]++|\\(?!\n).?|\\\n(?=\S)|(?&single)|(?&double)|(?&parameter)
        |\$(?![({])|[^\S\n\t\r\f\v ])++)"""
"""Parts of a statement; a comment between joined lines does not end the command, as its author meant."""
MAX_SECONDS = 5
"""Time for one part; only thousands of brackets inside each other take longer."""
OPENING = {"'": "the quote '", '"': 'the quote "', "`": "the backquote `", "(": "the parenthesis ("}


@dataclass(kw_only=True, frozen=True)
class ArrayWord:
    """An assignment ``name=(item ...)``, whose items are words with their quotes."""

    name: str
    appends: bool
    items: tuple[str, ...]


@dataclass(kw_only=True, frozen=True)
class Statement:
    """The words of a command, with their quotes, what ended it, and the text of its here-document."""

    words: tuple[str | ArrayWord, ...]
    end: str
    heredoc: str | None = None


def with_grammar(pattern: str) -> regex.Pattern[str]:
    return regex.compile(pattern + GRAMMAR, regex.DOTALL | regex.VERBOSE)


_token = with_grammar(TOKEN)


def read_statements(text: str) -> Iterator[Statement]:
    """Yield the statements of a script; raise ``ConfigError`` with the line of a quote that is never closed."""
    text, position = text.replace("\r\n", "\n"), 0
    words: list[str | ArrayWord] = []
    delimiters: list[str] = []
    drops_word = False
    while position < len(text):
        token = _next_token(text, position)
        if token is None or (token["end"] == "(" and text[position - 1 : position] in ("=", "<", ">")):
            raise _unfinished(text, position)
        position = token.end()
        if token["name"]:
            items = tuple(item["word"] for item in _token.finditer(token["items"]) if item["word"])
            words.append(ArrayWord(name=token["name"], appends=bool(token["appends"]), items=items))
        elif token["word"] and not drops_word:
            words.append(token["word"])
        elif token["delimiter"]:
            delimiters.append(token["delimiter"])
        if not token["space"]:
            drops_word = bool(token["redirection"])
        if token["end"]:
            heredoc = None
            for delimiter in delimiters if token["end"] == "\n" else ():
                heredoc, position = _read_heredoc(text, position, delimiter)
            delimiters = [] if token["end"] == "\n" else delimiters
            yield Statement(words=tuple(words), end=token["end"], heredoc=heredoc)
            words = []
    yield Statement(words=tuple(words), end="\n")


def _next_token(text: str, position: int) -> Any:
    try:
        return _token.match(text, position, timeout=MAX_SECONDS)
    except TimeoutError:
        raise ConfigError(
            f"line {_line(text, position)}: quotes and brackets are nested too deeply; simplify it"
        ) from None


def _read_heredoc(text: str, position: int, delimiter: str) -> tuple[str, int]:
    """Return the here-document at ``position``, and the position after it; one that is not ended takes the rest."""
    end = regex.compile(rf"^\t*{regex.escape(delimiter)}$\n?", regex.MULTILINE).search(text, position)
    return (text[position:], len(text)) if end is None else (text[position : end.start()], end.end())


def _unfinished(text: str, position: int) -> ConfigError:
    opening = OPENING.get(text[position], text[position : position + 2])
    return ConfigError(f"line {_line(text, position)}: {opening} that opens here is never closed; close it")


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
