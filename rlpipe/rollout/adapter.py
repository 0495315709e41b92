"""Reads from an adapter's folder what an engine must know before it loads it."""

from __future__ import annotations

from pathlib import Path

from rlpipe.configs.schema import AdapterConfig
from rlpipe.errors import ModelError
from rlpipe.hub import hub_has
from rlpipe.imports import describe_error
from rlpipe.training_record import read_record


def read_adapter_config(path: str) -> AdapterConfig:
    """What an engine must know of a PEFT adapter before it loads it; raises ``ModelError`` if it can't be read."""
    from peft import LoraConfig, PeftConfig  # a second, which every start of a run would take

    if not Path(path).is_dir() and not hub_has(path, kind="model", option="--adapter", error=ModelError):
        raise ModelError(f"--adapter: there is no folder {Path(path).absolute()}, and the hub can't be reached")
    try:
        settings = PeftConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"--adapter: {path} holds no PEFT adapter ({describe_error(error)})") from error
    if not isinstance(settings, LoraConfig):
        raise ModelError(f"--adapter: {path} is a {settings.peft_type} adapter; only LoRA can be served")
    modules = settings.target_modules
    return AdapterConfig(
        kind="qlora" if read_record(Path(path)).base_precision == "nf4" else "lora",
        path=path,
        r=max([settings.r, *(settings.rank_pattern or {}).values()]),
        alpha=settings.lora_alpha,
        target_modules=modules if isinstance(modules, str) else sorted(modules or ()),
        use_rslora=settings.use_rslora,
    )
