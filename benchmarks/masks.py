"""Tokens per second of the loss mask on one core, for batches of rows of two kinds of chat templates.

One kind has ChatML turns of about ``--turn-tokens`` tokens each; the other also has a tool result of as many tokens
within each assistant turn, as in Gemma 4. The masks are compared with those of plain Python, token by token, whose rate
is printed as well. Run: ``python -m benchmarks.masks``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np

from benchmarks.plain_masks import plain_mask
from rlpipe.data.masks.boundaries import LossMask, RoleBoundary
from rlpipe.types import IntArray

GOAL = 10e6
"""Tokens per second on one core."""
START, END, NEWLINE, IMAGE, PAD, RESULT, RESULT_END = range(7)
ROLES = {"system": 7, "user": 8, "assistant": 9, "tool": 10}
FIRST_TEXT, VOCABULARY = 11, 150_000


def rules_for(*, has_results: bool) -> LossMask:
    boundaries = [
        RoleBoundary(role=role, start=(START, token_id, NEWLINE), end=(END,)) for role, token_id in ROLES.items()
    ]
    if has_results:
        boundaries.append(RoleBoundary(role="tool", start=(RESULT,), end=(RESULT_END,), interrupts=True))
    return LossMask(boundaries=boundaries, media_ids=(IMAGE,), pad_id=PAD, end_id=END)


def conversations(num_rows: int, num_tokens: int, turn_tokens: int, *, has_results: bool, seed: int) -> IntArray:
    """Make rows ``[B, T]`` of turns with exponentially distributed lengths; the last turn of each row is cut off."""
    generator = np.random.default_rng(seed)

    def text() -> IntArray:
        return generator.integers(FIRST_TEXT, VOCABULARY, 1 + int(generator.exponential(turn_tokens)), np.int32)

    rows = np.empty((num_rows, num_tokens), np.int32)
    for row in rows:
        parts: list[IntArray] = []
        while sum(map(len, parts)) < num_tokens:
            is_answer = len(parts) % 2 == 1
            result = np.r_[RESULT, text(), RESULT_END, text()] if has_results and is_answer else np.array([], np.int32)
            role = ROLES["assistant" if is_answer else "user"]
            parts.append(np.r_[START, role, NEWLINE, text(), result, END, NEWLINE].astype(np.int32))
        row[:] = np.concatenate(parts)[:num_tokens]
    return rows


def _seconds(work: Callable[[], object], turns: int) -> float:
    """Return the median CPU seconds over ``turns`` calls."""
    taken = []
    for _ in range(turns):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def _plain_masks(rules: LossMask, rows: list[list[int]]) -> list[list[bool]]:
    return [plain_mask(rules, row) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turn-tokens", type=int, nargs="+", default=[20, 100, 500])
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    cases = {}
    for has_results, turn_tokens in product([False, True], arguments.turn_tokens):
        name = f"{turn_tokens} tokens{', with results' * has_results}"
        rules = rules_for(has_results=has_results)
        rows = conversations(arguments.rows, arguments.tokens, turn_tokens, has_results=has_results, seed=turn_tokens)
        plain = _plain_masks(rules, rows.tolist())
        found = rules.mark(rows)
        fast = rows.size / _seconds(partial(rules.mark, rows), arguments.turns)
        slow = rows[:2].size / _seconds(partial(_plain_masks, rules, rows[:2].tolist()), 1)
        cases[name] = {
            "tokens_per_second": fast,
            "over_goal": fast / GOAL,
            "over_plain": fast / slow,
            "is_equal": bool(np.array_equal(found, np.array(plain))),
            "counted_share": float(found.mean()),
        }
        print(f"turns of {name}: {fast / 1e6:.1f}M tokens/s, {fast / slow:.0f} times plain Python")
    worst = min(case["over_goal"] for case in cases.values())
    print(json.dumps({"goal": GOAL, "worst_over_goal": worst, "by_turns": cases}))


if __name__ == "__main__":
    main()
