"""The engine that samples with vLLM, in the calling process (``LLMEngine``) or with workers if GPUs share a model."""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.configs.serving import published_kind
from rlpipe.data.render.images import open_image
from rlpipe.data.render.processor import feature_token_id
from rlpipe.errors import ConfigError, EngineFailed, ModelError, WeightsMismatch
from rlpipe.models.adapter import read_adapter
from rlpipe.models.served_weights import ServedWeights
from rlpipe.rollout.engine import (
    Sample,
    build_group,
    engine_threads,
    failed_group,
    sample_seed,
    too_long,
    without_base,
    without_image,
)
from rlpipe.rollout.vllm.vllm_options import check_replaceable, describe_refusal, engine_args, sampling_args
from rlpipe.rollout.vllm.vllm_transfer import rendezvous_arguments
from rlpipe.types import (
    Buckets,
    EngineHealth,
    GroupRequest,
    Prompt,
    RolloutGroup,
    Transfer,
    WeightsKind,
    WeightsManifest,
)
from rlpipe.weights.buckets import BASE_DIGEST, adapter_bucket, digest_of_sums, merge_sums, pack_adapter

# isort: split
# After vllm_options, which sets what vLLM reads when it is imported.
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

if TYPE_CHECKING:
    from peft import PeftConfig

_IN_FLIGHT_ADAPTER = 1
_BASE_SALT = "base"
"""Cache salt of sequences without an adapter, whose KV cache stays valid when the adapter changes."""


@dataclass(slots=True)
class _Running:
    request: GroupRequest
    received_s: float
    version: int
    """The version that the sequences began with."""
    adapter_id: int | None


