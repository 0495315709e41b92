"""Tests that a step takes the memory that is predicted, counted over fake tensors as they are created and freed.

The runtime itself runs, with its chunks, slots and buffers; only the values are missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import pytest
import torch
from offload_cases import RATES, HostWorker, fused, in_nf4
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    Idefics3Config,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from rlpipe.common.formatting import MIB
from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.strategies.chunked import full_rows
from rlpipe.learner.workload import Workload
from rlpipe.models.loading import has_vision
from rlpipe.offload.api import OffloadedAdamW
from rlpipe.offload.decision import Arrangement, Capacity, Knobs, Mode
from rlpipe.offload.layout import make_layout
from rlpipe.offload.planner.cost import arrange, predict, why_impossible
from rlpipe.offload.planner.fake_trace import BITSANDBYTES, RealUnlessWeighted, trace_model, traceable_experts
from rlpipe.offload.planner.profiler import make_profile, resident_bytes
from rlpipe.offload.planner.trace import TensorTracker, Trace
from rlpipe.offload.runtime.activations import InlineStream, StreamEvent, Streams, Work
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision
from rlpipe.offload.units import SCALES, find_units, take_inventory
from rlpipe.plan.learner_memory import meta_policy

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
CONFIG = OptimizerConfig()
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class SlowStream(InlineStream):
    """A stream as slow as the search assumes: a unit's copies out end when the second unit after it begins."""

    def __init__(self) -> None:
        self._held: list[list[Work]] = [[], []]
        self.is_forward = False

    def submit(self, work: Work, behind: StreamEvent | None = None) -> StreamEvent:
        if self.is_forward:
            self._held[-1].append(work)
        return super().submit(work, behind)

    def begin_unit(self, *_: object) -> None:
        self._held = [self._held[-1], []]


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module], Tensor]
    precision: Precision = field(default_factory=Precision)
    chunk_bytes: int = 8 * MIB


def text_loss(num_tokens: int, num_rows: int = 1) -> Callable[[nn.Module], Tensor]:
    def loss_of(model: nn.Module) -> Tensor:
        tokens = torch.zeros(num_rows, num_tokens, dtype=torch.long)
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    return loss_of


def qwen(num_layers: int, hidden: int, *, dtype: torch.dtype = torch.bfloat16, tied: bool = False) -> nn.Module:
    config = Qwen3Config(
        vocab_size=4000,
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        intermediate_size=3 * hidden,
        tie_word_embeddings=tied,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def llama(num_layers: int, hidden: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=4 * hidden,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def lora(model: nn.Module, rank: int = 16) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=rank, target_modules=LINEAR)).train()


def qlora(make: Callable[[], nn.Module], rank: int = 16) -> nn.Module:
    with torch.device("cpu"):
        return lora(in_nf4(make(), dtype=torch.bfloat16), rank)


def autocast(loss_of: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
    def cast(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return loss_of(model)

    return cast


def t5() -> nn.Module:
    config = T5Config(vocab_size=4000, d_model=512, d_ff=1024, num_layers=4, num_heads=8, decoder_start_token_id=0)
    return T5ForConditionalGeneration._from_config(config, dtype=torch.bfloat16).train()


def moe() -> nn.Module:
    config = Qwen3MoeConfig(
        vocab_size=4000,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def image_text() -> nn.Module:
    text = {
        "vocab_size": 4000,
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1024,
        "rope_parameters": {"rope_type": "default", "mrope_section": [12, 10, 10], "rope_theta": 1e4},
    }
    vision = {
        "depth": 4,
        "hidden_size": 256,
        "num_heads": 4,
        "intermediate_size": 512,
        "patch_size": 16,
        "out_hidden_size": 512,
        "deepstack_visual_indexes": [1],
    }
    config = Qwen3VLConfig(text_config=text, vision_config=vision, image_token_id=3990)
    return Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16).train()


def image_text_loss(model: nn.Module) -> Tensor:
    """Return the loss on an image of 32 x 32 patches, which are 256 tokens."""
    tokens = torch.zeros(1, 512, dtype=torch.long)
    tokens[0, 10:266] = 3990
    return model(
        input_ids=tokens,
        labels=tokens,
        pixel_values=torch.zeros(1024, 3 * 2 * 16 * 16),
        image_grid_thw=torch.tensor([[1, 32, 32]]),
        mm_token_type_ids=(tokens == 3990).int(),
        use_cache=False,
    ).loss


VISION = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 16}
SQUARES = VISION | {"image_size": 224, "patch_size": 14}
TEXT: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "out_hidden_size": 2048,
    "fullatt_block_indexes": [1],
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4}}
DESCRIBED: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**TEXT),
    "gemma3": lambda: Gemma3TextConfig(**TEXT, sliding_window=256),
    "qwen2.5-vl": lambda: Qwen2_5_VLConfig(text_config=TEXT | MROPE, vision_config=QWEN_VISION, image_token_id=3990),
    "gemma3-images": lambda: Gemma3Config(
        text_config=TEXT, vision_config=SQUARES, mm_tokens_per_image=64, image_token_id=3990
    ),
    "llava": lambda: LlavaConfig(
        text_config=TEXT | {"model_type": "llama"},
        vision_config=SQUARES | {"model_type": "clip_vision_model", "projection_dim": 64},
        image_token_index=3990,
    ),
    "pixtral": lambda: Mistral3Config(
        text_config=TEXT | {"model_type": "mistral"},
        vision_config=SQUARES | {"model_type": "pixtral"},
        image_token_index=3990,
    ),
    "internvl": lambda: InternVLConfig(
        text_config=TEXT | {"model_type": "qwen2"},
        vision_config=SQUARES | {"image_size": [224, 224], "patch_size": [14, 14]},
        image_token_id=3990,
    ),
    "idefics3": lambda: Idefics3Config(
        text_config=TEXT | {"model_type": "llama"}, vision_config=SQUARES, image_token_id=3990
    ),
}


