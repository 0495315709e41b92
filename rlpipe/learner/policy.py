"""The policy that a learner trains: loading, adapters, and the strategy that holds it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlpipe.algorithms.features import layer_indices
from rlpipe.common.hub import find_source, local_model
from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, allows_flex_attention, reentrant_checkpointing
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig, serves_adapter
from rlpipe.data.render.processor import ImageProcessor
from rlpipe.errors import ConfigError, ModelError
from rlpipe.learner import row_plan
from rlpipe.learner.adapter_layers import Drift, fuse_lora, normalize_weight_scales
from rlpipe.learner.adapter_patches import LiveMerge
from rlpipe.learner.forward import LogprobModel, check_adapter, drop_unread
from rlpipe.learner.row_plan import AttentionLayout, Row, plan_row
from rlpipe.learner.strategies.sharding import Sharding, SingleRank
from rlpipe.learner.vision import Vision
from rlpipe.learner.workload import LM_HEAD, Workload, reads_logprobs
from rlpipe.models.adapter import TrainingRecord, put_tensors, read_adapter, read_record, without_copies
from rlpipe.models.gguf_models import model_folder
from rlpipe.models.loading import (
    CLASSIFIER,
    COMPLETE,
    describe_model,
    empty_model,
    has_vision,
    is_quantized,
    meta_model,
    open_model,
    open_reward_model,
    unknown_token,
    with_dtype,
)
from rlpipe.models.model_files import WHOLE_QUANTIZED
from rlpipe.models.nf4 import nf4_config, resolve_nf4
from rlpipe.models.served_weights import ServedWeights
from rlpipe.types import MicroBatch, WeightsKind

DROPOUT = ("dropout", "pdrop", "layerdrop")
JITTER = ("jitter_noise", "input_jitter_noise")
"""Endings and names of the attributes with which transformers' modules add noise in training alone."""

FROZEN_B = "mica"
"""PEFT's initialization of adapters whose B is never trained, and would be missing in an export."""


