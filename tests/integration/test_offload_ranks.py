"""Tests that training in chunks on two gloo ranks equals plain training on one, with full copies and with shards."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learner_cases import make_model_config
from offload_cases import (
    CPU,
    RATES,
    HostWorker,
    LateWorker,
    Loss,
    arrange_all,
    make_moe,
    make_nf4,
    make_qwen,
    token_loss,
    train_offloaded,
    train_plainly,
    with_lora,
)
from rank_cases import Ranks
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.errors import RunError
from rlpipe.learner.policy import load_logprob_model
from rlpipe.learner.strategies import chunked
from rlpipe.learner.strategies.chunked import Chunked
from rlpipe.learner.workload import Workload
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.offload.api import OffloadedAdamW, offload
from rlpipe.offload.decision import Capacity, Decision, Knobs, Mode
from rlpipe.offload.planner.cost import predict
from rlpipe.offload.planner.fake_trace import trace_model
from rlpipe.offload.planner.profiler import make_profile
from rlpipe.offload.planner.trace import TensorTracker
from rlpipe.offload.runtime.activations import InlineStream, Streams
from rlpipe.offload.runtime.chunk import Replicated, Sharded
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision
from rlpipe.offload.units import find_units

pytestmark = pytest.mark.covering(1)
CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.1)
OPTIONS = {"num_steps": 3, "num_micro_batches": 4, "max_norm": 0.5}
CYCLES = {
    "keep": [Mode.KEEP],
    "checkpoint": [Mode.CHECKPOINT],
    "swap": [Mode.SWAP],
    "offload": [Mode.OFFLOAD],
    "mixed": [Mode.SWAP, Mode.CHECKPOINT, Mode.OFFLOAD, Mode.KEEP],
}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    "full": lambda: make_qwen(tied=True),
    "lora": lambda: with_lora(make_qwen()),
    "qlora": lambda: with_lora(make_nf4()),
    "moe": make_moe,
}


def compare(kind: str, modes: str, is_sharded: bool, num_persistent: int) -> None:
    assert_equal_training(MAKERS[kind], token_loss, is_sharded, *CYCLES[modes], num_persistent=num_persistent)


def assert_equal_training(
    make: Callable[[], nn.Module],
    loss_of: Loss,
    is_sharded: bool,
    *cycle: Mode,
    num_persistent: int = 0,
    num_slots: int = 3,
    size: int = 100 * 1024,
) -> None:
    _, norms, expected = train_plainly(make(), loss_of, CONFIG, **OPTIONS)
    model = make()
    arrangement = arrange_all(model, *cycle, num_persistent=num_persistent, num_slots=num_slots)
    with OffloadedModel(
        model, arrangement, device=CPU, optimizer=CONFIG, ranks=Sharded() if is_sharded else Replicated(), sizes=[size]
    ) as offloaded:
        _, found_norms, found = train_offloaded(offloaded, loss_of, CONFIG, **OPTIONS)
    torch.testing.assert_close(torch.tensor(found_norms), torch.tensor(norms), atol=1e-5, rtol=1e-5)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=0, msg=name)
        both = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(both, found[name].contiguous())
        assert torch.equal(*both), f"{name} differs between the ranks"


def save_and_go_on(folder: Path) -> None:
    """Save with shards and go on with full copies, and the other way round."""
    options = OPTIONS | {"num_steps": 2}
    for sharing, other in ((Sharded, Replicated), (Replicated, Sharded)):
        where, found = folder / sharing.__name__, []
        for ranks, path in ((sharing(), None), (other(), where)):
            model = make_qwen()
            arrangement = arrange_all(model, Mode.CHECKPOINT, num_persistent=1, num_slots=3)
            with OffloadedModel(
                model, arrangement, device=CPU, optimizer=CONFIG, ranks=ranks, sizes=[100 * 1024]
            ) as offloaded:
                optimizer = OffloadedAdamW(offloaded, CONFIG)
                if path is None:
                    train_offloaded(offloaded, token_loss, CONFIG, optimizer=optimizer, **options)
                    optimizer.save(where)
                else:
                    optimizer.load(path)
                found.append(train_offloaded(offloaded, token_loss, CONFIG, optimizer=optimizer, **options)[2])
        for name, values in found[0].items():
            torch.testing.assert_close(found[1][name], values, atol=1e-6, rtol=0, msg=name)


def test_ranks_continue_from_what_others_saved(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(save_and_go_on, tmp_path)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("modes", CYCLES)
@pytest.mark.parametrize("kind", MAKERS)
def test_two_ranks_train_as_one_does_without_offload(ranks: Ranks, kind: str, modes: str, is_sharded: bool) -> None:
    ranks.run(compare, kind, modes, is_sharded, 0)


LITTLE = 1400 * 1024
"""The bytes of a device that can't hold the whole model."""


