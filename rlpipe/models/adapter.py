"""Files of a LoRA adapter in PEFT's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlpipe.common.atomic_io import DIGESTS, file_digest, seal, unseal
from rlpipe.common.hub import local_model
from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig, rescales_weights
from rlpipe.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel
    from torch import Tensor

ADAPTER = "default"
"""Name that PEFT gives a model's only adapter."""
FILE, WEIGHTS_FILE = "rlpipe.json", "adapter_model.safetensors"
PRECISIONS = ("full", "nf4")
RECORDED = {"record": FILE}
"""Metadata of the weights of an adapter that is wrong without its record."""
MAX_NUMBER = 2**31
KEEPING_THE_BASE = {"gaussian", "eva", "orthogonal", "mica"}
"""PEFT's initializations that leave the base as it is; the others move a part of its weights into the adapter."""
AGAIN = "export or download the adapter again"


@dataclass(kw_only=True, frozen=True, slots=True)
class TrainingRecord:
    """A record of how an adapter's base was changed for its training."""

    base_precision: str = "full"
    """``full``, or ``nf4`` for a base that QLoRA quantized to NF4."""
    weight_scales: Mapping[str, float] = field(default_factory=dict)
    """Factors that parameters were multiplied with, by name (``model.normalize_weight_scales``)."""

    def __post_init__(self) -> None:
        if self.base_precision not in PRECISIONS:
            raise ValueError(f"base_precision is {self.base_precision!r}, not one of {', '.join(PRECISIONS)}")
        if not all(isfinite(factor) for factor in self.weight_scales.values()):
            raise ValueError("weight_scales are not finite")

    @property
    def metadata(self) -> dict[str, str] | None:
        """Metadata for the file of the adapter's weights."""
        return None if self == TrainingRecord() else RECORDED

    def write(self, adapter: Path) -> None:
        """Write the record with the digests of the adapter's files, which must be complete."""
        (adapter / FILE).write_text(seal({**asdict(self), DIGESTS: _digests(adapter)}))


def read_record(adapter: Path) -> TrainingRecord:
    """Read an adapter's record; raise ``ModelError`` if it is broken, or if a file has changed since it was written.

    An adapter that rlpipe did not train has none, and counts as trained on the unchanged base model.
    """
    path = adapter / FILE
    with reading_files(f"{path} can't be read", AGAIN, error=ModelError):
        record = unseal(path.read_text()) if path.exists() else {}
        if DIGESTS not in record and _needs_record(adapter):
            raise ValueError("the adapter's weights say that it has digests")
        written = record.pop(DIGESTS, {})
        digests = _digests(adapter) if written else {}
        for name, digest in written.items():
            if digests.get(name) != digest:
                fix = f"{AGAIN}, or delete {FILE}'s digest and digests if you changed it yourself"
                raise ModelError(f"{adapter / name} has changed since it was written: {fix}")
        return TrainingRecord(**record)


def _digests(adapter: Path) -> dict[str, str]:
    return {path.name: file_digest(path) for path in sorted(adapter.glob("adapter_*")) if path.is_file()}


def _needs_record(adapter: Path) -> bool:
    from safetensors import safe_open

    if not (adapter / WEIGHTS_FILE).is_file():
        return False
    with safe_open(adapter / WEIGHTS_FILE, "numpy") as weights:
        return weights.metadata() == RECORDED


