"""Activations that are kept on the host between forward and backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from offload_cases import CPU, arrange_all, late_queues, make_qwen, train_offloaded, train_plainly
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.offload.decision import Mode
from rlpipe.offload.runtime.activations import HostArena, SwapHooks, WeightHooks
from rlpipe.offload.runtime.runtime import OffloadedModel

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)


def growing_loss(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(0, 97, (2, 5 + 3 * number), generator=torch.Generator().manual_seed(number))
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def test_micro_batches_of_growing_length_train_as_without_offload() -> None:
    options: dict[str, Any] = {"num_steps": 3, "num_micro_batches": 3, "max_norm": 0.5}
    _, _, expected = train_plainly(make_qwen(), growing_loss, CONFIG, **options)
    model = make_qwen()
    arrangement = arrange_all(model, Mode.SWAP, num_slots=4)
    with OffloadedModel(
        model, arrangement, device=CPU, optimizer=CONFIG, sizes=[100 * 1024], queues=late_queues()
    ) as offloaded:
        _, _, found = train_offloaded(offloaded, growing_loss, CONFIG, **options)
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("end", [HostArena.reset, HostArena.close], ids=["grown", "closed"])
def test_memory_is_freed_once_no_copy_uses_it(end: Callable[[HostArena], None]) -> None:
    queues = late_queues()
    arena = HostArena(queues, pin=False)
    arena.take(1000)
    arena.reset()
    before, seen = arena.num_bytes, []
    for stream in (queues.copies_in, queues.copies_out):
        stream.submit(lambda: seen.append(arena.num_bytes))
    arena.take(2 * before)
    end(arena)
    assert seen == [before, before]


def test_passes_that_get_longer_bit_by_bit_seldom_make_it_grow() -> None:
    arena, sizes = HostArena(late_queues(), pin=False), set()
    for num_bytes in range(10_000, 40_000, 500):
        arena.take(num_bytes)
        arena.reset()
        sizes.add(arena.num_bytes)
    assert max(sizes) < 1.25 * 40_000
    assert len(sizes) < 9


def test_passes_of_one_length_take_what_they_need_alone() -> None:
    arena = HostArena(late_queues(), pin=False)
    for _ in range(3):
        arena.take(4096)
        arena.reset()
    assert arena.num_bytes == 4096


def test_what_comes_back_does_not_wait_for_gradients_that_leave() -> None:
    queues, gone = late_queues(), []
    weights = WeightHooks({}, lambda _: None)
    swap = SwapHooks(weights, HostArena(queues, pin=False), queues, lambda _: False)
    hidden = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    with swap.watch():
        loss = hidden.square().sum()
    queues.copies_out.submit(lambda: gone.append("a gradient"))
    swap.fetch()
    loss.backward()
    assert torch.equal(hidden.grad, torch.tensor([2.0, 4.0, 6.0]))
    assert not gone
    queues.copies_out.block_host()
    assert gone
