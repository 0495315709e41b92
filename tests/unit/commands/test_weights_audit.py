"""Tests that merged versions are published with the digest that engines confirm and audits compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import load, request, rollout_config, sample
from learner_cases import make_adapter_config, make_learner, make_model_config, train_steps
from serving_cases import largest_gap, publish_policy

from rlpipe.commands.weights_audit import check_weights
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import DataError
from rlpipe.learner.checkpoints import CheckpointStore
from rlpipe.learner.publish import publish_weights
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.rollout.engine_thread import open_engine
from rlpipe.types import WeightsKind

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "modules to save": {"modules_to_save": ["norm"]},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(
        tmp_path_factory.mktemp("policy"),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=64,
    )


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_engines_serve_what_the_learner_publishes_for_them_to_merge(path: Path, adapter: str) -> None:
    model = make_model_config(path, adapter=make_adapter_config(**ADAPTERS[adapter]))
    learner, weights = make_learner(path, model=model), WeightsConfig(serve="merged")
    engine = open_engine("engine-0", model, rollout_config("hf"), weights, max_prompt_tokens=16)
    for version in (0, 1):
        state = torch.get_rng_state()
        published = publish_policy(learner.policy, version, WeightsKind.MERGED)
        assert torch.equal(torch.get_rng_state(), state)
        assert load(engine, published) == published[0].digest
        assert published[0].num_bytes < publish_policy(learner.policy, version, WeightsKind.FULL)[0].num_bytes
        assert largest_gap(learner.policy, sample(engine, [request(i) for i in range(4)])) < 1e-5
        train_steps(learner, 0, 3)


def test_an_engine_in_bfloat16_serves_dora_with_norms_in_float32(path: Path) -> None:
    model = make_model_config(path, adapter=make_adapter_config(use_dora=True), dtype="bfloat16")
    learner = make_learner(path, model=model)
    train_steps(learner, 0, 2)
    published = publish_policy(learner.policy, 1, WeightsKind.MERGED)
    weights = WeightsConfig(serve="merged")
    engine = open_engine("engine-0", model, rollout_config("hf"), weights, max_prompt_tokens=16)
    assert load(engine, published) == published[0].digest


@pytest.mark.parametrize(("kind", "adapter"), [("merged", "lora"), ("lora", "lora"), ("full", "none")])
def test_the_audit_computes_the_weights_of_checkpoints(path: Path, tmp_path: Path, kind: str, adapter: str) -> None:
    learner = make_learner(path, adapter=adapter)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    digests = {}
    for step in (2, 4):
        train_steps(learner, step - 2, step)
        store.save(learner, step=step, extra={"model": to_tree(learner.policy.config)})
        manifest = publish_weights(
            learner.policy, version=step, bucket_bytes=2**20, emit=lambda _: None, kind=WeightsKind(kind)
        )
        assert manifest is not None
        digests[str(step)] = (kind, manifest.digest, learner.policy.served_dtype)
    assert check_weights(tmp_path, digests, trusted=False).num_contradictions == 0
    assert digests["2"] != digests["4"]
    (problem,) = check_weights(tmp_path, {**digests, "2": digests["4"]}, trusted=False).contradictions
    assert problem.startswith(f"step 2: the checkpoint's weights have {digests['2'][1]}, engines served")
    with pytest.raises(DataError, match="has no checkpoint whose weights were served"):
        check_weights(tmp_path, {}, trusted=False)
