"""The models of the example: a reward model, trained on the pairs, and a policy that writes the rejected answers.

With models from the hub none of this is needed, but for the row transform ``to_prompt``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import rlpipe
from rlpipe.quickstart import cold_start, train_reward_model

Row = dict[str, Any]


def prepare(config: rlpipe.Config) -> None:
    """Train the reward model, unless there is one, and the policy; ``model.prepare`` of the example."""
    train_reward_model(config, "preference", Path(__file__).with_name("train.yaml"))
    warm_up(config)


def spoiled(cfg: Mapping[str, Any]) -> Callable[[Row], Row]:
    """Return a ``data.transform`` that puts a spoiled copy of the chosen answer in the place of the rejected one."""

    def map_row(row: Row) -> Row:
        draws = random.Random(f"{cfg['copy']} {row['prompt']}")  # so that a row is the same in every epoch
        return {**row, "rejected": spoil(row["chosen"], draws)}

    return map_row


def spoil(text: str, draws: random.Random) -> str:
    """Return the text without a piece of it, or with a piece repeated somewhere later."""
    start, end = sorted(draws.sample(range(len(text)), 2))
    position = draws.randrange(start + 1, len(text) + 1)
    return draws.choice([text[:start] + text[end:], text[:position] + text[start:end] + text[position:]])


def warm_up(config: rlpipe.Config) -> None:
    """Train the policy on the rejected answers, so that it has something to improve."""
    cold_start(
        config,
        f"seed={config.seed}",
        "data.completion_column=rejected",
        f"data.held_out.size={config.data.held_out.size}",
        "algorithm.num_steps=150",
        "algorithm.stop_loss=0.12",
        "algorithm.groups_per_step=16",
        "learner.num_cpus=2",
        "learner.optimizer.lr=1e-3",
    )


def to_prompt(cfg: Mapping[str, Any]) -> tuple[Callable[[Row], Row], dict[str, str]]:
    """Keep only ``prompt``, since the answers, which no reward reads, would be sent with every group."""

    def prompt_alone(row: Row) -> Row:
        return {"prompt": row["prompt"].strip()}

    return prompt_alone, {"remove_columns": "__all__"}
