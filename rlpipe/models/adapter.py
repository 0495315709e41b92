"""Files of a LoRA adapter in PEFT's format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rlpipe.common.hub import hub_has
from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig, rescales_weights
from rlpipe.errors import ConfigError, ModelError

FILE = "rlpipe.json"


@dataclass(kw_only=True, frozen=True, slots=True)
class TrainingRecord:
    base_precision: str = "full"
    """``full``, or ``nf4`` for a base that QLoRA quantised to NF4."""
    weight_scales: Mapping[str, float] = field(default_factory=dict)
    """Factors that parameters were multiplied with, by name (``model.normalize_weight_scales``)."""

    def write(self, adapter: Path) -> None:
        (adapter / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_record(adapter: Path) -> TrainingRecord:
    """Read an adapter's record; raise ``ModelError`` if it is broken.

    An adapter that rlpipe did not train has none, and counts as trained on the unchanged base model.
    """
    path = adapter / FILE
    try:
        return TrainingRecord(**json.loads(path.read_text())) if path.exists() else TrainingRecord()
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is not in the format of this version of rlpipe: {describe_error(error)}") from None


def without_learner(model: ModelConfig, adapter: str | None) -> ModelConfig:
    """Return the model config for serving without a learner, with ``adapter`` in place of the config's own if given.

    Only a learner merges adapters and rescales weights. Raises ``ConfigError`` or ``ModelError`` if the engines alone
    would serve a different policy.
    """
    if rescales_weights(model):
        raise ConfigError(
            "model.normalize_weight_scales: only a learner rescales weights; merge the adapter (rlpipe merge), and use "
            "the merged model, without these rules"
        )
    path = adapter or model.adapter.path
    return replace(model, adapter=AdapterConfig(kind=model.adapter.kind) if path is None else read_adapter_config(path))


def read_adapter_config(path: str) -> AdapterConfig:
    """Read the config of a PEFT adapter; raise ``ModelError`` if it can't be read or served."""
    from peft import LoraConfig, PeftConfig  # imported here because it takes a second

    if not Path(path).is_dir() and not hub_has(path, kind="model", option="--adapter", error=ModelError):
        raise ModelError(f"--adapter: there is no folder {Path(path).absolute()}, and the hub can't be reached")
    try:
        settings = PeftConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"--adapter: {path} holds no PEFT adapter ({describe_error(error)})") from error
    if not isinstance(settings, LoraConfig):
        raise ModelError(f"--adapter: {path} is a {settings.peft_type} adapter; only LoRA can be served")
    record = read_record(Path(path))
    if record.weight_scales:
        raise ModelError(f"--adapter: {path} was trained on rescaled weights: merge it first (rlpipe merge)")
    modules = settings.target_modules
    return AdapterConfig(
        kind="qlora" if record.base_precision == "nf4" else "lora",
        path=path,
        r=max([settings.r, *(settings.rank_pattern or {}).values()]),
        alpha=settings.lora_alpha,
        target_modules=modules if isinstance(modules, str) else sorted(modules or ()),
        use_rslora=settings.use_rslora,
    )
