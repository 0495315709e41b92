"""Rewards that query the run's own engines: the base model's answers, and engines killed during a query."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import REWARDS_FILE, make_config, trained_steps
from signal_cases import assert_accounts_add_up, ledger_of, signals
from transformers import AutoModelForCausalLM, AutoTokenizer

import rlpipe
from rlpipe.errors import ConfigError

pytestmark = pytest.mark.ray


def judged_by(engine: str, folder: Path, *settings: str, system: str = "") -> str:
    folder.mkdir(exist_ok=True)
    kwargs = f"kwargs: {{engine: {engine}, folder: '{folder}', system: '{system}'}}"
    entry = ", ".join([f"path: '{REWARDS_FILE}:EngineJudge'", "num_cpus: 0.1", "timeout_s: 120", kwargs, *settings])
    return f"+scoring.rewards.judge={{{entry}}}"


def read_judged(folder: Path) -> list[tuple[str, str, float]]:
    return [tuple(json.loads(line)) for line in (folder / "judged.jsonl").read_text().splitlines()]


class Base:
    """A reference judge: the answers of the model on disk, sampled by transformers alone."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def value(self, prompt: str, completion: str) -> float:
        messages = [{"role": "user", "content": f"{prompt} {completion}"}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, return_tensors="pt")["input_ids"]
        said = self._model.generate(ids, do_sample=False, max_new_tokens=6)[0, ids.shape[1] :]
        return sum(map(ord, self._tokenizer.decode(said, skip_special_tokens=True))) / 1000


@pytest.mark.slow
def test_the_base_judges_the_same_all_along_and_a_killed_engine_loses_nothing(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    output, folder = tmp_path / "run", tmp_path / "judge"
    config = make_config(
        tiny_policy, prompts_file, output, judged_by("base", folder), "algorithm.num_steps=6", "replay.max_staleness=1"
    )
    asked = lambda: any(folder.glob("*.asking"))  # noqa: E731
    with signals(output, {1: "rollout", 3: "rollout"}, signal.SIGKILL, also=asked) as killed:
        rlpipe.train(config)
    assert killed == ["rollout", "rollout"]
    steps = trained_steps(output)
    assert [row["groups/failed"] for row in steps] == [0] * 6
    assert_accounts_add_up(output, num_steps=6, groups_per_step=4)
    assert sum("serves again" in event.message for event in ledger_of(output).events()) == 2
    judged = read_judged(folder)
    assert len(judged) >= 6 * 4 * 4
    base = Base(tiny_policy)
    for prompt, completion, value in judged[-12:]:
        assert value == base.value(prompt, completion), "a trained adapter has no part in it"


@pytest.mark.slow
def test_served_judges_ask_the_policy(local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    reward = judged_by("policy", folder, "serve: {replicas: 1, batch_wait_s: 0.05}")
    rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path / "run", reward, "learner.optimizer.lr=0.1"))
    assert [row["groups/failed"] for row in trained_steps(tmp_path / "run")] == [0] * 3
    base = Base(tiny_policy)
    agreeing = [value == base.value(prompt, completion) for prompt, completion, value in read_judged(folder)]
    assert all(agreeing[:16]), "the first version is the base"
    assert not all(agreeing), "a later one is not"


@pytest.mark.slow
def test_an_evaluation_has_engines_to_ask(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "judge"
    held_out = ["data.held_out.size=3", judged_by("base", folder)]
    metrics = rlpipe.evaluate(make_config(tiny_policy, prompts_file, tmp_path / "run", *held_out))
    judged = read_judged(folder)
    assert metrics["eval/num_failed"] == 0
    assert metrics["eval/rewards/judge/mean"] == pytest.approx(sum(value for *_, value in judged) / 3)


def test_prompts_that_do_not_fit_fail_with_the_reason(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    reward = judged_by("base", tmp_path / "judge", "fail: raise", system="Judge as strictly as you can.")
    config = make_config(tiny_policy, prompts_file, tmp_path / "run", reward, "data.held_out.size=2")
    with pytest.raises(rlpipe.RewardFailed, match=r"the prompt is too long: .*rollout\.max_model_len"):
        rlpipe.evaluate(config)


def test_a_base_judge_of_full_training_is_refused_before_anything_starts(
    tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    full = ["model.adapter.kind=none", judged_by("base", tmp_path / "judge")]
    with pytest.raises(ConfigError, match=r"scoring\.rewards\.judge: engine=base .* set engine=policy, or a url"):
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path / "run", *full))
