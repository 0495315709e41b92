"""The learner group under Ray Train: two ranks that train as one does, and supervised runs on one and two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from run_cases import HOLDS_LOGP_TO, largest_difference, make_config, read_adapter, supervised_options, trained_steps
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlpipe
from rlpipe.errors import WaitTimeout

pytestmark = pytest.mark.ray

SAME_ON_ALL = (
    "reward",
    "rewards/digits/mean",
    "completions/mean_length",
    "loss",
    "grad_norm",
    "entropy",
    "sampling/logp_difference/mean",
)


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["fsdp2", "zero3"])
def test_two_ranks_train_as_one(
    local_ray: None, undisturbed_run: Path, tiny_policy: Path, prompts_file: Path, tmp_path: Path, learner: str
) -> None:
    config = make_config(tiny_policy, prompts_file, tmp_path, f"learner={learner}")
    summary = rlpipe.train(config)

    alone, shared = trained_steps(undisturbed_run)[:3], trained_steps(tmp_path)
    assert [row["step"] for row in shared] == [1, 2, 3]
    for mine, theirs in zip(alone, shared, strict=True):
        for name in SAME_ON_ALL:
            assert theirs[name] == pytest.approx(mine[name], abs=1e-4), name
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    assert read_adapter(tmp_path / "policy").keys() == read_adapter(undisturbed_run / "policy").keys()


@pytest.mark.slow
def test_a_learner_that_can_not_be_scheduled_ends_the_run(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    room_for_engine_and_scorer = 2
    taken = ray.available_resources()["CPU"] - room_for_engine_and_scorer
    other_work = placement_group([{"CPU": taken}])
    ray.get(other_work.ready())
    try:
        config = make_config(tiny_policy, prompts_file, tmp_path, "cluster.schedule_timeout_s=2")
        with pytest.raises(
            WaitTimeout, match=r"did not have {'learner-0': {'CPU': 1\.0}} free within .*=2 seconds: it has"
        ):
            rlpipe.train(config)
    finally:
        remove_placement_group(other_work)


@pytest.mark.parametrize(("learner", "chat"), [pytest.param("single", True, marks=pytest.mark.slow), ("fsdp2", False)])
def test_supervised_run(local_ray: None, tiny_policy: Path, tmp_path: Path, learner: str, chat: bool) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(supervised_row(number, chat)) + "\n" for number in range(32)))
    config = rlpipe.load_config(
        [
            "algorithm=sft",
            "algorithm.num_steps=12",
            "algorithm.groups_per_step=16",
            f"model={'full' if chat else 'lora'}",
            f"model.path={tiny_policy}",
            "model.dtype=float32",
            "data.source=jsonl",
            f"data.path={rows}",
            f"data.chat={str(chat).lower()}",
            f"learner={learner}",
            "learner.num_threads=1",
            "learner.max_tokens_per_microbatch=256",
            "learner.optimizer.lr=1e-2",
            "tracking=quiet",
            f"output={tmp_path / 'run'}",
        ]
    )
    summary = rlpipe.train(config)

    steps = trained_steps(tmp_path / "run")
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert summary["steps"] == 12
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 12
    assert_policy_loads(tiny_policy, tmp_path / "run" / "policy", is_adapter=not chat)


@pytest.mark.slow
def test_a_run_continues_under_another_strategy(local_ray: None, tiny_policy: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = supervised_options(tiny_policy, tmp_path / "rows.jsonl", output)
    rlpipe.train(rlpipe.load_config([*options, "learner=zero3", "algorithm.num_steps=4"]))
    rlpipe.train(rlpipe.load_config([*options, "learner=single", "algorithm.num_steps=8"]))
    steps = trained_steps(output)
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert steps[4]["loss"] < steps[0]["loss"], "it begins again"


def supervised_row(number: int, chat: bool) -> dict[str, object]:
    question, answer = f"{number}+1=", str(number + 1)
    if not chat:
        return {"prompt": question, "completion": answer}
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def assert_policy_loads(base: Path, policy: Path, *, is_adapter: bool) -> None:
    """Check that an adapter has a nonzero B, and that a whole model and its tokenizer load with transformers alone."""
    if is_adapter:
        assert any(float(tensor.abs().max()) > 0 for name, tensor in read_adapter(policy).items() if "lora_B" in name)
        return
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    assert largest_difference(before, after) > 1e-3
    assert AutoTokenizer.from_pretrained(policy)("1+1=")["input_ids"]
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
