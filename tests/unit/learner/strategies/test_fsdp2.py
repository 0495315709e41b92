"""The modules that ``learner.fsdp.wrap`` selects as units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_cases import make_model_config

from rlpipe.configs.schema.learner_config import FsdpConfig, LearnerConfig
from rlpipe.errors import ModelError
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.policy import load_logprob_model, load_policy
from rlpipe.learner.strategies.fsdp2 import find_fsdp_units, share_of_root
from rlpipe.models.tiny_model import make_tiny_policy


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> LogprobModel:
    path = make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2, intermediate_size=96)
    return load_logprob_model(make_model_config(path, adapter="none"), "cpu")


def names(module: LogprobModel, **options: Any) -> list[str]:
    by_module = {child: name for name, child in module.named_modules()}
    return [by_module[unit] for unit in find_fsdp_units(module, module.causal_model, FsdpConfig(**options))]


def test_blocks_are_the_models_layers(module: LogprobModel) -> None:
    assert sorted(names(module)) == ["model.model.layers.0", "model.model.layers.1"]


def test_without_wrapping_the_module_is_the_only_unit(module: LogprobModel) -> None:
    assert names(module, wrap="none") == []


def left_in(module: LogprobModel, found: list[str]) -> dict[str, int]:
    """Return the number of parameters of each unit that are in no unit inside it."""
    modules = dict(module.named_modules())
    sizes = {name: sum(p.numel() for p in modules[name].parameters()) for name in found}
    inside = {name: [other for other in found if other.startswith(f"{name}.")] for name in found}
    outermost = {
        name: [one for one in others if not any(one.startswith(f"{other}.") for other in others)]
        for name, others in inside.items()
    }
    return {name: sizes[name] - sum(sizes[one] for one in outermost[name]) for name in found}


def test_by_size_large_ones_and_large_rests_are_taken_but_never_the_head(module: LogprobModel) -> None:
    large = 64 * 96
    found = names(module, wrap="size", min_num_params=large)
    assert "model.model.layers.0.mlp.gate_proj" in found
    assert "model.model.layers.0.self_attn" in found  # each of its matrices is smaller
    assert not any(name.endswith(("mlp", "lm_head", "embed_tokens")) for name in found)
    rests = left_in(module, found)
    assert all(rest >= large for name, rest in rests.items() if "layers.0." in name)


def test_by_size_little_is_left_to_the_root(module: LogprobModel) -> None:
    """Check layers that are smaller than a unit in a large list, and small layers around large modules."""
    modules = dict(module.named_modules())
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
    layer = sizes["model.model.layers.0"]
    head = sizes["model.lm_head"]
    for least in (layer + 1, sizes["model.model.layers.0.mlp"]):
        found = names(module, wrap="size", min_num_params=least)
        assert {"model.model.layers.0", "model.model.layers.1"} <= set(found)
        share = share_of_root(module, [modules[name] for name in found])
        assert share * sizes[""] <= head + 64  # and the last norm


@pytest.mark.parametrize("options", [{"wrap": "size", "min_num_params": 64 * 96}, {"wrap": "Linear"}])
def test_a_layer_with_an_adapter_is_one_unit(tmp_path: Path, options: dict[str, Any]) -> None:
    path = make_tiny_policy(tmp_path, hidden_size=64, num_layers=2, intermediate_size=96)
    policy = load_policy(make_model_config(path, adapter="lora"), LearnerConfig(), torch.device("cpu"))
    found = names(policy.module, **options)
    assert any(name.endswith("layers.0.mlp.gate_proj") for name in found)
    assert not any("base_layer" in name or "lora_" in name for name in found)


def test_a_list_of_layers_is_no_unit(module: LogprobModel) -> None:
    """Check that neither the list nor its parent, with embeddings that are tied to the head, is a unit."""
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_modules()}
    assert names(module, wrap="size", min_num_params=sizes["model.model.layers"] + 1) == []
    assert "model.model.layers" not in names(module, wrap="size", min_num_params=sizes["model.model.layers"])


def test_inner_modules_come_before_those_around_them(module: LogprobModel) -> None:
    found = names(module, wrap=["Qwen3MLP", "Qwen3DecoderLayer"])
    assert found.index("model.model.layers.0.mlp") < found.index("model.model.layers.0")


def test_a_class_that_the_model_lacks_is_named(module: LogprobModel) -> None:
    with pytest.raises(ModelError, match=r"learner.fsdp.wrap: the model has no LlamaBlock; its modules are .*Qwen3MLP"):
        names(module, wrap=["LlamaBlock"])


def test_a_model_that_names_no_layers_is_refused(module: LogprobModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.causal_model, "_no_split_modules", set())
    with pytest.raises(ModelError, match="does not name its layers"):
        names(module)
