"""The rewards of the example: how well a sentence follows its prompt, in parts and as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

FEWEST_WORDS, MAX_WORDS = 5, 12
SENTENCE = re.compile(r"[A-Z][^.!?\n]*[.!?]")

Row = dict[str, Any]
Completions = Sequence[list[dict[str, Any]]]


def to_prompt(cfg: Mapping[str, Any]) -> Callable[[Row], Row]:
    """Return the transform that makes a prompt of a row's words; for ``data.transform``."""

    def map_row(row: Row) -> Row:
        first, second = row["words"]
        return {"prompt": f'Write a short sentence that contains the words "{first}" and "{second}".', **row}

    return map_row


def instruction(completions: Completions, words: Sequence[Sequence[str]]) -> list[float]:
    """Return the share of its instruction that a completion follows: each of the two words, and the form."""
    return [sum(checks(*pair)) / 3 for pair in zip(texts(completions), words, strict=True)]


def accuracy(completions: Completions, words: Sequence[Sequence[str]]) -> list[float]:
    """Return 1 if a completion follows its whole instruction, else 0."""
    return [float(all(checks(*pair))) for pair in zip(texts(completions), words, strict=True)]


def texts(completions: Completions) -> list[str]:
    return [completion[0]["content"].strip() for completion in completions]


def checks(text: str, words: Sequence[str]) -> list[bool]:
    """Return whether each of the two words occurs as a whole, and whether the text is one sentence of 5 to 12 words.

    Repeated words count once toward the minimum, so that no sentence is padded with them.
    """
    tokens = re.findall(r"[a-z']+", text.lower())
    is_sentence = SENTENCE.fullmatch(text) is not None and len(set(tokens)) >= FEWEST_WORDS and len(tokens) <= MAX_WORDS
    return [*(word in tokens for word in words), is_sentence]
