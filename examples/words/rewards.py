"""The rewards of the example: whether a sentence does what the prompt asks for, in parts and as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FEWEST_WORDS, MOST_WORDS = 5, 12
SENTENCE = re.compile(r"[A-Z][^.!?\n]*[.!?]")

Row = dict[str, Any]
Completions = Sequence[list[dict[str, Any]]]


def to_prompt(cfg: Mapping[str, Any]) -> Callable[[Row], Row]:
    """``data.transform``: the instruction that asks for the words of a row."""

    def map_row(row: Row) -> Row:
        first, second = row["words"]
        return {"prompt": f'Write a short sentence that contains the words "{first}" and "{second}".', **row}

    return map_row


def instruction(completions: Completions, words: Sequence[Sequence[str]]) -> list[float]:
    """The share of an instruction that a completion follows: the words, each by itself, and the form."""
    return [sum(checks(*pair)) / 3 for pair in zip(texts(completions), words, strict=True)]


def accuracy(completions: Completions, words: Sequence[Sequence[str]]) -> list[float]:
    """1 where a completion follows all of its instruction."""
    return [float(all(checks(*pair))) for pair in zip(texts(completions), words, strict=True)]


def texts(completions: Completions) -> list[str]:
    return [completion[0]["content"].strip() for completion in completions]


def checks(text: str, words: Sequence[str]) -> list[bool]:
    """Whether each of the two words occurs as a whole, and whether the text is one sentence of 5 to 12 words.

    A word that is repeated counts once for the length, so that no sentence is filled up.
    """
    found = re.findall(r"[a-z']+", text.lower())
    is_sentence = SENTENCE.fullmatch(text) is not None and len(set(found)) >= FEWEST_WORDS and len(found) <= MOST_WORDS
    return [*(word in found for word in words), is_sentence]
