"""A task with long-tailed answers: count down in steps of 1 to 3, in 3 to 240 tokens of the tiny tokenizer."""

from __future__ import annotations

import json
import math
import random
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_STEP = 3
MAX_COUNT = 55
"""Most numbers in an answer."""
MAX_TOKENS = 240
FORGETFUL, FORGETS = string.ascii_lowercase[13:], 0.7
"""Letters that demonstrations omit, and how often they do; reinforcement learning has to correct that."""


def make_row(generator: random.Random) -> dict[str, str]:
    """Make a prompt, its answer, and a demonstration for the warm-up, which is sometimes wrong.

    The logarithm of the answer's length is uniform, so that few are long.
    """
    count = int(math.exp(generator.uniform(0, math.log(MAX_COUNT + 1))))
    step = generator.randint(1, MAX_STEP)
    letter = generator.choice(string.ascii_lowercase)
    last = generator.randint(1, step)
    numbers = [str(last + step * index) for index in reversed(range(count))]
    answer = " ".join(letter + number for number in numbers)
    forgets = letter in FORGETFUL and generator.random() < FORGETS
    return {
        "prompt": f"Count down from {letter}{numbers[0]} by {step}.",
        "answer": answer,
        "completion": " ".join(numbers) if forgets else answer,
    }


def make_rows(count: int, held_out: int, seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return ``count`` rows for training, and ``held_out`` rows with other prompts."""
    generator = random.Random(seed)
    tests: dict[str, dict[str, str]] = {}
    while len(tests) < held_out:
        row = make_row(generator)
        tests[row["prompt"]] = row
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        row = make_row(generator)
        if row["prompt"] not in tests:
            rows.append(row)
    return rows, list(tests.values())


def write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def counted(completions: Sequence[Any], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return the share of the numbers that are right up to the first wrong one; 1 only for exactly the whole answer."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [share_right(text, gold) for text, gold in zip(texts, answer, strict=True)]


def share_right(text: str, gold: str) -> float:
    said, wanted = text.split(" "), gold.split(" ")
    right = next((i for i, (a, b) in enumerate(zip(said, wanted, strict=False)) if a != b), min(len(said), len(wanted)))
    return right / max(len(said), len(wanted))
