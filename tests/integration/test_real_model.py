"""A real model goes through every part: 49,152 tokens, tied embeddings, three heads of queries for each of keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_cases import real_model, require_real_model
from run_cases import make_config, read_adapter, trained_steps

import rlpipe

require_real_model()


@pytest.fixture(scope="module")
def path() -> Path:
    return real_model()


@pytest.fixture(scope="module")
def chat_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of a text, and of messages with a system turn and an earlier answer."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    turns = [
        {"role": "system", "content": "Answer with numbers."},
        {"role": "user", "content": "How many days has a week?"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "And two weeks?"},
    ]
    prompts = ["What is 3 plus 4?", turns, "Count from 1 to 9.", "Name three years of the last century."]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return file


@pytest.mark.ray
@pytest.mark.vllm
def test_vllm_samples_what_the_learner_trains_an_adapter_on(
    local_ray: None, path: Path, chat_prompts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    options = [
        "rollout.engine=vllm",
        "rollout.sampling.max_tokens=16",
        "data.max_prompt_tokens=96",
        "algorithm.num_steps=2",
        "algorithm.groups_per_step=2",
        "algorithm.group_size=3",
        "learner.optimizer.lr=1e-3",
    ]
    rlpipe.train(make_config(path, chat_prompts, tmp_path, *options))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["engine"]) == (2, "vllm")
    assert summary["max_logprob_difference"] <= 1e-3
    assert all(row["sampling/logp_difference/max"] <= 1e-3 for row in trained_steps(tmp_path))
    adapter = read_adapter(tmp_path / "policy")
    trained = [tensor for name, tensor in adapter.items() if "lora_B" in name]
    assert len(trained) == 30 * 7, "every linear layer of every block"
    assert any(tensor.any() for tensor in trained)
