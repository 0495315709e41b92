"""Tests that a resumed run on a mix of sources trains the rows of an uninterrupted run, in the same order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_cases import largest_difference, make_config, read_adapter, trained_steps

import rlpipe
from rlpipe.common.run_files import LEDGER
from rlpipe.replay.ledger.audit import audit
from rlpipe.replay.ledger.query import reading

pytestmark = pytest.mark.ray


def write(path: Path, name: str, count: int) -> Path:
    rows = [{"prompt": f"{name}{number}+1=", "completion": str(number + 1)} for number in range(count)]
    path.write_text("\n".join(json.dumps(row) for row in [*rows, {"prompt": None, "completion": None}]))
    return path


def trained_rows(output: Path) -> list[tuple[int, int, int]]:
    """Return the position, prompt and step of every trained group."""
    with reading(output / LEDGER) as ledger:
        assert audit(ledger).problems == []
        return ledger.rows("SELECT position, prompt_id, step FROM groups WHERE state = 'TRAINED' ORDER BY position")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_mix_resumes_at_its_cursor(local_ray: None, tiny_policy: Path, tmp_path: Path, algorithm: str) -> None:
    small, large = write(tmp_path / "small.jsonl", "", 3), write(tmp_path / "large.jsonl", "1", 40)
    mix = [
        f"algorithm={algorithm}",
        "data.source=mix",
        "data.path=null",
        f"data.sources.small={{source: jsonl, path: {small}, weight: 2}}",
        f"data.sources.large={{source: jsonl, path: {large}, streaming: true, shuffle_rows: 7}}",
        "algorithm.num_steps=4",
        "checkpoint.every_steps=2",
        "checkpoint.keep=3",
    ]
    outputs = tmp_path / "whole", tmp_path / "resumed"
    rlpipe.train(make_config(tiny_policy, small, outputs[0], *mix))
    checkpoint = outputs[0] / "checkpoints" / "step_000002"
    rlpipe.train(make_config(tiny_policy, small, outputs[1], *mix, f"resume={checkpoint}"))
    if algorithm == "grpo":
        assert trained_rows(outputs[1]) == trained_rows(outputs[0])
    whole, resumed = (trained_steps(output) for output in outputs)
    assert len(resumed) == 2
    for name in ("num_tokens", "rows/taken/small", "rows/taken/large", "epoch/small"):
        if name == "num_tokens" or algorithm == "sft":  # RL takes prompts ahead of the steps
            assert [step[name] for step in resumed] == [step[name] for step in whole[2:]], name
    assert largest_difference(*(read_adapter(output / "policy") for output in outputs)) < 1e-5
