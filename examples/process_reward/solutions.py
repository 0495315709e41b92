"""Sums that are added up step by step, with errors: what a process reward model learns from, and the policy's start."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rlpipe
from rlpipe.configs.compose import quoted
from rlpipe.quickstart import cold_start, train_reward_model

RowMap = Callable[[dict[str, Any]], dict[str, Any]]

END = ";"
"""Text after each step, which is the ``separator`` of the reward model."""


def labelled(cfg: Mapping[str, Any]) -> RowMap:
    """Return a ``data.transform`` of reasoning-gym's sums to a solution up to its first wrong step, with labels."""

    def map_row(row: dict[str, Any]) -> dict[str, Any]:
        numbers, draws = _numbers(row), _draws(row)
        steps, labels = solve(numbers, draws, errors=cfg["errors"])
        end = labels.index(False) + 1 if False in labels else len(steps)
        return {"prompt": _prompt(numbers), "completions": steps[:end], "labels": labels[:end]}

    return map_row


def attempted(cfg: Mapping[str, Any]) -> RowMap:
    """Return a ``data.transform`` to the right answer, and to a whole solution in which carries are forgotten."""

    def map_row(row: dict[str, Any]) -> dict[str, Any]:
        numbers = _numbers(row)
        steps = forget_carries(numbers, _draws(row), share=cfg["forgotten"])
        return {
            "prompt": _prompt(numbers),
            "completion": "".join(step + END for step in steps),
            "answer": str(sum(numbers)),
        }

    return map_row


def solve(numbers: Sequence[int], draws: random.Random, *, errors: float) -> tuple[list[str], list[bool]]:
    """Return the steps that add up numbers, each wrong with probability ``errors``, and whether each is right.

    A wrong step has a wrong result, or adds a wrong number, or adds to one. The next step goes on from its result.
    """
    steps, labels = [], []
    total = numbers[0]
    for number in numbers[1:]:
        first, second, result = total, number, total + number
        right = draws.random() >= errors
        if not right:
            match draws.choices(["result", "second", "first"], [3, 1, 1])[0]:
                case "result":
                    result = _near(result, draws)
                case "second":
                    second = _near(second, draws)
                    result = first + second
                case _:
                    first = _near(first, draws)
                    result = first + second
        steps.append(f"{first}+{second}={result}")
        labels.append(right)
        total = result
    return steps, labels


def forget_carries(numbers: Sequence[int], draws: random.Random, *, share: float) -> list[str]:
    """Return the steps that add up numbers; of those that carry into the tens, a ``share`` forgets to."""
    steps = []
    total = numbers[0]
    for number in numbers[1:]:
        result = total + number
        if result // 10 > total // 10 and draws.random() < share:
            result -= 10
        steps.append(f"{total}+{number}={result}")
        total = result
    return steps


def make_model(config: rlpipe.Config) -> None:
    """Write a random model of 0.4M parameters, in which each number up to 59 is a token, to ``config.model.path``."""
    from rlpipe.models.tiny_model import make_tiny_policy

    words = [str(number) for number in range(10, 60)]
    make_tiny_policy(
        config.model.path, hidden_size=128, num_layers=2, intermediate_size=384, words=words, seed=config.seed
    )


def prepare(config: rlpipe.Config) -> None:
    """Train the reward model, unless there is one, and the policy; ``model.prepare`` of the example."""
    train_reward_model(config, "steps", Path(__file__).with_name("train.yaml"))
    warm_up(config)


def warm_up(config: rlpipe.Config) -> None:
    """Train the policy on solutions in which carries are forgotten, so that it has something to improve."""
    sums = config.data
    cold_start(
        config,
        f"seed={config.seed}",
        "model.prepare=examples/process_reward/solutions.py:make_model",
        "data=addition",
        "data.path=null",
        *(
            f"data.task_args.{name}={sums.task_args[name]}"
            for name in ("min_terms", "max_terms", "min_digits", "max_digits")
        ),
        f"data.transform={quoted(sums.transform)}",
        f"data.transform_args.forgotten={sums.transform_args['forgotten']}",
        f"data.held_out.size={sums.held_out.size}",
        "algorithm.num_steps=400",
        "algorithm.groups_per_step=64",
        "learner.num_cpus=1",
        "learner.optimizer.lr=2e-3",
        "learner.schedule.warmup_steps=10",
    )


def _near(number: int, draws: random.Random) -> int:
    """Return another positive number, at most ten away."""
    return draws.choice([candidate for candidate in range(max(1, number - 10), number + 11) if candidate != number])


def _numbers(row: Mapping[str, Any]) -> list[int]:
    return [int(number) for number in row["entry"]["metadata"]["expression"].split("+")]


def _prompt(numbers: Sequence[int]) -> str:
    return "+".join(map(str, numbers)) + ":"


def _draws(row: Mapping[str, Any]) -> random.Random:
    """Return the random numbers of a row, which are the same in every epoch."""
    return random.Random(row["entry"]["metadata"]["source_index"])
