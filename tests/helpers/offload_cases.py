"""Tiny models, and plain and offloaded training of them, for the tests of chunked offload."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.learner.adapter_layers import FusedLora, fuse_lora
from rlpipe.learner.strategies.optimizer import make_optimizer
from rlpipe.models.nf4 import nf4_config, resolve_nf4
from rlpipe.offload.api import OffloadedAdamW
from rlpipe.offload.decision import Arrangement, Mode
from rlpipe.offload.planner.cost import Rates
from rlpipe.offload.planner.trace import TensorTracker
from rlpipe.offload.runtime.activations import Done, InlineStream, StreamEvent, Streams, Work
from rlpipe.offload.runtime.runtime import OffloadedModel
from rlpipe.offload.units import find_units

Loss = Callable[[nn.Module, int], Tensor]
"""A function that returns the loss of a model on the micro batch with the given number."""
CPU = torch.device("cpu")
RATES = Rates(
    host_to_device=5e10,
    device_to_host=5e10,
    both=4e10,
    device_adam={"float32": 1e11},
    host_adam={"float32": 1e9},
    host_adding={"float32 to float32": 1e10},
    device_bandwidth=1e12,
    host_bandwidth=1e11,
)


def make_qwen(*, num_layers: int = 4, tied: bool = False, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        tie_word_embeddings=tied,
        **options,
    )
    return Qwen3ForCausalLM(config).train()


def token_loss(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 97, (2, 9), generator=generator)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def modes_for(model: nn.Module, *cycle: Mode) -> list[Mode]:
    """Return the given modes in turn for the model's blocks."""
    modes, count = [], 0
    for unit in find_units(model):
        modes.append(cycle[count % len(cycle)] if unit.is_block else Mode.KEEP)
        count += unit.is_block
    return modes


def train_plainly(
    model: nn.Module, loss_of: Loss, config: OptimizerConfig, *, num_steps: int, num_micro_batches: int, max_norm: float
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train plainly, and return the losses, gradient norms, and trained parameters."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = make_optimizer(trained.values(), config)
    losses, norms = [], []
    for step in range(num_steps):
        for index in range(num_micro_batches):
            loss = loss_of(model, step * num_micro_batches + index)
            loss.backward()
            losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach().clone() for name, parameter in trained.items()}


def train_offloaded(
    offloaded: OffloadedModel,
    loss_of: Loss,
    config: OptimizerConfig,
    *,
    num_steps: int,
    num_micro_batches: int,
    max_norm: float,
    optimizer: OffloadedAdamW | None = None,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train as ``train_plainly`` does; ranks take the micro batches in turn."""
    model, ranks = offloaded.model, offloaded.ranks
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = optimizer or OffloadedAdamW(offloaded, config)
    losses, norms = [], []
    for step in range(num_steps):
        for index in range(ranks.rank, num_micro_batches, ranks.num_ranks):
            loss = loss_of(model, step * num_micro_batches + index)
            loss.backward()
            losses.append(float(loss.detach()))
        norms.append(optimizer.step(max_norm=max_norm))
    return losses, norms, {name: offloaded.values(parameter).clone() for name, parameter in trained.items()}


def arrange_all(model: nn.Module, *cycle: Mode, num_persistent: int = 0, num_slots: int = 2) -> Arrangement:
    return Arrangement(num_persistent=num_persistent, num_slots=num_slots, modes=modes_for(model, *cycle))


def with_lora(model: nn.Module, *, second: bool = False, **options: Any) -> nn.Module:
    """Add an adapter with nonzero B; ``second`` adds another one that is not used."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], **options)
    adapted = get_peft_model(model, config)
    if second:
        adapted.add_adapter("other", config)
        adapted.set_adapter("default")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return adapted.train()


def fused(adapted: nn.Module) -> nn.Module:
    """Fuse the adapter as the learner does."""
    fuse_lora(adapted)
    assert any(isinstance(module, FusedLora) for module in adapted.modules())
    return adapted


def make_nf4() -> nn.Module:
    """Return a model as QLoRA loads it, wide enough for bitsandbytes on a CPU."""
    return in_nf4(make_qwen(), dtype=torch.float32)


def in_nf4(model: PreTrainedModel, *, dtype: torch.dtype) -> nn.Module:
    """Return the model as QLoRA loads it, with linear layers in NF4, and everything else in ``dtype``."""
    with TemporaryDirectory() as folder:
        # With several ranks, transformers' ``save_pretrained`` would write on the first one only.
        model.config.save_pretrained(folder)
        save_file(model.state_dict(), f"{folder}/model.safetensors", metadata={"format": "pt"})
        quantised = type(model).from_pretrained(
            folder, quantization_config=nf4_config(dtype), device_map={"": "cpu"}, dtype=dtype
        )
    resolve_nf4(quantised, CPU)
    return quantised.train()


def make_moe() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config).train()


