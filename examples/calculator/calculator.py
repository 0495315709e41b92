"""Products of numbers with three digits, for a policy that may ask a calculator."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import rlpipe
from rlpipe.quickstart import teach

SLIP = 0.05
"""Share of the digits in the warm-up that are wrong."""
CALLS, RARE_CALLS, SMALL = 0.8, 0.05, 460
"""Shares of the warm-up's products for which the calculator is asked: with a first number below ``SMALL``, and others.

A greedy policy then asks for half of them.
"""
WORDS = ['{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}", "<tool_call>", "</tool_call>"]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def right(completions: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1 where the policy's last message is the answer."""
    last = [completion[-1] for completion in completions]
    return [
        float(message["role"] == "assistant" and message["content"] == expected)
        for message, expected in zip(last, answer, strict=True)
    ]


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy on products that are often wrong, or guessed; ``model.prepare`` of the example."""
    rng = random.Random(config.seed)
    teach(config, (sloppy_product(rng) for _ in range(8000)), words=WORDS, num_steps=600)


def sloppy_product(rng: random.Random) -> list[dict[str, Any]]:
    """Return the messages of a product in which digits may be wrong; in most cases no calculator is asked."""
    a, b = rng.randint(100, 999), rng.randint(100, 999)
    question = {"role": "user", "content": f"{a}*{b}="}
    if rng.random() > (CALLS if a < SMALL else RARE_CALLS):
        return [question, {"role": "assistant", "content": str(rng.randint(10_000, 998_001))}]
    a, b = copied(a, rng), copied(b, rng)
    call = {"id": "000000000", "type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "000000000", "name": "multiply", "content": str(multiply(a, b))},
        {"role": "assistant", "content": str(copied(multiply(a, b), rng))},
    ]


def copied(number: int, rng: random.Random) -> int:
    """Return a number some of whose digits but the first are wrong."""
    first, *others = str(number)
    return int("".join([first, *(str(rng.randrange(10)) if rng.random() < SLIP else digit for digit in others)]))
