"""Groups that the learner's ranks score: their assignment, the arrival of scores, and the queue for new ranks."""

import asyncio
from collections.abc import Sequence

import numpy as np

from rlpipe.replay.step_queue import FeatureQueue
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import Prompt, RolloutGroup


def groups(count: int) -> list[RolloutGroup]:
    prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(1, np.int32), prompt="", task={})
    return [RolloutGroup(group_id=group_id, prompt=prompt, rollouts=[]) for group_id in range(count)]


def scores(share: Sequence[RolloutGroup]) -> list[GroupScores]:
    return [GroupScores(group_id=group.group_id) for group in share]


def ids(answer: Sequence[GroupScores]) -> list[int]:
    return sorted(entry.group_id for entry in answer)


def test_each_group_is_scored_by_one_rank() -> None:
    async def scenario() -> tuple[list[list[int]], list[int]]:
        board = FeatureQueue(num_ranks=2)
        waiting = asyncio.create_task(board.score(groups(5)))
        job = await board.due(5.0)
        assert job is not None
        shares = [board.share(job, rank) for rank in range(2)]
        board.answer(job, 0, scores(shares[0]))
        await asyncio.sleep(0)
        assert not waiting.done(), "the other rank's share is missing"
        board.answer(job, 1, scores(shares[1]))
        return [[group.group_id for group in share] for share in shares], ids(await waiting)

    assert asyncio.run(scenario()) == ([[0, 2, 4], [1, 3]], [0, 1, 2, 3, 4])


def test_jobs_are_due_in_the_order_in_which_they_came() -> None:
    async def scenario() -> list[int | None]:
        board = FeatureQueue(num_ranks=1)
        assert await board.due(0.01) is None
        first, second = (asyncio.create_task(board.score(groups(count))) for count in (1, 2))
        found = []
        for count in (1, 2):
            job = await board.due(5.0)
            assert job is not None
            share = board.share(job, 0)
            assert len(share) == count
            board.answer(job, 0, scores(share))
            found.append(job)
        await asyncio.gather(first, second)
        return [*found, await board.due(0.01)]

    first, second, none = asyncio.run(scenario())
    assert first is not None
    assert second is not None
    assert first < second
    assert none is None


def test_new_ranks_score_a_job_anew() -> None:
    async def scenario() -> list[int]:
        board = FeatureQueue(num_ranks=2)
        waiting = asyncio.create_task(board.score(groups(4)))
        job = await board.due(5.0)
        assert job is not None
        board.answer(job, 0, scores(board.share(job, 0)))
        board.begin_again()
        assert await board.due(5.0) == job
        board.answer(job, 1, scores(board.share(job, 1)))
        await asyncio.sleep(0)
        assert not waiting.done(), "what the dead rank had answered does not count"
        board.answer(job, 0, scores(board.share(job, 0)))
        return ids(await waiting)

    assert asyncio.run(scenario()) == [0, 1, 2, 3]


def test_scores_of_a_dead_process_s_job_do_not_count_for_one_with_the_same_number() -> None:
    """Check a queue that replaces another, and gets the repeated calls in another order."""

    async def scenario() -> list[int]:
        dead, board = FeatureQueue(num_ranks=1), FeatureQueue(num_ranks=1)
        first, second = groups(2)
        calls = [asyncio.create_task(dead.score([first])), asyncio.create_task(board.score([second]))]
        job = await dead.due(5.0)
        assert job is not None
        assert await board.due(5.0) == job
        board.answer(job, 0, scores(dead.share(job, 0)))
        await asyncio.sleep(0)
        assert not calls[1].done()
        board.answer(job, 0, scores(board.share(job, 0)))
        calls[0].cancel()
        return ids(await calls[1])

    assert asyncio.run(scenario()) == [1]


def test_a_job_that_nobody_waits_for_is_over() -> None:
    async def scenario() -> tuple[int | None, list[RolloutGroup]]:
        board = FeatureQueue(num_ranks=1)
        waiting = asyncio.create_task(board.score(groups(1)))
        job = await board.due(5.0)
        assert job is not None
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        board.answer(job, 0, [])
        return await board.due(0.01), board.share(job, 0)

    assert asyncio.run(scenario()) == (None, [])


def test_ranks_learn_that_no_more_groups_come() -> None:
    async def scenario() -> bool:
        board = FeatureQueue(num_ranks=1)
        waiting = asyncio.create_task(board.ended())
        await asyncio.sleep(0)
        assert not waiting.done()
        await board.end()
        await waiting
        return True

    assert asyncio.run(scenario())
