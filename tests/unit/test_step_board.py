"""Ranks wait for their share of a step, and the controller for reports."""

import asyncio

from rlpipe.replay.steps import StepBoard, StepReport
from rlpipe.types import TrainBatch


def batches(step: int, num_ranks: int) -> list[TrainBatch]:
    return [TrainBatch(step=step, mini_batches=[], metrics={"rank": float(rank)}) for rank in range(num_ranks)]


def test_every_rank_gets_its_own_share_once_the_step_is_there() -> None:
    async def scenario() -> list[TrainBatch]:
        board = StepBoard(num_ranks=2)
        assert board.want(0)
        assert not board.want(0), "a second rank wants the same step"
        waiting = [asyncio.create_task(board.batch(0, rank)) for rank in (0, 1)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        await board.put(0, batches(0, 2))
        return list(await asyncio.gather(*waiting))

    assert [batch.metrics["rank"] for batch in asyncio.run(scenario())] == [0.0, 1.0]


def test_a_slow_rank_still_finds_the_step_before() -> None:
    async def scenario() -> TrainBatch:
        board = StepBoard(num_ranks=2)
        for step in (0, 1):
            board.want(step)
            await board.put(step, batches(step, 2))
        return await board.batch(0, 1)

    assert asyncio.run(scenario()).step == 0


def test_a_step_that_was_served_is_not_wanted_again() -> None:
    async def scenario() -> bool:
        board = StepBoard(num_ranks=1)
        board.want(0)
        await board.put(0, batches(0, 1))
        return board.want(0)

    assert not asyncio.run(scenario())


def test_reports_are_handed_out_once() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        board = StepBoard(num_ranks=1)
        waiting = asyncio.create_task(board.wait_completed(5.0))
        await asyncio.sleep(0)
        await board.complete(StepReport(step=0, metrics={}))
        first = await waiting
        await board.complete(StepReport(step=1, metrics={}))
        second = await board.wait_completed(5.0)
        assert await board.wait_completed(0.01) == []
        return [r.step for r in first], [r.step for r in second]

    assert asyncio.run(scenario()) == ([0], [1])
