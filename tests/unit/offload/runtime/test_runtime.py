"""Tests of offloading a model and restoring it, and of errors in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from copy import deepcopy
from typing import Any

import pytest
import torch
from offload_cases import (
    CPU,
    LateWorker,
    NarrowStream,
    arrange_all,
    late_queues,
    make_nf4,
    make_qwen,
    token_loss,
    train_offloaded,
    train_plainly,
    with_lora,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.learner.strategies.optimizer import make_optimizer
from rlpipe.offload.api import OffloadedAdamW
from rlpipe.offload.decision import Arrangement, Mode
from rlpipe.offload.planner.cost import Rates
from rlpipe.offload.planner.fake_trace import trace_model
from rlpipe.offload.planner.trace import TensorTracker, Trace
from rlpipe.offload.runtime.activations import InlineStream, Streams
from rlpipe.offload.runtime.runtime import OffloadedModel
from rlpipe.offload.units import find_units

CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
MIXED = [Mode.SWAP, Mode.CHECKPOINT, Mode.OFFLOAD, Mode.KEEP]
SIZES = [100 * 1024]


def offload(model: nn.Module, **options: Any) -> OffloadedModel:
    arrangement = arrange_all(model, *MIXED, num_slots=options.pop("num_slots", 3))
    return OffloadedModel(model, arrangement, device=CPU, optimizer=CONFIG, sizes=SIZES, **options)


def hooks_of(model: nn.Module) -> int:
    modules = model.modules()
    own = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + ("forward" in m.__dict__) for m in modules)
    return own + sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())


@pytest.mark.covering(1)
@pytest.mark.parametrize("num_slots", [3, 4, 7])
@pytest.mark.parametrize("make", [make_qwen, lambda: with_lora(make_qwen()), lambda: with_lora(make_nf4())])
def test_everything_waits_for_what_it_needs(make: Callable[[], nn.Module], num_slots: int) -> None:
    options: dict[str, Any] = {"num_steps": 3, "num_micro_batches": 2, "max_norm": 0.5}
    _, _, expected = train_plainly(make(), token_loss, CONFIG, **options)
    with offload(make(), num_slots=num_slots, queues=late_queues()) as offloaded:
        _, _, found = train_offloaded(offloaded, token_loss, CONFIG, **options)
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=0, msg=name)


def test_a_model_that_is_given_back_is_as_it_was() -> None:
    model, expected = with_lora(make_qwen()), with_lora(make_qwen())
    threads, hooks = threading.active_count(), hooks_of(model)
    with offload(model) as offloaded:
        assert hooks_of(model) > hooks
        token_loss(model, 0).backward()
        offloaded.optimizer.drop()
        model.zero_grad()
    assert (threading.active_count(), hooks_of(model)) == (threads, hooks)
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert (mine.dtype, mine.device, mine.requires_grad) == (theirs.dtype, theirs.device, theirs.requires_grad)
    assert torch.equal(token_loss(model, 1), token_loss(expected, 1))


def test_a_closed_model_is_closed_once_and_offloaded_anew() -> None:
    model = make_qwen()
    offloaded = offload(model)
    with pytest.raises(RuntimeError, match="offloaded already: close it first"):
        offload(model)
    offloaded.close()
    offloaded.close()
    with pytest.raises(RuntimeError, match="closed"):
        offloaded.values(model.lm_head.weight)
    with offload(model) as again:
        token_loss(model, 0).backward()
        assert float(again.optimizer.squared_norm()) > 0


def test_a_model_with_gradients_is_refused() -> None:
    model, hooks = make_qwen(), hooks_of(make_qwen())
    token_loss(model, 0).backward()
    with pytest.raises(ValueError, match=r"the model has gradients: call zero_grad\(set_to_none=True\) first"):
        offload(model)
    assert hooks_of(model) == hooks
    assert all(map(torch.equal, model.parameters(), make_qwen().parameters()))
    model.zero_grad(set_to_none=True)
    offload(model).close()


def test_gradients_of_chunks_that_are_not_applied_are_dropped_with_the_offload() -> None:
    model = make_qwen()
    with offload(model) as offloaded:
        token_loss(model, 0).backward()
        resident = {id(parameter) for parameter in offloaded.resident.values()}
    assert all((parameter.grad is not None) == (id(parameter) in resident) for parameter in model.parameters())
    with pytest.raises(ValueError, match="the model has gradients"):
        offload(model)


class StubbornWorker(LateWorker):
    """A worker whose first shutdown fails."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown()
        if self.num_shut_down == 1:
            raise OSError("no")


