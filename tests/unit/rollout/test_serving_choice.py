from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.root_config import Config, WeightsConfig
from rlpipe.configs.serving import published_kind
from rlpipe.errors import ConfigError, ModelError
from rlpipe.rollout.serving_choice import serve_alone, settle_serving

SMALL = {"hidden_size": 64, "intermediate_size": 128}
LONG = ["rollout.sampling.max_tokens=4096", "algorithm.group_size=64"]
"""Enough tokens for every version that merging it pays."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    (folder / "model.safetensors").touch()
    return folder


def make(model: Path, *overrides: str) -> Config:
    return load_config([f"model.path={model}", "data=addition", "rollout.num_gpus=0", *overrides], need_files=False)


@pytest.mark.parametrize(
    ("overrides", "kind", "reason"),
    [
        (["rollout.sampling.max_tokens=4"], "lora", "merging only pays from"),
        (LONG, "merged", "merging pays from"),
        ([*LONG, "rollout.num_gpus=1"], "lora", "the default on GPUs"),
        ([*LONG, "replay.max_staleness=1"], "lora", "running sequences keep their version"),
        ([*LONG, "replay.max_staleness=1", "weights.on_update=inflight"], "merged", "merging pays from"),
        (
            [*LONG, "+scoring.rewards.j.path=a:b", "scoring.rewards.j.kwargs={engine: base}"],
            "lora",
            "rewards.j samples",
        ),
        (["model.adapter.use_dora=true", "rollout.num_gpus=1"], "merged", "can't apply use_dora"),
        (["model.adapter.modules_to_save=[norm]"], "merged", "can't apply modules_to_save"),
        (["model.adapter.target_parameters=[x]"], "merged", "can't apply target_parameters"),
        (["model.adapter.r=513", "rollout.num_gpus=1"], "merged", "ranks of up to 512"),
        (["model.adapter.merge=true"], "full", "model.adapter.merge=true"),
        (["model.adapter.kind=none"], "full", "all weights are trained"),
        (["model.adapter.use_dora=true", "model.adapter.kind=qlora"], "full", "a base in NF4"),
        (["model.adapter.use_dora=true", "weights.transport=nccl"], "full", "weights.transport=nccl"),
        (["+model.normalize_weight_scales.x.name_pattern=x"], "full", "changes the base"),
        ([*LONG, "model.adapter.kind=qlora"], "lora", "the base is quantized"),
        ([*LONG, "rollout.engine_args={quantization: fp8}"], "lora", "the base is quantized"),
        (["weights.serve=merged"], "merged", "as the config says"),
        (["weights.serve=adapter", *LONG], "lora", "as the config says"),
    ],
)
def test_what_engines_serve_and_why(model: Path, overrides: list[str], kind: str, reason: str) -> None:
    settled, chosen = settle_serving(make(model, *overrides), "vllm")
    assert (chosen.kind, published_kind(settled.model, settled.weights)) == (kind, kind)
    assert reason in str(chosen)
    assert settle_serving(settled, "vllm")[1].kind == kind, "what is settled stays so"


def test_hf_engines_apply_any_rank(model: Path) -> None:
    config = make(model, "model.adapter.r=600", "rollout.num_gpus=1", "rollout.engine=hf")
    assert settle_serving(config, "hf")[1].kind == "lora"


@pytest.mark.parametrize(("described", "kind"), [({"num_local_experts": 4}, "merged"), ({}, "lora")])
def test_all_linear_of_a_mixture_is_folded(model: Path, described: dict[str, Any], kind: str) -> None:
    (model / "config.json").write_text(json.dumps(SMALL | described))
    assert settle_serving(make(model, "rollout.num_gpus=1"), "vllm")[1].kind == kind


def test_a_base_in_other_files_is_merged_by_the_learner(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    _, chosen = settle_serving(make(model, "model.adapter.use_dora=true"), "vllm")
    assert (chosen.kind, chosen.reason) == ("full", "use_dora can only be merged into a base in safetensors")


def test_higher_ranks_pay_sooner(model: Path) -> None:
    tokens = ["rollout.sampling.max_tokens=100", "algorithm.group_size=16", "algorithm.groups_per_step=8"]
    kinds = [settle_serving(make(model, *tokens, f"model.adapter.r={r}"), "vllm")[1].kind for r in (1, 256)]
    assert kinds == ["lora", "merged"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+scoring.rewards.j.path=a:b", "scoring.rewards.j.kwargs={engine: base}"],
            r"scoring\.rewards\.j: engines have to merge .*all-linear includes the router and 4 experts.*engine=base",
        ),
        (["rollout.engine_args={quantization: fp8}"], r"all-linear includes.*and the base is quantized"),
    ],
)
def test_what_merged_weights_rule_out_is_named_before_they_are_chosen(
    model: Path, overrides: list[str], message: str
) -> None:
    (model / "config.json").write_text(json.dumps(SMALL | {"num_local_experts": 4}))
    with pytest.raises(ConfigError, match=message):
        settle_serving(make(model, *overrides), "vllm")


def test_engines_without_a_learner_merge_what_they_cannot_apply(model: Path) -> None:
    def serve(asked: str = "auto", **options: Any) -> str:
        adapter = AdapterConfig(path="trained", target_modules=["q_proj"], **options)
        return serve_alone(ModelConfig(path=str(model), adapter=adapter), WeightsConfig(serve=asked), "vllm").serve

    assert serve() == "auto"
    assert serve("adapter") == "adapter"
    assert serve(use_dora=True) == serve(r=600) == serve("merged", use_dora=True) == "merged"
    with pytest.raises(ModelError, match=r"trained: they can't apply use_dora .*; set weights\.serve=auto"):
        serve("adapter", use_dora=True)
    with pytest.raises(ModelError, match=r"trained: they can't apply use_dora .*NF4: merge it first"):
        serve(use_dora=True, kind="qlora")
    (model / "config.json").write_text(json.dumps(SMALL | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="use an unquantized one"):
        serve(use_dora=True)
    (model / "config.json").write_text(json.dumps(SMALL))
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="not in safetensors: merge it first"):
        serve(modules_to_save=["norm"])
