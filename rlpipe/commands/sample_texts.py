"""Sampling from a policy and adapter in this process, for ``rlpipe generate``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from transformers.utils.logging import disable_progress_bar

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.rollout_config import RolloutConfig, SamplingConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.data.render.processor import ImageProcessor, load_tokenizer
from rlpipe.data.row import RowLocation, UnusableRow
from rlpipe.data.row_renderer import PromptRenderer
from rlpipe.errors import DataError, EngineFailed, InputError
from rlpipe.hardware.dtypes import WIDE, choose_dtype
from rlpipe.models.adapter import read_adapter_config
from rlpipe.models.gguf_models import model_folder
from rlpipe.models.model_files import model_products
from rlpipe.rollout.engine import Engine, resolve_engine
from rlpipe.rollout.engine_thread import open_engine
from rlpipe.rollout.serving_choice import serve_alone
from rlpipe.types import GroupRequest, Prompt, Rollout, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNLIMITED = 2**31 - 1


@dataclass(kw_only=True, slots=True, frozen=True)
class SamplingRequest:
    """Policy, and options for sampling from it."""

    model: str
    """Folder or hub id of the policy."""
    adapter: str | None = None
    trust_remote_code: bool = False
    """Run the code that comes with the model."""
    engine: str = "auto"
    dtype: str = "auto"
    """Type to compute in; auto: bfloat16 if this machine is faster in it, else float32."""
    tensor_parallel_size: int = 1
    """GPUs that share the model (vllm)."""
    chat: bool = True
    """True: render each prompt as a user turn with the chat template."""
    system_prompt: str | None = None
    images: Sequence[str] = ()
    """Image files that precede each prompt."""
    num: int = 1
    """Number of completions of each prompt."""
    max_tokens: int = 256
    temperature: float = 1.0
    """Sampling temperature; 0 selects the most likely token."""
    top_p: float = 1.0
    seed: int = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Completion:
    """A completion of a prompt, as text, with its log-prob."""

    text: str
    finish_reason: str
    num_tokens: int
    logprob: float
    """Sum of the tokens' log-probs under the distribution that they were sampled from."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SampledPrompt:
    """Prompt with its completions."""

    prompt: str
    completions: list[Completion]

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    def to_text(self) -> str:
        return "\n---\n".join(completion.text for completion in self.completions)


def sample_texts(prompts: Sequence[str], request: SamplingRequest) -> Iterator[SampledPrompt]:
    """Yield the completions of each prompt as soon as they are finished, in the order of the prompts.

    Raises ``InputError`` if the model, the adapter or a prompt can't be used, ``EngineFailed`` if sampling fails.
    """
    disable_progress_bar()
    model = model_config(request)
    tokenizer = load_tokenizer(model)
    rendered = render_prompts(prompts, tokenizer, request, ImageProcessor(model))
    longest = max(len(prompt.token_ids) for prompt in rendered)
    rollout = rollout_config(request)
    weights = serve_alone(model, WeightsConfig(), resolve_engine(rollout))
    engine = open_engine("generate", model, rollout, weights, max_prompt_tokens=longest)
    try:
        engine.submit([group_request(prompt, request) for prompt in rendered])
        for text, group in zip(prompts, finished_in_order(engine, len(prompts)), strict=True):
            if group.failure is not None:
                raise EngineFailed(f"prompt {group.group_id + 1} can't be sampled: {group.failure}")
            yield SampledPrompt(prompt=text, completions=[read_completion(rollout, tokenizer) for rollout in group])
    finally:
        engine.stop()


def sampling_dtype(model: str, asked: str) -> tuple[str, str | None]:
    """Return the type that ``asked`` selects on this machine, and a line about it for the user, or None."""
    if asked == WIDE:  # float32 is slow on no device
        return asked, None
    # GPUs are queried through the driver's library: torch would start CUDA in this process, from which vLLM forks.
    import torch

    from rlpipe.actors.node_dtypes import node_types

    products = None if torch.cuda.device_count() else model_products(model, os.cpu_count() or 1)
    devices = node_types(asked, products)
    choice = choose_dtype(asked, devices, option="--dtype")
    return choice.dtype, choice.line


def model_config(request: SamplingRequest) -> ModelConfig:
    adapter = AdapterConfig(kind="none") if request.adapter is None else read_adapter_config(request.adapter)
    return ModelConfig(
        path=model_folder(request.model),
        dtype=request.dtype,
        images=bool(request.images),
        adapter=adapter,
        trust_remote_code=request.trust_remote_code,
    )


def rollout_config(request: SamplingRequest) -> RolloutConfig:
    return RolloutConfig(
        engine=request.engine,
        num_threads=os.cpu_count(),
        tensor_parallel_size=request.tensor_parallel_size,
        sampling=SamplingConfig(max_tokens=request.max_tokens, top_p=request.top_p),
    )


def render_prompts(
    prompts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    request: SamplingRequest,
    processor: ImageProcessor | None = None,
) -> list[Prompt]:
    if request.chat and not tokenizer.chat_template:
        raise DataError(f"the tokenizer of {request.model} has no chat template; add --raw for plain text")
    if request.images and not request.chat:
        raise InputError("--image needs the chat template: leave --raw out")
    data = DataConfig(chat=request.chat, system_prompt=request.system_prompt, max_prompt_tokens=UNLIMITED)
    renderer = PromptRenderer(tokenizer, data, processor)
    task = {data.images_column: list(request.images)} if request.images else {}
    try:
        return [
            renderer.render_value(text, task, RowLocation(row=index, epoch=0, location=f"prompt {index + 1}"))
            for index, text in enumerate(prompts)
        ]
    except UnusableRow as error:
        raise InputError(f"a prompt can't be rendered: {error.reason}") from error


def group_request(prompt: Prompt, request: SamplingRequest) -> GroupRequest:
    return GroupRequest(
        group_id=prompt.prompt_id,
        prompt=prompt,
        group_size=request.num,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        seed=request.seed + prompt.prompt_id,
    )


def finished_in_order(engine: Engine, count: int) -> Iterator[RolloutGroup]:
    """Step the engine until every group is finished, and yield the groups in the order of their ids."""
    finished: dict[int, RolloutGroup] = {}
    for group_id in range(count):
        while group_id not in finished:
            if not engine.has_work:
                raise EngineFailed(f"the engine stopped before prompt {group_id + 1} was finished")
            finished |= {group.group_id: group for group in engine.step()}
        yield finished.pop(group_id)


def read_completion(rollout: Rollout, tokenizer: PreTrainedTokenizerBase) -> Completion:
    text = tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)
    assert isinstance(text, str)
    return Completion(
        text=text,
        finish_reason=rollout.finish_reason,
        num_tokens=rollout.num_loss_tokens,
        logprob=float(rollout.logprobs.sum()),
    )
