"""Whole runs, from the prompts to the exported policy, with every part real."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from family_cases import make_family
from peft import PeftModel
from run_cases import HOLDS_LOGP_TO, REWARDS_FILE, make_config, read_adapter, read_jsonl, trained_steps
from signal_cases import assert_accounts_add_up
from transformers import AutoModelForCausalLM

import rlpipe
from rlpipe.data.prompts import open_prompts
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.learner.merging import MergeRequest, merge
from rlpipe.simulation.setup import read_measured
from rlpipe.tracking.part_states import read_parts

pytestmark = pytest.mark.ray

STEP_METRICS = {
    "reward",
    "reward_std",
    "rewards/digits/mean",
    "rewards/digits/std",
    "frac_reward_zero_std",
    "completions/mean_length",
    "completions/min_length",
    "completions/max_length",
    "completions/clipped_ratio",
    "entropy",
    "kl",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "grad_norm",
    "sampling/logp_difference/mean",
    "sampling/logp_difference/max",
    "sampling/importance_ratio/min",
    "sampling/importance_ratio/mean",
    "sampling/importance_ratio/max",
    "sampling/effective_ratio",
    "staleness/mean",
    "staleness/max",
    "staleness/mixed_ratio",
    "groups/failed",
    "groups/discarded",
    "rows/skipped/held_out",
    "rows/skipped/too_long",
    "rows/skipped/unrenderable",
    "time/generate",
    "time/score",
    "time/wait",
    "time/train",
    "time/sync",
    "tokens_per_second",
    "num_tokens",
}
SUMMARY_FIGURES = {
    "engine",
    "eval_accuracy_start",
    "eval_accuracy_end",
    "steps",
    "seconds",
    "tokens_per_second",
    "adapter",
    "max_logprob_difference",
}


def assert_steps_agree(output: Path, num_steps: int) -> list[dict[str, Any]]:
    """Check that every step is there once, without staleness, and that engine and learner log-probs agree."""
    steps = trained_steps(output)
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    for row in steps:
        assert row["staleness/max"] == 0
        assert row["sampling/logp_difference/max"] <= HOLDS_LOGP_TO
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
    return steps


@pytest.mark.vllm
def test_synchronous_lora_run_on_vllm(local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    config = make_config(
        tiny_policy,
        prompts_file,
        tmp_path,
        "rollout.engine=vllm",
        "data.held_out.size=4",
        "data.held_out.correct_at=0.1",
        "algorithm.loss.beta=0.01",
        "tracking.tensorboard=true",
        "tracking.log_completions=4",
    )
    summary = rlpipe.train(config)

    steps = assert_steps_agree(tmp_path, 3)
    measured = read_measured(tmp_path)
    assert len(measured.sync) >= 2, "rlpipe simulate --from needs the times of a real run"
    assert measured.score
    assert measured.train
    for row in steps:
        assert row.keys() >= STEP_METRICS
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary.keys() >= SUMMARY_FIGURES
    assert (summary["engine"], summary["steps"]) == ("vllm", 3)
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    evaluated = [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/accuracy" in row]
    assert evaluated == [0, 3]
    assert (tmp_path / "reward.png").stat().st_size > 1000
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    seen = read_parts(tmp_path)
    assert seen is not None
    assert {part.kind for part in seen[1]} >= {"engine", "scorer"}
    assert_adapter_loads_alone(tiny_policy, Path(summary["adapter"]))
    assert_held_out_prompts_are_not_trained(config, tmp_path)


def assert_adapter_loads_alone(policy: Path, adapter: Path) -> None:
    """Check that the adapter loads with PEFT and transformers only, and changes the model's output."""
    model = AutoModelForCausalLM.from_pretrained(policy)
    token_ids = torch.tensor([[10, 20, 30]])
    before = model(token_ids).logits
    after = PeftModel.from_pretrained(model, adapter)(token_ids).logits
    assert float((after - before).abs().max()) > 1e-3


def assert_held_out_prompts_are_not_trained(config: rlpipe.Config, output: Path) -> None:
    _, held_out = open_prompts(config.data, load_tokenizer(config.model), seed=config.seed)
    trained = read_jsonl(output / "completions.jsonl")
    assert len(held_out) == 4
    assert len(trained) == 3 * 4 * 4
    assert not {row["prompt_id"] for row in trained} & {prompt.prompt_id for prompt in held_out}


