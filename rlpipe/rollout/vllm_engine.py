"""Samples with vLLM, inside the calling process (``LLMEngine``), or with its workers where GPUs share a model."""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch

from rlpipe.configs.schema import ModelConfig, RolloutConfig, SamplingConfig
from rlpipe.errors import ConfigError, ModelError, WeightsMismatch
from rlpipe.rollout.assemble import Sample, build_group, failed_group, sample_seed
from rlpipe.rollout.engine import DEFAULT_SEQUENCES, num_threads
from rlpipe.types import Buckets, EngineHealth, GroupRequest, RolloutGroup, WeightsKind, WeightsManifest
from rlpipe.weights import BASE_DIGEST, adapter_bucket, digest_of_sums, merge_sums, pack_adapter

# vLLM reads these when it is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}.items():
    os.environ.setdefault(_name, _value)

from vllm import EngineArgs, SamplingParams  # noqa: E402
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.inputs.engine import tokens_input  # noqa: E402
from vllm.logprobs import FlatLogprobs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.model_executor.layers.linear import LinearBase  # noqa: E402
from vllm.outputs import CompletionOutput, RequestOutput  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: E402
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: E402

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_OWN_ENGINE_ARGS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "max_model_len": "rollout.max_model_len",
    "enable_lora": "model.adapter.kind",
    "logprobs_mode": "",
    "worker_extension_cls": "",
}
_OWN_SAMPLING_ARGS = {
    "n": "algorithm.group_size",
    "seed": "seed",
    "temperature": "rollout.sampling.temperature",
    "max_tokens": "rollout.sampling.max_tokens",
    "logprobs": "",
    "flat_logprobs": "",
    "output_kind": "",
    "detokenize": "",
    "structured_outputs": "rollout.sampling.guided_regex or guided_json",
}


@dataclass(slots=True)
class _Running:
    request: GroupRequest
    received_s: float
    version: int
    adapter_id: int | None