class Policy:
    """The model being trained; ``model`` is transformers' or PEFT's, and must not be called for its own logits."""

    def __init__(
        self, module: LogprobModel, config: ModelConfig, device: torch.device, sharding: Sharding | None = None
    ) -> None:
        self.module = module
        self.config = config
        self.device = device
        self.sharding = sharding or SingleRank()
        self.served_dtype = str(module.compute_dtype).removeprefix("torch.")
        """Type of the weights that engines are sent, such as ``bfloat16``."""
        self.num_trained = sum(parameter.numel() for parameter in self.trainable_parameters().values())
        """Number of elements of all trained parameters."""

    @property
    def notes(self) -> list[str]:
        """Messages to the user about how the model was loaded and sharded."""
        return [*map(str, self.module.drifts), *self.sharding.notes]

    @property
    def model(self) -> PreTrainedModel | PeftModel:
        return self.module.model

    @property
    def kind(self) -> WeightsKind:
        """Kind of weights that engines are given, unless ``weights.serve`` says otherwise."""
        return WeightsKind.LORA if serves_adapter(self.config) else WeightsKind.FULL

    @property
    def exports_adapter(self) -> bool:
        """Whether the trained policy is saved as an adapter; a reward model is merged, as scorers load it whole."""
        return isinstance(self.model, PeftModel) and self.module.classifier is None

    @cached_property
    def merged(self) -> LiveMerge:
        """The whole model with the LoRA adapter merged; raises ``ModelError`` if it can't be merged exactly."""
        assert isinstance(self.model, PeftModel)
        return LiveMerge(self.model, self.sharding)

    @cached_property
    def served(self) -> ServedWeights:
        """The weights of engines that merge the adapter into the base, from the base's files."""
        return ServedWeights(replace(self.config, dtype=self.served_dtype))

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their names in ``model``, each tied one once."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @cached_property
    def adapter_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of a LoRA adapter by their names in PEFT's files; cached, because finding the names is slow."""
        trained = self.trainable_parameters()
        named = get_peft_model_state_dict(self.model, state_dict=trained, save_embedding_layers=False)
        return {name: named[name] for name in sorted(named)}

    def plan(self, micro_batch: MicroBatch) -> Row:
        """Plan the row that the micro batch is run as; raise ``ModelError`` for a token that the model lacks."""
        if micro_batch.images:  # whose placeholder need not be a token of the model
            return self.vision.plan(micro_batch, self.module.layout, self.device)
        if (problem := unknown_token(micro_batch.token_ids, self.module.num_embeddings)) is not None:
            raise ModelError(f"model.path={self.config.path}: {problem}")
        return plan_row(micro_batch, layout=self.module.layout, device=self.device)

    @property
    def has_vision(self) -> bool:
        return has_vision(self.module.causal_model)

    @cached_property
    def vision(self) -> Vision:
        """Preparation of the model's image inputs."""
        return Vision(self.module.causal_model, self.image_processor)

    @cached_property
    def image_processor(self) -> ImageProcessor:
        return ImageProcessor(self.config)

    def logprobs(
        self, micro_batch: MicroBatch, *, temperature: float, with_entropy: bool = False, chunk_tokens: int = 1024
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs and entropies ``[N]`` of the micro batch's loss tokens; 0 for all others."""
        row = self.plan(micro_batch)
        logprobs, entropy = self.module.logprobs(
            row, temperature, chunk_tokens, with_entropy, entropy_gradient=with_entropy
        )
        zeros = logprobs.new_zeros(micro_batch.num_tokens)
        return (
            zeros.index_copy(0, row.loss_tokens, logprobs),
            None if entropy is None else zeros.index_copy(0, row.loss_tokens, entropy),
        )

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Turn off gradients and dropout inside the context; contexts may be nested."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.sharding.end_inference(self.module)
            self.model.train(training)

    @contextmanager
    def adapter_off(self) -> Iterator[None]:
        """Disable the LoRA adapter inside the context; only for LoRA."""
        assert isinstance(self.model, PeftModel)
        trained = self.trainable_parameters().values()
        with self.model.disable_adapter():
            # PEFT freezes what it disables; FSDP treats what is frozen in its first forward pass as frozen for good.
            for parameter in trained:
                parameter.requires_grad_(True)
            yield


def load_policy(
    model: ModelConfig, learner: LearnerConfig, device: torch.device, *, seed: int = 0, workload: Workload | None = None
) -> Policy:
    """Load model and adapter, and shard them over the ranks; a new adapter is initialized from ``seed`` on every rank.

    Trained parameters are kept in float32 and computed with in ``model.dtype``. Chunked offload is planned for
    ``workload``. Raises ``ModelError``, in one line, if the model or adapter can't be found, loaded or trained.
    """
    model = with_dtype(model, device)
    workload = workload or Workload()
    sharding = make_sharding(learner, device, model, workload)
    module = load_logprob_model(model, "cpu" if sharding.loads_on_cpu else device, head=workload.head, seed=seed)
    if workload.takes_masks:
        module.take_masks(model.attention, device, flex=allows_flex_attention(model, learner))
    if model.gradient_checkpointing:
        attention = module.causal_model.config.get_text_config()._attn_implementation
        _enable_checkpointing(
            module.causal_model, reentrant=reentrant_checkpointing(replace(model, attention=attention), learner)
        )
    if model.adapter.kind != "none":
        module.model = _add_adapter(module.causal_model, model.adapter, seed, module.drifts)
    module.train()
    sharding.shard(module, trained=True)
    if model.adapter.kind == "qlora":
        resolve_nf4(module, device)
    return Policy(module, model, device, sharding)


def empty_policy(model: ModelConfig) -> Policy:
    """Make a policy on the CPU to read a checkpoint's adapter into; its base is empty and can't be run."""
    model = with_dtype(model, torch.device("cpu"))
    with reading_files(f"model.path={model.path} can't be loaded", COMPLETE, error=ModelError):
        base = empty_model(describe_policy(model), images=model.images, trust_remote_code=model.trust_remote_code)
    module = LogprobModel(base, compute_dtype=getattr(torch, model.dtype), layout=AttentionLayout.SHARED)
    module.model = _add_adapter(base, model.adapter, seed=0)
    return Policy(module, model, torch.device("cpu"))


def describe_policy(model: ModelConfig) -> PreTrainedConfig:
    """Return transformers' config of ``model.path``; raise ``ModelError`` if it can't be found or read."""
    return describe_model(find_source(model_folder(model.path), "model.path", revision=model.revision), model)


def pads_sequences(model: ModelConfig) -> bool:
    """Return whether the policy runs sequences apart, padded to the longest one; its weights are not read."""
    described = describe_policy(model)
    with reading_files(f"model.path={model.path}: its config does not describe a model", COMPLETE, error=ModelError):
        causal = meta_model(described, images=model.images, trust_remote_code=model.trust_remote_code)
    return row_plan.find_layout(causal, model.attention) is AttentionLayout.APART


def load_copy(model: ModelConfig, algorithm: AlgorithmConfig, device: torch.device | str) -> LogprobModel:
    """Load a copy of the initial model for a reference: what the algorithm reads of it, without gradients."""
    module = load_logprob_model(model, device, frozen=not algorithm.reference.sync_steps)
    return _as_copy(module, algorithm)


def meta_copy(described: PreTrainedConfig, model: ModelConfig, algorithm: AlgorithmConfig) -> LogprobModel:
    """Make what ``load_copy`` loads, without its weights; ``described`` is transformers' config of the model."""
    causal = meta_model(deepcopy(described), images=model.images, trust_remote_code=model.trust_remote_code)
    dtype: torch.dtype = getattr(torch, model.dtype)
    cast(nn.Module, causal).to(torch.float32 if algorithm.reference.sync_steps else dtype)
    return _as_copy(LogprobModel(causal, compute_dtype=dtype, layout=AttentionLayout.SHARED), algorithm)


def _as_copy(module: LogprobModel, algorithm: AlgorithmConfig) -> LogprobModel:
    if not reads_logprobs(algorithm):
        drop_unread(module, max(layer_indices(algorithm.ebft.features.layers, module.num_layers)))
    module.requires_grad_(False).eval()
    return module


def make_sharding(learner: LearnerConfig, device: torch.device, model: ModelConfig, workload: Workload) -> Sharding:
    if learner.offload == "chunked":
        from rlpipe.learner.strategies.chunked import Chunked

        copy = None
        if workload.copied_for is not None:
            copy = meta_copy(describe_policy(model), model, workload.copied_for)
        return Chunked(learner, device, workload, copy)
    if learner.strategy == "fsdp2":
        from rlpipe.learner.strategies.fsdp2 import Fsdp2

        return Fsdp2(
            learner.fsdp, device, on_cpu=learner.offload == "policy", reduce_every_backward=model.adapter.kind == "none"
        )
    if learner.strategy == "zero3":
        from rlpipe.learner.strategies.zero3 import Zero3

        return Zero3(learner.zero3, device)
    if learner.num_ranks > 1:
        raise ConfigError(
            f"learner.num_ranks={learner.num_ranks} needs learner.strategy=fsdp2 or zero3: single has only one rank"
        )
    return SingleRank()


def load_logprob_model(
    config: ModelConfig, device: torch.device | str, *, frozen: bool = False, head: str = LM_HEAD, seed: int = 0
) -> LogprobModel:
    """Load the model without adapter on ``device``, in float32 if trained as a whole, else in ``config.dtype``.

    A reward head that the model lacks is initialized from ``seed``.
    """
    config = with_dtype(config, torch.device(device))
    compute_dtype: torch.dtype = getattr(torch, config.dtype)
    is_full_training = config.adapter.kind == "none" and not frozen
    if is_full_training or head != LM_HEAD or config.adapter.merge:
        _refuse_quantized(config)
    model = _load_model(config, torch.float32 if is_full_training else compute_dtype, head, seed)
    cast(nn.Module, model).to(device)
    turn_off_dropout(model)
    drifts = normalize_weight_scales(model, config.normalize_weight_scales)
    layout = row_plan.find_layout(model, config.attention)
    if layout is AttentionLayout.SHARED:
        row_plan.use_packed_attention(model)
    return LogprobModel(model, compute_dtype=compute_dtype, layout=layout, drifts=drifts)


def turn_off_dropout(model: nn.Module) -> None:
    """Set the model's own dropout and router noise to 0: the log-probs in training are those of the policy itself."""
    for child in model.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        for name, value in vars(child).items():
            if isinstance(value, float) and (name.endswith(DROPOUT) or name in JITTER):
                setattr(child, name, 0.0)


def _refuse_quantized(config: ModelConfig) -> None:
    """Raise ``ModelError`` if the model's files are quantized, so that it can't be trained or sent whole."""
    if is_quantized(describe_policy(config)):
        raise ModelError(f"model.path={config.path}: {WHOLE_QUANTIZED}")


def _load_model(config: ModelConfig, dtype: torch.dtype, head: str, seed: int) -> PreTrainedModel:
    source = find_source(model_folder(config.path), "model.path", revision=config.revision)
    quantization: dict[str, Any] = {}
    if config.adapter.kind == "qlora":
        quantization = {"quantization_config": nf4_config(dtype), "device_map": {"": "cpu"}}
    with reading_files(f"model.path={config.path} can't be loaded", COMPLETE, error=ModelError):
        if head != LM_HEAD:
            return open_reward_model(source, config, dtype, head=head, seed=seed)
        model = open_model(source, config, dtype, **quantization)
    if model.base_model is model or model.get_output_embeddings() is None:
        raise ModelError(f"model.path={config.path}: {type(model).__name__} has no lm_head of its own")
    return model


def _enable_checkpointing(model: PreTrainedModel, *, reentrant: bool) -> None:
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} has no gradient checkpointing: set model.gradient_checkpointing=false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:  # a reentrant block has gradients only if its input requires them, unlike a frozen embedding's output
        model.enable_input_require_grads()


