"""Options of the model and its adapter, and whether engines can serve that adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlpipe.configs.schema.option import CHARACTERS, DTYPES, MAX_WEIGHT, MISSING, Freezable, option


@dataclass(kw_only=True)
class AdapterConfig(Freezable):
    """Options of the adapter that is trained."""

    kind: str = option(
        "lora",
        "Train a LoRA adapter, one over a base in NF4 (QLoRA), or all weights.",
        choices=("none", "lora", "qlora"),
    )
    path: str | None = option(None, "A PEFT adapter to start from.")
    r: int = option(16, "Rank.", minimum=1, maximum=65536)
    alpha: float = option(32.0, "Scale; the update is alpha / r times B·A.", above=0, maximum=1_000_000)
    dropout: float = option(0.0, "Dropout before A.", minimum=0, maximum=0.99)
    target_modules: Any = option("all-linear", "Module names, a regex, or all-linear.", text=CHARACTERS)
    target_parameters: list[str] = option(
        [], "Names of parameters outside of linear layers to adapt, such as those of experts."
    )
    modules_to_save: list[str] = option([], "Names of modules that are trained in full, in addition to the adapter.")
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r).")
    use_dora: bool = option(False, "Train direction and magnitude of each weight separately (DoRA).")
    merge: bool | None = option(
        None, "Send engines whole models with the adapter merged; null: only if they can't merge it themselves."
    )


@dataclass(kw_only=True)
class WeightScaleRule(Freezable):
    """A rule that evens out the scales of some weights when the model is loaded."""

    name_pattern: str = option(MISSING, "A regex; the parameters whose names match it form a group.", text=CHARACTERS)
    threshold: float = option(
        1.5, "Factor by which a standard deviation may differ from the group's median.", above=1, maximum=MAX_WEIGHT
    )
    dry_run: bool = option(False, "Report only.")


@dataclass(kw_only=True)
class ModelConfig(Freezable):
    """Options of the model, its tokenizer and its adapter."""

    path: str = option(
        MISSING, "A folder or a hub id of a transformers causal language model, or a GGUF file, which is dequantized."
    )
    revision: str | None = option(None, "Hub revision.")
    tokenizer: str | None = option(None, "Another folder or hub id for the tokenizer.")
    processor_kwargs: dict[str, Any] = option(
        {}, "Further arguments of the processor's from_pretrained, such as min_pixels (models with image input)."
    )
    chat_template: str | None = option(None, "A Jinja file that replaces the tokenizer's chat template.")
    dtype: str = option(
        "auto",
        "Type of weights and activations; auto: bfloat16 if learner and engines are faster in it, else float32.",
        choices=("auto", *DTYPES),
    )
    attention: str = option(
        "sdpa",
        "transformers' attention implementation.",
        choices=("sdpa", "eager", "flex_attention", "flash_attention_2"),
    )
    images: bool = option(
        False, "Load the class that accepts images even if there is one for text only (Llama 3.2 Vision, Qwen3.5)."
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass.")
    reentrant_checkpointing: bool | None = option(
        None, "Use reentrant checkpointing; null: only with learner.strategy=zero3 or flex_attention."
    )
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    normalize_weight_scales: dict[str, WeightScaleRule] = field(default_factory=dict)
    prepare: str | None = option(
        None, "module:function that creates model.path if it does not exist; called with the config."
    )

    @property
    def tokenizer_revision(self) -> str | None:
        """The revision of the tokenizer's files; ``revision`` is that of ``path``."""
        return self.revision if self.tokenizer in (None, self.path) else None


def serves_adapter(model: ModelConfig) -> bool:
    """Return whether engines get an adapter; if not, they get whole models."""
    adapter = model.adapter
    merges = needs_merging(model) if adapter.merge is None else adapter.merge
    return adapter.kind != "none" and not merges


def needs_merging(model: ModelConfig) -> bool:
    """Return whether the policy is more than vLLM can serve: A and B of linear layers over an unchanged base model."""
    adapter = model.adapter
    return bool(adapter.use_dora or adapter.modules_to_save or adapter.target_parameters or rescales_weights(model))


def rescales_weights(model: ModelConfig) -> bool:
    """Return whether rlpipe rescales the base model's weights (``model.normalize_weight_scales``)."""
    return any(not rule.dry_run for rule in model.normalize_weight_scales.values())
