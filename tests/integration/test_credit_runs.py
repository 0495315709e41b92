"""A run whose advantages need greedy completions and the KL to the reference, and that goes on where it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from run_cases import largest_difference, make_config, read_adapter, read_jsonl, trained_steps

import rlpipe

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_a_run_of_remax_with_an_adaptive_kl_continues_where_it_was(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    options = [
        *("algorithm=remax", "algorithm.group_size=2", "algorithm.num_steps=4"),
        *("algorithm.reward_kl.coef=0.5", "algorithm.reward_kl.target=1e-4", "algorithm.reward_kl.horizon=20"),
        *("checkpoint.every_steps=2", "checkpoint.keep=3"),
    ]
    outputs = tmp_path / "whole", tmp_path / "resumed"
    rlpipe.train(make_config(tiny_policy, prompts_file, outputs[0], *options))
    checkpoint = outputs[0] / "checkpoints" / "step_000002"
    rlpipe.train(make_config(tiny_policy, prompts_file, outputs[1], *options, f"resume={checkpoint}"))
    whole, resumed = (trained_steps(output) for output in outputs)
    assert (len(whole), len(resumed)) == (4, 2)
    assert len({step["kl/coefficient"] for step in whole}) == 4
    for step, again in zip(whole[2:], resumed, strict=True):
        for name in ("reward", "reward/greedy", "kl/coefficient", "kl/in_reward", "loss"):
            assert step[name] == again[name], name
    assert largest_difference(*(read_adapter(output / "policy") for output in outputs)) == 0
    for output in outputs:
        by_group: dict[int, list[bool]] = {}
        for row in read_jsonl(output / "completions.jsonl"):
            by_group.setdefault(row["group_id"], []).append(row.get("is_greedy", False))
        assert set(map(tuple, by_group.values())) == {(False, False, True)}
    trained = Counter(row["group_id"] for row in read_jsonl(outputs[0] / "completions.jsonl"))
    assert set(trained.values()) == {3}, "every group is trained once"
