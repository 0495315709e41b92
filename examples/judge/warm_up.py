"""The cold start of the example: a small policy that judges well and answers badly.

It is trained to mark right and wrong answers, and to give mostly wrong answers. Models from the hub need no cold start,
because they can judge already.
"""

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path

import rlpipe
from rlpipe.configs.compose import quoted
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.quickstart import cold_start

RIGHT, WRONG = "5", "1"
NUM_RIGHT_GUESSES = 8
"""Right guesses for each question that is marked, so that right and wrong marks are about as frequent."""
NUM_ANSWERS, NUM_RIGHT_ANSWERS = 10, 3
"""Answers for each question that is answered, and how many of them are right."""


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    output = Path(config.model.path).parent
    rows = [json.loads(line) for line in Path(config.data.path).read_text().splitlines()]
    lessons = list(make_lessons(rows))
    output.mkdir(parents=True, exist_ok=True)
    (output / "rows.jsonl").write_text("".join(json.dumps(lesson) + "\n" for lesson in lessons))
    cold_start(
        config,
        "model.prepare=examples/judge/warm_up.py:make_policy",
        "data=jsonl",
        f"data.path={quoted(output / 'rows.jsonl')}",
        "algorithm.num_steps=700",
        "algorithm.groups_per_step=128",
        "learner.optimizer.lr=3e-3",
        "learner.optimizer.betas=[0.9, 0.95]",
        "learner.schedule.name=linear",
        "learner.schedule.warmup_steps=20",
    )


def make_policy(config: rlpipe.Config) -> None:
    """Make a policy with 0.4M random weights; ``model.prepare`` of the warm-up."""
    make_tiny_policy(config.model.path, hidden_size=128, num_layers=2, num_heads=2, intermediate_size=384)


def make_lessons(rows: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield rows for judging, in the form of ``run.yaml``'s template, and for answering."""
    chance = random.Random(0)
    for row in rows:
        question, answer = row["prompt"], row["answer"]
        others = [digit for digit in string.digits if digit != answer]
        nonsense = ["", answer + answer, *(answer + digit for digit in chance.sample(others, 2))]
        guesses = [answer] * NUM_RIGHT_GUESSES + others + nonsense
        for guess in guesses:
            mark = RIGHT if guess == answer else WRONG
            yield {"prompt": f"{question}{guess}?", "completion": f"{answer}:{mark}"}
        answers = [answer] * NUM_RIGHT_ANSWERS + chance.sample(others, NUM_ANSWERS - NUM_RIGHT_ANSWERS)
        yield from ({"prompt": question, "completion": guess} for guess in answers)
