"""Training through the chunks on two gloo ranks equals plain training on one, with whole copies and with shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from offload_cases import (
    CPU,
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
from torch import nn

from rlpipe.configs.schema_learner import OptimizerConfig
from rlpipe.offload.auto import offload
from rlpipe.offload.profile import Capacity, Mode
from rlpipe.offload.ranks import Replicated, Sharded
from rlpipe.offload.runtime import OffloadedModel

pytestmark = pytest.mark.slow
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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.end()


def compare(kind: str, modes: str, is_sharded: bool, num_persistent: int) -> None:
    _, norms, expected = train_plainly(MAKERS[kind](), token_loss, CONFIG, **OPTIONS)
    model = MAKERS[kind]()
    arrangement = arrange_all(model, *CYCLES[modes], num_persistent=num_persistent, num_slots=3)
    with OffloadedModel(
        model,
        arrangement,
        device=CPU,
        optimizer=CONFIG,
        ranks=Sharded() if is_sharded else Replicated(),
        sizes=[100 * 1024],
    ) as offloaded:
        _, found_norms, found = train_offloaded(offloaded, token_loss, CONFIG, **OPTIONS)
    torch.testing.assert_close(torch.tensor(found_norms), torch.tensor(norms), atol=1e-5, rtol=1e-5)
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, atol=1e-5, rtol=0, msg=name)
        both = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(both, found[name].contiguous())
        assert torch.equal(*both), f"{name} differs between the ranks"


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("modes", CYCLES)
@pytest.mark.parametrize("kind", MAKERS)
def test_two_ranks_train_as_one_does_without_offload(ranks: Ranks, kind: str, modes: str, is_sharded: bool) -> None:
    ranks.run(compare, kind, modes, is_sharded, 0)


LITTLE = 1400 * 1024
"""Bytes of a device that holds not all of the model."""


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


@pytest.mark.parametrize("sharing", ["auto", "replicated", "sharded"])
def test_ranks_decide_alike_and_train_as_one(ranks: Ranks, sharing: str) -> None:
    ranks.run(compare_decided, sharing)


def find_no_way() -> None:
    free = Capacity(device_bytes=2**30 if dist.get_rank() else 1, host_bytes=2**30)
    with pytest.raises(ValueError, match="the smallest on the device takes"):
        offload(make_qwen(), device=CPU, optimizer=CONFIG, num_tokens=18, capacity=free)


def test_what_does_not_fit_on_one_rank_is_said_on_all(ranks: Ranks) -> None:
    ranks.run(find_no_way)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("num_persistent", [2, 5])
def test_chunks_that_stay_are_the_same_on_all_ranks(ranks: Ranks, num_persistent: int, is_sharded: bool) -> None:
    ranks.run(compare, "full", "mixed", is_sharded, num_persistent)