def test_a_close_that_fails_can_be_tried_again() -> None:
    model, worker = make_qwen(), StubbornWorker()
    offloaded = offload(model, queues=Streams(copies_in=InlineStream(), copies_out=InlineStream(), worker=worker))
    with pytest.raises(OSError, match="no"):
        offloaded.close()
    assert not offloaded.is_closed
    with pytest.raises(RuntimeError, match="offloaded already"):
        offload(model)
    offloaded.close()
    assert offloaded.is_closed
    assert all(map(torch.equal, model.parameters(), make_qwen().parameters()))


def test_tensors_that_are_out_keep_their_shape_and_kind() -> None:
    model, expected = with_lora(make_nf4()), with_lora(make_nf4())
    with offload(model):
        for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
            assert (type(mine), mine.requires_grad) == (type(theirs), theirs.requires_grad), name


def test_passes_without_gradients_change_nothing() -> None:
    """Check reference passes in training and evaluation mode, between steps and between forward and backward pass."""
    options: dict[str, Any] = {"num_steps": 2, "num_micro_batches": 1, "max_norm": 1.0}

    def loss_of(model: nn.Module, number: int) -> Tensor:
        loss = token_loss(model, number)
        with torch.no_grad():
            token_loss(model, number + 10)
            token_loss(model.eval(), number + 20)
            model.train()
        return loss

    _, _, expected = train_plainly(make_qwen(), token_loss, CONFIG, **options)
    with offload(make_qwen()) as offloaded:
        _, _, found = train_offloaded(offloaded, loss_of, CONFIG, **options)
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, atol=1e-6, rtol=0, msg=name)


def test_two_forward_passes_may_come_before_their_backward_passes() -> None:
    expected, model = make_qwen(), make_qwen()
    (token_loss(expected, 0) + token_loss(expected, 1)).backward()
    norm = nn.utils.get_total_norm([p.grad for p in expected.parameters()])
    with offload(model) as offloaded:
        first, second = token_loss(model, 0), token_loss(model, 1)
        first.backward()
        second.backward()
        squared = offloaded.optimizer.squared_norm() + offloaded.resident_squared_norm()
        assert float(squared) ** 0.5 == pytest.approx(float(norm), rel=1e-5)


def test_a_pass_that_raises_leaves_a_usable_model() -> None:
    model = make_qwen()
    with offload(model) as offloaded:
        handle = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            token_loss(model, 0)
        handle.remove()
        handle = model.model.layers[1].mlp.act_fn.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            token_loss(model, 0).backward()
        handle.remove()
        offloaded.optimizer.drop()
        model.zero_grad()
        token_loss(model, 0).backward()
        plain = make_qwen()
        token_loss(plain, 0).backward()
        expected = sum(float(p.grad.square().sum()) for p in plain.parameters())
        squared = offloaded.optimizer.squared_norm() + offloaded.resident_squared_norm()
        assert float(squared) == pytest.approx(expected, rel=1e-5)


def test_loads_without_room_leave_a_usable_model() -> None:
    options: dict[str, Any] = {"num_steps": 2, "num_micro_batches": 2, "max_norm": 0.5}
    _, _, expected = train_plainly(make_qwen(), token_loss, CONFIG, **options)
    model, stream = make_qwen(), NarrowStream(num_failures=0)
    queues = Streams(copies_in=stream, copies_out=InlineStream(), worker=LateWorker())
    with offload(model, queues=queues) as offloaded:
        for _ in range(4):
            stream.num_failures = 1
            with pytest.raises(torch.OutOfMemoryError):
                token_loss(model, 0)
        for _ in range(4):
            loss = token_loss(model, 0)
            stream.num_failures = 1
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()
            offloaded.optimizer.drop()
            model.zero_grad()
        _, _, found = train_offloaded(offloaded, token_loss, CONFIG, **options)
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=0, msg=name)


def test_an_update_that_is_not_finite_is_left_out() -> None:
    model = make_qwen()
    with offload(model) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        (token_loss(model, 0) * torch.inf).backward()
        assert not torch.isfinite(torch.tensor(optimizer.step(max_norm=1.0)))
        token_loss(model, 1).backward()
        norm = optimizer.step(max_norm=1.0)
        found = {name: offloaded.values(parameter).clone() for name, parameter in model.named_parameters()}
    plain = make_qwen()
    _, norms, expected = train_plainly(
        plain, lambda m, _: token_loss(m, 1), CONFIG, num_steps=1, num_micro_batches=1, max_norm=1.0
    )
    assert norm == pytest.approx(norms[0], rel=1e-5)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-6, rtol=0, msg=name)


