"""The facts that an engine reads from an adapter's folder."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file

from rlpipe.common import hub
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig, WeightScaleRule, serves_adapter
from rlpipe.errors import ConfigError, ModelError
from rlpipe.models.adapter import RECORDED, TrainingRecord, read_adapter, read_adapter_config, without_learner


def test_room_is_made_for_the_largest_rank(tmp_path: Path) -> None:
    LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "k_proj"], rank_pattern={"k_proj": 16}, use_rslora=True
    ).save_pretrained(str(tmp_path))
    adapter = read_adapter_config(str(tmp_path))
    assert (adapter.r, adapter.alpha, adapter.use_rslora) == (16, 6, True)
    assert adapter.target_modules == ["k_proj", "q_proj"]
    assert adapter.path == str(tmp_path)


def test_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"--adapter: .* holds no PEFT adapter"):
        read_adapter_config(str(tmp_path))


@pytest.mark.parametrize(
    "odd", [{"r": None}, {"lora_alpha": "8"}, {"rank_pattern": {"q": []}}, {"target_modules": [1, "q"]}]
)
def test_values_of_other_types_are_named(tmp_path: Path, odd: dict[str, object]) -> None:
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | odd))
    with pytest.raises(ModelError, match=r"holds no PEFT adapter: ValueError: it has .*; export or download"):
        read_adapter_config(str(tmp_path))


def test_an_adapter_whose_base_was_changed_is_refused(tmp_path: Path) -> None:
    LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="olora").save_pretrained(str(tmp_path))
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="init_lora_weights=olora changed the base as well; save the adapter with"):
        read_adapter(str(tmp_path))


@pytest.mark.parametrize(("precision", "kind"), [("nf4", "qlora"), ("full", "lora"), (None, "lora")])
def test_an_adapter_is_served_over_the_base_that_it_was_trained_on(
    tmp_path: Path, precision: str | None, kind: str
) -> None:
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    if precision is not None:
        TrainingRecord(base_precision=precision).write(tmp_path)
    assert read_adapter_config(str(tmp_path)).kind == kind


def test_an_adapter_over_mended_weights_is_not_served_over_others(tmp_path: Path) -> None:
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    TrainingRecord(weight_scales={"lm_head.weight": 0.5}).write(tmp_path)
    with pytest.raises(ModelError, match="on rescaled weights: merge it first"):
        read_adapter_config(str(tmp_path))


def test_the_record_of_an_adapter_from_the_hub_counts_and_a_cached_copy_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    weights = {"base_model.model.q_proj.lora_A.weight": torch.zeros(4, 8)}
    save_file(weights, tmp_path / "adapter_model.safetensors", metadata=RECORDED)
    TrainingRecord(base_precision="nf4").write(tmp_path)
    monkeypatch.setattr(hub, "hub_has", lambda *_, **__: False)
    monkeypatch.setattr(hub, "model_snapshot", lambda *_, **__: str(tmp_path))
    adapter = read_adapter_config("org/adapter")
    assert (adapter.kind, adapter.path) == ("qlora", "org/adapter")
    (tmp_path / "rlpipe.json").unlink()
    with pytest.raises(ModelError, match=r"rlpipe\.json can't be read"):
        read_adapter("org/adapter")


@pytest.mark.parametrize("given", [False, True])
def test_without_a_learner_an_adapter_is_served_as_it_is(tmp_path: Path, given: bool) -> None:
    LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
    path = str(tmp_path)
    model = ModelConfig(path="base", adapter=AdapterConfig(path=None if given else path, merge=True, use_dora=True))
    assert not serves_adapter(model)
    served = without_learner(model, path if given else None)
    assert serves_adapter(served)
    assert (served.path, served.adapter.path) == ("base", path)


@pytest.mark.parametrize("kind", ["none", "lora", "qlora"])
def test_without_a_learner_and_an_adapter_it_is_the_base(kind: str) -> None:
    served = without_learner(ModelConfig(path="base", adapter=AdapterConfig(kind=kind, merge=None)), None)
    assert (served.adapter.kind, served.adapter.path) == (kind, None)


def test_without_a_learner_nobody_mends_weights() -> None:
    model = ModelConfig(path="base", normalize_weight_scales={"all": WeightScaleRule(name_pattern=".")})
    with pytest.raises(ConfigError, match="only a learner rescales"):
        without_learner(model, None)