def read_adapter(path: str, subject: str | None = None) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Read the config and the tensors of a PEFT adapter in a folder or on the hub.

    Raises ``ModelError``, which begins with the ``subject``, if a file is missing, damaged or changed.
    """
    from peft.utils import WEIGHTS_NAME, load_peft_weights

    subject = subject or f"model.adapter.path={path}"
    folder = local_model(path, "model.adapter.path")
    read_record(folder)
    config = read_peft_config(str(folder), subject)
    if not any((folder / name).is_file() for name in (WEIGHTS_FILE, WEIGHTS_NAME)):
        raise ModelError(f"{subject} holds no {WEIGHTS_FILE}: {AGAIN}")  # PEFT would look for it on the hub
    with reading_files(f"{subject} can't be read", AGAIN, error=ModelError):
        tensors: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
        for name, tensor in tensors.items():
            if ("lora_" in name and not tensor.is_floating_point()) or not tensor.isfinite().all():
                raise ValueError(f"{name} holds values that are not finite numbers")
        initialized = getattr(config, "init_lora_weights", True)
        if isinstance(initialized, str) and initialized not in KEEPING_THE_BASE:
            raise ValueError(
                f"init_lora_weights={initialized} changed the base as well; save the adapter with PEFT's "
                "path_initial_model_for_weight_conversion"
            )
        largest = max((max(tensor.shape, default=0) for tensor in tensors.values()), default=0)
        for rank in (getattr(config, "r", 0), *(getattr(config, "rank_pattern", None) or {}).values()):
            if rank > largest:  # PEFT would allocate memory for it
                raise ValueError(f"its config asks for rank {rank}, which no tensor has")
    return config, tensors


def read_peft_config(path: str, subject: str) -> PeftConfig:
    """Read the config of a PEFT adapter; raise ``ModelError``, which begins with the ``subject``, if that fails."""
    from peft import LoraConfig, PeftConfig  # imported here because it takes a second

    if Path(path).is_dir():
        path = str(Path(path).absolute())  # else PEFT would look for a missing file on the hub
    with reading_files(f"{subject} holds no PEFT adapter", AGAIN, error=ModelError):
        config = PeftConfig.from_pretrained(path)
        if isinstance(config, LoraConfig):
            _check_types(config)
    return config


def _check_types(config: LoraConfig) -> None:
    """Raise for values that PEFT takes from the file as they are, and that others calculate with."""
    patterns: list[Mapping[str, Any]] = [config.rank_pattern or {}, config.alpha_pattern or {}]
    for number in (config.r, config.lora_alpha, *(value for pattern in patterns for value in pattern.values())):
        if not isinstance(number, int | float) or not abs(number) < MAX_NUMBER:
            raise ValueError(f"it has {number!r} for r, lora_alpha, or a pattern of them")
    modules = config.target_modules
    if not isinstance(modules, str) and not all(isinstance(module, str) for module in modules or ()):
        raise ValueError(f"it has target_modules={modules!r}")


def without_copies(adapted: PeftModel, tensors: Mapping[str, Tensor], subject: str) -> dict[str, Tensor]:
    """Return an adapter's tensors without copies of the base's own parameters, which PEFT may save beside it.

    Raises ``ModelError`` for copies that differ from the base, unless the base is an empty model.
    """
    base = dict(adapted.named_parameters(remove_duplicate=False))
    copies = {name: tensor for name, tensor in tensors.items() if name in base}
    for name, copy in copies.items():
        if not _is_same(copy, base[name]):
            raise ModelError(
                f"{subject} holds {name}, which differs from the base and would not be in the trained adapter: merge "
                "it (rlpipe merge), and train a new adapter on the merged model"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in copies}


def _is_same(copy: Tensor, parameter: Tensor) -> bool:
    """Return whether both have the same values in the less precise type of the two; placeholders equal everything."""
    if copy.shape != parameter.shape:
        return False
    coarse = min(copy.dtype, parameter.dtype, key=lambda dtype: dtype.itemsize)
    return not parameter.is_contiguous() or copy.to(coarse).equal(parameter.detach().to("cpu", coarse))


def put_tensors(adapted: PeftModel, tensors: Mapping[str, Tensor], subject: str) -> None:
    """Give an adapter its tensors; raise ``ModelError`` for those that it lacks and those that the model lacks."""
    from peft import set_peft_model_state_dict

    with reading_files(f"{subject} does not fit the base", "give the model that it was trained on", error=ModelError):
        result: Any = set_peft_model_state_dict(adapted, dict(tensors), ADAPTER)
        missing = [name for name in result.missing_keys if "lora_" in name and f".{ADAPTER}" in name]
        for problem, names in (
            ("the base has no parameters for these tensors", result.unexpected_keys),
            ("these tensors are missing", missing),
        ):
            if names:
                raise ValueError(f"{problem}: {', '.join(sorted(names))}")


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
    if adapter is not None:
        return replace(model, adapter=read_adapter_config(adapter))
    path = model.adapter.path
    adapter_config = (
        AdapterConfig(kind=model.adapter.kind) if path is None else read_adapter_config(path, "model.adapter.path")
    )
    return replace(model, adapter=adapter_config)


def read_adapter_config(path: str, option: str = "--adapter") -> AdapterConfig:
    """Read the config of a PEFT adapter that an option names; raise ``ModelError`` if it can't be read or served."""
    from peft import LoraConfig  # imported here because it takes a second

    folder = local_model(path, option)
    settings = read_peft_config(str(folder), f"{option}: {path}")
    if not isinstance(settings, LoraConfig):
        raise ModelError(f"{option}: {path} is a {settings.peft_type} adapter; only LoRA can be served")
    record = read_record(folder)
    if record.weight_scales:
        raise ModelError(f"{option}: {path} was trained on rescaled weights: merge it first (rlpipe merge)")
    modules = settings.target_modules
    return AdapterConfig(
        kind="qlora" if record.base_precision == "nf4" else "lora",
        path=path,
        r=max([settings.r, *(settings.rank_pattern or {}).values()]),
        alpha=settings.lora_alpha,
        target_modules=modules if isinstance(modules, str) else sorted(modules or ()),
        use_rslora=settings.use_rslora,
        use_dora=settings.use_dora,
        modules_to_save=list(settings.modules_to_save or ()),
        target_parameters=list(settings.target_parameters or ()),
    )
