"""Training through the chunks on two gloo ranks equals plain training on one, with whole copies and with shares."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learner_cases import make_model_config
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

from rlpipe.configs.schema_learner import LearnerConfig, OptimizerConfig
from rlpipe.errors import RunError
from rlpipe.learner import chunked
from rlpipe.learner.chunked import Chunked
from rlpipe.learner.policy import load_scorer
from rlpipe.learner.workload import Workload
from rlpipe.offload.decide import Decision
from rlpipe.offload.profile import Mode
from rlpipe.offload.ranks import Replicated, Sharded
from rlpipe.offload.runtime import OffloadedModel
from rlpipe.tiny import make_tiny_policy

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


@pytest.mark.parametrize("is_sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("num_persistent", [2, 5])
def test_chunks_that_stay_are_the_same_on_all_ranks(ranks: Ranks, num_persistent: int, is_sharded: bool) -> None:
    ranks.run(compare, "full", "mixed", is_sharded, num_persistent)


def fail_on_the_first_rank() -> None:
    model, is_first = make_qwen(), dist.get_rank() == 0
    arrangement, began_s = arrange_all(model, Mode.KEEP, num_slots=3), time.perf_counter()
    offloaded = OffloadedModel(model, arrangement, device=CPU, optimizer=CONFIG, ranks=Sharded(), sizes=[100 * 1024])
    if is_first:
        with pytest.raises(KeyError), offloaded:
            raise KeyError("the first rank alone")
        assert time.perf_counter() - began_s < 1
    # The group is still in step: what the first rank does next meets what the other does.
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
        patch.setattr(chunked, "own_device", lambda _: None)
        sharding = Failing(LearnerConfig(strategy="fsdp2", offload="chunked"), CPU, Workload())
        scorer = load_scorer(make_model_config(folder, adapter="none"), CPU)
        with pytest.raises(OSError if sharding.rank == 0 else RunError, match="no space"):
            sharding.shard(scorer, trained=True)


def test_all_ranks_are_told_that_nothing_is_decided(ranks: Ranks, tmp_path: Path) -> None:
    path = make_tiny_policy(tmp_path / "tiny", hidden_size=64, num_layers=2, intermediate_size=96)
    ranks.run(fail_to_decide, path)
