"""Tiny models of popular model families, with random weights and the tests' tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    set_seed,
)

from rlpipe.models.tiny_model import make_tokenizer

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
WINDOW = 6
"""The sliding window, which is shorter than most rows of the tests."""
HYBRID = ["sliding_attention", "full_attention"]
VISION = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
EXPERTS = {"num_experts_per_tok": 2}


def _gemma_with_images(vocab_size: int) -> PreTrainedConfig:
    text = Gemma3TextConfig(**SIZES, vocab_size=vocab_size, sliding_window=WINDOW, layer_types=HYBRID)
    vision = VISION | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    return Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)


def _qwen35_with_images(vocab_size: int) -> PreTrainedConfig:
    """Return the config of the class with images; only its text model is trained."""
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    text = SIZES | linear | {"vocab_size": vocab_size, "linear_num_value_heads": 4}
    vision = VISION | {"depth": 2, "num_heads": 2, "out_hidden_size": 64}
    layers = ["linear_attention", "full_attention"]
    return Qwen3_5Config(text_config=text | {"layer_types": layers}, vision_config=vision)


def _qwen_with_images(vocab_size: int) -> PreTrainedConfig:
    """Return the config of a class that has no text-only counterpart in transformers."""
    text = SIZES | {"vocab_size": vocab_size, "rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
    vision = VISION | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=text, vision_config=vision)


FAMILIES: dict[str, Callable[[int], PreTrainedConfig]] = {
    "llama": lambda vocab: LlamaConfig(**SIZES, vocab_size=vocab),
    "qwen2": lambda vocab: Qwen2Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"}, vocab_size=vocab
    ),
    "qwen3": lambda vocab: Qwen3Config(**SIZES, vocab_size=vocab),
    "qwen3.5": lambda vocab: Qwen3_5TextConfig(
        **SIZES,
        vocab_size=vocab,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "qwen3.5-images": _qwen35_with_images,
    "gemma3": lambda vocab: Gemma3TextConfig(**SIZES, vocab_size=vocab, sliding_window=WINDOW, layer_types=HYBRID),
    "gemma4": lambda vocab: Gemma4TextConfig(
        **SIZES,
        vocab_size=vocab,
        vocab_size_per_layer_input=vocab,
        hidden_size_per_layer_input=16,
        global_head_dim=64,
        sliding_window=WINDOW,
        layer_types=HYBRID,
        final_logit_softcapping=30.0,
    ),
    "mistral": lambda vocab: MistralConfig(**SIZES, vocab_size=vocab, sliding_window=WINDOW),
    "qwen3-moe": lambda vocab: Qwen3MoeConfig(
        **SIZES, **EXPERTS, vocab_size=vocab, num_experts=4, moe_intermediate_size=48
    ),
    "mixtral": lambda vocab: MixtralConfig(**SIZES, **EXPERTS, vocab_size=vocab, num_local_experts=4),
    "gemma3-images": _gemma_with_images,
    "qwen3-vl": _qwen_with_images,
}


def make_family(name: str, folder: Path) -> Path:
    """Write the model, in float32, and its tokenizer."""
    set_seed(0)
    tokenizer = make_tokenizer()
    config = FAMILIES[name](len(tokenizer))
    with_images = isinstance(config, Qwen3VLConfig | Qwen3_5Config)
    auto_class = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    return write_model(auto_class.from_config(config), tokenizer, folder)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    assert model.generation_config is not None
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
