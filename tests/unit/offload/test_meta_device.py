"""Tests that a model on the meta device, filled while it is offloaded, trains like the model with the same values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from offload_cases import CPU, arrange_all, make_qwen, token_loss, train_offloaded, train_plainly, with_lora
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.offload.decision import Mode
from rlpipe.offload.runtime.runtime import OffloadedModel

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
SIZES = [100 * 1024]


def on_meta(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return a model without values, except for its buffers, and one with all of them."""
    real = make()
    with torch.device("meta"):
        empty = make()
    buffers = dict(real.named_buffers())
    for path, module in empty.named_modules():
        for name in list(module._buffers):
            module._buffers[name] = buffers[f"{path}.{name}"].clone()
    return empty, real


@pytest.mark.parametrize("num_persistent", [0, 2])
@pytest.mark.parametrize("kind", ["full", "tied", "lora"])
def test_a_model_without_values_is_filled_chunk_by_chunk(kind: str, num_persistent: int) -> None:
    makers: dict[str, Callable[[], nn.Module]] = {
        "full": make_qwen,
        "tied": lambda: make_qwen(tied=True),
        "lora": lambda: with_lora(make_qwen()),
    }
    empty, real = on_meta(makers[kind])
    values = {name: parameter.detach().clone() for name, parameter in real.named_parameters()}
    before = dict(empty.named_parameters())

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(values[name])

    options = {"num_steps": 2, "num_micro_batches": 2, "max_norm": 0.5}
    losses, norms, expected = train_plainly(real, token_loss, CONFIG, **options)
    arrangement = arrange_all(empty, Mode.CHECKPOINT, num_persistent=num_persistent, num_slots=3)
    with OffloadedModel(empty, arrangement, device=CPU, optimizer=CONFIG, sizes=SIZES, fill=fill) as offloaded:
        found = train_offloaded(offloaded, token_loss, CONFIG, **options)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(norms), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[2], expected, atol=1e-5, rtol=0)
    after = dict(empty.named_parameters())
    assert all(after[name] is parameter and not parameter.is_meta for name, parameter in before.items())


def test_values_that_nobody_gives_are_missed() -> None:
    empty, _ = on_meta(make_qwen)
    arrangement = arrange_all(empty, Mode.KEEP, num_slots=9)
    with pytest.raises(ValueError, match="pass fill"):
        OffloadedModel(empty, arrangement, device=CPU, optimizer=CONFIG, sizes=SIZES)


def test_buffers_must_have_their_values() -> None:
    with torch.device("meta"):
        empty = make_qwen()
    arrangement = arrange_all(empty, Mode.KEEP, num_slots=9)
    with pytest.raises(ValueError, match="inv_freq is on the meta device"):
        OffloadedModel(
            empty, arrangement, device=CPU, optimizer=CONFIG, sizes=SIZES, fill=lambda _, tensor: tensor.zero_()
        )
