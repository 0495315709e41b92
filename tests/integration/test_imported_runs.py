"""Runs of configs that ``rlpipe import`` makes from files of axolotl, TRL, verl and OpenRLHF, two of each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from run_cases import REWARDS_FILE, trained_steps

import rlpipe
from rlpipe.cli import main

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FOLDER = Path(__file__).parents[1] / "unit" / "configs" / "foreign" / "examples"
NUMBERS = range(16)
PROMPTS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in NUMBERS]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in NUMBERS]
TALKS = [
    {"talk": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]} for n in NUMBERS
]
LABELS = [{"instruction": f"{n}+1=", "response": str(n + 1 + n % 2), "score": n % 2 == 0} for n in NUMBERS]
ONE_CPU = (
    *("learner=single", "rollout=auto", "rollout.engine=hf", "model.dtype=float32", "model.attention=sdpa"),
    *("learner.num_threads=1", "rollout.num_threads=1", "tracking=quiet", "cluster.schedule_timeout_s=300"),
    *("algorithm.num_steps=2", "learner.schedule.warmup_steps=1", "data.max_prompt_tokens=64"),
)
"""Overrides for two steps on a machine without GPUs."""
REWARD = f"scoring.rewards.{{}}.path={REWARDS_FILE}:digits"
CASES: dict[str, tuple[list[dict[str, Any]], list[str], dict[str, Any]]] = {
    "axolotl/orpo.yml": (PAIRS, [], {"algorithm.preference.beta": 0.15, "algorithm.groups_per_step": 6}),
    "axolotl/gdpo.yaml": (
        PROMPTS,
        ["rollout.sampling.max_tokens=8", REWARD.format("format"), REWARD.format("right")],
        {"algorithm.groups_per_step": 4, "algorithm.combine": "normalize_then_sum"},
    ),
    "trl/sft_docstring.py": (
        [{"messages": row["talk"]} for row in TALKS],
        ["algorithm.groups_per_step=4"],  # batches of packed sequences are not translated
        {"learner.optimizer.lr": 2e-4, "learner.schedule.name": "linear"},
    ),
    "trl/adaptive_entropy.py": (
        PROMPTS,
        ["rollout.sampling.max_tokens=8", REWARD.format("digits")],
        {"algorithm.loss.entropy_target": 0.2, "algorithm.group_size": 8},
    ),
    "verl/sft_multiturn.sh": (
        TALKS,
        ["algorithm.groups_per_step=4", "model.trust_remote_code=false"],
        {"data.messages_column": "talk", "learner.optimizer.betas": (0.9, 0.95)},
    ),
    "verl/rloo.sh": (
        PROMPTS,
        ["algorithm.groups_per_step=4", "rollout.sampling.max_tokens=8", REWARD.format("digits")],
        {"algorithm.num_minibatches": 4, "algorithm.advantage.name": "rloo"},
    ),
    "openrlhf/kto.sh": (LABELS, ["algorithm.groups_per_step=8"], {"data.label_column": "score"}),
    "openrlhf/dapo.sh": (
        PROMPTS,
        [
            *("algorithm.groups_per_step=4", "rollout.sampling.max_tokens=8", "rollout.num_engines=1"),
            *("data.held_out.path=null", "data.held_out.every_steps=0", REWARD.format("digits")),
        ],
        {"algorithm.correction.mode": "token_mask", "algorithm.advantage.name": "reinforce_baseline"},
    ),
}
"""Rows, overrides, and options of the imported file, by file."""


@pytest.mark.parametrize("name", CASES)
def test_an_imported_config_trains(local_ray: None, tiny_policy: Path, tmp_path: Path, name: str) -> None:
    rows, overrides, imported = CASES[name]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["import", str(FOLDER / name), "-o", str(tmp_path / "run.yaml")]) == 0
    own = [f"model.path={tiny_policy}", "data=jsonl", f"data.path={tmp_path / 'rows.jsonl'}"]
    config = rlpipe.load_config([*ONE_CPU, *own, *overrides, f"output={tmp_path / 'run'}"], file=tmp_path / "run.yaml")
    for option, value in imported.items():
        found: Any = config
        for part in option.split("."):
            found = getattr(found, part)
        assert found == value, option
    rlpipe.train(config)
    steps = trained_steps(tmp_path / "run")
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) and step["num_tokens"] > 0 for step in steps)