class VllmEngine:
    """``rlpipe.rollout.engine.Engine`` on vLLM.

    A LoRA version is an adapter with an id of its own: running sequences keep the one they began with, and it is
    removed with its last sequence. Full weights are replaced in place once nothing runs. Of several engines in one
    process none works any more after the first of them is stopped.
    """

    def __init__(self, name: str, model: ModelConfig, rollout: RolloutConfig, *, max_prompt_tokens: int) -> None:
        self._name = name
        self._kind = WeightsKind.LORA if model.adapter.kind == "lora" else WeightsKind.FULL
        self._sampling = sampling_args(rollout.sampling)
        self._waiting: deque[tuple[GroupRequest, float]] = deque()
        self._running: dict[str, _Running] = {}
        self._failed: list[RolloutGroup] = []
        self._num_sequences = 0
        self._num_requests = 0
        self._holding = False
        self._version, self._digest = 0, BASE_DIGEST
        self._adapter: LoRARequest | None = None
        self._num_loads = 0
        self._num_tokens, self._busy_s = 0, 0.0

        self._llm = _open_llm(engine_args(model, rollout, max_prompt_tokens), rollout)
        self._llm.collective_rpc("prepare_serving")
        if model.adapter.path is not None:
            self._load_first(*pack_adapter(model.adapter.path, getattr(torch, model.dtype)))

    @property
    def has_work(self) -> bool:
        return bool(self._failed or self._running) or self._next_eligible() is not None

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        now = time.perf_counter()
        self._waiting.extend((request, now) for request in requests)

    def step(self) -> list[RolloutGroup]:
        start = time.perf_counter()
        self._start_requests()
        groups, self._failed = self._failed, []
        if self._running:
            outputs = self._llm.step()
            groups += [self._finish(output) for output in outputs if isinstance(output, RequestOutput)]
            self._busy_s += time.perf_counter() - start
        return groups

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        if self._kind is WeightsKind.FULL:
            self._holding = True
            return not self._running
        kept = {running.adapter_id for running in self._running.values()} - {None}
        if self._adapter is not None:
            kept.add(self._adapter.lora_int_id)
        lora_config = self._llm.vllm_config.lora_config
        assert lora_config is not None
        return len(kept) < lora_config.max_loras

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        if manifest.kind is not self._kind:
            raise ModelError(f"engine {self._name} takes {self._kind} weights, got {manifest.kind}")
        digest = self._load_adapter(manifest, buckets) if self._kind is WeightsKind.LORA else self._load_full(buckets)
        self._version, self._digest, self._holding = manifest.version, digest, False
        return digest

    def health(self) -> EngineHealth:
        return EngineHealth(
            name=self._name,
            version=self._version,
            digest=self._digest,
            outstanding_groups=len(self._waiting) + len(self._running),
            num_tokens=self._num_tokens,
            busy_s=self._busy_s,
        )

    def stop(self) -> None:
        self._llm.engine_core.shutdown()

    def _next_eligible(self) -> int | None:
        """Place in the queue of the next request that may start now."""
        limit = self._llm.vllm_config.scheduler_config.max_num_seqs
        if self._holding or (self._num_sequences >= limit):
            return None
        for index, (request, _) in enumerate(self._waiting):
            if request.min_version <= self._version:
                return index
        return None

    def _start_requests(self) -> None:
        while (index := self._next_eligible()) is not None:
            request, received_s = self._waiting[index]
            del self._waiting[index]
            try:
                self._start(request, received_s)
            except (ValueError, VLLMValidationError) as error:
                self._failed.append(failed_group(request, f"vllm refused the request: {_reason(error)}"))

    def _start(self, request: GroupRequest, received_s: float) -> None:
        request_id = str(self._num_requests)
        greedy = request.temperature == 0
        params = SamplingParams(
            # The siblings of a greedy sample are all the same.
            n=1 if greedy else request.group_size,
            seed=None if greedy else sample_seed(request.seed),
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            skip_clone=True,
            **self._sampling,
        )
        prompt = tokens_input(request.prompt.token_ids.tolist())
        self._llm.add_request(request_id, prompt, params, lora_request=self._adapter)
        adapter_id = self._adapter.lora_int_id if self._adapter else None
        self._running[request_id] = _Running(request, received_s, self._version, adapter_id)
        self._num_requests += 1
        self._num_sequences += request.group_size

    def _finish(self, output: RequestOutput) -> RolloutGroup:
        running = self._running.pop(output.request_id)
        request = running.request
        self._num_sequences -= request.group_size
        self._drop_unused(running.adapter_id)
        samples = [_sample(completion, running.version) for completion in output.outputs]
        self._num_tokens += sum(len(sample.token_ids) for sample in samples)
        samples *= request.group_size // len(samples)
        return build_group(request, samples, time.perf_counter() - running.received_s)

    def _load_adapter(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        bucket = adapter_bucket(manifest, buckets)
        self._num_loads += 1
        adapter_id = self._num_loads
        try:
            digests = self._llm.collective_rpc("serve_adapter", args=(bucket, manifest.adapter_config, adapter_id))
            if len(set(digests)) != 1:
                raise WeightsMismatch(f"the ranks of engine {self._name} serve different adapters: {digests}")
        except BaseException:
            self._llm.collective_rpc("drop_adapter", args=(adapter_id,))
            raise
        previous = self._adapter
        # The name is part of the prefix cache's key, so that no version reads what another one computed.
        name = f"policy-{manifest.version}-load-{adapter_id}"
        self._adapter = LoRARequest(name, adapter_id, "/only-in-memory")
        if previous is not None:
            self._drop_unused(previous.lora_int_id)
        return digests[0]

    def _load_full(self, buckets: Buckets) -> str:
        assert not self._running, "full weights are loaded only when nothing runs"
        self._llm.collective_rpc("begin_full_load")
        for bucket in buckets:
            self._llm.collective_rpc("load_full_bucket", args=(bucket,))
        sums = self._llm.collective_rpc("finish_full_load")
        self._llm.reset_prefix_cache()
        return digest_of_sums(merge_sums(sums))

    def _load_first(self, manifest: WeightsManifest, buckets: Buckets) -> None:
        if self.load(manifest, buckets) != manifest.digest:
            raise WeightsMismatch(f"engine {self._name} does not serve the adapter that it started from")

    def _drop_unused(self, adapter_id: int | None) -> None:
        is_current = self._adapter is not None and adapter_id == self._adapter.lora_int_id
        is_used = any(running.adapter_id == adapter_id for running in self._running.values())
        if adapter_id is not None and not is_current and not is_used:
            self._llm.collective_rpc("drop_adapter", args=(adapter_id,))


def _sample(completion: CompletionOutput, version: int) -> Sample:
    assert isinstance(completion.logprobs, FlatLogprobs), "requests ask for flat log-probabilities"
    return Sample(
        token_ids=completion.token_ids,
        logprobs=completion.logprobs.logprobs,
        version=version,
        finish_reason=completion.finish_reason or "abort",
    )


def engine_args(model: ModelConfig, rollout: RolloutConfig, max_prompt_tokens: int) -> dict[str, Any]:
    """vLLM's ``EngineArgs`` for a config, ``rollout.engine_args`` among them.

    Raises ``ConfigError`` if one of these is unknown to vLLM, or set by another option.
    """
    _check_names(rollout.engine_args, {f.name for f in fields(EngineArgs)}, _OWN_ENGINE_ARGS, "rollout.engine_args")
    max_model_len = rollout.max_model_len or max_prompt_tokens + rollout.sampling.max_tokens
    args: dict[str, Any] = {
        "model": model.path,
        "tokenizer": model.tokenizer or model.path,
        "revision": model.revision,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "max_model_len": max_model_len,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "rlpipe.rollout.vllm_worker.WeightsExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if current_platform.is_cpu():
        # Seeded requests fail with chunked prefill: CPU generators can't be set back.
        args |= {"enforce_eager": True, "enable_chunked_prefill": False}
        args |= {"max_num_batched_tokens": max(4096, max_model_len), "max_num_seqs": DEFAULT_SEQUENCES}
        # Siblings share whole blocks of their prompt; the default block of 128 tokens is longer than many prompts.
        args["block_size"] = 32
    if model.adapter.kind == "lora":
        args |= {"enable_lora": True, "max_loras": 3, "max_lora_rank": _lora_rank(model.adapter.r)}
        args["lora_target_modules"] = _target_suffixes(model)
    return args | dict(rollout.engine_args)


def sampling_args(sampling: SamplingConfig) -> dict[str, Any]:
    """The ``SamplingParams`` that all requests share; ``ConfigError`` if one of ``sampling.extra`` is unknown."""
    _check_names(sampling.extra, set(SamplingParams.__struct_fields__), _OWN_SAMPLING_ARGS, "rollout.sampling.extra")
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
        raise ConfigError(f"vllm refused rollout.sampling: {_reason(error)}") from error
    return args


def _open_llm(args: dict[str, Any], rollout: RolloutConfig) -> LLMEngine:
    if current_platform.is_cpu():
        torch.set_num_threads(num_threads(rollout))
        # oneDNN's packed weights can neither be replaced in place nor read back.
        setattr(LinearBase, "_cpu_skip_gemm_dispatch", not args.get("enable_lora"))  # noqa: B010
        # vLLM compiles one small sampling function, which takes ten seconds.
        current_platform.simple_compile_backend = "eager"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return LLMEngine.from_engine_args(EngineArgs(**args))
    except (OSError, TypeError, ValueError, VLLMValidationError) as error:
        raise ConfigError(f"vllm can't be started with model.path={args['model']}: {_reason(error)}") from error


def _check_names(given: dict[str, Any], known: set[str], own: dict[str, str], option: str) -> None:
    for name in given:
        if name in own:
            hint = f"set {own[name]} instead" if own[name] else "rlpipe sets it itself"
            raise ConfigError(f"{option}.{name} can't be set: {hint}")
        if name not in known:
            close = get_close_matches(name, known - own.keys(), n=1)
            raise ConfigError(f"{option}.{name} is unknown to vllm" + (f": did you mean {close[0]}?" if close else ""))


def _lora_rank(rank: int) -> int:
    """The smallest rank that vLLM has room for and that is large enough."""
    fitting = [size for size in _LORA_RANKS if size >= rank]
    if not fitting:
        raise ConfigError(f"model.adapter.r={rank} is more than vllm serves; at most {_LORA_RANKS[-1]}")
    return fitting[0]


def _target_suffixes(model: ModelConfig) -> list[str]:
    """The modules that vLLM must prepare for an adapter; it would also take the large embedding and output layers."""
    targets = model.adapter.target_modules
    if not isinstance(targets, str):
        return [target.rsplit(".", 1)[-1] for target in targets]
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model.path, revision=model.revision, trust_remote_code=model.trust_remote_code)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    linear = {name.rsplit(".", 1)[-1] for name, layer in skeleton.named_modules() if isinstance(layer, torch.nn.Linear)}
    return sorted(linear - {"lm_head"})


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    # The first line of pydantic's errors only counts them.
    return lines[1] if "validation error" in lines[0] and len(lines) > 1 else lines[0]
