"""Tokens a second of the loss mask on one core, for batches of rows of a kind of chat template.

Turns of ChatML, of about ``--turn-tokens`` tokens each. The mask is held against one made token by token in plain
Python, whose rate is printed beside it. Run: ``python -m benchmarks.masks``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from benchmarks.plain_masks import plain_mask
from rlpipe.data.masks.boundaries import RoleBoundary
from rlpipe.data.masks.loss_mask import LossMask
from rlpipe.types import IntArray

GOAL = 10e6
"""Tokens a second, of one core."""
START, END, NEWLINE, IMAGE, PAD = range(5)
ROLES = {"system": 5, "user": 6, "assistant": 7, "tool": 8}
FIRST_TEXT, VOCABULARY = 9, 150_000


def chatml() -> LossMask:
    boundaries = [
        RoleBoundary(role=role, start=(START, token_id, NEWLINE), end=(END,)) for role, token_id in ROLES.items()
    ]
    return LossMask(boundaries=boundaries, media_ids=(IMAGE,), pad_id=PAD, end_id=END)


def conversations(num_rows: int, num_tokens: int, turn_tokens: int, seed: int) -> IntArray:
    """Rows ``[B, T]`` of turns whose lengths are exponentially distributed; the last one of each is cut off."""
    generator = np.random.default_rng(seed)
    rows = np.empty((num_rows, num_tokens), np.int32)
    for row in rows:
        parts: list[IntArray] = []
        while sum(map(len, parts)) < num_tokens:
            role = ROLES["assistant" if len(parts) % 2 else "user"]
            content = generator.integers(FIRST_TEXT, VOCABULARY, 1 + int(generator.exponential(turn_tokens)))
            parts.append(np.r_[START, role, NEWLINE, content, END, NEWLINE].astype(np.int32))
        row[:] = np.concatenate(parts)[:num_tokens]
    return rows


def _seconds(work: Callable[[], object], turns: int) -> float:
    """The median of several."""
    taken = []
    for _ in range(turns):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--turn-tokens", type=int, nargs="+", default=[20, 100, 500])
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    rules, cases = chatml(), {}
    for turn_tokens in arguments.turn_tokens:
        rows = conversations(arguments.rows, arguments.tokens, turn_tokens, seed=turn_tokens)
        plain = [plain_mask(rules, row) for row in rows.tolist()]
        found = rules.mark(rows)
        fast = rows.size / _seconds(lambda rows=rows: rules.mark(rows), arguments.turns)
        slow = rows[:2].size / _seconds(lambda rows=rows: [plain_mask(rules, row) for row in rows[:2].tolist()], 1)
        cases[turn_tokens] = {
            "tokens_per_second": fast,
            "over_goal": fast / GOAL,
            "over_plain": fast / slow,
            "is_equal": bool(np.array_equal(found, np.array(plain))),
            "counted_share": float(found.mean()),
        }
        print(f"turns of {turn_tokens} tokens: {fast / 1e6:.1f}M tokens/s, {fast / slow:.0f} times plain Python")
    worst = min(case["over_goal"] for case in cases.values())
    print(json.dumps({"goal": GOAL, "worst_over_goal": worst, "by_turn_tokens": cases}))


if __name__ == "__main__":
    main()