def _check_base(record: TrainingRecord, config: AdapterConfig, drifts: Sequence[Drift]) -> None:
    """Raise ``ValueError`` if an adapter was trained on other values of the base's weights."""
    if record.base_precision == "nf4" and config.kind != "qlora":
        raise ValueError("it was trained on the base in NF4: set model.adapter.kind=qlora")
    different = record.weight_scales.keys() ^ {drift.name for drift in drifts if drift.factor != 1}
    if different:
        name = min(different)
        raise ValueError(f"it was trained with another scale of {name}: set model.normalize_weight_scales back")


def _add_adapter(
    model: PreTrainedModel, config: AdapterConfig, seed: int, drifts: Sequence[Drift] | None = None
) -> PeftModel:
    name = "model.adapter" if config.path is None else f"model.adapter.path={config.path}"
    hint = "; adapters go on the language model, unless target_modules is a regex" if has_vision(model) else ""
    with reading_files(f"{name} can't be loaded", f"give one that fits the model{hint}", error=ModelError):
        if config.path is not None:
            folder = local_model(config.path, "model.adapter.path")
            settings, tensors = read_adapter(str(folder), name)
            if drifts is not None:
                _check_base(read_record(folder), config, drifts)
            if getattr(settings, "init_lora_weights", None) == FROZEN_B:
                raise ValueError(f"init_lora_weights={FROZEN_B} trains A alone, and rlpipe A and B")
            settings.inference_mode = False
            adapted = PeftModel(model, settings)
            put_tensors(adapted, without_copies(adapted, tensors, name), name)
        else:
            with torch.random.fork_rng():
                torch.manual_seed(seed)
                adapted = get_peft_model(model, lora_config(config, model))
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # modules_to_save are created in the base's dtype
            parameter.data = parameter.data.float()
    check_adapter(model)
    fuse_lora(model)
    return adapted


def lora_config(config: AdapterConfig, model: PreTrainedModel) -> LoraConfig:
    """Make PEFT's config; a vision tower, which engines don't adapt, is excluded unless a regex names the targets.

    A reward head is trained in full.
    """
    targets, saved_modules = config.target_modules, list(config.modules_to_save)
    classifies = hasattr(model, CLASSIFIER)
    by_regex = isinstance(targets, str) and targets != "all-linear"
    excluded = None if by_regex else outside_language(model)
    if classifies and targets == "all-linear":
        excluded = CLASSIFIER  # it is trained whole
    return LoraConfig(
        task_type=None if classifies else "CAUSAL_LM",
        r=config.r,
        lora_alpha=config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        target_parameters=list(config.target_parameters) or None,
        exclude_modules=excluded,
        modules_to_save=[*saved_modules, CLASSIFIER] if classifies else saved_modules or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
    )


def outside_language(model: PreTrainedModel) -> str | None:
    """Return a regex of the modules outside of the language model, or None if there are none."""
    if not has_vision(model):
        return None
    decoder = model.get_decoder()
    (name,) = (name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(name)}\.|.*lm_head).*"
