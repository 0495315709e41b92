"""Tests that training in chunks equals plain training, wherever the activations are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import one_in
from offload_cases import (
    CPU,
    Loss,
    arrange_all,
    fused,
    image_text_loss,
    make_image_text,
    make_moe,
    make_nf4,
    make_qwen,
    make_t5,
    token_loss,
    train_offloaded,
    train_plainly,
    translation_loss,
    with_lora,
)
from torch import nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.offload.decision import Mode
from rlpipe.offload.runtime.runtime import OffloadedModel

pytestmark = pytest.mark.covering(1)

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
KEEP, CHECKPOINT, SWAP, OFFLOAD = Mode.KEEP, Mode.CHECKPOINT, Mode.SWAP, Mode.OFFLOAD
CYCLES = {
    "keep": [KEEP],
    "checkpoint": [CHECKPOINT],
    "swap": [SWAP],
    "offload": [OFFLOAD],
    "mixed": [SWAP, CHECKPOINT, OFFLOAD, KEEP],
}
SIZES = [100 * 1024]
"""The chunk size; two chunks hold a block of the tiny models, or a little more."""


def assert_equal_training(
    make: Callable[[], nn.Module], loss_of: Loss, *cycle: Mode, num_persistent: int = 0, num_slots: int = 3
) -> OffloadedModel:
    options: dict[str, Any] = {"num_steps": 3, "num_micro_batches": 2, "max_norm": 0.5}
    losses, norms, expected = train_plainly(make(), loss_of, CONFIG, **options)
    model = make()
    arrangement = arrange_all(model, *cycle, num_persistent=num_persistent, num_slots=num_slots)
    with OffloadedModel(model, arrangement, device=CPU, optimizer=CONFIG, sizes=SIZES) as offloaded:
        found = train_offloaded(offloaded, loss_of, CONFIG, **options)
        assert min(norms) > 0.5, "clipping has something to do"
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(norms), atol=1e-5, rtol=1e-5)
        assert found[2].keys() == expected.keys()
        for name, parameter in expected.items():
            torch.testing.assert_close(found[2][name], parameter, atol=1e-5, rtol=0, msg=name)
    return offloaded


@pytest.mark.parametrize("modes", CYCLES)
@pytest.mark.parametrize("kind", ["full", "tied", "lora", "fused lora", "dora", "qlora", "fused qlora"])
def test_every_mode_trains_as_without_offload(kind: str, modes: str) -> None:
    makers = {
        "full": make_qwen,
        "tied": lambda: make_qwen(tied=True),
        "lora": lambda: with_lora(make_qwen()),
        "fused lora": lambda: fused(with_lora(make_qwen())),
        "dora": lambda: with_lora(make_qwen(), use_dora=True),
        "qlora": lambda: with_lora(make_nf4()),
        "fused qlora": lambda: fused(with_lora(make_nf4())),
    }
    assert_equal_training(makers[kind], token_loss, *CYCLES[modes])


@pytest.mark.parametrize("num_persistent", [0, 1, 4, 100])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_any_number_of_chunks_may_stay(kind: str, num_persistent: int) -> None:
    make = make_qwen if kind == "full" else lambda: with_lora(make_qwen())
    with OffloadedModel(model := make(), arrange_all(model, KEEP, num_slots=9), device=CPU, sizes=SIZES) as probe:
        count = len(probe.layout.chunks)
    offloaded = assert_equal_training(
        make,
        token_loss,
        *CYCLES["mixed"],
        num_persistent=min(num_persistent, count),
        num_slots=3 * (num_persistent < count),
    )
    assert len(offloaded.layout.chunks) > 4


@pytest.mark.parametrize("modes", CYCLES)
@pytest.mark.parametrize(
    "kind", one_in(2, ["moe", "moe lora", "image-text", "two adapters", "encoder-decoder", "inputs"])
)
def test_every_kind_of_model_trains_as_without_offload(kind: str, modes: str) -> None:
    cases: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
        "two adapters": (lambda: with_lora(make_qwen(), second=True), token_loss),
        "moe": (make_moe, token_loss),
        "moe lora": (lambda: with_lora(make_moe(), target_parameters=["experts.gate_up_proj"]), token_loss),
        "image-text": (make_image_text, image_text_loss),
        "encoder-decoder": (make_t5, translation_loss),
        "inputs": (lambda: with_lora(make_qwen(), modules_to_save=["lm_head"]), token_loss),
    }
    make, loss_of = cases[kind]
    assert_equal_training(make, loss_of, *CYCLES[modes], num_slots=4)