def compare_decided(sharing: str) -> None:
    _, norms, expected = train_plainly(make_qwen(), token_loss, CONFIG, **OPTIONS)
    model = make_qwen()
    free = Capacity(device_bytes=(1 + dist.get_rank()) * LITTLE, host_bytes=2**30)
    options = {"num_tokens": 18, "num_micro_batches": 2, "sizes": [100 * 1024]}
    with offload(model, device=CPU, optimizer=CONFIG, capacity=free, sharing=sharing, **options) as offloaded:
        assert offloaded.decision.prediction.device_bytes <= LITTLE, "rank 0 has no more"
        assert offloaded.ranks.num_parts in {"replicated": (1,), "sharded": (2,)}.get(sharing, (1, 2))
        assert ("shared: " in offloaded.decision.describe()) == (sharing == "auto" and offloaded.ranks.num_parts == 1)
        _, found_norms, found = train_offloaded(offloaded, token_loss, CONFIG, **OPTIONS)
    torch.testing.assert_close(torch.tensor(found_norms), torch.tensor(norms), atol=1e-5, rtol=1e-5)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=0, msg=name)


@pytest.mark.covering(0)
@pytest.mark.parametrize("sharing", ["auto", "replicated", "sharded"])
def test_ranks_decide_alike_and_train_as_one(ranks: Ranks, sharing: str) -> None:
    ranks.run(compare_decided, sharing)


def find_no_way() -> None:
    free = Capacity(device_bytes=2**30 if dist.get_rank() else 1, host_bytes=2**30)
    with pytest.raises(RunError if dist.get_rank() else ValueError, match="the smallest on the device needs"):
        offload(make_qwen(), device=CPU, optimizer=CONFIG, num_tokens=18, capacity=free)


def test_what_does_not_fit_on_one_rank_is_said_on_all(ranks: Ranks) -> None:
    ranks.run(find_no_way)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("num_persistent", [2, 5])
def test_chunks_that_stay_are_the_same_on_all_ranks(ranks: Ranks, num_persistent: int, is_sharded: bool) -> None:
    ranks.run(compare, "full", "mixed", is_sharded, num_persistent)


def run_other_units() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(32, 32, bias=False)
            self.blocks = nn.ModuleList([nn.Linear(32, 32, bias=False)])

        def forward(self, hidden: Tensor, *, with_tower: bool) -> Tensor:
            return self.blocks[0](self.tower(hidden) if with_tower else hidden).square().sum()

    torch.manual_seed(0)
    model, hidden = Tower(), torch.randn(4, 32)
    arrangement = arrange_all(model, Mode.KEEP)
    with OffloadedModel(
        model, arrangement, device=CPU, optimizer=CONFIG, ranks=Replicated(), sizes=[4096]
    ) as offloaded:
        with pytest.raises(RuntimeError, match="have all ranks call the same units"):
            model(hidden, with_tower=dist.get_rank() == 0).backward()
        optimizer = OffloadedAdamW(offloaded, CONFIG)
        optimizer.zero_grad()
        model(hidden, with_tower=True).backward()
        assert optimizer.step() > 0


