"""Tests that a merged model equals PEFT's merge in memory, whatever the adapter, the model and its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_cases import largest_file
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import KasaConfig
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

from rlpipe.common import hub
from rlpipe.errors import ModelError, RunError
from rlpipe.learner import merging
from rlpipe.learner.adapter_patches import empty_base, is_made_for
from rlpipe.learner.merging import MergeRequest, merge, write_file
from rlpipe.models.adapter import WEIGHTS_FILE
from rlpipe.models.tiny_model import make_tiny_policy

LINEAR = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}},
    "modules to save": {"modules_to_save": ["norm"]},
    "MiCA": {"init_lora_weights": "mica"},
}


def merge_adapter(base: Path, adapter: Path, output: Path) -> None:
    list(merge(MergeRequest(base=str(base), adapter=str(adapter), output=output)))


def make_base(folder: Path, shard_bytes: int = 12_000, dtype: torch.dtype = torch.float32) -> Path:
    path = make_tiny_policy(
        folder / "whole", hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=48
    )
    return save_sharded(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), folder / "base", shard_bytes)


def make_mixture(folder: Path, shard_bytes: int = 10_000) -> Path:
    set_seed(0)
    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, dtype="float32",
    )  # fmt: skip
    return save_sharded(MixtralForCausalLM(config), folder / "base", shard_bytes)


def save_sharded(model: PreTrainedModel, folder: Path, shard_bytes: int) -> Path:
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    return folder


def make_biased(folder: Path, *, tied: bool = False) -> Path:
    """Make a model with attention biases, which Qwen2 has and Qwen3 has not."""
    set_seed(0)
    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, dtype="float32",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return save_sharded(model, folder / "base", 10_000)


def make_adapter(base: Path, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> PeftModel:
    """Make an adapter in which every tensor is random, as after training."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    options = {"target_modules": LINEAR, "r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options
    adapted = get_peft_model(model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return adapted


def assert_same(folder: Path, adapted: PeftModel) -> None:
    expected = adapted.merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_merged_model_is_the_one_that_peft_merges(variant: str, tmp_path: Path) -> None:
    base = make_base(tmp_path)
    adapted = make_adapter(base, tmp_path / "adapter", **VARIANTS[variant])
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    assert_same(tmp_path / "merged", adapted)


def test_fused_experts_go_back_to_the_files_of_each(tmp_path: Path) -> None:
    base = make_mixture(tmp_path)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=parameters)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert_same(tmp_path / "merged", adapted)


