"""The quickstart's policy and rows: random weights, warmed up by supervised fine-tuning, and bare sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema import Config
from rlpipe.tracking.phases import PHASES

RowMap = Callable[[dict[str, Any]], dict[str, Any]]


def warm_up(config: Config) -> None:
    """``model.prepare`` of the quickstart: trains the policy at ``config.model.path`` by SFT."""
    from rlpipe.pipeline import train

    output = Path(config.model.path).parent
    with PHASES.phase("warming up the policy by supervised fine-tuning, which is done once"):
        train(load_config(["experiment=quickstart_warmup", f"output={output}", f"seed={config.seed}"]))


def make_adder(config: Config) -> None:
    """``model.prepare`` of the warm-up: writes a random policy of 1.6M parameters to ``config.model.path``."""
    from rlpipe.tiny import make_tiny_policy

    make_tiny_policy(config.model.path, num_layers=2, seed=config.seed)


def make_policy(config: Config) -> None:
    """``model.prepare`` of examples: writes a random policy of 3.2M parameters to ``config.model.path``."""
    from rlpipe.tiny import make_tiny_policy

    make_tiny_policy(config.model.path, seed=config.seed)


def short_sums(cfg: Mapping[str, Any]) -> RowMap:
    """``data.transform`` of reasoning-gym's sums: the prompt is the bare sum, such as ``27+45=``.

    A character tokenizer would spend a token on every letter of the question.
    """

    def map_row(row: dict[str, Any]) -> dict[str, Any]:
        expression: str = row["entry"]["metadata"]["expression"]
        return {"prompt": expression.replace(" ", "") + "=", "completion": row["answer"]}

    return map_row
