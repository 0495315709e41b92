"""Rollout engine that samples with transformers, on a CPU or a GPU.

Shapes: B sequences, P tokens of the longest prompt.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.model_config import ModelConfig, serves_adapter
from rlpipe.configs.schema.rollout_config import RolloutConfig, SamplingConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.configs.serving import published_kind
from rlpipe.data.render.processor import ImageProcessor, check_ids, feature_token_id, seen_tiles
from rlpipe.errors import ConfigError, ModelError, WeightsMismatch, did_you_mean
from rlpipe.models.adapter import AGAIN, read_adapter
from rlpipe.models.hf_weight_map import WeightGroup, plan_units, to_files, untied_state
from rlpipe.models.loading import COMPLETE, num_embeddings, open_model, unknown_token
from rlpipe.models.nf4 import to_nf4_and_back
from rlpipe.models.served_weights import PREFIX, ServedWeights
from rlpipe.rollout.engine import (
    DEFAULT_SEQUENCES,
    Sample,
    build_group,
    engine_threads,
    failed_group,
    too_long,
    without_base,
    without_image,
)
from rlpipe.rollout.hf_sampling import Sampler, StopCriterion
from rlpipe.types import Buckets, EngineHealth, GroupRequest, RolloutGroup, WeightsKind, WeightsManifest
from rlpipe.weights.buckets import (
    BASE_DIGEST,
    LoraPairs,
    adapter_bucket,
    add_checksum,
    check_adapter_modules,
    check_dtype,
    check_parameters,
    check_shape,
    digest_of_sums,
    lora_digest,
    pack_adapter,
    pair_adapter,
    unpack,
)


class ImageInputs:
    """A builder of generate's image arguments, with the model's processor."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self._processor = ImageProcessor(config)
        self._image_id = feature_token_id(model.config)
        self._arguments = set(inspect.signature(model.forward).parameters)

    def arguments(self, requests: Sequence[GroupRequest], token_ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments by name, for left-padded prompts ``[B, P]`` with the same number of images each."""
        rows = [
            [image.content for image in request.prompt.images]
            for request in requests
            for _ in range(request.group_size)
        ]
        if not rows[0]:
            return {}
        pixels = self._processor.pixels(rows)
        arguments = {name: value.to(token_ids.device) for name, value in pixels.items() if name in self._arguments}
        assert self._image_id is not None, "a model that takes images has a token for them"
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self._arguments:
                arguments[name] = token_ids.eq(self._image_id).long()
        if "cross_attention_mask" in self._arguments:
            tiles = zip(token_ids, arguments["aspect_ratio_mask"], strict=True)
            tile_masks = [seen_tiles(row, self._image_id, row_tiles) for row, row_tiles in tiles]
            arguments["cross_attention_mask"] = torch.stack(tile_masks)
        return arguments


_OWN_SAMPLING_ARGS = {
    "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length",
    "stop_strings", "eos_token_id", "pad_token_id", "num_return_sequences", "num_beams", "use_cache",
}  # fmt: skip
_ADAPTER_KEYS = (
    "r", "lora_alpha", "target_modules", "use_rslora", "rank_pattern", "alpha_pattern", "exclude_modules",
    "layers_to_transform", "layers_pattern", "fan_in_fan_out",
)  # fmt: skip


class HfEngine:
    """``rlpipe.rollout.engine.Engine`` on transformers: one ``step`` samples a whole batch of waiting groups.

    Nothing runs between two steps, so weights are replaced in place, whatever ``weights.on_update`` says.
    ``rollout.engine_args`` takes only ``max_batch_size``, the most sequences of a batch.
    """

    def __init__(
        self, name: str, model: ModelConfig, rollout: RolloutConfig, weights: WeightsConfig, *, max_prompt_tokens: int
    ) -> None:
        _check_options(rollout)
        torch.set_num_threads(engine_threads(rollout))
        self._name = name
        self._kind = WeightsKind(published_kind(model, weights))
        self._sampling = rollout.sampling
        self._batch_size: int = rollout.engine_args.get("max_batch_size", DEFAULT_SEQUENCES)
        self._max_model_len = rollout.max_model_len or max_prompt_tokens + rollout.sampling.max_tokens
        self._waiting: list[tuple[GroupRequest, float]] = []
        self._version, self._digest = 0, BASE_DIGEST
        self._num_tokens, self._busy_s = 0, 0.0

        self._base, self._tokenizer = _open_model(model, nf4=model.adapter.kind == "qlora" and serves_adapter(model))
        self._served = ServedWeights(model) if self._kind is WeightsKind.MERGED else None
        self._images = ImageInputs(self._base, model)
        self._end_ids = _end_token_ids(self._base, self._tokenizer.eos_token_id)
        self._image_id = feature_token_id(self._base.config)
        self._base.generation_config = GenerationConfig()
        self._linear_modules = [
            name for name, layer in self._base.named_modules() if isinstance(layer, nn.Linear | Conv1D)
        ]
        self._policy: Any = self._base
        if self._kind is not WeightsKind.FULL and model.adapter.path is not None:
            merged_digest = self._digest_of if self._kind is WeightsKind.MERGED else None
            with reading_files(f"model.adapter.path={model.adapter.path} can't be served", AGAIN, error=ModelError):
                manifest, buckets = pack_adapter(*read_adapter(model.adapter.path), self._base.dtype, merged_digest)
                if self.load(manifest, buckets) != manifest.digest:
                    raise WeightsMismatch(f"engine {name} does not serve the adapter that it started from")

    @property
    def has_work(self) -> bool:
        return any(request.min_version <= self._version for request, _ in self._waiting)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        now = time.perf_counter()
        self._waiting.extend((request, now) for request in requests)
        self._waiting.sort(key=lambda waiting: not waiting[0].has_priority)

    def cancel(self, group_ids: Collection[int]) -> None:
        self._waiting = [waiting for waiting in self._waiting if waiting[0].group_id not in group_ids]

    def step(self) -> list[RolloutGroup]:
        start = time.perf_counter()
        batch, failed = self._take_batch()
        if not batch:
            return failed
        samples = self._sample([request for request, _ in batch])
        now = time.perf_counter()
        self._busy_s += now - start
        groups = []
        for request, received_s in batch:
            group_samples, samples = samples[: request.group_size], samples[request.group_size :]
            groups.append(build_group(request, group_samples, now - received_s))
        return failed + groups

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        return True

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        if manifest.kind is not self._kind:
            raise ModelError(f"engine {self._name} expects {self._kind} weights, got {manifest.kind}")
        if manifest.kind is WeightsKind.LORA:
            digest = self._load_adapter(manifest.adapter_config or {}, unpack(adapter_bucket(manifest, buckets)))
        elif manifest.kind is WeightsKind.MERGED:
            digest = self._merge_adapter(manifest.adapter_config or {}, unpack(adapter_bucket(manifest, buckets)))
        else:
            digest = self._load_full(buckets)
        self._version, self._digest = manifest.version, digest
        return digest

    def health(self) -> EngineHealth:
        return EngineHealth(
            name=self._name,
            version=self._version,
            digest=self._digest,
            outstanding_groups=len(self._waiting),
            num_tokens=self._num_tokens,
            busy_s=self._busy_s,
        )

    def stop(self) -> None:
        del self._policy, self._base

    def _take_batch(self) -> tuple[list[tuple[GroupRequest, float]], list[RolloutGroup]]:
        """Take the requests that one call of generate can sample together, and fail those that it never can."""
        batch: list[tuple[GroupRequest, float]] = []
        failed, waiting, num_sequences = [], [], 0
        for request, received_s in self._waiting:
            eligible = request.min_version <= self._version
            fits = not batch or (
                num_sequences + request.group_size <= self._batch_size and _can_batch(request, batch[0][0])
            )
            if eligible and (problem := self._problem(request)):
                failed.append(failed_group(request, problem))
            elif eligible and fits:
                batch.append((request, received_s))
                num_sequences += request.group_size
            else:
                waiting.append((request, received_s))
        self._waiting = waiting
        return batch, failed

    def _problem(self, request: GroupRequest) -> str | None:
        """Return why the request can't be sampled; None if it can."""
        length = len(request.prompt.token_ids)
        if length >= self._max_model_len:
            return too_long(length, self._max_model_len)
        prompt = request.prompt
        if not prompt.images and (problem := unknown_token(prompt.token_ids, num_embeddings(self._base))) is not None:
            return problem
        if not request.use_adapter and self._kind is not WeightsKind.LORA:
            return without_base(self._kind)
        try:
            if request.sampling is not None:
                _check_sampling(request.sampling)
        except ConfigError as error:
            return str(error)
        return None

    @torch.inference_mode()
    def _sample(self, requests: Sequence[GroupRequest]) -> list[Sample]:
        """Sample all completions of requests of the same kind, group by group, in one left-padded batch."""
        sampling = requests[0].sampling or self._sampling
        prompts = [request.prompt.token_ids for request in requests for _ in range(request.group_size)]
        width = max(map(len, prompts))
        pad_id = self._tokenizer.pad_token_id if self._tokenizer.pad_token_id is not None else 0
        token_ids = torch.full((len(prompts), width), pad_id)  # [B, P]
        mask = torch.zeros_like(token_ids)  # [B, P]
        for row, prompt in enumerate(prompts):
            token_ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        device = self._base.device
        sampler = Sampler(requests, sampling, mask.to(device))
        ending = StopCriterion(
            [
                min(r.max_tokens, self._max_model_len - len(r.prompt.token_ids))
                for r in requests
                for _ in range(r.group_size)
            ],
            num_prompt=width,
            end_ids={*self._end_ids, *sampling.stop_token_ids, self._image_id},
            stop=sampling.stop,
            decode=lambda ids: str(self._tokenizer.decode(ids, skip_special_tokens=True)),
        )
        config = GenerationConfig(
            do_sample=False, max_new_tokens=ending.most_tokens, pad_token_id=pad_id, **sampling.extra
        )
        without = not requests[0].use_adapter and isinstance(self._policy, PeftModel)
        with self._policy.disable_adapter() if without else nullcontext():
            output = self._policy.generate(
                input_ids=token_ids.to(device),
                attention_mask=mask.to(device),
                **self._images.arguments(requests, token_ids.to(device)),
                generation_config=config,
                logits_processor=[sampler],
                stopping_criteria=[ending],
            )
        sampled, logprobs = output[:, width:].tolist(), torch.stack(sampler.logprobs, dim=1).tolist()
        samples = [
            Sample(
                token_ids=sampled[row][:length],
                logprobs=logprobs[row][:length],
                policy_versions=[self._version] * length,
                finish_reason=without_image(sampled[row][:length], self._image_id, reason),
            )
            for row, (length, reason) in enumerate(zip(ending.lengths, ending.reasons, strict=True))
        ]
        self._num_tokens += sum(ending.lengths)
        return samples

    @torch.no_grad()
    def _load_adapter(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        check_dtype(tensors, self._base.dtype)
        pairs = pair_adapter(tensors)
        check_adapter_modules(pairs.keys(), self._linear_modules, config)
        if isinstance(self._policy, PeftModel):
            self._base = self._policy.unload()
        settings = {key: config[key] for key in _ADAPTER_KEYS if config.get(key) is not None}
        self._policy = get_peft_model(self._base, LoraConfig(**settings), autocast_adapter_dtype=False).eval()
        layers = _adapted_layers(self._policy)
        check_parameters(pairs.keys(), layers.keys())
        for module, pair in pairs.items():
            weights = layers[module].lora_A["default"].weight, layers[module].lora_B["default"].weight
            for weight, tensor in zip(weights, pair, strict=True):
                check_shape(module, tensor, weight)
                weight.copy_(tensor)
        return lora_digest(_served_pairs(layers))

    @torch.no_grad()
    def _merge_adapter(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        assert self._served is not None, "the engine was opened to serve merged weights"
        served = untied_state(self._base)
        for _, parameters in self._served.changed(config, tensors, self._base.device):
            for name, value in parameters.items():
                served[name].copy_(value)
        return _digest(served, self._base.dtype)

    def _digest_of(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
        assert self._served is not None, "the engine was opened to serve merged weights"
        return self._served.digest(config, tensors, self._base.device)

    @cached_property
    def _file_plan(self) -> tuple[dict[str, Tensor], dict[str, WeightGroup]]:
        """The tensors of the model's files, on the meta device, and the ``WeightGroup`` that each belongs to."""
        meta_tensors: dict[str, Tensor] = {}
        for name, tensor in untied_state(self._base).items():
            meta_tensors |= to_files(self._base, name, tensor.detach().to("meta"))
        return meta_tensors, {name: unit for unit in plan_units(self._base, meta_tensors) for name in unit.sources}

    @torch.no_grad()
    def _load_full(self, buckets: Buckets) -> str:
        served, (meta_tensors, units) = untied_state(self._base), self._file_plan
        received: set[str] = set()
        waiting: dict[str, Tensor] = {}
        for bucket in buckets:
            tensors = unpack(bucket)
            check_dtype(tensors, self._base.dtype)
            check_parameters(tensors.keys(), meta_tensors.keys(), complete=False)
            received |= tensors.keys()
            for name, tensor in tensors.items():
                check_shape(name, tensor, meta_tensors[name])
                waiting[name] = tensor
                sources = units[name].sources
                if sources.keys() <= waiting.keys():
                    parameters = units[name].to_parameters({source: waiting.pop(source) for source in sources})
                    for parameter, value in parameters.items():
                        served[parameter].copy_(value)
        check_parameters(received, meta_tensors.keys())
        return _digest(served, self._base.dtype)


def _digest(served: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    sums: dict[int, int] = {}
    for name, tensor in served.items():
        add_checksum(sums, name, tensor, dtype)
    return digest_of_sums(sums)


def _adapted_layers(policy: PeftModel) -> dict[str, Any]:
    """Return PEFT's LoRA layers, by the name of the module that each wraps."""
    return {
        name.removeprefix(PREFIX): layer
        for name, layer in policy.named_modules()
        if isinstance(getattr(layer, "lora_A", None), nn.ModuleDict) and layer.lora_A
    }


def _served_pairs(layers: Mapping[str, Any]) -> LoraPairs:
    return {
        module: (layer.lora_A["default"].weight, layer.lora_B["default"].weight * layer.scaling["default"])
        for module, layer in layers.items()
    }


def _open_model(model: ModelConfig, *, nf4: bool) -> tuple[PreTrainedModel, Any]:
    """Open the base model, ready to serve, and its tokenizer; ``nf4`` rounds its weights as QLoRA does."""
    source = {"revision": model.tokenizer_revision, "trust_remote_code": model.trust_remote_code}
    with reading_files(f"model.path={model.path} can't be loaded", COMPLETE, error=ModelError):
        check_ids(Path(model.tokenizer or model.path))
        tokenizer = AutoTokenizer.from_pretrained(model.tokenizer or model.path, **source)
        policy: Any = open_model(model.path, model, getattr(torch, model.dtype))
    if nf4:
        to_nf4_and_back(policy)
    return policy.to("cuda" if torch.cuda.is_available() else "cpu").eval().requires_grad_(False), tokenizer


def _end_token_ids(model: PreTrainedModel, tokenizer_eos: int | None) -> set[int]:
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    end_ids = configured if isinstance(configured, list) else [configured]
    return {token for token in (*end_ids, tokenizer_eos) if token is not None}


def _can_batch(request: GroupRequest, other: GroupRequest) -> bool:
    return _kind(request) == _kind(other)


def _kind(request: GroupRequest) -> tuple[Any, ...]:
    return request.use_adapter, request.sampling, len(request.prompt.images)


def _check_options(rollout: RolloutConfig) -> None:
    _check_sampling(rollout.sampling)
    if rollout.tensor_parallel_size > 1:
        raise ConfigError("rollout.tensor_parallel_size needs rollout.engine=vllm; set it to 1 for hf")
    _check_names(rollout.engine_args, {"max_batch_size"}, "rollout.engine_args")


def _check_sampling(sampling: SamplingConfig) -> None:
    for name in ("guided_regex", "guided_json"):
        if getattr(sampling, name) is not None:
            raise ConfigError(f"rollout.sampling.{name} needs rollout.engine=vllm; set it to null for hf")
    allowed = set(vars(GenerationConfig())) - _OWN_SAMPLING_ARGS
    _check_names(sampling.extra, allowed, "rollout.sampling.extra")


def _check_names(arguments: Mapping[str, Any], allowed: set[str], option: str) -> None:
    for name in arguments:
        if name not in allowed:
            raise ConfigError(f"{option}.{name} can't be set for the hf engine{did_you_mean(name, allowed)}")
