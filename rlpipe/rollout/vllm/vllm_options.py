"""vLLM's arguments for a config: those of its engine and those of a request."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import torch

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import ENGINE_ARGUMENTS, SAMPLING_ARGUMENTS, RolloutConfig, SamplingConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.configs.serving import published_kind
from rlpipe.errors import ConfigError, did_you_mean
from rlpipe.rollout.engine import DEFAULT_SEQUENCES, num_slots, slot_rank
from rlpipe.types import WeightsKind

# vLLM reads these when it is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}.items():
    os.environ.setdefault(_name, _value)

from vllm import EngineArgs, SamplingParams, envs  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: E402

from rlpipe.rollout.vllm.vllm_transfer import LOAD_FORMAT, backend  # noqa: E402

OLDER_RUNNER = "; with VLLM_USE_V2_MODEL_RUNNER=0 in the environment, it takes any number"


def engine_args(
    model: ModelConfig, rollout: RolloutConfig, weights: WeightsConfig, max_prompt_tokens: int
) -> dict[str, Any]:
    """Return vLLM's ``EngineArgs`` for a config, including ``rollout.engine_args``.

    Raises ``ConfigError`` if one of the latter is unknown to vLLM, or set by another option.
    """
    assert model.dtype != "auto", "with auto, vLLM would use the type of the model's files"
    _check_names(rollout.engine_args, {f.name for f in fields(EngineArgs)}, ENGINE_ARGUMENTS, "rollout.engine_args")
    max_model_len = rollout.max_model_len or max_prompt_tokens + rollout.sampling.max_tokens
    args: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer or model.path,
        "revision": model.revision,
        "tokenizer_revision": model.tokenizer_revision or ("main" if model.revision else None),
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "mm_processor_kwargs": dict(model.processor_kwargs) or None,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "max_model_len": max_model_len,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rlpipe.rollout.vllm.vllm_worker.WeightsExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        # Seeded requests fail with chunked prefill, because CPU generators can't be rewound.
        args |= {"enforce_eager": True, "enable_chunked_prefill": False}
        args |= {"max_num_batched_tokens": max(4096, max_model_len), "max_num_seqs": DEFAULT_SEQUENCES}
        # Siblings share whole blocks of their prompt; the default block of 128 tokens is longer than many prompts.
        args["block_size"] = 32
    if rollout.tensor_parallel_size > 1:
        # By default, vLLM would place its workers into the bundle in which the engine's actor holds the GPUs itself.
        args["distributed_executor_backend"] = "mp"
    kind = published_kind(model, weights)
    if kind == "lora":
        args |= {"enable_lora": True, "max_loras": num_slots(weights), "max_lora_rank": slot_rank(model.adapter.r)}
        args["lora_target_modules"] = _target_suffixes(model)
    if model.adapter.kind == "qlora" and kind == "lora" and "quantization" not in rollout.engine_args:
        args["load_format"] = LOAD_FORMAT
    if weights.transport == "nccl":
        args["weight_transfer_config"] = {"backend": backend()}
    return args | dict(rollout.engine_args)


def check_replaceable(kind: WeightsKind, text_config: Any) -> None:
    """Raise ``ConfigError`` if the engine would go on with other weights than those that are published.

    vLLM computes further matrices from those of multi-head latent attention when it loads a model, and only then.
    """
    if kind is not WeightsKind.LORA and getattr(text_config, "kv_lora_rank", None):
        raise ConfigError(
            "vllm can't replace the weights of multi-head latent attention while it serves: set rollout.engine=hf, or "
            "train a LoRA adapter that vllm serves as it is (weights.serve=adapter)"
        )


def sampling_args(sampling: SamplingConfig) -> dict[str, Any]:
    """Return the ``SamplingParams`` arguments that all requests share.

    Raises ``ConfigError`` if one of ``sampling.extra`` is unknown or set by another option, or if vLLM refuses them.
    """
    _check_names(sampling.extra, set(SamplingParams.__struct_fields__), SAMPLING_ARGUMENTS, "rollout.sampling.extra")
    args: dict[str, Any] = {
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "detokenize": bool(sampling.stop or sampling.extra.get("bad_words")),
        "logprobs": 0,
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    if sampling.guided_regex is not None and sampling.guided_json is not None:
        raise ConfigError("rollout.sampling has both guided_regex and guided_json: set one of them to null")
    if sampling.guided_regex is not None:
        args["structured_outputs"] = StructuredOutputsParams(regex=sampling.guided_regex)
    elif sampling.guided_json is not None:
        args["structured_outputs"] = StructuredOutputsParams(json=sampling.guided_json)
    args |= dict(sampling.extra)
    try:
        SamplingParams(**args)
    except (TypeError, ValueError, VLLMValidationError) as error:
        raise ConfigError(f"vllm refused rollout.sampling: {describe_refusal(error)}") from error
    if not current_platform.is_cpu() and envs.VLLM_USE_V2_MODEL_RUNNER is not False:
        _check_lengths(sampling)
    return args


def _check_lengths(sampling: SamplingConfig) -> None:
    """Raise ``ConfigError`` if a list is longer than the sampler of vLLM's runner V2 takes; an engine would die of it.

    Whether vLLM chooses its older runner, which has no limits, is only known for sure if the environment asks for it.
    """
    from vllm.v1.worker.gpu.sample import logit_bias

    limits = {
        "allowed_token_ids": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "logit_bias": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
    }
    for name, limit in limits.items():
        if len(sampling.extra.get(name) or ()) > limit:
            raise ConfigError(
                f"rollout.sampling.extra.{name} has more than {limit} entries, which vllm takes on GPUs{OLDER_RUNNER}"
            )
    limit = logit_bias.MAX_NUM_STOP_TOKEN_IDS - 1  # the model's own end is one
    if sampling.extra.get("min_tokens") and len(sampling.stop_token_ids) > limit:
        raise ConfigError(
            f"rollout.sampling.stop_token_ids has more than {limit} ids, which vllm takes with min_tokens{OLDER_RUNNER}"
        )


def _check_names(arguments: dict[str, Any], allowed: set[str], reserved: dict[str, str], option: str) -> None:
    for name in arguments:
        if name in reserved:
            hint = f"set {reserved[name]} instead" if reserved[name] else "rlpipe sets it itself"
            raise ConfigError(f"{option}.{name} can't be set: {hint}")
        if name not in allowed:
            raise ConfigError(f"{option}.{name} is unknown to vllm{did_you_mean(name, allowed)}")


def _target_suffixes(model: ModelConfig) -> list[str]:
    """Return the modules that vLLM must prepare for an adapter.

    By default vLLM would also prepare the large embedding and output layers.
    """
    targets = model.adapter.target_modules
    if not isinstance(targets, str):
        return [target.rsplit(".", 1)[-1] for target in targets]
    from rlpipe.models.loading import describe_model, has_vision, meta_model

    meta = meta_model(describe_model(model.path, model), images=model.images, trust_remote_code=model.trust_remote_code)
    modules = (meta.get_decoder() if has_vision(meta) else meta).named_modules()
    linear = {name.rsplit(".", 1)[-1] for name, layer in modules if isinstance(layer, torch.nn.Linear)}
    return sorted(linear - {"lm_head"})


def describe_refusal(error: Exception) -> str:
    """Return vLLM's error message about arguments that it refuses, in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # The first line of pydantic's errors only counts them.
    return lines[1] if "validation error" in lines[0] and len(lines) > 1 else lines[0]
