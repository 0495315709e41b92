"""The cases of ``benchmarks.offload``: models on the meta device, values to fill them with, and their batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from rlpipe.configs.schema.model_config import AdapterConfig
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.policy import lora_config
from rlpipe.learner.row_plan import NAME, AttentionLayout, Row, plan_row
from rlpipe.types import MicroBatch

COMPUTE = torch.bfloat16
LOGIT_TOKENS = 1024
"""Tokens whose logits are computed at one time, on all sides."""
RANK = 16
STD = 0.02
POOL_ELEMENTS = 2**22 - 3
"""Number of distinct random values in the weights; no matrix row is a multiple of it, so no two rows are equal."""


@dataclass(kw_only=True, frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False

    def config(self, **options: Any) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            tie_word_embeddings=self.tied,
            **options,
        )


@dataclass(kw_only=True, frozen=True)
class Case:
    shape: Shape
    kind: str = "full"
    """Trained weights: ``full``, all weights, or ``lora``, an adapter on a bfloat16 base."""
    states: str = "float32"
    """Dtype of the weights and moments that are updated."""
    gradients: str = "float32"
    """Dtype in which an update's gradients are summed."""
    tokens: int = 8192
    """Tokens of a micro batch, which is one sequence."""
    micro_batches: int = 1
    device_gib: float | None = None
    """Device memory that rlpipe may take; None: the free memory, less a tenth."""
    chunk_mib: float | None = None
    compared: bool = False
    """Whether the baselines train it, too."""

    @property
    def update_tokens(self) -> int:
        return self.tokens * self.micro_batches

    @classmethod
    def of(cls, content: dict[str, Any]) -> Case:
        """Return the case of these fields; the inverse of ``asdict``."""
        return cls(**{**content, "shape": Shape(**content["shape"])})


TINY = Shape(hidden=128, intermediate=256, layers=4, heads=4, kv_heads=2, head_dim=32, vocabulary=1024, tied=True)
LLAMA_1B = Shape(
    hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8, head_dim=64, vocabulary=128256, tied=True
)
QWEN_4B = Shape(
    hidden=2560, intermediate=9728, layers=36, heads=32, kv_heads=8, head_dim=128, vocabulary=151936, tied=True
)
QWEN_8B = Shape(hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8, head_dim=128, vocabulary=151936)
QWEN_14B = Shape(hidden=5120, intermediate=17408, layers=40, heads=40, kv_heads=8, head_dim=128, vocabulary=151936)
LLAMA_70B = Shape(hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, head_dim=128, vocabulary=128256)

CASES = {
    "tiny": Case(shape=TINY, tokens=128, micro_batches=2, device_gib=0.006, chunk_mib=0.5, compared=True),
    "tiny-lora": Case(shape=TINY, kind="lora", tokens=128, micro_batches=2, device_gib=0.0045, chunk_mib=0.25),
    # The baselines keep all weights and states on the host; with the cap rlpipe really offloads, too.
    "1b-8k": Case(shape=LLAMA_1B, device_gib=12, compared=True),
    "4b-8k": Case(shape=QWEN_4B, compared=True),
    "4b-64k": Case(shape=QWEN_4B, micro_batches=8, compared=True),
    "8b-8k": Case(shape=QWEN_8B),
    "8b-64k": Case(shape=QWEN_8B, micro_batches=8),
    "14b-8k": Case(shape=QWEN_14B, states="bfloat16", gradients="bfloat16"),
    "70b-lora-8k": Case(shape=LLAMA_70B, kind="lora"),
}
ON_CPU = ("tiny", "tiny-lora")
"""Cases for the CPU, which are no measure of a GPU."""


def make_module(case: Case, dtype: torch.dtype | None = None) -> LogprobModel:
    """Make the model as a run trains it, with parameters on the meta device and buffers on the CPU.

    ``dtype`` is that of the weights; by default float32 if all are trained, else the compute dtype.
    """
    dtype = dtype or (torch.float32 if case.kind == "full" else COMPUTE)
    config = case.shape.config(max_position_embeddings=max(case.tokens, 32768))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.set_attn_implementation(NAME)
        module = LogprobModel(model, compute_dtype=COMPUTE, layout=AttentionLayout.SHARED)
        if case.kind == "lora":
            module.model = get_peft_model(model, lora_config(AdapterConfig(r=RANK), model))
    compute_buffers(module, torch.device("cpu"))
    return module.train()


def compute_buffers(module: LogprobModel, device: torch.device) -> None:
    """Place buffers, such as the frequencies of rotary embeddings, on the device, with the values of a new model."""
    model: PreTrainedModel = module.causal_model
    for child in model.modules():
        if child._buffers:
            for name, buffer in child._buffers.items():
                assert buffer is not None
                child._buffers[name] = torch.full_like(buffer, math.nan, device=device)
            model._init_weights(child)


class Values:
    """Random values for weights, filled in at the speed of a copy; drawing those of a large model takes minutes."""

    def __init__(self) -> None:
        wide = torch.randn(POOL_ELEMENTS, generator=torch.Generator().manual_seed(0)) * STD
        self._pools = {dtype: wide.to(dtype) for dtype in (torch.float32, torch.bfloat16)}

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill the parameter of this name; norms with 1, an adapter's B with 0."""
        if "lora_B" in name:
            tensor.zero_()
        elif tensor.ndim < 2:
            tensor.fill_(1.0)
        else:
            pool, flat = self._pools[tensor.dtype], tensor.view(-1)
            for part in flat.split(len(pool)):
                part.copy_(pool[: len(part)])


def make_row(case: Case, number: int, device: torch.device) -> Row:
    """Make a row of random tokens; all but the first are loss tokens."""
    count = case.tokens
    random = np.random.default_rng(number)
    micro_batch = MicroBatch(
        token_ids=random.integers(0, case.shape.vocabulary, count),
        position_ids=np.arange(count),
        sequence_starts=np.array([0, count], np.int32),
        loss_mask=np.arange(count) > 0,
        logprobs=np.zeros(count, np.float32),
        advantages=np.zeros(count, np.float32),
        policy_versions=np.zeros(count, np.int32),
        group_ids=np.zeros(1, np.int32),
        first_indices=np.zeros(1, np.int64),
    )
    return plan_row(micro_batch, layout=AttentionLayout.SHARED, device=device)


def loss_of(module: LogprobModel, case: Case, row: Row) -> Tensor:
    """Return a micro batch's share of the mean cross-entropy over an update's tokens."""
    logprobs, _ = module.logprobs(row, 1.0, LOGIT_TOKENS)
    return -logprobs.sum() / (case.micro_batches * (case.tokens - 1))