def learner_case(name: str, adapter: str, num_tokens: int = 1024) -> Case:
    """Return a learner's model with the row for which a run is planned, and the loss of its workload."""
    config = ModelConfig(
        path=name, dtype="bfloat16", images=True, adapter=AdapterConfig(kind=adapter, target_modules=LINEAR)
    )

    def make() -> nn.Module:
        with unset_fake_temporarily():
            return meta_policy(DESCRIBED[name](), config).module

    def loss_of(model: nn.Module) -> Tensor:
        assert isinstance(model, LogprobModel)
        with unset_fake_temporarily():
            row = full_rows(model, num_tokens)[0]
        assert bool(row.images) == has_vision(model.causal_model)
        return Workload().loss_of(model, row, chunk_tokens=256)

    precision = Precision(compute=torch.bfloat16, state=torch.float32) if adapter == "none" else Precision()
    return Case(make, loss_of, precision, chunk_bytes=32 * MIB)


CASES = {
    **{f"learner, {name}": learner_case(name, "none") for name in DESCRIBED},
    "learner, qwen2.5-vl with lora": learner_case("qwen2.5-vl", "lora"),
    "full": Case(lambda: qwen(4, 512), text_loss(1024)),
    "long": Case(lambda: qwen(6, 512, tied=True), text_loss(4096)),
    "rows": Case(lambda: llama(4, 768), text_loss(256, 8)),
    "float32": Case(lambda: qwen(3, 512, dtype=torch.float32), text_loss(1024)),
    "float32 states": Case(
        lambda: qwen(6, 512, dtype=torch.float32),
        autocast(text_loss(2048)),
        Precision(compute=torch.bfloat16, state=torch.float32),
    ),
    "float32 states, short": Case(
        lambda: qwen(4, 512, dtype=torch.float32),
        autocast(text_loss(32)),
        Precision(compute=torch.bfloat16, state=torch.float32, gradient=torch.bfloat16),
    ),
    "lora": Case(lambda: lora(llama(3, 768)), autocast(text_loss(2048))),
    "lora, short": Case(lambda: lora(qwen(6, 512), 64), autocast(text_loss(512))),
    "qlora": Case(lambda: qlora(lambda: llama(3, 768)), autocast(text_loss(2048))),
    "qlora, short": Case(lambda: qlora(lambda: qwen(6, 512), 64), autocast(text_loss(512)), chunk_bytes=2 * MIB),
    "fused lora": Case(lambda: fused(lora(llama(3, 768))), autocast(text_loss(2048))),
    "fused lora, short": Case(lambda: fused(lora(qwen(6, 512), 64)), autocast(text_loss(512))),
    "fused qlora": Case(lambda: fused(qlora(lambda: llama(3, 768))), autocast(text_loss(2048))),
    "fused qlora, short": Case(
        lambda: fused(qlora(lambda: qwen(6, 512), 64)), autocast(text_loss(512)), chunk_bytes=2 * MIB
    ),
    "experts": Case(moe, text_loss(1024)),
    "image and text": Case(image_text, image_text_loss),
    "encoder-decoder": Case(
        t5,
        lambda m: (
            m(
                input_ids=torch.zeros(4, 512, dtype=torch.long),
                labels=torch.zeros(4, 256, dtype=torch.long),
                use_cache=False,
            ).loss
        ),
    ),
}