def make_t5() -> nn.Module:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=97,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=3,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config).train()


def translation_loss(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(2, 97, (2, 16), generator=generator)
    return model(input_ids=tokens[:, :9], labels=tokens[:, 9:].contiguous(), use_cache=False).loss


def make_image_text() -> nn.Module:
    torch.manual_seed(0)
    text = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4},
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "patch_size": 4,
        "out_hidden_size": 64,
        "in_channels": 3,
        "deepstack_visual_indexes": [1],
        "num_position_embeddings": 64,
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
    )
    return Qwen3VLForConditionalGeneration(config).train()


def image_text_loss(model: nn.Module, number: int) -> Tensor:
    """Return the loss on an image of 4 x 4 patches, which are 4 tokens, between words."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(2, 80, (1, 12), generator=generator)
    tokens[0, 2], tokens[0, 3:7], tokens[0, 7] = 92, 90, 93
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
    grid = torch.tensor([[1, 4, 4]])
    kinds = (tokens == 90).int()
    return model(
        input_ids=tokens,
        labels=tokens,
        pixel_values=pixels,
        image_grid_thw=grid,
        mm_token_type_ids=kinds,
        use_cache=False,
    ).loss


class NarrowStream(InlineStream):
    """A stream that runs out of memory at the end of its first works, as in a gather, which follows the copy."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    def submit(self, work: Work, after: StreamEvent | None = None) -> StreamEvent:
        event = super().submit(work, after)
        if self.num_failures:
            self.num_failures -= 1
            raise torch.OutOfMemoryError("no")
        return event


class LateEvent:
    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream, self._number = stream, number

    def block_device(self) -> None:
        self._stream.run_until(self._number)

    def block_host(self) -> None:
        self._stream.run_until(self._number)


class LateStream:
    """A stream that does nothing until it is waited for, so that results used without waiting are wrong."""

    def __init__(self) -> None:
        self._waiting: list[Work] = []
        self._num_done = 0

    def mark(self) -> StreamEvent:
        return Done()

    def submit(self, work: Work, after: StreamEvent | None = None) -> LateEvent:
        self._waiting.append(work)
        return LateEvent(self, self._num_done + len(self._waiting))

    def block_host(self) -> None:
        self.run_until(self._num_done + len(self._waiting))

    def run_until(self, number: int) -> None:
        while self._num_done < number:
            self._num_done += 1
            self._waiting.pop(0)()


class LateFuture(Future[Any]):
    def __init__(self, worker: LateWorker) -> None:
        super().__init__()
        self._worker = worker

    def result(self, timeout: float | None = None) -> Any:
        self._worker.run_until(self)
        return super().result(timeout)


class LateWorker(Executor):
    """A worker that does nothing until a result is wanted, and then all work up to it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[LateFuture, Callable[[], Any]]] = []
        self.num_shut_down = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = LateFuture(self)
        self._waiting.append((future, partial(function, *args, **kwargs)))
        return future

    def run_until(self, wanted: LateFuture) -> None:
        while not wanted.done():
            future, work = self._waiting.pop(0)
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised by the one who waits
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.num_shut_down += 1


class EagerWorker(LateWorker):
    """A worker that does everything at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(function, *args, **kwargs)
        future.result()
        return future


class HostWorker(Executor):
    """A worker that works at once, because fake tensors belong to one thread; ``live`` counts the bytes of its work."""

    def __init__(self) -> None:
        self._tracker: TensorTracker | None = None

    @property
    def is_busy(self) -> bool:
        return self._tracker is not None

    @property
    def live(self) -> int:
        return 0 if self._tracker is None else self._tracker.live

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with TensorTracker() as self._tracker:
            future.set_result(function(*args, **kwargs))
        self._tracker = None
        return future


def late_queues() -> Streams:
    return Streams(copies_in=LateStream(), copies_out=LateStream(), worker=LateWorker())
