"""Tests of the real pool on real Ray: a bad reward costs only its own group, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import isolation_cases
import numpy as np
import psutil
import pytest
import ray
from run_cases import make_config

from rlpipe.actors.reward import Engines
from rlpipe.run.cluster import Reservation, end_actors
from rlpipe.run.prepare import Run, prepare_run
from rlpipe.run.scoring_pools import ScorerPool
from rlpipe.run.workers import pool_needs, start_pools
from rlpipe.scoring.pools import resolve_pools
from rlpipe.scoring.processes import list_processes
from rlpipe.scoring.sandbox.seccomp import unsupported
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import Prompt, Rollout, RolloutGroup

pytestmark = pytest.mark.ray

DEATHS_S = 30.0
START_S = 120.0
How = tuple[str, Any]
StartPool = Callable[..., Any]


def make_group(group_id: int, how: How) -> RolloutGroup:
    task = {"how": how[0], "argument": how[1]}
    tokens = np.array([1, 2, 3, 4], dtype=np.int32)
    sampled = np.arange(4) >= 2
    rollout = Rollout(
        group_id=group_id,
        sample_index=0,
        prompt_id=group_id,
        task=task,
        token_ids=tokens,
        loss_mask=sampled,
        logprobs=np.zeros(4, dtype=np.float32),
        policy_versions=np.where(sampled, 0, -1).astype(np.int32),
    )
    prompt = Prompt(prompt_id=group_id, epoch=0, token_ids=tokens[:2], prompt="?", task=task)
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=[rollout])


@pytest.fixture
def start_pool(local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> StartPool:
    """Return a function that starts a pool of one scoring process for the reward ``behave`` with some options."""

    @contextmanager
    def start(**options: Any) -> Iterator[ScorerPool]:
        entry = {"path": f"'{isolation_cases.__file__}:behave'", **options}
        text = ", ".join(f"{key}: {value}" for key, value in entry.items())
        overrides = ["~scoring.rewards.digits", f"+scoring.rewards.behave={{{text}}}", "scoring.memory_gb=1"]
        run: Run = prepare_run(make_config(tiny_policy, prompts_file, tmp_path / "run", *overrides))
        before = set(ray.util.list_named_actors())
        places = Reservation(pool_needs(resolve_pools(run.config, run.rewards).values(), served=False), START_S)
        try:
            (pool,) = start_pools(run, places, Engines(actors={}, chat_template_kwargs={}))
            asyncio.run(pool.start())
            yield pool
        finally:
            end_actors(before)
            places.release()

    return start


def score(pool: ScorerPool, hows: Sequence[How]) -> Mapping[int, GroupScores]:
    groups = ray.put([make_group(group_id, how) for group_id, how in enumerate(hows)])
    scores = asyncio.run(pool.score(groups, {index: index for index in range(len(hows))}))
    assert [entry.group_id for entry in scores] == list(range(len(hows)))
    return {entry.group_id: entry for entry in scores}


def check(pool: ScorerPool, cases: Mapping[How, str]) -> None:
    """Check that each case fails with its message, and that the groups between the cases succeed."""
    hows: list[How] = [("well", None)]
    for how in cases:
        hows += [how, ("well", None)]
    for group_id, scores in score(pool, hows).items():
        if hows[group_id][0] == "well":
            assert scores.scores == {"behave": [1.0]}, scores.failures
        else:
            assert cases[hows[group_id]] in scores.failures["behave"], hows[group_id]


def all_dead(folder: Path) -> bool:
    pids = {int(pid) for pid in (folder / "pids").read_text().split()}
    deadline = time.monotonic() + DEATHS_S
    while (living := list_processes().keys() & pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not living


DEATHS: dict[How, str] = {
    ("segfault", None): "died while it scored 1 groups",
    ("abort", None): "used more memory than scoring.memory_gb=1 allows",
    ("leave", None): "died while it scored 1 groups",
    ("interrupt", None): "aborted: ",
    ("hoard", None): "its process may use scoring.memory_gb=1",
}
FAILURES: dict[How, str] = {
    ("sys_exit", None): "SystemExit: enough (isolation_cases.py:",
    ("grow", None): "its process may use scoring.memory_gb=1",
    ("nothing_to_show", None): "it returned 2 values for 1 completions",
}


def test_failures_leave_the_process_alone(start_pool: StartPool) -> None:
    with start_pool(timeout_s=60) as pool:
        actors = ray.util.list_named_actors()
        check(pool, FAILURES)
        assert ray.util.list_named_actors() == actors


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [how if how[0] == "leave" else pytest.param(how, marks=pytest.mark.slow) for how in DEATHS],
    ids=lambda how: how[0],
)
def test_what_ends_the_process_costs_its_own_group(start_pool: StartPool, how: How) -> None:
    with start_pool(timeout_s=60) as pool:
        check(pool, {how: DEATHS[how]})


def test_a_hang_costs_its_own_group_and_leaves_no_process(start_pool: StartPool, tmp_path: Path) -> None:
    with start_pool(timeout_s=5) as pool:
        hangs: How = ("start_children_and_hang", str(tmp_path))
        check(pool, {hangs: "took longer than 5 seconds (timeout_s) for 1 groups"})
        assert all_dead(tmp_path)


@pytest.mark.slow
def test_a_process_that_dies_leaves_no_process(start_pool: StartPool, tmp_path: Path) -> None:
    with start_pool(timeout_s=60) as pool:
        dies: How = ("start_children_and_die", str(tmp_path))
        check(pool, {dies: "died while it scored 1 groups"})
        assert all_dead(tmp_path)


@pytest.mark.slow
def test_alarms_work_and_hit_no_other_group(start_pool: StartPool) -> None:
    with start_pool(timeout_s=60) as pool:
        hows = [("use_alarm", None), ("leave_alarm", None), ("look_around", None)]
        assert [entry.scores for entry in score(pool, hows).values()] == [{"behave": [1.0]}] * 3


@pytest.mark.skipif(unsupported() is not None, reason="this machine has no filter of system calls")
def test_a_sandbox_holds_and_its_process_continues(start_pool: StartPool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        start_pool(timeout_s=10, isolation="sandbox", memory_gb=0.5) as pool,
    ):
        listener.setblocking(False)
        port = listener.getsockname()[1]
        actors = ray.util.list_named_actors()
        cases: dict[How, str] = {
            ("reach", port): "PermissionError",
            ("segfault", None): "died of SIGSEGV",
            ("leave", None): "wrote no answer",
            ("sys_exit", None): "SystemExit: enough",
            ("grow", None): "its sandbox may use memory_gb=0.5",
            ("write_nonsense", None): "wrote no answer, but",
            ("kill_parent", None): "PermissionError",
            ("start_children_and_hang", None): "took longer than 10 seconds (timeout_s) in its sandbox",
        }
        check(pool, cases)
        # Processes of other tests may end meanwhile, which psutil allows for.
        commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        assert not any(("sleep", "3600") in pairwise(command) for command in commands)
        assert score(pool, [("reach_by_program", port)])[0].scores == {"behave": [0.0]}
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert ray.util.list_named_actors() == actors, "the scoring process was never replaced"
