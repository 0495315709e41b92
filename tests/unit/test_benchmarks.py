"""The arithmetic of the benchmarks and the keys of their last lines, on tiny inputs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks import counting_task, examples, lora_sync, overlap, viewer, vs_trl
from benchmarks.ideal_schedule import PROMPT
from rlpipe.configs.compose import compose_tree
from rlpipe.configs.schema.root_config import Config
from rlpipe.models.tiny_model import make_tiny_policy, make_tokenizer
from rlpipe.types import GroupRequest


def test_an_adapter_has_about_the_asked_size(tmp_path: Path) -> None:
    layers = lora_sync.layers_for(2.5)
    path = make_tiny_policy(
        tmp_path, hidden_size=lora_sync.HIDDEN, intermediate_size=lora_sync.INTERMEDIATE, num_layers=layers
    )
    config = LoraConfig(r=lora_sync.RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), config)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert trained == pytest.approx(2.5e6, rel=0.05)
    assert layers == 2
    assert lora_sync.layers_for(40) == 32


def test_lora_sync_reports_medians_and_their_ratio() -> None:
    found = {
        "object_store": [{"total": 0.1, "pack": 0.04}, {"total": 0.3, "pack": 0.05}, {"total": 0.2, "pack": 0.03}],
        "file": [{"total": 1.0}, {"total": 0.8}, {"total": 9.0}],
    }
    result = lora_sync.summarize(found, adapter_mb=39.846, engines=2)
    assert lora_sync.medians(found["object_store"]) == {"total": 0.2, "pack": 0.04}
    expected = {"adapter_mb": 39.8, "engines": 2, "object_store_s": 0.2, "file_s": 1.0, "ratio": 5.0}
    assert {key: result[key] for key in expected} == expected
    assert result["object_store_spread_s"] == (0.1, 0.3)
    json.dumps(result)


def test_answers_count_down_within_the_token_limit() -> None:
    generator = random.Random(1)
    tokenizer = make_tokenizer()
    rows = [counting_task.make_row(generator) for _ in range(300)]
    lengths = [len(tokenizer(row["answer"]).input_ids) + 1 for row in rows]
    assert min(lengths) <= 5
    assert 150 < max(lengths) <= counting_task.MAX_TOKENS
    assert sorted(lengths)[len(lengths) // 2] < max(lengths) / 4, "the lengths have no long tail"
    assert {row["prompt"]: row["answer"] for row in rows}[rows[0]["prompt"]] == rows[0]["answer"]


def test_held_out_prompts_are_never_trained_on() -> None:
    rows, held_out = counting_task.make_rows(2000, 50)
    assert len({row["prompt"] for row in held_out}) == 50
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in held_out}


@pytest.mark.parametrize(
    ("text", "share"), [("a3 a2 a1", 1), ("a3 a2", 2 / 3), ("a3 a1 a1", 1 / 3), ("a3 a2 a1 a0", 3 / 4), ("", 0)]
)
def test_counting_is_rewarded_up_to_the_first_mistake(text: str, share: float) -> None:
    chat = [{"role": "assistant", "content": text}]
    assert counting_task.counted([text, chat], ["a3 a2 a1"] * 2, step=[1, 1]) == pytest.approx([share] * 2)


def test_the_first_quarter_of_the_steps_is_warm_up() -> None:
    assert vs_trl.warm_median([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == 3.5
    lines = [{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "time/step": 2.0}, {"step": 2, "time/step": 1.5}]
    assert vs_trl.step_seconds([json.dumps(line) for line in lines]) == [2.0, 1.5]


def test_vs_trl_reports_ratios_and_accuracies() -> None:
    def result(seconds: float, accuracy: float) -> dict[str, Any]:
        steps = [100.0, *[seconds] * 4]
        return {"seconds": steps, "command_seconds": sum(steps), "accuracy_start": 0.3, "accuracy": accuracy}

    results = {
        "trl": [result(3.0, 0.7), result(3.2, 0.5), result(2.0, 0.6)],
        "async": [result(1.0, 0.8), result(1.0, 0.9), result(9.0, 1.0)],
        "sync": [result(1.5, 0.9)],
    }
    summary = vs_trl.summarize("long", results)
    expected = {"long_ratio": 3.0, "long_ratio_sync": 2.0, "long_accuracy": 0.9, "long_accuracy_trl": 0.6}
    expected |= {"long_wall_ratio": 1.077, "long_wall_ratio_sync": 1.057}
    expected |= {"long_mean_ratio": 3.0, "long_mean_ratio_sync": 2.0}
    assert {key: summary[key] for key in expected} == expected
    results["async"] = [{**result(1.0, 0.8), "seconds": [100.0, 5.0, 1.0, 5.0, 1.0, 5.0, 1.0]}]
    bursts = vs_trl.summarize("long", results)
    assert (bursts["long_ratio"], bursts["long_mean_ratio"]) == (1.0, 1.0)


@pytest.mark.parametrize("workload", vs_trl.WORKLOADS.values(), ids=vs_trl.WORKLOADS)
def test_vs_trl_sets_options_that_exist(workload: vs_trl.Workload) -> None:
    tree = compose_tree(vs_trl.run_overrides(workload, max_staleness=1, num_steps=7))
    assert (tree.replay.max_staleness, tree.algorithm.num_steps) == (1, 7)
    assert tree.algorithm.loss.aggregate == "token"
    assert compose_tree(["experiment=quickstart_warmup", *(workload.warmup or ())]).algorithm.kind == "sft"


def work(generate_s: float, train_s: float, max_staleness: int, **options: Any) -> overlap.Work:
    sizes = {"num_engines": 2, "groups_per_step": 4, "group_size": 2, "num_steps": 30, "warmup_steps": 5}
    return overlap.Work(generate_s=generate_s, train_s=train_s, max_staleness=max_staleness, **{**sizes, **options})


@pytest.mark.parametrize("times", [(1.0, 4.0), (3.0, 3.0), (4.0, 1.0)])
@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_an_ideal_run_reaches_the_bound_of_given_times(times: tuple[float, float], max_staleness: int) -> None:
    given = work(*times, max_staleness)
    assert given.bound() == pytest.approx(1 / (max(times) if max_staleness else sum(times)))
    assert given.ideal() == pytest.approx(given.bound())


def test_random_times_have_the_given_mean_and_a_lower_bound() -> None:
    given = work(1.0, 1.0, 1, sigma=0.5)
    times = [given.group_seconds(group_id) for group_id in range(4000)]
    assert sum(times) / len(times) == pytest.approx(1.0, rel=0.03)
    assert times[:3] == [given.group_seconds(group_id) for group_id in range(3)]
    assert 0.5 < given.bound() < 1.0


def test_a_sleeping_engine_serves_its_share_at_one_time() -> None:
    engine = overlap.SleepingEngine(work(0.03, 1.0, 1), "engine")
    engine.submit(
        [
            GroupRequest(group_id=index, prompt=PROMPT, group_size=2, max_tokens=1, temperature=1.0, seed=0)
            for index in range(5)
        ]
    )
    finished = []
    while engine.has_work:
        if groups := engine.step():
            finished.append([group.group_id for group in groups])
    assert [sorted(groups) for groups in finished] == [[0, 1], [2, 3], [4]]


def test_the_worst_efficiency_is_that_of_asynchronous_runs_with_given_times() -> None:
    def cell(max_staleness: int, sigma: float, efficiency: float) -> dict[str, float]:
        return {"max_staleness": max_staleness, "sigma": sigma, "efficiency": efficiency}

    grid = [cell(1, 0.0, 0.97), cell(2, 0.0, 0.96), cell(0, 0.0, 0.9), cell(1, 0.5, 0.8)]
    summary = overlap.summarize(grid)
    assert (summary["worst_efficiency"], summary["worst"], summary["grid"]) == (0.96, grid[1], grid)
    json.dumps(summary)


def test_every_ratio_has_the_given_seconds_as_its_longer_part() -> None:
    arguments = overlap.parse_arguments(["--seconds", "0.8", "--ratios", "0.5", "4", "--random-ratios", "1"])
    times = {(w.generate_s, w.train_s, w.max_staleness, w.sigma) for w in overlap.plan(arguments)}
    assert times == {
        (generate, train, staleness, sigma)
        for ratios, sigmas, stalenesses in (([(0.4, 0.8), (0.8, 0.2)], [0.0], [0, 1, 2]), ([(0.8, 0.8)], [0.5], [1, 2]))
        for generate, train in ratios
        for sigma in sigmas
        for staleness in stalenesses
    }


def test_a_warm_up_that_was_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vs_trl, "FOLDER", tmp_path)
    half_made = vs_trl.SHORT.policy.parent
    (half_made / "checkpoints" / "step_000100").mkdir(parents=True)
    seen = []

    def train(config: Config) -> None:
        assert not half_made.exists()
        assert Path(config.output) == half_made
        seen.append(config.model.prepare)
        vs_trl.SHORT.policy.mkdir(parents=True)

    monkeypatch.setattr(vs_trl.rlpipe, "train", train)
    vs_trl.warm_up(vs_trl.SHORT)
    vs_trl.warm_up(vs_trl.SHORT)
    assert seen == ["rlpipe.quickstart:make_policy"]


def test_the_viewers_limits_hold_for_a_million_rollouts() -> None:
    fast, slow = {"first_view_s": 0.9, "filter_s": 0.3}, {"first_view_s": 1.2, "filter_s": 0.31}
    assert viewer.exceeded(1_000_000, fast) == []
    assert viewer.exceeded(1_000_000, slow) == ["first_view_s is 1.20, over 1.0", "filter_s is 0.31, over 0.3"]
    assert viewer.exceeded(999_992, slow) == [], "a smaller run measures something else"


def test_an_example_is_missed_if_it_fails_reaches_too_little_or_is_warned_of() -> None:
    good = {"metric": "eval/accuracy", "end": 0.85, "rules": []}
    results = {
        "quickstart": good,
        "sft": {"metric": "eval/loss", "end": 0.1, "rules": []},
        "online_dpo": {**good, "rules": ["entropy_low", "reward_falls"]},
        "orpo": good,
        "math": {"error": "it died"},
        "images": good | {"metric": "eval/loss", "end": None},
    }
    assert examples.find_missed(results) == {
        "online_dpo": ["entropy_low", "reward_falls"],
        "orpo": ["eval/accuracy 0.85 < 0.9"],
        "math": ["error"],
        "images": ["eval/loss is not finite"],
    }
