"""Tests that weights with drifted scales are found, and scaled back on request."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_cases import make_batches, make_learner, make_model_config
from torch import nn
from transformers import AutoModelForCausalLM

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.model_config import WeightScaleRule
from rlpipe.errors import ModelError
from rlpipe.learner.adapter_layers import apply_factors, normalize_weight_scales
from rlpipe.learner.checkpoints import export_policy
from rlpipe.learner.merging import MergeRequest, merge
from rlpipe.models.tiny_model import make_tiny_policy


def make_layers(*factors: float) -> nn.ModuleDict:
    torch.manual_seed(0)
    layers = nn.ModuleDict({str(index): nn.Linear(64, 64) for index in range(len(factors))})
    for layer, factor in zip(layers.values(), factors, strict=True):
        layer.weight.data *= factor
    return layers


def rule(**options: object) -> dict[str, WeightScaleRule]:
    return {"layers": WeightScaleRule(name_pattern=r"\d\.weight", **options)}


def test_what_leaves_the_bounds_is_scaled_to_the_median() -> None:
    layers = make_layers(1.0, 1.0, 2.0, 0.3, 1.2)
    before = [layer.weight.clone() for layer in layers.values()]
    drifts = normalize_weight_scales(layers, rule())
    assert [drift.name for drift in drifts] == ["2.weight", "3.weight"]
    assert all(str(drift).endswith("scaled to the median") for drift in drifts)
    spreads = [float(layer.weight.std()) for layer in layers.values()]
    middle = sorted(float(weight.std()) for weight in before)[2]
    assert spreads[2] == pytest.approx(middle)
    assert spreads[3] == pytest.approx(middle)
    torch.testing.assert_close(layers["2"].weight / before[2], torch.full((64, 64), middle / float(before[2].std())))
    for index in (0, 1, 4):
        assert torch.equal(layers[str(index)].weight, before[index])


def test_a_dry_run_changes_nothing() -> None:
    layers = make_layers(1.0, 1.0, 2.0)
    before = layers["2"].weight.clone()
    (drift,) = normalize_weight_scales(layers, rule(dry_run=True))
    assert (drift.name, drift.factor) == ("2.weight", 1.0)
    assert str(drift).startswith("model.normalize_weight_scales.layers: 2.weight has a standard deviation of ")
    assert str(drift).endswith("left unchanged")
    assert torch.equal(layers["2"].weight, before)


def test_the_threshold_is_the_rules_own() -> None:
    assert not normalize_weight_scales(make_layers(1.0, 1.0, 2.0), rule(threshold=2.5))


@pytest.mark.parametrize("layers", [make_layers(1.0), make_layers(0.0)])
def test_a_rule_that_matches_nothing_or_only_zeros_is_an_error(layers: nn.ModuleDict) -> None:
    pattern = "conv" if float(layers["0"].weight.abs().max()) else "weight"
    with pytest.raises(ModelError, match=rf"normalize_weight_scales.rule: no parameter .* '{pattern}'.*0.weight"):
        normalize_weight_scales(layers, {"rule": WeightScaleRule(name_pattern=pattern)})


def test_zeros_among_others_are_named_and_stay() -> None:
    layers = make_layers(1.0, 1.0, 0.0)
    (drift,) = normalize_weight_scales(layers, rule())
    assert (drift.name, drift.factor) == ("2.weight", 1.0)
    assert float(layers["2"].weight.abs().max()) == 0


def test_every_expert_of_a_fused_parameter_counts() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.experts = nn.Parameter(torch.randn(4, 32, 16))
    model.experts.data[2] *= 5
    before = model.experts.detach().clone()
    (drift,) = normalize_weight_scales(model, {"experts": WeightScaleRule(name_pattern="experts")})
    assert drift.name == "experts[2]"
    assert float(model.experts[2].std()) == pytest.approx(drift.median, rel=1e-5)
    assert torch.equal(model.experts[:2], before[:2])
    torch.testing.assert_close(apply_factors("experts", before, {drift.name: drift.factor}), model.experts.detach())


def test_an_adapter_over_mended_weights_is_merged_into_mended_weights(tmp_path: Path) -> None:
    base = make_tiny_policy(tmp_path / "base", hidden_size=64, num_layers=3, intermediate_size=96)
    model = AutoModelForCausalLM.from_pretrained(base)
    drifted = "model.layers.1.self_attn.q_proj.weight"
    model.get_parameter(drifted).data *= 4
    model.save_pretrained(base)
    rules = {"queries": WeightScaleRule(name_pattern="q_proj")}
    algorithm = AlgorithmConfig(kind="sft", num_steps=10)
    learner = make_learner(base, model=make_model_config(base, normalize_weight_scales=rules), algorithm=algorithm)
    assert [drift.name for drift in learner.policy.module.drifts] == [drifted]
    (batch,) = make_batches(algorithm=algorithm)
    learner.train_step(batch)
    export_policy(learner.policy, tmp_path / "policy")
    list(merge(MergeRequest(adapter=str(tmp_path / "policy"), output=tmp_path / "merged")))
    merged = make_learner(tmp_path / "merged", adapter="none").policy
    (micro_batch,) = batch.mini_batches[0].micro_batches
    with learner.policy.inference(), merged.inference():
        expected, _ = learner.policy.logprobs(micro_batch, temperature=1.0)
        torch.testing.assert_close(merged.logprobs(micro_batch, temperature=1.0)[0], expected, atol=1e-5, rtol=0)
