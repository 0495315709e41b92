"""Tests that ranks wait for their share of a step, and the controller for reports."""

import asyncio

from rlpipe.replay.step_queue import StepQueue
from rlpipe.types import TrainBatch


def batches(step: int, num_ranks: int) -> list[TrainBatch]:
    return [TrainBatch(step=step, mini_batches=[], metrics={"rank": float(rank)}) for rank in range(num_ranks)]


def test_every_rank_gets_its_own_share_once_the_step_is_there() -> None:
    async def scenario() -> list[TrainBatch]:
        board = StepQueue(num_ranks=2)
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
        board = StepQueue(num_ranks=2)
        for step in (0, 1):
            board.want(step)
            await board.put(step, batches(step, 2))
        return await board.batch(0, 1)

    assert asyncio.run(scenario()).step == 0


def test_a_step_that_was_served_is_not_wanted_again() -> None:
    async def scenario() -> bool:
        board = StepQueue(num_ranks=1)
        board.want(0)
        await board.put(0, batches(0, 1))
        return board.want(0)

    assert not asyncio.run(scenario())


def test_after_a_stop_every_rank_ends_after_the_same_step() -> None:
    async def scenario() -> list[bool]:
        board = StepQueue(num_ranks=2)
        board.want(0)
        await board.put(0, batches(0, 2))
        first = await board.batch(0, 0)
        early = asyncio.create_task(board.batch(1, 0))
        await asyncio.sleep(0)
        await board.stop()
        answers = [first, await early, await board.batch(0, 1), await board.batch(1, 1)]
        return [answer is not None for answer in answers]

    assert asyncio.run(scenario()) == [True, False, True, False]


def test_new_ranks_may_begin_at_any_step_and_old_ones_are_answered_with_nothing() -> None:
    async def scenario() -> list[int | None]:
        board = StepQueue(num_ranks=2)
        for step in (4, 5):
            board.want(step)
            await board.put(step, batches(step, 2))
            for rank in (0, 1):
                await board.batch(step, rank)
        await board.put(6, batches(6, 2))
        orphan = asyncio.create_task(board.batch(7, 0))
        await asyncio.sleep(0)
        await board.begin_again()
        assert board.due is None, "nobody has said yet where the new ranks begin"
        board.want(4)
        await board.put(4, batches(4, 2))
        answers = [await orphan, await board.batch(4, 0)]
        assert board.due == 5
        await board.put(5, batches(5, 2))
        answers += [await board.batch(4, 1), await board.batch(5, 1)]
        return [None if answer is None else answer.step for answer in answers]

    assert asyncio.run(scenario()) == [None, 4, 4, 5]


def test_a_stop_holds_for_new_ranks() -> None:
    async def scenario() -> None:
        board = StepQueue(num_ranks=1)
        board.want(3)
        await board.put(3, batches(3, 1))
        await board.batch(3, 0)
        await board.stop()
        await board.begin_again()
        await board.stop()
        assert await board.batch(2, 0) is None

    asyncio.run(scenario())


def test_the_next_step_is_due_once_ranks_have_one() -> None:
    async def scenario() -> None:
        board = StepQueue(num_ranks=1)
        assert board.due is None, "the run may go on anywhere"
        board.want(4)
        assert board.due == 4
        await board.put(4, batches(4, 1))
        await board.batch(4, 0)
        assert board.due == 5
        await board.put(5, batches(5, 1))
        assert board.due is None, "ranks have not begun it"
        assert not board.want(5)
        async with asyncio.timeout(60):
            assert await board.batch(5, 0) is not None
        assert board.due == 6

    asyncio.run(scenario())


def test_a_step_that_is_ready_is_not_handed_out_after_a_stop() -> None:
    async def scenario() -> TrainBatch | None:
        board = StepQueue(num_ranks=1)
        for step in (0, 1):
            await board.put(step, batches(step, 1))
        await board.batch(0, 0)
        await board.stop()
        assert board.due is None
        return await board.batch(1, 0)

    assert asyncio.run(scenario()) is None