def knobs_for(num_chunks: int, num_blocks: int, least: int) -> list[Knobs]:
    """Return knobs that treat all blocks alike, and mixtures."""
    half, third = num_blocks // 2, num_blocks // 3
    slots = max(least, 3)
    return [
        Knobs(num_persistent=num_chunks, num_slots=0),
        Knobs(num_persistent=0, num_slots=slots, num_offloaded=num_blocks),
        Knobs(num_persistent=0, num_slots=slots, num_checkpointed=num_blocks),
        Knobs(num_persistent=0, num_slots=slots, num_swapped=num_blocks),
        Knobs(num_persistent=num_chunks // 2, num_slots=slots, num_checkpointed=half, num_offloaded=num_blocks - half),
        Knobs(
            num_persistent=1,
            num_slots=slots,
            num_swapped=third,
            num_checkpointed=third,
            num_offloaded=num_blocks - 2 * third,
        ),
    ]


def make_model(case: Case) -> nn.Module:
    """Make the model on the meta device with PEFT's casts; quantized weights have real values."""
    with torch.device("meta"):
        return case.make()


def make_fake(case: Case) -> nn.Module:
    """Make the model with fake parameters and buffers, within a fake mode."""
    with unset_fake_temporarily():
        model = make_model(case)
    fakes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in fakes:
                fakes[id(parameter)] = fake_parameter(parameter)
            setattr(module, name, fakes[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, fake_like(buffer))
    return model


def fake_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def fake_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return a fake parameter with bitsandbytes' attributes, of which the scales are fake and the codebooks real."""
    fake = nn.Parameter(fake_like(parameter), requires_grad=parameter.requires_grad)
    for key in BITSANDBYTES:
        if hasattr(parameter, key):
            setattr(fake, key, getattr(parameter, key))
    for path in SCALES if hasattr(parameter, "quant_state") else ():
        owner, _, name = f"quant_state.{path}".rpartition(".")
        holder = attrgetter(owner)(fake)
        setattr(holder, name, fake_like(getattr(holder, name)))
    return fake


class NumbersAreTwo(TorchDispatchMode):
    """A mode in which every number read from a fake tensor, such as a norm, is 2, so that gradients are clipped."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 2.0
        return func(*args, **(kwargs or {}))


def measured_peaks(case: Case, arrangement: Arrangement) -> Capacity:
    """Return the peak bytes of an update's last micro batch and of its end, once buffers have grown."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, stream, worker = make_fake(case), SlowStream(), HostWorker()
        offloaded = OffloadedModel(
            model,
            arrangement,
            device=CPU,
            optimizer=CONFIG,
            precision=case.precision,
            sizes=[case.chunk_bytes],
            queues=Streams(copies_in=InlineStream(), copies_out=stream, worker=worker),
        )
        if isinstance(model, LogprobModel):
            model.announce = offloaded.read
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        on_device = on_host = 0

        def look(_: object) -> None:
            nonlocal on_device, on_host
            on_host = max(on_host, offloaded.host_bytes + worker.live)
            if not worker.is_busy:  # the worker's results are on the host
                on_device = max(on_device, tracker.live + offloaded.device_bytes)

        def run() -> None:
            stream.is_forward = True
            loss = case.loss_of(model)
            stream.is_forward = False
            stream.begin_unit()
            stream.begin_unit()
            loss.backward()

        def update() -> None:
            with NumbersAreTwo():
                optimizer.step(max_norm=1.0)

        for unit in offloaded.inventory.units:
            unit.module.register_forward_pre_hook(stream.begin_unit)
        tracker = TensorTracker(look)
        with RealUnlessWeighted():
            run()
            update()
            run()
            with tracker:
                run()
                update()
        return Capacity(device_bytes=on_device + resident_bytes(model, offloaded.inventory), host_bytes=on_host)


@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peaks_are_the_measured_ones(name: str) -> None:
    case = CASES[name]
    model = make_model(case)
    units = find_units(model)
    inventory = take_inventory(model, units, compute_dtype=case.precision.compute)
    layout = make_layout(inventory.tensors, sizes=[case.chunk_bytes])

    def loss_of(trace: Trace) -> Tensor:
        if isinstance(model, LogprobModel):
            model.announce = trace.read
        return case.loss_of(model)

    with traceable_experts(model):
        trace = trace_model(model, units, loss_of, lambda _: 1e-5, compute_dtype=case.precision.compute)
    profile = make_profile(model, inventory, layout, trace, precision=case.precision)
    device, host = {}, {}
    for knobs in knobs_for(len(profile.chunks), len(profile.blocks), profile.least_slots(0)):
        assert not (problem := why_impossible(profile, knobs, RATES)), problem
        modes = [Mode.KEEP] * len(units)
        for stage, mode in zip(trace.stages, arrange(profile, knobs, RATES), strict=True):
            if stage.unit is not None:
                modes[stage.unit] = mode
        arrangement = Arrangement(num_persistent=knobs.num_persistent, num_slots=knobs.num_slots, modes=modes)
        predicted, measured = predict(profile, knobs, RATES), measured_peaks(case, arrangement)
        device[knobs] = predicted.device_bytes / measured.device_bytes
        host[knobs] = ratio(predicted.host_bytes, measured.host_bytes)
    assert all(0.98 <= ratio <= 1.05 for ratio in device.values()), device
    assert all(0.98 <= ratio <= 1.05 for ratio in host.values()), host


def ratio(predicted: float, measured: float) -> float:
    """Return predicted over measured; 1 if nothing is predicted and nothing measured."""
    return predicted / measured if measured else 1.0 + predicted