class VllmEngine:
    """``rlpipe.rollout.engine.Engine`` on vLLM.

    With ``weights.on_update=wait`` each LoRA version is an adapter with an id of its own: running sequences keep the
    one they began with, and it is removed with its last sequence. Full and merged weights are replaced in place once
    nothing runs.
    With ``inflight`` both are replaced in place between two steps, and running sequences continue; their entries in
    the KV cache stay as older versions computed them. In both modes, no sequence of another version reads them.

    If several engines run in one process, none of them works after the first one is stopped.
    """

    def __init__(
        self, name: str, model: ModelConfig, rollout: RolloutConfig, weights: WeightsConfig, *, max_prompt_tokens: int
    ) -> None:
        self._name = name
        self._kind = WeightsKind(published_kind(model, weights))
        self._in_flight = weights.on_update == "inflight"
        self._timeout_s = weights.timeout_s
        self._sampling = sampling_args(rollout.sampling)
        self._waiting: deque[tuple[GroupRequest, float]] = deque()
        self._running: dict[str, _Running] = {}
        self._ready: list[RolloutGroup] = []
        """Groups that the next step returns."""
        self._num_sequences = 0
        self._num_requests = 0
        self._holding = False
        self._version, self._digest = 0, BASE_DIGEST
        self._adapter: LoRARequest | None = None
        self._num_loads = 0
        self._num_tokens, self._busy_s = 0, 0.0

        self._llm = _open_llm(engine_args(model, rollout, weights, max_prompt_tokens), rollout)
        check_replaceable(self._kind, self._llm.vllm_config.model_config.hf_text_config)
        client: Any = self._llm.engine_core
        self._core = client.engine_core
        self._image_id = feature_token_id(self._llm.vllm_config.model_config.hf_config)
        self._llm.set_weight_version(str(self._version))
        self._llm.collective_rpc("prepare_serving", args=(model if self._kind is WeightsKind.MERGED else None,))
        if self._kind is not WeightsKind.FULL and model.adapter.path is not None:
            self._load_first(model, *read_adapter(model.adapter.path))

    @property
    def has_work(self) -> bool:
        return bool(self._ready or self._running) or self._next_eligible() is not None

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        now = time.perf_counter()
        self._waiting.extend((request, now) for request in requests)
        if any(request.has_priority for request in requests):
            self._waiting = deque(sorted(self._waiting, key=lambda waiting: not waiting[0].has_priority))

    def cancel(self, group_ids: Collection[int]) -> None:
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0].group_id not in group_ids)
        self._ready = [group for group in self._ready if group.group_id not in group_ids]
        running = [name for name, sequence in self._running.items() if sequence.request.group_id in group_ids]
        self._llm.abort_request(running)
        for name in running:
            self._forget(name)

    def step(self) -> list[RolloutGroup]:
        start = time.perf_counter()
        self._start_requests()
        if self._running:
            self._advance()
            self._busy_s += time.perf_counter() - start
        groups, self._ready = self._ready, []
        return groups

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        if self._kind is WeightsKind.LORA and not self._in_flight:
            return self._has_free_slot()
        running = self._running.values()
        must_finish = [
            sequence for sequence in running if not self._in_flight or not self._can_go_on(sequence, manifest.version)
        ]
        # Full weights that do not fit are only detected after some of them have been replaced.
        self._holding = bool(must_finish) or self._kind is not WeightsKind.LORA
        return not must_finish

    def _has_free_slot(self) -> bool:
        adapter_ids = {running.adapter_id for running in self._running.values()} - {None}
        if self._adapter is not None:
            adapter_ids.add(self._adapter.lora_int_id)
        lora_config = self._llm.vllm_config.lora_config
        assert lora_config is not None
        return len(adapter_ids) < lora_config.max_loras

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        if manifest.kind is not self._kind:
            raise ModelError(f"engine {self._name} expects {self._kind} weights, got {manifest.kind}")
        if self._in_flight:
            self._deliver_sampled()
        self._num_loads += 1
        if self._kind is WeightsKind.LORA:
            digest = self._load_adapter(manifest, buckets)
        elif self._kind is WeightsKind.MERGED:
            digest = self._merge_adapter(manifest, buckets)
        elif manifest.transfer is None:
            digest = self._load_full(buckets)
        else:
            digest = self._receive_full(manifest.transfer)
        if self._kind is not WeightsKind.LORA:
            self._llm.reset_encoder_cache()  # image features from the old weights
        self._version, self._digest, self._holding = manifest.version, digest, False
        self._llm.set_weight_version(str(manifest.version))
        if self._in_flight:
            self._renew_cache_keys()
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
        """Return the index in the queue of the next request that may start now; None if there is none."""
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
            except ConfigError as error:
                self._refuse(request, str(error))
            except (ValueError, VLLMValidationError) as error:
                self._refuse(request, f"vllm refused the request: {describe_refusal(error)}")

    def _refuse(self, request: GroupRequest, failure: str) -> None:
        if request.prompt.folded_ids is not None:
            # vLLM may have noted images as sent that its core lacks, and would fail on the next prompt that has them.
            self._llm.reset_mm_cache()
        self._ready.append(failed_group(request, failure))

    def _start(self, request: GroupRequest, received_s: float) -> None:
        if not request.use_adapter and self._kind is not WeightsKind.LORA:
            raise ConfigError(without_base(self._kind))
        length, limit = len(request.prompt.token_ids), self._llm.vllm_config.model_config.max_model_len
        if length >= limit:
            raise ConfigError(too_long(length, limit))
        request_id = str(self._num_requests)
        greedy = request.temperature == 0
        sampling = self._sampling if request.sampling is None else sampling_args(request.sampling)
        if self._image_id is not None:
            sampling = {**sampling, "stop_token_ids": [*sampling["stop_token_ids"], self._image_id]}
        adapter, salt = (self._adapter, self._cache_salt) if request.use_adapter else (None, _BASE_SALT)
        params = SamplingParams(
            # All siblings of a greedy sample are the same.
            n=1 if greedy else request.group_size,
            seed=None if greedy else sample_seed(request.seed),
            temperature=request.temperature,
            max_tokens=request.max_tokens,
            skip_clone=True,
            **sampling,
        )
        self._llm.add_request(request_id, self._input(request.prompt, salt), params, lora_request=adapter)
        adapter_id = adapter.lora_int_id if adapter else None
        self._running[request_id] = _Running(request, received_s, self._version, adapter_id)
        self._num_requests += 1
        self._num_sequences += request.group_size

    def _input(self, prompt: Prompt, salt: str) -> Any:
        """Return the prompt as vLLM's input; raise ``ConfigError`` if vLLM makes other tokens of the images."""
        token_ids = prompt.token_ids.tolist()
        if prompt.folded_ids is None:
            return tokens_input(token_ids, cache_salt=salt)
        images = [open_image(image.content) for image in prompt.images]
        raw: Any = {"prompt_token_ids": prompt.folded_ids.tolist(), "multi_modal_data": {"image": images}}
        (rendered,) = self._llm.renderer.render_cmpl([raw], prompt_extras={"cache_salt": salt})
        if list(rendered["prompt_token_ids"]) != token_ids:
            raise ConfigError(
                f"vllm creates {len(rendered['prompt_token_ids'])} tokens for a prompt with images that has "
                f"{len(token_ids)}, or different ones; set rollout.engine=hf, which uses the model's own processor"
            )
        return rendered

    def _advance(self) -> None:
        self._ready += [self._finish(output) for output in self._llm.step() if isinstance(output, RequestOutput)]

    def _finish(self, output: RequestOutput) -> RolloutGroup:
        running = self._forget(output.request_id)
        request = running.request
        samples = [self._sample(completion, running) for completion in output.outputs]
        self._num_tokens += sum(len(sample.token_ids) for sample in samples)
        samples *= request.group_size // len(samples)
        return build_group(request, samples, time.perf_counter() - running.received_s)

    def _forget(self, request_id: str) -> _Running:
        running = self._running.pop(request_id)
        self._num_sequences -= running.request.group_size
        self._drop_unused(running.adapter_id)
        return running

    def _sample(self, completion: CompletionOutput, running: _Running) -> Sample:
        assert isinstance(completion.logprobs, FlatLogprobs), "requests ask for flat log-probabilities"
        reason = completion.finish_reason or "abort"
        return Sample(
            token_ids=completion.token_ids,
            logprobs=completion.logprobs.logprobs,
            policy_versions=self._policy_versions(completion, running),
            finish_reason=without_image(completion.token_ids, self._image_id, reason),
        )

    def _policy_versions(self, completion: CompletionOutput, running: _Running) -> list[int]:
        if not self._in_flight:
            return [running.version] * len(completion.token_ids)
        spans = completion.weight_versions or []
        return [int(span.version) for span in spans for _ in range(span.start, span.end)]

    def _can_go_on(self, running: _Running, version: int) -> bool:
        """Whether ``version`` may sample the rest of a sequence; a LoRA version can't without an adapter slot."""
        if not running.request.use_adapter:
            return True  # the base model samples it, whatever the version
        has_slot = self._kind is not WeightsKind.LORA or running.adapter_id is not None
        return has_slot and running.request.min_version <= version

    def _deliver_sampled(self) -> None:
        """Take the sampled tokens that vLLM has not delivered yet, because it labels them on delivery.

        Delivered after the load, they would be labelled with the new version.
        """
        self._llm.sleep(level=0, mode="keep")
        while self._core.batch_queue:
            self._advance()
        self._llm.wake_up(tags=["scheduling"])

    @property
    def _cache_salt(self) -> str:
        """Part of the prefix cache's key, so that no version reads what another version computed."""
        return f"load-{self._num_loads}"

    def _renew_cache_keys(self) -> None:
        """Give sequences that vLLM has queued but not started the new version's cache key."""
        for request in self._core.scheduler.requests.values():
            if request.num_computed_tokens == 0 and request.cache_salt != _BASE_SALT:
                request.cache_salt = self._cache_salt
                request.block_hashes.clear()
                request.update_block_hashes()

    def _load_adapter(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        bucket = adapter_bucket(manifest, buckets)
        adapter_id = _IN_FLIGHT_ADAPTER if self._in_flight else self._num_loads
        try:
            digests = self._llm.collective_rpc("serve_adapter", args=(bucket, manifest.adapter_config, adapter_id))
            if len(set(digests)) != 1:
                raise WeightsMismatch(f"the ranks of engine {self._name} serve different adapters: {digests}")
        except BaseException:
            if not self._in_flight:
                self._llm.collective_rpc("drop_adapter", args=(adapter_id,))
            raise
        previous = self._adapter
        self._adapter = LoRARequest(f"policy-{adapter_id}", adapter_id, "/only-in-memory")
        if previous is not None:
            self._drop_unused(previous.lora_int_id)
        return digests[0]

    def _merge_adapter(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        with self._in_place_errors():
            arguments = adapter_bucket(manifest, buckets), manifest.adapter_config
            return digest_of_sums(merge_sums(self._llm.collective_rpc("merge_adapter", args=arguments)))

    def _load_full(self, buckets: Buckets) -> str:
        with self._in_place_errors():
            self._llm.collective_rpc("begin_full_load")
            for bucket in buckets:
                self._llm.collective_rpc("load_full_bucket", args=(bucket,))
            return digest_of_sums(merge_sums(self._llm.collective_rpc("finish_full_load")))

    @contextmanager
    def _in_place_errors(self) -> Iterator[None]:
        """Raise ``EngineFailed`` if replacing weights in place fails while sequences run with them."""
        try:
            yield
        except (ModelError, WeightsMismatch) as error:
            if self._running:
                raise EngineFailed(f"engine {self._name} samples with parts of two versions: {error}") from error
            raise

    def _receive_full(self, transfer: Transfer) -> str:
        joining, receiving = rendezvous_arguments(transfer, self._timeout_s)
        self._llm.collective_rpc("init_weight_transfer_engine", args=(joining,))
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", args=(receiving,))
        self._llm.collective_rpc("finish_weight_update")
        self._llm.collective_rpc("shutdown_weight_transfer_engine")
        published = {spec.name: spec.shape for spec in transfer.specs}
        return digest_of_sums(merge_sums(self._llm.collective_rpc("checksums", args=(published,))))

    def _load_first(self, model: ModelConfig, config: PeftConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        merged_digest = None
        if self._kind is WeightsKind.MERGED:
            served = ServedWeights(model)
            merged_digest = partial(served.digest, device=torch.device("cpu"))
        manifest, buckets = pack_adapter(config, tensors, getattr(torch, model.dtype), merged_digest)
        if self.load(manifest, buckets) != manifest.digest:
            raise WeightsMismatch(f"engine {self._name} does not serve the adapter that it started from")

    def _drop_unused(self, adapter_id: int | None) -> None:
        is_current = self._adapter is not None and adapter_id == self._adapter.lora_int_id
        is_used = any(running.adapter_id == adapter_id for running in self._running.values())
        if adapter_id is not None and not is_current and not is_used:
            self._llm.collective_rpc("drop_adapter", args=(adapter_id,))


def _open_llm(args: dict[str, Any], rollout: RolloutConfig) -> LLMEngine:
    if current_platform.is_cpu():
        torch.set_num_threads(engine_threads(rollout))
        # Packed weights can neither be replaced in place nor read back; ``pack_layers`` packs copies of them.
        setattr(LinearBase, "_cpu_skip_gemm_dispatch", not args.get("enable_lora"))  # noqa: B010
        # vLLM compiles one small sampling function, which takes ten seconds.
        current_platform.simple_compile_backend = "eager"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return LLMEngine.from_engine_args(EngineArgs(**args))
    except (OSError, TypeError, ValueError, VLLMValidationError) as error:
        raise ConfigError(
            f"vllm can't be started with model.path={args['model']}: {describe_refusal(error)}"
        ) from error
