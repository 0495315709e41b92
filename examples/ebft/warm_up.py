"""The cold start of the example: a policy that can do the task, but writes two of three answers in another way.

A model from the hub needs no cold start.
"""

import json
import random
from pathlib import Path

import rlpipe
from rlpipe.configs.compose import quoted
from rlpipe.quickstart import cold_start


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    output = Path(config.model.path).parent
    rows = output / "rows.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.write_text("".join(_without_parentheses(Path(config.data.path), share=2 / 3)))
    cold_start(
        config,
        f"data.path={quoted(rows)}",
        "data.completion_column=answer",
        f"data.held_out.size={config.data.held_out.size}",
        "algorithm.num_steps=200",
        "algorithm.stop_loss=0.15",
        "algorithm.groups_per_step=32",
        "learner.optimizer.lr=1e-3",
    )


def _without_parentheses(path: Path, share: float) -> list[str]:
    """Return the rows, a share of them with ``x+3*2`` in place of ``(x+3)*2``."""
    rng = random.Random(0)
    lines = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if rng.random() < share:
            row["answer"] = row["answer"].replace("(", "").replace(")", "")
        lines.append(json.dumps(row) + "\n")
    return lines
