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
from rlpipe.learner.policy import load_policy, load_scorer
from rlpipe.learner.strategies.fsdp2 import find_fsdp_units, share_of_root
from rlpipe.models.tiny import make_tiny_policy


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> LogprobModel:
    path = make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2, intermediate_size=96)
    return load_scorer(make_model_config(path, adapter="none"), "cpu")


def names(scorer: LogprobModel, **options: Any) -> list[str]:
    by_module = {module: name for name, module in scorer.named_modules()}
    return [by_module[unit] for unit in find_fsdp_units(scorer, scorer.causal_model, FsdpConfig(**options))]


def test_blocks_are_the_models_layers(scorer: LogprobModel) -> None:
    assert sorted(names(scorer)) == ["model.model.layers.0", "model.model.layers.1"]


def test_without_wrapping_the_scorer_is_the_only_unit(scorer: LogprobModel) -> None:
    assert names(scorer, wrap="none") == []


def left_in(scorer: LogprobModel, found: list[str]) -> dict[str, int]:
    """Return the number of parameters of each unit that are in no unit inside it."""
    modules = dict(scorer.named_modules())
    sizes = {name: sum(p.numel() for p in modules[name].parameters()) for name in found}
    inside = {name: [other for other in found if other.startswith(f"{name}.")] for name in found}
    outermost = {
        name: [one for one in others if not any(one.startswith(f"{other}.") for other in others)]
        for name, others in inside.items()
    }
    return {name: sizes[name] - sum(sizes[one] for one in outermost[name]) for name in found}


def test_by_size_large_ones_and_large_rests_are_taken_but_never_the_head(scorer: LogprobModel) -> None:
    large = 64 * 96
    found = names(scorer, wrap="size", min_num_params=large)
    assert "model.model.layers.0.mlp.gate_proj" in found
    assert "model.model.layers.0.self_attn" in found  # each of its matrices is smaller
    assert not any(name.endswith(("mlp", "lm_head", "embed_tokens")) for name in found)
    rests = left_in(scorer, found)
    assert all(rest >= large for name, rest in rests.items() if "layers.0." in name)


def test_by_size_little_is_left_to_the_root(scorer: LogprobModel) -> None:
    """Check layers that are smaller than a unit in a large list, and small layers around large modules."""
    modules = dict(scorer.named_modules())
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
    layer = sizes["model.model.layers.0"]
    head = sizes["model.lm_head"]
    for least in (layer + 1, sizes["model.model.layers.0.mlp"]):
        found = names(scorer, wrap="size", min_num_params=least)
        assert {"model.model.layers.0", "model.model.layers.1"} <= set(found)
        share = share_of_root(scorer, [modules[name] for name in found])
        assert share * sizes[""] <= head + 64  # and the last norm


@pytest.mark.parametrize("options", [{"wrap": "size", "min_num_params": 64 * 96}, {"wrap": "Linear"}])
def test_a_layer_with_an_adapter_is_one_unit(tmp_path: Path, options: dict[str, Any]) -> None:
    path = make_tiny_policy(tmp_path, hidden_size=64, num_layers=2, intermediate_size=96)
    policy = load_policy(make_model_config(path, adapter="lora"), LearnerConfig(), torch.device("cpu"))
    found = names(policy.scorer, **options)
    assert any(name.endswith("layers.0.mlp.gate_proj") for name in found)
    assert not any("base_layer" in name or "lora_" in name for name in found)


def test_a_list_of_layers_is_no_unit(scorer: LogprobModel) -> None:
    """Check that neither the list nor its parent, with embeddings that are tied to the head, is a unit."""
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in scorer.named_modules()}
    assert names(scorer, wrap="size", min_num_params=sizes["model.model.layers"] + 1) == []
    assert "model.model.layers" not in names(scorer, wrap="size", min_num_params=sizes["model.model.layers"])


def test_inner_modules_come_before_those_around_them(scorer: LogprobModel) -> None:
    found = names(scorer, wrap=["Qwen3MLP", "Qwen3DecoderLayer"])
    assert found.index("model.model.layers.0.mlp") < found.index("model.model.layers.0")


def test_a_class_that_the_model_lacks_is_named(scorer: LogprobModel) -> None:
    with pytest.raises(ModelError, match=r"learner.fsdp.wrap: the model has no LlamaBlock; its modules are .*Qwen3MLP"):
        names(scorer, wrap=["LlamaBlock"])


def test_a_model_that_names_no_layers_is_refused(scorer: LogprobModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer.causal_model, "_no_split_modules", set())
    with pytest.raises(ModelError, match="does not name its layers"):
        names(scorer)