def test_asynchronous_run_on_two_engines(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    config = make_config(
        tiny_policy,
        prompts_file,
        tmp_path / "run",
        "rollout.num_engines=2",
        "replay.max_staleness=2",
        "algorithm.num_steps=6",
        "data.held_out.size=4",
        f"scoring.rewards.witness={{path: '{REWARDS_FILE}:witness', weight: 0, kwargs: {{folder: '{seen}'}}}}",
    )
    with EngineWatch(["rollout-0", "rollout-1"]) as watch:
        rlpipe.train(config)

    assert all(watch.num_tokens.values())
    assert watch.names >= {"rollout-0", "rollout-1", "scorer-0", "replay", "weights"}
    steps = trained_steps(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert 0 < max(row["staleness/max"] for row in steps) <= 2
    groups = [row for file in seen.glob("*.jsonl") for row in read_jsonl(file)]
    assert len(groups) >= 6 * 4
    for group in groups:
        for mask, versions in zip(group["masked"], group["versions"], strict=True):
            assert all((version >= 0) == sampled for version, sampled in zip(versions, mask, strict=True))
    assert max(max(versions) for group in groups for versions in group["versions"]) > 0


@pytest.mark.slow
def test_weights_may_be_published_every_few_steps(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    output, options = tmp_path / "run", ("weights.every_steps=3", "replay.max_staleness=2", "algorithm.num_steps=7")
    rlpipe.train(make_config(tiny_policy, prompts_file, output, *options, "data.held_out={size: 4, every_steps: 2}"))
    assert [row["staleness/max"] for row in trained_steps(output)] == [0, 1, 2, 0, 1, 2, 0]
    evaluated = [row["step"] for row in read_jsonl(output / "metrics.jsonl") if "eval/reward" in row]
    assert evaluated == [0, 3, 6, 7], "of the versions that the engines get"
    assert_accounts_add_up(output, num_steps=7, groups_per_step=4)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("model", [[], ["model=full", "model.dtype=float32"]], ids=["lora", "full"])
def test_rollouts_continue_with_new_weights_while_they_are_sampled(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, model: list[str]
) -> None:
    pytest.importorskip("vllm")
    seen = tmp_path / "seen"
    seen.mkdir()
    config = make_config(
        tiny_policy,
        prompts_file,
        tmp_path / "run",
        "rollout.engine=vllm",
        "rollout.sampling.max_tokens=400",
        "rollout.sampling.extra={ignore_eos: true}",
        "replay=async",
        "weights.on_update=inflight",
        "algorithm.num_steps=6",
        "learner.optimizer.lr=1e-3",
        f"scoring.rewards.witness={{path: '{REWARDS_FILE}:witness', weight: 0, kwargs: {{folder: '{seen}'}}}}",
        *model,
    )
    summary = rlpipe.train(config)

    steps = trained_steps(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert all(row["staleness/max"] <= 1 for row in steps)
    assert max(row["staleness/mixed_ratio"] for row in steps) > 0
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    groups = [row for file in seen.glob("*.jsonl") for row in read_jsonl(file)]
    sampled = [[v for v in versions if v >= 0] for group in groups for versions in group["versions"]]
    assert all(len(versions) == 400 and versions == sorted(versions) for versions in sampled)
    assert any(len(set(versions)) > 1 for versions in sampled)


class EngineWatch:
    """A thread that polls how many tokens the engines have sampled while a run goes on."""

    def __init__(self, names: list[str]) -> None:
        self.num_tokens = dict.fromkeys(names, 0)
        self.names: set[str] = set()
        """The names of all actors that existed at any time."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> EngineWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.names |= set(ray.util.list_named_actors())
            for name in self.num_tokens:
                try:
                    health = ray.get(ray.get_actor(name).health.remote(), timeout=5)
                except (ValueError, AssertionError, ray.exceptions.RayError):
                    continue  # not started yet, not open yet, or gone already
                self.num_tokens[name] = max(self.num_tokens[name], health.num_tokens)


@pytest.mark.slow
@pytest.mark.vllm
def test_qlora_trains_and_serves_over_the_same_base(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    config = make_config(tiny_policy, prompts_file, tmp_path, "rollout.engine=vllm", "model=qlora")
    summary = rlpipe.train(config)

    assert_steps_agree(tmp_path, 3)
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    merged = tmp_path / "merged"
    printed = list(merge(MergeRequest(adapter=summary["adapter"], output=merged)))
    assert printed[-1] == f"merged into the base in nf4: {merged}"
    AutoModelForCausalLM.from_pretrained(merged)


@pytest.mark.slow
@pytest.mark.vllm
def test_an_adapter_that_engines_cant_add_reaches_vllm_in_whole_models(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    adapter = ("model.adapter.use_dora=true", "model.adapter.modules_to_save=[norm]")
    options = ("rollout.engine=vllm", "learner=zero3", "learner.num_ranks=2", *adapter)
    summary = rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *options))

    assert_steps_agree(tmp_path, 3)
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    trained = read_adapter(Path(summary["adapter"]))
    assert any("lora_magnitude_vector" in name for name in trained)
    assert any("norm" in name for name in trained)


@pytest.mark.slow
@pytest.mark.vllm
def test_an_adapter_of_experts_is_merged_and_sent_directly(local_ray: None, prompts_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    mixture = make_family("qwen3-moe", tmp_path / "mixture")
    options = (
        "rollout.engine=vllm",
        "learner=fsdp2",
        "learner.num_ranks=2",
        "weights=nccl",
        "model.adapter.merge=true",
    )
    summary = rlpipe.train(make_config(mixture, prompts_file, tmp_path / "run", *options))

    assert_steps_agree(tmp_path / "run", 3)
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    assert any("experts" in name for name in read_adapter(Path(summary["adapter"])))


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("learner", "transport"), [pytest.param("fsdp2", "object_store", marks=pytest.mark.slow), ("zero3", "nccl")]
)
def test_full_finetuning_on_two_ranks_reaches_vllm(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, learner: str, transport: str
) -> None:
    pytest.importorskip("vllm")
    config = make_config(
        tiny_policy,
        prompts_file,
        tmp_path,
        "rollout.engine=vllm",
        "model=full",
        "model.dtype=float32",
        f"learner={learner}",
        "learner.optimizer.lr=1e-3",
        f"weights={transport}",
        "weights.bucket_bytes=65536",
        "learner.profile_steps=[2]",
    )
    summary = rlpipe.train(config)

    assert_steps_agree(tmp_path, 3)
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    before = AutoModelForCausalLM.from_pretrained(tiny_policy).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)
    profiles = sorted(path.name for path in (tmp_path / "profiles").iterdir())
    assert profiles == [f"step_000002_rank_{rank}.json.gz" for rank in range(2)]
    assert all(step["memory/resident"] > 0 for step in trained_steps(tmp_path))


def test_a_run_from_python_with_rows_and_a_reward_in_memory(local_ray: None, tiny_policy: Path, tmp_path: Path) -> None:
    def short(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(len(text) < len(gold)) for text, gold in zip(completions, answer, strict=True)]

    given: dict[str, Any] = {
        "model": str(tiny_policy),
        "output": str(tmp_path / "run"),
        "rewards": short,
        "rollout": {"engine": "hf", "sampling": {"max_tokens": 8}},
        "algorithm.groups_per_step": 4,
        "algorithm.group_size": 2,
        "tracking.ray_metrics": False,
        "model.dtype": "float32",
        "data.max_prompt_tokens": 64,
        "cluster.preload": False,
    }
    rows = [{"prompt": f"{number}+1=", "answer": "1234"} for number in range(8)]
    assert rlpipe.train(**given, dataset=rows, num_epochs=1)["steps"] == 2
    assert "rewards/short/mean" in trained_steps(tmp_path / "run")[-1]
    assert rlpipe.train(**given, dataset=iter(rows), num_epochs=2)["steps"] == 4
    with pytest.raises(rlpipe.ConfigError, match=r"^dataset: the run in .* began with other rows"):
        rlpipe.train(**given, dataset=rows[1:], num_epochs=2)


@pytest.mark.slow
def test_a_policy_that_engines_merge_is_evaluated_as_in_its_run(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    held_out = ("data.held_out.size=8", "rollout.engine=hf")
    dora = ("model.adapter.use_dora=true", "learner.optimizer.lr=0.1")
    rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path / "run", *held_out, *dora))
    first, *_, last = (row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "eval/reward" in row)
    alone = make_config(tiny_policy, prompts_file, tmp_path / "alone", *held_out)
    metrics = rlpipe.evaluate(alone, adapter=str(tmp_path / "run" / "policy"))
    names = ("eval/reward", "eval/completions/mean_length")
    assert [metrics[name] for name in names] == [last[name] for name in names] != [first[name] for name in names]
