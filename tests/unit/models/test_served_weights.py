"""Tests that served weights equal PEFT's merge, and that their digest is that of the weights themselves."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.errors import ModelError
from rlpipe.models.hf_weight_map import untied_state
from rlpipe.models.served_weights import ServedWeights
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.weights.buckets import add_checksum, digest_of_sums

CPU = torch.device("cpu")
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}},
    "modules to save": {"modules_to_save": ["norm", "lm_head"], "use_dora": True},
    "rank 600": {"r": 600},
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "v_proj"]},
    "embedding with dora": {"target_modules": ["embed_tokens", "q_proj", "v_proj"], "use_dora": True},
    "biases": {"target_modules": ["q_proj", "v_proj"], "lora_bias": True},
    "parameters": {"target_modules": ["o_proj"], "target_parameters": ["q_proj.weight"], "modules_to_save": ["norm"]},
}


def make_untied(folder: Path) -> Path:
    """Make a model with attention biases, in several files."""
    set_seed(0)
    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder, max_shard_size=10_000)
    return folder


def adapt(path: Path, **options: Any) -> PeftModel:
    """Put an adapter on the model in which every tensor is random, as after training."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    options = {"target_modules": ["q_proj", "o_proj", "down_proj"], "r": 4, "lora_alpha": 8} | options
    adapted = get_peft_model(model, LoraConfig(**options))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapted


def tensors_of(adapted: PeftModel) -> dict[str, Tensor]:
    return get_peft_model_state_dict(adapted, save_embedding_layers=False)


def serve(path: Path, adapted: PeftModel, dtype: str = "float32") -> tuple[dict[str, Tensor], str]:
    """Return all weights that are served, and their digest."""
    served = ServedWeights(ModelConfig(path=str(path), dtype=dtype))
    config = adapted.peft_config["default"].to_dict()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    weights = {name: tensor.detach().clone() for name, tensor in untied_state(model).items()}
    for _, parameters in served.changed(config, tensors_of(adapted), CPU):
        weights |= parameters
    return weights, served.digest(config, tensors_of(adapted), CPU)


def digest_of(weights: dict[str, Tensor]) -> str:
    sums: dict[int, int] = {}
    for name, tensor in weights.items():
        add_checksum(sums, name, tensor)
    return digest_of_sums(sums)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_untied(tmp_path_factory.mktemp("untied"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_served_weights_are_those_that_peft_merges(variant: str, untied: Path) -> None:
    adapted = adapt(untied, **VARIANTS[variant])
    weights, digest = serve(untied, adapted)
    expected = untied_state(adapted.merge_and_unload())
    assert weights.keys() == expected.keys()
    base = AutoModelForCausalLM.from_pretrained(untied).state_dict()
    changed = [name for name, tensor in weights.items() if not torch.equal(tensor, base[name])]
    assert len(changed) >= 3
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-6), name
    assert digest == digest_of(weights)


def make_mixture(folder: Path) -> Path:
    set_seed(0)
    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, dtype="float32",
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(folder, max_shard_size=10_000)
    return folder


@pytest.mark.parametrize("targets", [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]])
def test_experts_are_folded_and_go_back_to_the_files_of_each(targets: list[str], tmp_path: Path) -> None:
    path = make_mixture(tmp_path)
    parameters = [f"mlp.experts.{target}" for target in targets]
    adapted = adapt(path, target_modules=["q_proj"], target_parameters=parameters, rank_pattern={"down_proj": 3})
    weights, digest = serve(path, adapted)
    config, tensors = adapted.peft_config["default"].to_dict(), tensors_of(adapted)
    merged = adapted.merge_and_unload()
    expected = untied_state(merged)
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-6), name
    assert digest == digest_of(weights)
    merged.save_pretrained(tmp_path / "merged")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    written: set[str] = set()
    for unit, found in ServedWeights(ModelConfig(path=str(path), dtype="float32")).changed(config, tensors, CPU):
        for name, tensor in unit.to_sources(found).items():
            assert torch.allclose(tensor, saved[name], rtol=1e-5, atol=1e-6), name
            written.add(name)
    assert len([name for name in written if ".experts." in name]) == 2 * 4 * 3, "vLLM lays all experts out together"


def test_all_linear_of_a_mixture_is_folded(tmp_path: Path) -> None:
    path = make_mixture(tmp_path)
    adapted = adapt(path, target_modules="all-linear")
    assert any("experts" in name for name in tensors_of(adapted))
    weights, digest = serve(path, adapted)
    expected = untied_state(adapted.merge_and_unload())
    for name, tensor in weights.items():
        assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-6), name
    assert digest == digest_of(weights)


def test_engines_in_bfloat16_serve_the_sum_rounded_once(untied: Path) -> None:
    adapted = adapt(untied)
    weights, digest = serve(untied, adapted, "bfloat16")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    name, parts = "model.layers.1.self_attn.q_proj", tensors_of(adapted)
    base = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.bfloat16).state_dict()[f"{name}.weight"]
    a, b = (parts[f"base_model.model.{name}.lora_{half}.weight"].double() for half in "AB")
    exact = (base.double() + 2 * b @ a).float().bfloat16()
    assert torch.equal(weights[f"{name}.weight"], exact)
    assert not torch.equal(base + (2 * b @ a).bfloat16(), exact), "rounding twice is seen"
    assert digest == digest_of(weights)


def test_a_second_version_is_computed_from_the_base_again(untied: Path) -> None:
    served = ServedWeights(ModelConfig(path=str(untied), dtype="float32"))
    adapted = adapt(untied)
    config, first = adapted.peft_config["default"].to_dict(), tensors_of(adapted)
    digest = served.digest(config, first, CPU)
    assert served.digest(config, {name: tensor + 1 for name, tensor in first.items()}, CPU) != digest
    assert served.digest(config, first, CPU) == digest
    assert served.digest(config | {"lora_alpha": 7}, first, CPU) != digest