def test_ranks_that_call_other_units_are_reported(ranks: Ranks) -> None:
    ranks.run(run_other_units)


class Experts(nn.Module):
    """A block of two experts, each in its own chunk, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, hidden: Tensor, expert: int) -> Tensor:
        return hidden + self.experts[expert](hidden)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Experts(), Experts()])

    def forward(self, hidden: Tensor, expert: int) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, expert)
        return hidden.square().sum()


def make_mixture() -> nn.Module:
    torch.manual_seed(0)
    return Mixture()


def mixture_loss(model: nn.Module, number: int) -> Tensor:
    """Return a loss for which the ranks use different experts, which change with their next micro batch."""
    hidden = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
    return model(hidden, (0, 1, 1, 0)[number % 4])


def compare_mixtures(mode: Mode, is_sharded: bool, num_persistent: int) -> None:
    assert_equal_training(
        make_mixture, mixture_loss, is_sharded, mode, num_persistent=num_persistent, num_slots=2, size=4096
    )


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("num_persistent", [0, 4])
@pytest.mark.parametrize("mode", [Mode.KEEP, Mode.CHECKPOINT])
def test_ranks_may_use_other_experts_than_each_other(
    ranks: Ranks, mode: Mode, num_persistent: int, is_sharded: bool
) -> None:
    ranks.run(compare_mixtures, mode, is_sharded, num_persistent)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(6))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().sum()


def compare_room(dtype: torch.dtype, is_sharded: bool) -> None:
    base: type[Replicated | Sharded] = Sharded if is_sharded else Replicated

    class Watched(base):  # type: ignore[misc, valid-type]
        peak = sent = 0

        def reduce(self, whole: Tensor) -> Tensor:
            held = offloaded.optimizer.gradients.device_bytes + whole.untyped_storage().nbytes()
            with TensorTracker() as tracker:
                part: Tensor = super().reduce(whole)
            self.peak, self.sent = max(self.peak, held + tracker.peak), part.nbytes
            return part

    model, hidden, watched = Layers().to(dtype), torch.ones(4, 32, dtype=dtype), Watched()
    size = 32 * 32 * dtype.itemsize
    trace = trace_model(model, find_units(model), lambda _: model(hidden), lambda _: 1e-5)
    queues = Streams(copies_in=InlineStream(), copies_out=InlineStream(), worker=LateWorker())
    with OffloadedModel(
        model,
        arrange_all(model, Mode.KEEP, num_slots=6),
        device=CPU,
        optimizer=CONFIG,
        ranks=watched,
        sizes=[size],
        queues=queues,
    ) as offloaded:
        profile = make_profile(
            model,
            offloaded.inventory,
            offloaded.layout,
            trace,
            precision=Precision(),
            num_ranks=2,
            num_parts=watched.num_parts,
        )
        for _ in range(2):
            model(hidden).backward()
        offloaded.optimizer.drop()
    gathered = size // 2 if is_sharded else 0
    assert watched.peak == profile.resident_bytes - gathered
    assert {chunk.gradient_bytes for chunk in profile.chunks} == {watched.sent}


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gradients_of_ranks_take_the_memory_that_is_predicted(
    ranks: Ranks, dtype: torch.dtype, is_sharded: bool
) -> None:
    ranks.run(compare_room, dtype, is_sharded)


class Wide(Layers):
    """A model whose head takes four slots."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 128, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.head(hidden).square().sum()


def compare_gather() -> None:
    class Watched(Sharded):
        peak = 0

        def gather(self, whole: Tensor) -> None:
            with TensorTracker() as tracker:
                super().gather(whole)
            self.peak = max(self.peak, tracker.peak)

    model, hidden, watched = Wide(), torch.ones(4, 32), Watched()
    trace = trace_model(model, find_units(model), lambda _: model(hidden), lambda _: 1e-5)
    arrangement = arrange_all(model, Mode.CHECKPOINT, num_slots=5)
    with OffloadedModel(model, arrangement, device=CPU, optimizer=CONFIG, ranks=watched, sizes=[4096]) as offloaded:
        model(hidden).backward()
        alone, shared = (
            make_profile(
                model, offloaded.inventory, offloaded.layout, trace, precision=Precision(), num_parts=num_parts
            )
            for num_parts in (1, 2)
        )
        assert watched.peak == shared.resident_bytes - alone.resident_bytes == 2 * offloaded.layout.slot_bytes


