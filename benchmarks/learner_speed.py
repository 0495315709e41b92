"""Tokens per second and model FLOPs utilisation of a LoRA step, against transformers' Trainer with PEFT.

Both fine-tune the same random model, of a 1.5B model's shape on a GPU and a small one on the CPU, on the same packed
rows (8k tokens on a GPU). Needs no Ray and no engine. Run: ``python -m benchmarks.learner_speed``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config, Trainer, TrainerCallback, TrainingArguments, set_seed

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.learner.policy import load_policy, lora_config
from rlpipe.learner.step import Learner
from rlpipe.types import Rollout, TrainBatch

FOLDER = Path("outputs/benchmarks/learner_speed")
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}
"""Peak FLOP/s of bfloat16 products without sparsity, by the name of the GPU."""


@dataclass(kw_only=True, frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    row_tokens: int
    rows: int

    @property
    def tokens(self) -> int:
        return self.rows * self.row_tokens

    def flops(self) -> float:
        """Return the FLOPs of one step: each weight's forward product and its input's gradient, and causal attention.

        The base's weights are frozen and have no gradient; recomputation by checkpointing does not count.
        """
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * head_dim
        weights = self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary
        scores = 6 * self.layers * self.hidden * self.row_tokens
        return self.tokens * (4 * weights + scores)


SHAPES = {
    "cuda": Shape(
        hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocabulary=151936, row_tokens=1024, rows=8
    ),
    "cpu": Shape(hidden=256, intermediate=768, layers=4, heads=4, kv_heads=2, vocabulary=8192, row_tokens=128, rows=8),
}


def make_model(shape: Shape, folder: Path, dtype: torch.dtype) -> Path:
    set_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


def make_rows(shape: Shape, step: int) -> np.ndarray:
    """Return random token ids ``[rows, row_tokens]``."""
    return np.random.default_rng(step).integers(0, shape.vocabulary, (shape.rows, shape.row_tokens)).astype(np.int32)


def make_batch(shape: Shape, step: int) -> TrainBatch:
    length = shape.row_tokens
    mask = np.r_[False, np.ones(length - 1, bool)]
    rows = [
        Rollout(
            group_id=index,
            sample_index=0,
            prompt_id=index,
            task={},
            token_ids=row,
            loss_mask=mask,
            logprobs=np.zeros(length, np.float32),
            policy_versions=np.zeros(length, np.int32),
            advantages=np.ones(length, np.float32),
        )
        for index, row in enumerate(make_rows(shape, step))
    ]
    return pack_step(rows, step=step, num_ranks=1, max_tokens=shape.tokens)[0]


def time_ours(shape: Shape, model: ModelConfig, device: torch.device, steps: int) -> list[float]:
    settings = LearnerConfig(max_tokens_per_microbatch=shape.tokens)
    policy = load_policy(model, settings, device)
    learner = Learner(policy, settings, AlgorithmConfig(kind="sft", num_steps=steps))
    return [_timed(lambda step=step: learner.train_step(make_batch(shape, step)), device) for step in range(steps)]


class Rows(torch.utils.data.Dataset):
    def __init__(self, shape: Shape, steps: int) -> None:
        self._rows = np.concatenate([make_rows(shape, step) for step in range(steps)])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.from_numpy(self._rows[index]).long()
        return {"input_ids": row, "labels": row.clone()}


class Clock(TrainerCallback):
    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        _settle(self._device)
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        _settle(self._device)
        self.seconds.append(time.perf_counter() - self._started)


def time_trainer(shape: Shape, model: ModelConfig, device: torch.device, steps: int) -> list[float]:
    base = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=getattr(torch, model.dtype), attn_implementation=model.attention
    )
    adapted = get_peft_model(base, lora_config(model.adapter, base))
    if model.gradient_checkpointing:
        adapted.enable_input_require_grads()
    clock = Clock(device)
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "trainer"),
        per_device_train_batch_size=shape.rows,
        max_steps=steps,
        bf16=model.dtype == "bfloat16",
        use_cpu=device.type == "cpu",
        gradient_checkpointing=model.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=adapted, args=arguments, train_dataset=Rows(shape, steps), callbacks=[clock]).train()
    return clock.seconds


def _timed(action: Callable[[], object], device: torch.device) -> float:
    _settle(device)
    started = time.perf_counter()
    action()
    _settle(device)
    return time.perf_counter() - started


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12, help="number of steps, of which the first two are not timed")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, dtype = SHAPES[device.type], "bfloat16" if device.type == "cuda" else "float32"
    path = make_model(shape, FOLDER / "model", getattr(torch, dtype))
    model = ModelConfig(
        path=str(path), dtype=dtype, gradient_checkpointing=arguments.checkpointing, adapter=AdapterConfig()
    )
    seconds = {
        name: statistics.median(measure(shape, model, device, arguments.steps)[2:])
        for name, measure in {"rlpipe": time_ours, "trainer": time_trainer}.items()
    }
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    result = {
        "device": name,
        "tokens_per_second": round(shape.tokens / seconds["rlpipe"]),
        "tokens_per_second_trainer": round(shape.tokens / seconds["trainer"]),
        "ratio": round(seconds["trainer"] / seconds["rlpipe"], 3),
        "mfu": None if peak is None else round(shape.flops() / seconds["rlpipe"] / peak, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
