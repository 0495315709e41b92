"""Preferences on sums: the right answer is better than a wrong one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from rlpipe.configs.schema.root_config import Config
from rlpipe.quickstart import short_sums, warm_up

RowMap = Callable[[dict[str, Any]], dict[str, Any]]


def learn_the_form(config: Config) -> None:
    """Train the policy until it writes numbers of the right length, few of which are right; for ``model.prepare``."""
    warm_up(config, "algorithm.stop_loss=1.2")


def pairs(cfg: Mapping[str, Any]) -> RowMap:
    """Return a ``data.transform`` of reasoning-gym's sums to a prompt, the right answer and one with a wrong digit."""
    sums = short_sums(cfg)

    def map_row(row: dict[str, Any]) -> dict[str, Any]:
        problem = sums(row)
        answer = problem["completion"]
        return {
            "prompt": problem["prompt"],
            "chosen": answer,
            "rejected": with_a_wrong_digit(answer, problem["prompt"]),
        }

    return map_row


def labelled(cfg: Mapping[str, Any]) -> RowMap:
    """Return a ``data.transform`` to one completion a row, with a label that tells whether it is right."""
    make_pair = pairs(cfg)

    def map_row(row: dict[str, Any]) -> dict[str, Any]:
        pair = make_pair(row)
        is_right = random.Random(f"{pair['prompt']} is right").random() < 0.5
        return {"prompt": pair["prompt"], "completion": pair["chosen" if is_right else "rejected"], "label": is_right}

    return map_row


def with_a_wrong_digit(answer: str, seed: str) -> str:
    """Return the answer with one of its digits replaced by another, always the same for a ``seed``.

    It is the last one in three of four, as a wrong first digit is often seen from the sizes of the numbers alone.
    """
    choice = random.Random(seed)
    position = choice.choice([0, *[len(answer) - 1] * 3])
    digits = "123456789" if position == 0 else "0123456789"
    others = [digit for digit in digits if digit != answer[position]]
    return answer[:position] + choice.choice(others) + answer[position + 1 :]