def test_a_share_that_is_spread_takes_the_memory_that_is_predicted(ranks: Ranks) -> None:
    ranks.run(compare_gather)


def compare_host(dtype: torch.dtype, is_sharded: bool, num_persistent: int) -> None:
    model, ranks, worker = make_qwen().to(dtype), Sharded() if is_sharded else Replicated(), HostWorker()
    trace = trace_model(model, find_units(model), lambda _: token_loss(model, 0), lambda _: 1e-5)
    with OffloadedModel(
        model,
        arrange_all(model, Mode.SWAP, num_persistent=num_persistent, num_slots=3),
        device=CPU,
        optimizer=CONFIG,
        ranks=ranks,
        sizes=[100 * 1024],
        queues=Streams(copies_in=InlineStream(), copies_out=InlineStream(), worker=worker),
    ) as offloaded:
        profile = make_profile(
            model,
            offloaded.inventory,
            offloaded.layout,
            trace,
            precision=Precision(),
            num_ranks=2,
            num_parts=ranks.num_parts,
        )
        optimizer, held = OffloadedAdamW(offloaded, CONFIG), [0]
        for number in range(2):
            token_loss(model, number).backward()
            optimizer.step()
        with TensorTracker(lambda _: held.append(offloaded.host_bytes + worker.live)):
            token_loss(model, 2).backward()
            optimizer.step()
    knobs = Knobs(num_persistent=num_persistent, num_slots=3, num_swapped=len(profile.blocks))
    ratio = predict(profile, knobs, RATES).host_bytes / max(held)
    assert 0.98 <= ratio <= 1.05, ratio


@pytest.mark.parametrize("num_persistent", [0, 2])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ranks_hold_on_the_host_what_is_predicted(
    ranks: Ranks, dtype: torch.dtype, is_sharded: bool, num_persistent: int
) -> None:
    ranks.run(compare_host, dtype, is_sharded, num_persistent)


def fail_on_the_first_rank() -> None:
    model, is_first = make_qwen(), dist.get_rank() == 0
    arrangement, began_s = arrange_all(model, Mode.KEEP, num_slots=3), time.perf_counter()
    offloaded = OffloadedModel(model, arrangement, device=CPU, optimizer=CONFIG, ranks=Sharded(), sizes=[100 * 1024])
    if is_first:
        with pytest.raises(KeyError), offloaded:
            raise KeyError("the first rank alone")
        assert time.perf_counter() - began_s < 1
    # The group is still in step: the next collectives of both ranks match.
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total)
    assert total.item() == 3
    if is_first:
        with pytest.raises(RuntimeError, match="load the model again"):
            token_loss(model, 0)


def test_an_error_on_one_rank_waits_for_no_other(ranks: Ranks) -> None:
    ranks.run(fail_on_the_first_rank)


class Failing(Chunked):
    def _search(self, *_: object) -> Decision:
        raise OSError("no space")


def fail_to_decide(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "measured_device", lambda _: None)
        sharding = Failing(LearnerConfig(strategy="fsdp2", offload="chunked"), CPU, Workload())
        module = load_logprob_model(make_model_config(folder, adapter="none"), CPU)
        with pytest.raises(OSError if sharding.rank == 0 else RunError, match="no space"):
            sharding.shard(module, trained=True)


def test_all_ranks_learn_that_nothing_is_decided(ranks: Ranks, tmp_path: Path) -> None:
    path = make_tiny_policy(tmp_path / "tiny", hidden_size=64, num_layers=2, intermediate_size=96)
    ranks.run(fail_to_decide, path)
