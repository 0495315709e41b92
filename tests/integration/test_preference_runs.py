"""Tests that runs on preferences train, measure held-out rows, and go on where they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_cases import largest_difference, make_config, read_adapter, trained_steps
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import rlpipe
from rlpipe.common.atomic_io import file_digest
from rlpipe.common.run_files import LEDGER
from rlpipe.replay.ledger.audit import audit
from rlpipe.replay.ledger.run_ledger import Ledger

pytestmark = pytest.mark.ray


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_a_run_on_preferences_continues_where_it_was(
    local_ray: None, tiny_policy: Path, tmp_path: Path, algorithm: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(40)]
    rows.write_text("\n".join(json.dumps(row) for row in pairs))
    options = [
        *(f"algorithm={algorithm}", "algorithm.num_steps=4", "data.held_out.size=8", "data.held_out.every_steps=2"),
        *("checkpoint.every_steps=2", "checkpoint.keep=3"),
    ]
    outputs = tmp_path / "whole", tmp_path / "resumed"
    rlpipe.train(make_config(tiny_policy, rows, outputs[0], *options))
    checkpoint = outputs[0] / "checkpoints" / "step_000002"
    rlpipe.train(make_config(tiny_policy, rows, outputs[1], *options, f"resume={checkpoint}"))
    whole, resumed = (trained_steps(output) for output in outputs)
    assert len(whole) == 4
    for step, again in zip(whole[2:], resumed, strict=True):
        assert step["num_tokens"] == again["num_tokens"]
        for name in ("loss", "rewards/margins", "logps/chosen", "logps/rejected"):
            assert step[name] == pytest.approx(again[name], abs=1e-4), name
    assert all(step["tokens/shared_ratio"] > 0 for step in whole)
    records = [json.loads(line) for line in (outputs[0] / "metrics.jsonl").read_text().splitlines()]
    held_out = [record for record in records if "eval/rewards/margins" in record]
    assert [record["step"] for record in held_out] == [0, 2, 4]
    assert held_out[0]["eval/rewards/margins"] == pytest.approx(0, abs=1e-5)  # the policy is its reference at first
    assert held_out[-1]["eval/rewards/margins"] != held_out[0]["eval/rewards/margins"]
    assert largest_difference(*(read_adapter(output / "policy") for output in outputs)) < 1e-5


def test_a_reward_model_is_exported_as_a_classifier(local_ray: None, tiny_policy: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(40)]
    rows.write_text("\n".join(json.dumps(row) for row in pairs))
    options = ["algorithm=reward_model", "algorithm.num_steps=2", "data.held_out.size=8"]
    rlpipe.train(make_config(tiny_policy, rows, tmp_path / "run", *options))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "eval/rewards/accuracies" in record] == [0, 2]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "policy")
    assert model.num_labels == 1


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dpo", "reward_model"])
def test_a_run_continues_under_one_strategy_after_the_other(
    local_ray: None, tiny_policy: Path, tmp_path: Path, algorithm: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(20)]
    rows.write_text("\n".join(json.dumps(row) for row in pairs))
    options = [f"algorithm={algorithm}", "learner.optimizer.lr=1e-3", f"data.cache={tmp_path / 'cache'}"]
    if algorithm == "dpo":
        options.append("algorithm.preference.precompute_ref_log_probs=true")
    outputs = tmp_path / "whole", tmp_path / "sharded"
    rlpipe.train(make_config(tiny_policy, rows, outputs[0], *options, "algorithm.num_steps=6"))
    for num_steps, strategy in ((2, "single"), (4, "fsdp2"), (6, "zero3")):
        steps = [f"algorithm.num_steps={num_steps}", f"learner={strategy}"]
        rlpipe.train(make_config(tiny_policy, rows, outputs[1], *options, *steps))
    whole, sharded = (trained_steps(output) for output in outputs)
    assert [row["step"] for row in sharded] == [1, 2, 3, 4, 5, 6]
    for step, again in zip(whole, sharded, strict=True):
        for name in ("num_tokens", "epoch", "loss", "rewards/margins", "grad_norm"):
            assert step[name] == pytest.approx(again[name], abs=1e-4), name
    found = [load_file(next((output / "policy").glob("*.safetensors"))) for output in outputs]
    assert largest_difference(*found) < 1e-5


FUNCTIONS = '''
import numpy as np


def squared(scores, *, target):
    return (scores.config.beta * scores.mean_difference - target) ** 2


def hardest(kept, inputs):
    return sorted(kept, key=lambda group: np.mean([rollout.reward for rollout in group]))[: inputs.num_wanted]


def half_flat(completions, answer, **columns):
    """Reward the digits in answers to half of the prompts, and nothing in those to the others."""
    if int(answer[0]) % 4 == 1:
        return [0.0] * len(completions)
    texts = [completion[0]["content"] for completion in completions]
    return [sum(map(str.isdigit, text)) + len(set(text)) / 100 for text in texts]
'''


def test_sampled_pairs_train_with_functions_of_ones_own_and_replayed_groups(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    functions, output = tmp_path / "functions.py", tmp_path / "run"
    functions.write_text(FUNCTIONS)
    options = [
        *("algorithm=online_dpo", f"algorithm.preference.path={functions}:squared", "algorithm.num_steps=6"),
        *("algorithm.preference.kwargs={target: 1.0}", f"algorithm.replay.path={functions}:hardest"),
        *("replay.reuse_groups=8", "replay.reroll_after=0.4", "replay.rerolls_per_step=2"),
        *("~scoring.rewards.digits", f"scoring.rewards.half.path={functions}:half_flat"),
    ]
    rlpipe.train(make_config(tiny_policy, prompts_file, output, *options))
    steps = trained_steps(output)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(0 < step["groups/paired"] <= 4 for step in steps)
    assert sum(step["groups/replayed"] for step in steps) > 0
    assert [step["groups/rerolled"] for step in steps[:2]] == [0, 0], "too early"
    assert sum(step["groups/rerolled"] for step in steps) > 0
    ledger = Ledger(output / LEDGER, read_only=True)
    assert not audit(ledger).problems
    ledger.close()
    recorded = rlpipe.load_config(file=output / "config.yaml").algorithm
    assert recorded.preference.digest == recorded.replay.digest == file_digest(functions)