def test_the_output_may_lie_in_the_bases_folder(tmp_path: Path) -> None:
    base, adapter = make_base(tmp_path), tmp_path / "adapter"
    make_adapter(base, adapter)
    merge_adapter(base, adapter, base / "merged")
    assert not [path for path in (base / "merged").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [(None, ("org/base", "v1")), ("org/base", ("org/base", "v1")), ("org/other", ("org/other", None))],
)
def test_the_revision_that_an_adapter_names_is_merged_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None, expected: tuple[str, str | None]
) -> None:
    base, adapter = make_base(tmp_path), tmp_path / "adapter"
    make_adapter(base, adapter)
    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings |= {"base_model_name_or_path": "org/base", "revision": "v1"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    fetched: list[tuple[str, str | None]] = []

    def fetch(name: str, *, revision: str | None) -> str:
        fetched.append((name, revision))
        return str(base)

    monkeypatch.setattr(hub, "hub_has", lambda *_, **__: True)
    monkeypatch.setattr(hub, "model_snapshot", fetch)
    list(merge(MergeRequest(adapter=str(adapter), output=tmp_path / "merged", base=wanted)))
    assert fetched == [expected]


def test_an_interrupted_merge_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(tmp_path)
    adapted = make_adapter(base, tmp_path / "adapter")
    written: list[str] = []

    def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        write_file(path, tensors)
        written.append(path.name)

    with monkeypatch.context() as patched:
        patched.setattr(merging, "write_file", write)
        with pytest.raises(KeyboardInterrupt):
            merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    again: list[str] = []
    monkeypatch.setattr(
        merging, "write_file", lambda path, tensors: (again.append(path.name), write_file(path, tensors))
    )
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert not set(again) & set(written)
    assert_same(tmp_path / "merged", adapted)


def test_a_base_in_bfloat16_is_merged_as_peft_does(tmp_path: Path) -> None:
    base = make_base(tmp_path, dtype=torch.bfloat16)
    adapted = make_adapter(base, tmp_path / "adapter", dtype=torch.bfloat16)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert_same(tmp_path / "merged", adapted)


def test_biases_of_the_adapter_are_merged(tmp_path: Path) -> None:
    base = make_biased(tmp_path)
    adapted = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"], lora_bias=True)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert_same(tmp_path / "merged", adapted)


def test_embeddings_that_are_saved_with_the_adapter_are_merged(tmp_path: Path) -> None:
    base = make_biased(tmp_path)
    adapted = make_adapter(base, tmp_path / "adapter", target_modules=["embed_tokens", "lm_head", "q_proj"])
    assert any(
        name.endswith("embed_tokens.base_layer.weight") for name in load_file(tmp_path / "adapter" / WEIGHTS_FILE)
    )
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert_same(tmp_path / "merged", adapted)


def test_the_rest_of_the_base_comes_along_and_the_adapters_tokenizer(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    make_adapter(base, tmp_path / "adapter")
    (base / "LICENSE").write_text("free")
    (base / "pytorch_model.bin").write_bytes(b"other weights")
    (base / "chat_template.jinja").write_text("the base's")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("the one trained with")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    merged = tmp_path / "merged"
    assert (merged / "LICENSE").read_text() == "free"
    assert (merged / "chat_template.jinja").read_text() == "the one trained with"
    assert not {path.name for path in merged.iterdir()} & {"pytorch_model.bin", "adapter_config.json", merging.PLAN}


@pytest.mark.parametrize("tied", [False, True])
def test_copies_of_embeddings_beside_an_adapter_are_merged(tmp_path: Path, tied: bool) -> None:
    base, adapter = make_biased(tmp_path, tied=tied), tmp_path / "adapter"
    adapted = make_adapter(base, adapter, target_modules=["q_proj"])
    for embeddings in (adapted.get_input_embeddings(), adapted.get_output_embeddings()):
        embeddings.weight.data += 0.5
    adapted.save_pretrained(adapter, save_embedding_layers=True)
    assert {"base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"} & load_file(
        adapter / WEIGHTS_FILE
    ).keys()
    merge_adapter(base, adapter, tmp_path / "merged")
    assert_same(tmp_path / "merged", adapted)


def test_embeddings_of_a_resized_base_name_the_size(tmp_path: Path) -> None:
    base, adapter = make_biased(tmp_path), tmp_path / "adapter"
    adapted = make_adapter(base, adapter, target_modules=["q_proj"])
    adapted.resize_token_embeddings(44)
    adapted.save_pretrained(adapter, save_embedding_layers=True)
    with pytest.raises(
        ModelError, match=r"shape \[44, 32\], and the base has \[40, 32\]: resize the base to 44 tokens"
    ):
        merge_adapter(base, adapter, tmp_path / "merged")


@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "embed_tokens"]}])
def test_the_class_that_an_adapter_is_made_for_is_told_by_loras_names_alone(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    make_adapter(make_biased(tmp_path), tmp_path / "adapter", **{"target_modules": ["q_proj"]} | options)
    names = load_file(tmp_path / "adapter" / WEIGHTS_FILE).keys()
    model = empty_base(tmp_path / "base")
    assert is_made_for(model, names)
    assert not is_made_for(model, [name.replace("model.layers", "model.language_model.layers") for name in names])


def test_a_base_with_its_own_code_is_merged_if_it_is_trusted(tmp_path: Path) -> None:
    base, adapter, merged = make_biased(tmp_path), tmp_path / "adapter", tmp_path / "merged"
    adapted = make_adapter(base, adapter, target_modules=["q_proj"])
    (base / "own.py").write_text(
        "from transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "class OwnConfig(Qwen2Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen2ForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((base / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (base / "config.json").write_text(
        json.dumps(config | {"model_type": "own", "architectures": ["OwnModel"], "auto_map": classes})
    )
    with pytest.raises(ModelError, match=r"code of its own: .*--trust-remote-code"):
        merge_adapter(base, adapter, merged)
    list(merge(MergeRequest(adapter=str(adapter), output=merged, base=str(base), trust_remote_code=True)))
    state = AutoModelForCausalLM.from_pretrained(merged, trust_remote_code=True).state_dict()
    expected = adapted.merge_and_unload().state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


def test_an_index_that_was_left_behind_is_ignored(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    adapted = make_adapter(base, tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(base)
    for file in base.glob("*.safetensors"):
        file.unlink()
    index = (base / "model.safetensors.index.json").read_text()
    whole.save_pretrained(base)
    (base / "model.safetensors.index.json").write_text(index)
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert [path.name for path in (tmp_path / "merged").glob("*.safetensors*")] == ["model.safetensors"]
    assert_same(tmp_path / "merged", adapted)


def test_nothing_of_the_bases_tokenizer_changes_the_adapters(tmp_path: Path) -> None:
    base, adapter, merged = make_base(tmp_path), tmp_path / "adapter", tmp_path / "merged"
    make_adapter(base, adapter)
    (base / "special_tokens_map.json").write_text('{"eos_token": "<of the base>"}')
    (base / "chat_template.jinja").write_text("the base's")
    (base / "additional_chat_templates").mkdir()
    for content, kept in (
        ({}, {"special_tokens_map.json", "chat_template.jinja", "additional_chat_templates"}),
        ({"chat_template": "trained with"}, {"special_tokens_map.json"}),
    ):
        (adapter / "tokenizer_config.json").write_text(json.dumps(content))
        merge_adapter(base, adapter, merged)
        names = {"special_tokens_map.json", "chat_template.jinja", "additional_chat_templates"}
        assert {path.name for path in merged.iterdir()} & names == kept
        shutil.rmtree(merged)
    (adapter / "tokenizer.json").write_text("{}")
    merge_adapter(base, adapter, merged)
    assert not {path.name for path in merged.iterdir()} & names
    assert (merged / "tokenizer.json").read_text() == "{}"


def test_weights_in_other_formats_and_histories_stay_behind(tmp_path: Path) -> None:
    base, merged = make_base(tmp_path), tmp_path / "merged"
    make_adapter(base, tmp_path / "adapter")
    for name in (
        ".git/objects/x",
        "original/consolidated.00.pth",
        "original/params.json",
        "onnx/model.onnx_data",
        "a.h5",
    ):
        (base / name).parent.mkdir(exist_ok=True, parents=True)
        (base / name).touch()
    merge_adapter(base, tmp_path / "adapter", merged)
    assert [path.name for path in merged.rglob("*") if path.parent != merged] == ["params.json"]
    assert not {path.name for path in merged.iterdir()} & {".git", "a.h5"}


@pytest.mark.parametrize(
    ("options", "tied", "message"),
    [
        ({"bias": "lora_only"}, False, "trained biases of the base"),
        ({"init_lora_weights": "pissa"}, False, "init_lora_weights=pissa changed the base"),
        ({"target_modules": ["embed_tokens"]}, True, "changes .*embed_tokens.weight, but the base ties"),
        ({"trainable_token_indices": [1, 2]}, False, "train without trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 2]]}, False, "uses layer_replication"),
        ({"kasa_config": KasaConfig()}, False, "uses kasa_config"),
    ],
)
def test_what_cannot_be_merged_exactly_is_refused(
    tmp_path: Path, options: dict[str, Any], tied: bool, message: str
) -> None:
    base = make_biased(tmp_path, tied=tied)
    make_adapter(base, tmp_path / "adapter", **{"target_modules": ["q_proj"]} | options)
    with pytest.raises(ModelError, match=message):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_tensors_that_are_left_over_or_missing_are_named(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    make_adapter(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / WEIGHTS_FILE
    tensors = load_file(file)
    first = min(tensors)
    tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"] = tensors.pop(first)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"the base has no parameters for these tensors: .*layers\.9\.mlp\.up_proj"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    del tensors["base_model.model.model.layers.9.mlp.up_proj.lora_A.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=f"these tensors are missing: .*{first.split('.lora_')[0][-20:]}"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")


def test_an_adapter_without_its_tensors_or_with_half_of_them_is_refused_at_once(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    make_adapter(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match="can't be read: SafetensorError"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    file.unlink()
    with pytest.raises(ModelError, match=r"holds no adapter_model\.safetensors"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")


def test_a_full_disk_keeps_what_is_written_and_the_merge_continues(tmp_path: Path) -> None:
    base = make_base(tmp_path, shard_bytes=24_000)
    adapted = make_adapter(base, tmp_path / "adapter")
    sizes = sorted(path.stat().st_size for path in base.glob("*.safetensors"))
    with (
        largest_file(sizes[-1] - 1),
        pytest.raises(RunError, match="the same command continues with the missing files"),
    ):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert_same(tmp_path / "merged", adapted)


def test_an_existing_folder_is_never_written_to(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    make_adapter(base, tmp_path / "adapter")
    (tmp_path / "merged").mkdir()
    with pytest.raises(ModelError, match="exists: choose another folder"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")


def test_an_adapter_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    base = make_base(tmp_path)
    make_adapter(make_mixture(tmp_path / "other"), tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(ModelError, match="does not fit the base"):
        merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