def test_an_update_that_waits_uses_the_learning_rate_of_its_step() -> None:
    plain = make_qwen()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
    )
    model = make_qwen()
    with offload(model, queues=late_queues()) as offloaded:
        steps = OffloadedAdamW(offloaded, CONFIG)
        for number, rate in enumerate((1e-2, 1e-4, 1e-3)):
            token_loss(plain, number).backward()
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            token_loss(model, number).backward()
            steps.step(learning_rate=rate)
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(offloaded.values(mine), theirs.detach(), atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("make_streams", [late_queues, lambda: None], ids=["late", "threads"])
def test_gradients_are_dropped_while_updates_continue(make_streams: Callable[[], Streams | None]) -> None:
    plain, model = make_qwen(), make_qwen()
    expected = make_optimizer(plain.parameters(), CONFIG)
    with offload(model, queues=make_streams()) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        for number in range(3):
            token_loss(plain, number).backward()
            expected.step()
            expected.zero_grad()
            token_loss(model, number + 10).backward()
            optimizer.zero_grad()
            token_loss(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(offloaded.values(mine), theirs.detach(), atol=1e-5, rtol=0, msg=name)


def test_dropping_gradients_waits_for_no_update() -> None:
    model = make_qwen()
    with offload(model, queues=late_queues()) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        token_loss(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not any(map(offloaded.optimizer.is_updated, offloaded.optimizer.adams))


@pytest.mark.parametrize("make_streams", [late_queues, lambda: None], ids=["late", "threads"])
def test_a_step_without_a_backward_pass_changes_nothing(make_streams: Callable[[], Streams | None]) -> None:
    model = make_qwen()
    _, _, expected = train_plainly(make_qwen(), token_loss, CONFIG, num_steps=1, num_micro_batches=1, max_norm=0.5)
    with offload(model, queues=make_streams()) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        token_loss(model, 0).backward()
        optimizer.step(max_norm=0.5)
        assert optimizer.step(max_norm=0.5) == 0
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(offloaded.values(parameter), expected[name], atol=1e-5, rtol=0, msg=name)


class Tower(nn.Module):
    """A block and a tower that only some passes use; the block's chunk is the first to become persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False)])
        self.tower = nn.Linear(32, 32, bias=False)

    def forward(self, hidden: Tensor, *, with_tower: bool) -> Tensor:
        return self.blocks[0](self.tower(hidden) if with_tower else hidden)


@pytest.mark.parametrize("make_streams", [late_queues, lambda: None], ids=["late", "threads"])
@pytest.mark.parametrize("num_persistent", [0, 1])
def test_a_unit_may_be_left_out_of_an_update(make_streams: Callable[[], Streams | None], num_persistent: int) -> None:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
        return model(hidden, with_tower=number % 2 == 0).square().sum()

    torch.manual_seed(0)
    options: dict[str, Any] = {"num_steps": 5, "num_micro_batches": 1, "max_norm": 0.5}
    plain, model = Tower(), Tower()
    model.load_state_dict(plain.state_dict())
    _, norms, expected = train_plainly(plain, loss_of, CONFIG, **options)
    arrangement = Arrangement(num_persistent=num_persistent, num_slots=2, modes=[Mode.KEEP] * 2)
    with OffloadedModel(
        model, arrangement, device=CPU, optimizer=CONFIG, sizes=[4096], queues=make_streams()
    ) as offloaded:
        assert len(offloaded.layout.chunks) == 2
        _, found_norms, found = train_offloaded(offloaded, loss_of, CONFIG, **options)
    assert found_norms == pytest.approx(norms, rel=1e-5)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=0, msg=name)


class FailingWorker(LateWorker):
    """A worker that fails at the first update of a chunk."""

    has_failed = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if function.__name__ == "update" and not self.has_failed:
            self.has_failed = True
            return super().submit(lambda: 1 / 0)
        return super().submit(function, *args, **kwargs)


def test_what_an_update_raises_is_not_lost_in_a_step_that_has_no_gradients() -> None:
    model = make_qwen()
    queues = Streams(copies_in=InlineStream(), copies_out=InlineStream(), worker=FailingWorker())
    with offload(model, queues=queues) as offloaded:
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        token_loss(model, 0).backward()
        optimizer.step()
        optimizer.step()
        with pytest.raises(ZeroDivisionError):
            offloaded.optimizer.flush()


def test_arrangements_that_do_not_suit_the_model_are_refused() -> None:
    model = make_qwen()
    modes = [Mode.KEEP] * len(find_units(model))
    for arrangement, message in [
        (Arrangement(num_persistent=99, num_slots=3, modes=modes), "num_persistent=99: the model has 8 chunks"),
        (Arrangement(num_persistent=0, num_slots=1, modes=modes), "num_slots=1: one unit of the model needs 3"),
        (Arrangement(num_persistent=0, num_slots=3, modes=modes[1:]), "6 modes for the model's 7 units"),
    ]:
        with pytest.raises(ValueError, match=message):
            OffloadedModel(model, arrangement, device=CPU, optimizer=CONFIG, sizes=SIZES)
    model.gradient_checkpointing_enable()
    hooks = hooks_of(model)
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        offload(model)
    model.gradient_checkpointing_disable()
    assert hooks_of(model) == hooks
    assert torch.isfinite(token_loss(model, 0))


def test_a_missing_rate_is_no_free_transfer() -> None:
    numbers = dict.fromkeys(("host_to_device", "device_to_host", "both", "device_bandwidth", "host_bandwidth"), 1.0)
    by_dtype = {name: {"float32": 1.0, "bfloat16": 1.0} for name in ("device_adam", "host_adam", "host_adding")}
    Rates(**numbers, **by_dtype)
    for missing in (0.0, float("nan")):
        wrong = dict.fromkeys(numbers, missing) | {name: {"float32": 1.0, "x": missing} for name in by_dtype}
        for name, value in wrong.items():
            with pytest.raises(ValueError, match=f"the rate {name} is {missing}"):
                Rates(**numbers | by_dtype | {name: value})


def test_tracing_leaves_the_model_and_its_gradients_alone() -> None:
    model = with_lora(make_qwen())
    token_loss(model, 0).backward()
    before = {name: (p.clone(), None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()}
    state, hooks = torch.get_rng_state(), hooks_of(model)
    trace = trace_model(model, find_units(model), lambda _: token_loss(model, 1), lambda _: 1.0)
    assert len(trace.profiles()) >= 7
    assert torch.equal(torch.get_rng_state(), state)
    assert hooks_of(model) == hooks
    for name, parameter in model.named_parameters():
        weight, gradient = before[name]
        assert torch.equal(parameter, weight)
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)


def test_a_trace_is_of_one_run() -> None:
    model = make_qwen()
    trace = Trace(find_units(model), lambda _: 0.0)
    with pytest.raises(ZeroDivisionError):
        trace.run(lambda: 1 / 0, [])
    assert hooks_of(model) == 0
    with pytest.raises(RuntimeError, match="a trace records one run"):
        trace.run(lambda: token_loss(model, 0), model.parameters())


class Twice(nn.Module):
    """A module whose weight receives one gradient in an inner backward pass and another in the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(checkpoint(self.linear, hidden, use_reentrant=True))


def test_a_weight_may_have_several_gradients_in_a_backward_pass() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 32), nn.ModuleList([Twice()]))
    plain.forward = lambda hidden: plain[1][0](plain[0](hidden))  # type: ignore[method-assign]
    model, hidden = deepcopy(plain), torch.randn(4, 32, requires_grad=True)
    model.forward = lambda hidden: model[1][0](model[0](hidden))  # type: ignore[method-assign]
    plain(hidden).square().sum().backward()
    expected = sum(float(parameter.grad.square().sum()) for parameter in plain.parameters())
    arrangement = Arrangement(num_persistent=0, num_slots=2, modes=[Mode.KEEP] * 2)
    with OffloadedModel(model, arrangement, device=CPU, optimizer=CONFIG, sizes=[4096]) as offloaded:
        model(hidden).square().sum().backward()
        squared = offloaded.optimizer.squared_norm() + offloaded.resident_squared_norm()
        assert float(squared) == pytest.approx(expected, rel=1e-5)


def test_attention_counts_among_the_work() -> None:
    query = torch.randn(1, 2, 8, 4)
    flops = {}
    with TensorTracker(lambda operator: flops.update({operator.name: operator.flops})) as tracker:
        nn.functional.scaled_dot_product_attention(query, query, query)
    assert sum(flops.values()) == 2 * 2 * 8 * 8 * 4 * 2
    assert tracker.peak >= query.nbytes
