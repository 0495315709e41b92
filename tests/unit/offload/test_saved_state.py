"""Tests that an offloaded model's training resumes from a saved state, whatever the arrangement of its chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from offload_cases import CPU, Loss, arrange_all, make_qwen, make_t5, token_loss, translation_loss, with_lora
from torch import nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.errors import ConfigError
from rlpipe.offload.api import OffloadedAdamW
from rlpipe.offload.decision import Mode
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
SIZES = [100 * 1024]
CASES = {
    "full": (make_qwen, token_loss),
    "lora": (lambda: with_lora(make_qwen()), token_loss),
    "encoder-decoder": (make_t5, translation_loss),
}


def take(model: nn.Module, num_persistent: int, *modes: Mode, precision: Precision | None = None) -> OffloadedModel:
    arrangement = arrange_all(model, *modes, num_persistent=num_persistent, num_slots=4)
    return OffloadedModel(model, arrangement, device=CPU, optimizer=CONFIG, precision=precision, sizes=SIZES)


def train(offloaded: OffloadedModel, optimizer: OffloadedAdamW, loss_of: Loss, steps: range) -> None:
    for step in steps:
        loss_of(offloaded.model, step).backward()
        optimizer.step(max_norm=0.5)


def trained(offloaded: OffloadedModel) -> dict[str, torch.Tensor]:
    named = offloaded.model.named_parameters()
    return {name: offloaded.values(parameter).clone() for name, parameter in named if parameter.requires_grad}


@pytest.mark.parametrize("kind", CASES)
def test_what_was_saved_continues_in_another_arrangement(tmp_path: Path, kind: str) -> None:
    make, loss_of = CASES[kind]
    with take(make(), 1, Mode.CHECKPOINT) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        train(offloaded, optimizer, loss_of, range(2))
        optimizer.save(tmp_path / "state")
        train(offloaded, optimizer, loss_of, range(2, 4))
        expected = trained(offloaded)
    with take(make(), 0, Mode.OFFLOAD, Mode.SWAP) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        train(offloaded, optimizer, loss_of, range(7, 9))
        loss_of(offloaded.model, 9).backward()  # these gradients are dropped
        optimizer.load(tmp_path / "state")
        train(offloaded, optimizer, loss_of, range(2, 4))
        found = trained(offloaded)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, atol=1e-6, rtol=0, msg=name)


def test_before_the_first_update_there_are_no_moments(tmp_path: Path) -> None:
    with take(make_qwen(), 0, Mode.KEEP) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        optimizer.save(tmp_path / "state")
        train(offloaded, optimizer, token_loss, range(2))
        expected = trained(offloaded)
        optimizer.load(tmp_path / "state")
        train(offloaded, optimizer, token_loss, range(2))
        assert all(torch.equal(values, expected[name]) for name, values in trained(offloaded).items())


def test_states_of_another_type_are_taken_over(tmp_path: Path) -> None:
    narrow = Precision(state=torch.bfloat16, compute=torch.bfloat16)
    with take(make_qwen(), 1, Mode.KEEP) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        train(offloaded, optimizer, token_loss, range(2))
        optimizer.save(tmp_path / "state")
        expected = trained(offloaded)
    with take(make_qwen(), 0, Mode.KEEP, precision=narrow) as offloaded:
        OffloadedAdamW(offloaded, CONFIG).load(tmp_path / "state")
        for name, values in trained(offloaded).items():
            torch.testing.assert_close(values, expected[name].to(values.dtype))


def test_a_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    with take(make_qwen(), 0, Mode.KEEP) as offloaded:
        OffloadedAdamW(offloaded, CONFIG).save(tmp_path / "state")
    with take(with_lora(make_qwen()), 0, Mode.KEEP) as offloaded:
        before = trained(offloaded)
        with pytest.raises(
            ConfigError, match=r"state has other trained parameters than this model \(\d+ differ, such as"
        ):
            OffloadedAdamW(offloaded, CONFIG).load(tmp_path / "state")
        assert all(torch.equal(values, before[name]) for name, values in trained(offloaded).items())