def test_what_only_an_earlier_version_changed_is_as_in_the_base_again(untied: Path) -> None:
    served = ServedWeights(ModelConfig(path=str(untied), dtype="float32"))
    wide, narrow = adapt(untied, use_dora=True), adapt(untied, target_modules=["o_proj"])
    weights = {
        name: tensor.clone() for name, tensor in untied_state(AutoModelForCausalLM.from_pretrained(untied)).items()
    }
    for adapted in (wide, narrow):
        config, tensors = adapted.peft_config["default"].to_dict(), tensors_of(adapted)
        for _, parameters in served.changed(config, tensors, CPU):
            weights |= parameters
        assert served.digest(config, tensors, CPU) == digest_of(weights)
    assert digest_of(weights) == serve(untied, narrow)[1]


def test_tied_embeddings_are_counted_once(tmp_path: Path) -> None:
    path = make_tiny_policy(
        tmp_path / "policy", hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=48
    )
    weights, digest = serve(path, adapt(path))
    assert "lm_head.weight" not in weights
    assert digest == digest_of(weights)
    served = ServedWeights(ModelConfig(path=str(path), dtype="float32"))
    assert served.file_shapes == {name: tuple(tensor.shape) for name, tensor in weights.items()}


def test_an_adapter_on_one_of_two_tied_tensors_is_refused(tmp_path: Path) -> None:
    path = make_tiny_policy(
        tmp_path / "policy", hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=48
    )
    for options in ({"modules_to_save": ["lm_head"]}, {"target_modules": ["embed_tokens", "q_proj"]}):
        with pytest.raises(ModelError, match=r"the model ties to .*: leave it out of model\.adapter"):
            serve(path, adapt(path, **options))


def test_weights_that_are_stored_transposed_are_folded_so(tmp_path: Path) -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=32, dtype="float32")
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for options in ({}, {"use_dora": True}):
        adapted = adapt(tmp_path, target_modules=["c_attn", "c_fc"], **options)
        weights, digest = serve(tmp_path, adapted)
        expected = untied_state(adapted.merge_and_unload())
        for name, tensor in weights.items():
            assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-6), name
        assert digest == digest_of(weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name: name.replace("layers.1", "layers.7"), "layers.7.* not a layer of Qwen2ForCausalLM"),
        (lambda name: name.replace("lora_", "vera_"), "match no parameter of the model"),
        (
            lambda name: None if name.endswith("0.self_attn.q_proj.lora_B.weight") else name,
            "no lora_B for model.layers.0",
        ),
    ],
)
def test_tensors_that_nothing_loads_are_named(untied: Path, change: Any, message: str) -> None:
    adapted = adapt(untied)
    tensors = {changed: tensor for name, tensor in tensors_of(adapted).items() if (changed := change(name))}
    served = ServedWeights(ModelConfig(path=str(untied), dtype="float32"))
    with pytest.raises(ModelError, match=message):
        served.digest(adapted.peft_config["default"].to_dict(), tensors, CPU)


def test_a_model_without_safetensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        ServedWeights(ModelConfig(path=str(tmp_path), dtype="float32"))


def make_float32_router(folder: Path) -> Path:
    """Make a mixture that keeps the biases of its routers in float32, and fill these with random values."""
    set_seed(0)
    config = Glm4MoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, n_shared_experts=1, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    model = Glm4MoeForCausalLM(config)
    for name, tensor in untied_state(model).items():
        if "correction_bias" in name:
            tensor.normal_()
    model.save_pretrained(folder)
    return folder


def test_what_a_model_keeps_in_float32_counts_in_the_served_type(tmp_path: Path) -> None:
    path = make_float32_router(tmp_path)
    adapted = adapt(path, target_modules=["q_proj", "o_proj"])
    weights, digest = serve(path, adapted, "bfloat16")
    assert torch.float32 in {tensor.dtype for tensor in weights.values()}
    sums: dict[int, int] = {}
    for name, tensor in weights.items():
        add_checksum(sums, name, tensor, torch.bfloat16)
    assert digest == digest_of_sums(sums)


def test_quantized_bases_are_refused(untied: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="trained on a base in NF4"):
        ServedWeights(ModelConfig(path=str(untied), dtype="float32", adapter=AdapterConfig(kind="qlora")))
    quantized = shutil.copytree(untied, tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized"):
        ServedWeights(ModelConfig(path=str(quantized), dtype="float32"))


def test_an_adapter_that_a_merge_does_not_capture_is_refused(untied: Path) -> None:
    adapted = adapt(untied)
    config = adapted.peft_config["default"].to_dict() | {"alora_invocation_tokens": [1, 2]}
    with pytest.raises(ModelError, match="alora_invocation_tokens, which can't be merged"):
        ServedWeights(ModelConfig(path=str(untied), dtype="float32")).digest(config, tensors_of(adapted), CPU)


def test_values_that_are_not_finite_are_refused_by_name(untied: Path) -> None:
    adapted = adapt(untied, modules_to_save=["norm"])
    tensors = tensors_of(adapted)
    saved = next(name for name in tensors if name.endswith("model.norm.weight"))
    tensors[saved] = torch.full_like(tensors[saved], torch.inf)
    served = ServedWeights(ModelConfig(path=str(untied), dtype="float32"))
    with pytest.raises(ModelError, match=r"makes model\.norm\.weight infinite or NaN"):
        served.digest(adapted.peft_config["default"].to_dict(), tensors, CPU)
