"""Tests that every family is packed without leaks, trained by SFT and RL, and merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import request, rollout_config, sample
from family_cases import FAMILIES, make_family
from learner_cases import make_adapter_config, make_batches, make_learner, make_model_config, make_rollouts
from peft import LoraConfig, get_peft_model
from serving_cases import largest_gap, publish_policy
from transformers import AutoModelForImageTextToText

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.data.packing import pack_step
from rlpipe.errors import ModelError
from rlpipe.learner.checkpoints import export_policy
from rlpipe.learner.merging import MergeRequest, merge
from rlpipe.learner.policy import Policy
from rlpipe.learner.row_plan import AttentionPlan, Row
from rlpipe.models.loading import open_model
from rlpipe.rollout.engine_thread import open_engine
from rlpipe.types import WeightsKind

pytestmark = pytest.mark.covering(1)
BACK_ENDS = ["sdpa", "eager", "flex_attention"]
MISSING = [(name, "flex_attention") for name in ("qwen3.5", "qwen3.5-images", "qwen3-vl")]
"""Combinations of family and attention implementation that transformers lacks."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(request.param, tmp_path_factory.mktemp("family") / request.param)


def compare_with_rows_run_alone(policy: Policy, path: Path) -> None:
    """Compare token by token with transformers' own forward pass over each row."""
    plain = open_model(str(path), make_model_config(path), torch.float32).eval()
    rollouts = make_rollouts(num_groups=3)
    (micro_batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=4096)[0].mini_batches[0].micro_batches
    with policy.inference():
        packed, _ = policy.logprobs(micro_batch, temperature=1.0)
        for rollout, start in zip(rollouts, micro_batch.sequence_starts[:-1], strict=True):
            token_ids = torch.from_numpy(rollout.token_ids).long()
            alone = plain(input_ids=token_ids[None]).logits[0, :-1].log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
            mask = torch.from_numpy(rollout.loss_mask)
            own = packed[start : start + len(token_ids)]
            torch.testing.assert_close(own[mask], alone[mask[1:]], atol=1e-5, rtol=0)


def leak(row: Row) -> Row:
    """Return the row with its sequences treated as one, as with a wrong plan or wrong position ids."""
    places = torch.arange(len(row.token_ids))
    attention = row.attention and AttentionPlan(blocks=[places[None]], selected=places)
    return replace(row, position_ids=places if attention is None else row.position_ids, attention=attention)


@pytest.mark.parametrize("attention", ["sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_packed_rows_equal_rows_run_alone_and_a_leak_is_seen(
    family: Path, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_model_config(family, attention=attention)
    if (family.name, attention) in MISSING:
        with pytest.raises(ModelError, match="flex"):
            make_learner(family, model=config)
        return
    policy = make_learner(family, model=config).policy
    compare_with_rows_run_alone(policy, family)
    plan = policy.plan
    monkeypatch.setattr(policy, "plan", lambda micro_batch: leak(plan(micro_batch)))
    with pytest.raises(AssertionError, match="not close"):
        compare_with_rows_run_alone(policy, family)


@pytest.mark.parametrize("kind", ["sft", "rl"])
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_family_learns_and_its_policy_is_loaded_as_it_is(
    family: Path, tmp_path: Path, kind: str, adapter: str
) -> None:
    algorithm = AlgorithmConfig(kind=kind, num_steps=10)
    learner = make_learner(family, adapter=adapter, algorithm=algorithm)
    batch = make_batches(algorithm=algorithm)[0]
    losses = [learner.train_step(batch)["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    export_policy(learner.policy, tmp_path / "policy")
    merged = tmp_path / "policy"
    if adapter == "lora":
        merged = tmp_path / "merged"
        list(merge(MergeRequest(adapter=str(tmp_path / "policy"), output=merged, base=str(family))))
    (micro_batch,) = batch.mini_batches[0].micro_batches
    again = make_learner(merged, adapter="none").policy
    with learner.policy.inference(), again.inference():
        torch.testing.assert_close(
            again.logprobs(micro_batch, temperature=1.0)[0],
            learner.policy.logprobs(micro_batch, temperature=1.0)[0],
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize(
    ("adapter", "kind"),
    [({"kind": "none"}, "full"), ({"merge": True}, "full"), ({}, "merged")],
    ids=["full", "merged by the learner", "merged by engines"],
)
def test_engines_serve_what_a_family_has_learned(family: Path, adapter: dict[str, Any], kind: str) -> None:
    """Check whole models with the names and splits of their files; PEFT's all-linear includes fused experts."""
    config = make_model_config(family, adapter=make_adapter_config(**adapter))
    learner = make_learner(family, model=config)
    learner.train_step(make_batches()[0])
    weights = WeightsConfig(serve="merged" if kind == "merged" else "auto")
    engine = open_engine("hf-0", config, rollout_config("hf"), weights, max_prompt_tokens=64)
    published = publish_policy(learner.policy, 1, WeightsKind(kind))
    assert published[0].kind is WeightsKind(kind)
    assert engine.load(*published) == published[0].digest
    assert largest_gap(learner.policy, sample(engine, [request(0), request(1)])) < 1e-5


def test_an_adapter_of_fused_experts_is_refused_with_the_way_out(tmp_path: Path) -> None:
    learner = make_learner(make_family("qwen3-moe", tmp_path))
    with pytest.raises(ModelError, match=r"uses target_parameters.*set weights\.serve=merged"):
        publish_policy(learner.policy, 1)


def test_what_is_tied_is_not_published_apart(tmp_path: Path) -> None:
    adapter = make_adapter_config(target_modules=["q_proj"], modules_to_save=["lm_head"])
    path = make_family("gemma3", tmp_path)
    learner = make_learner(path, model=make_model_config(path, adapter=adapter))
    with pytest.raises(ModelError, match=r"changes lm_head\.weight.*ties to model\.embed_tokens\.weight.*leave it out"):
        publish_policy(learner.policy, 1)


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["embed_tokens"]}])
def test_an_adapter_on_the_class_with_images_is_merged_too(tmp_path: Path, options: dict[str, Any]) -> None:
    """Check an adapter as other libraries train it; rlpipe's own adapters are on the text-only class."""
    base = make_family("qwen3.5-images", tmp_path / "base")
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "out_proj"], r=4, **options))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    list(merge(MergeRequest(adapter=str(tmp_path / "adapter"), output=tmp_path / "merged", base=str(base))))
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
