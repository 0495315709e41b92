"""Tests that the dataset actor packs a step while ranks train the one before, and no step that nobody will want."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpipe.actors.dataset import ANSWER_LEAVES_S, DatasetActor, DatasetSetup
from rlpipe.configs.compose import load_config
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import DataError
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.replay.step_queue import StepReport
from rlpipe.types import Rollout, TrainBatch

NUM_STEPS = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy", hidden_size=32, num_layers=1)


class Counting(DatasetActor):
    """A dataset actor that keeps the steps that it has packed, and can't pack one of them."""

    unusable = -1

    def __init__(self, setup: DatasetSetup) -> None:
        super().__init__(setup)
        self.packed: list[int] = []

    def _pack_step(self, step: int, rows: Sequence[Rollout]) -> list[TrainBatch]:
        self.packed.append(step)
        if step == self.unusable:
            raise DataError("rows.jsonl is gone")
        return super()._pack_step(step, rows)


def actor_of(policy: Path, folder: Path, *, num_ranks: int = 1, num_rows: int | None = None) -> Counting:
    (folder / "rows.jsonl").write_text('{"prompt": "1+2=", "completion": "3"}\n{"prompt": "2+2=", "completion": "4"}\n')
    config = load_config(
        [
            *("algorithm=sft", "data=jsonl", f"data.path={folder}/rows.jsonl", f"model.path={policy}"),
            *(
                f"algorithm.num_steps={NUM_STEPS}",
                "algorithm.groups_per_step=2",
                "learner.strategy=fsdp2",
                f"learner.num_ranks={num_ranks}",
            ),
        ]
    )
    parts: dict[str, Any] = {name: getattr(config, name) for name in ("data", "model", "algorithm", "learner", "seed")}
    cursor = Cursor(epoch=0, position=0)
    return Counting(DatasetSetup(**parts, folder=str(folder), first_step=0, cursor=cursor, num_rows=num_rows))


def test_rows_that_were_added_since_the_run_began_are_noticed(policy: Path, tmp_path: Path) -> None:
    async def begin(num_rows: int) -> dict[str, Any]:
        actor = actor_of(policy, tmp_path, num_rows=num_rows)
        await actor.start()
        batch = await actor.next_batch(0, 0)
        assert batch is not None
        return batch.resume

    assert asyncio.run(begin(2)) == {"epoch": 0, "position": 2, "num_rows": 2}
    with pytest.raises(DataError, match="the data has 2 rows for training, and had 1 when the run began: put the rows"):
        asyncio.run(begin(1))


async def pause() -> None:
    await asyncio.sleep(ANSWER_LEAVES_S * 5)


def test_a_step_is_packed_while_the_one_before_is_trained(policy: Path, tmp_path: Path) -> None:
    async def train() -> None:
        actor = actor_of(policy, tmp_path)
        for step in range(NUM_STEPS):
            assert await actor.next_batch(step, 0) is not None
            assert actor.packed == list(range(step + 1)), "packing the next step would keep the rank waiting"
            await pause()
            assert actor.packed == list(range(min(step + 2, NUM_STEPS)))

    asyncio.run(train())


def test_a_slower_rank_gets_its_share_at_once(policy: Path, tmp_path: Path) -> None:
    async def train() -> None:
        actor = actor_of(policy, tmp_path, num_ranks=2)
        assert await actor.next_batch(0, 0) is not None
        assert await actor.next_batch(0, 1) is not None
        assert actor.packed == [0]
        await pause()
        assert actor.packed == [0, 1]
        assert await actor.next_batch(0, 1) is not None, "a call that Ray repeats"

    asyncio.run(train())


def test_a_step_that_cannot_be_packed_ahead_fails_for_the_rank_that_asks_for_it(policy: Path, tmp_path: Path) -> None:
    async def train() -> None:
        actor = actor_of(policy, tmp_path)
        actor.unusable = 1
        assert await actor.next_batch(0, 0) is not None
        await pause()
        assert actor.packed == [0, 1]
        with pytest.raises(DataError, match="is gone"):
            await actor.next_batch(1, 0)
        actor.unusable = -1
        assert await actor.next_batch(1, 0) is not None, "a call that Ray repeats"

    asyncio.run(train())


def test_reports_are_kept_until_the_driver_has_them(policy: Path, tmp_path: Path) -> None:
    async def train() -> None:
        actor = actor_of(policy, tmp_path)
        for step in range(5):
            actor._keep_report(StepReport(step=step, metrics={}))
        assert [report.step for report in (await actor.wait_updates(-1, 0, 1.0)).reports] == [0, 1, 2, 3, 4]
        assert [report.step for report in (await actor.wait_updates(-1, 0, 1.0)).reports] == [0, 1, 2, 3, 4]
        assert [report.step for report in (await actor.wait_updates(2, 0, 1.0)).reports] == [3, 4]
        assert not (await actor.wait_updates(4, 0, 0.01)).reports
        assert [report.step for report in actor._known_reports] == [4]
        actor._keep_report(StepReport(step=4, metrics={}))
        assert len(actor._known_reports) == 1, "a step that is trained again is reported once"

    asyncio.run(train())


def test_events_have_rising_numbers_when_the_clock_goes_back(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = actor_of(policy, tmp_path)
    for now in (10, 10, 7):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now)
        actor._keep_event("rank", "learner-0", f"at {now}")
    assert [event.number for event in actor._events(9)] == [10, 11, 12]
