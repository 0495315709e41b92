"""Tests of environments of the real verifiers as players of episodes, on its own server."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from framework_servers import FrameworkServer, framework_server
from player_cases import play

from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes import verifiers_agent
from rlpipe.episodes.agents import AgentFailed, EndpointAccess
from rlpipe.episodes.load_environment import EpisodeKind, import_kind
from rlpipe.episodes.verifiers_agent import ServedRollout
from rlpipe.errors import ConfigError
from rlpipe.types import RolloutGroup, RolloutStatus

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
ROW = {"prompt": "6 * 7?", "answer": 42, "column": "of something else"}
URL = "http://127.0.0.1:1/v1"
ACCESS = EndpointAccess(base_url=URL, api_key="key")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrameworkServer]:
    with framework_server("verifiers", "1", home=tmp_path_factory.mktemp("home")) as running:
        yield running


def kind_of(address: str) -> EpisodeKind:
    return import_kind(EnvironmentConfig(agent={"verifiers": address}))


def play_on(server: FrameworkServer, *said: list[str], timeout_s: float = 60.0, **row: Any) -> RolloutGroup:
    group, _ = play(*said, kind=kind_of(server.address), row={**ROW, **row}, timeout_s=timeout_s)
    return group


def rewards(group: RolloutGroup) -> list[float]:
    return [rollout.episode.reward for rollout in group if rollout.episode]


def test_its_environments_play_and_the_tokens_are_those_that_were_sampled(server: FrameworkServer) -> None:
    group = play_on(server, [CALL, "It is 42."], [CALL, "It is 41, as far as I can see."], ["42"])
    assert group.failure is None
    assert rewards(group) == [2.5, 0.0, 2.5], "of each its own, by the weights of the rewards"
    assert group.logged["episodes/branches"] == 1.0
    for rollout, num_turns in zip(group, (2, 2, 1), strict=True):
        assert rollout.turns is not None
        assert {*np.unique(rollout.turns[rollout.loss_mask])} == {*range(num_turns)}
        assert rollout.policy_versions[rollout.loss_mask].tolist() == rollout.turns[rollout.loss_mask].tolist()


@pytest.mark.slow
def test_a_pool_of_its_servers_plays_too(tmp_path: Path) -> None:
    with framework_server("verifiers", "2", home=tmp_path) as pool:
        assert rewards(play_on(pool, ["42"], ["41"])) == [2.5, 0.5]


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("breaks", "HarnessError: harness 'verifiers_server' exited 3: the board is gone"),
        ("scores badly", "TaskError: .*the answer can't be compared"),
    ],
)
def test_a_rollout_that_fails_fails_its_episode(server: FrameworkServer, way: str, reason: str) -> None:
    group = play_on(server, ["42"], ["42"], way=way)
    assert group.failure is not None
    assert re.search(f"verifiers at {server.address}: the rollout failed: {reason}", group.failure)


def test_a_row_that_is_no_task_is_named(server: FrameworkServer) -> None:
    group = play_on(server, ["42"], ["42"], answer="many")
    assert f"verifiers at {server.address}: the rollout failed" in str(group.failure)
    assert "answer Input should be a valid integer" in str(group.failure)


def test_a_limit_of_the_run_truncates_the_episode(server: FrameworkServer) -> None:
    group, _ = play([CALL] * 5, ["42"], kind=kind_of(server.address), row=ROW, max_turns=2, timeout_s=60.0)
    assert group.failure is None
    assert [rollout.status for rollout in group] == [RolloutStatus.TRUNCATED, RolloutStatus.COMPLETED]


def waits_for(note: Path, text: str) -> None:
    until = time.monotonic() + 30
    while not note.exists() or note.read_text() != text:
        assert time.monotonic() < until, f"{note} does not say {text!r}"
        time.sleep(0.05)


def test_a_rollout_whose_episode_is_over_is_cancelled(server: FrameworkServer, tmp_path: Path) -> None:
    note = tmp_path / "note"
    group = play_on(server, ["42"], timeout_s=2.0, way="hangs", note=str(note))
    assert "it ended without a turn of the policy (timeout)" in str(group.failure)
    waits_for(note, "cancelled")


def test_a_run_that_ends_cancels_its_rollouts(server: FrameworkServer, tmp_path: Path) -> None:
    note = tmp_path / "note"
    agent = kind_of(server.address).agent
    assert agent is not None

    async def begin_and_end() -> None:
        playing = asyncio.create_task(agent.run({**ROW, "way": "hangs", "note": str(note)}, ACCESS))
        await asyncio.to_thread(waits_for, note, "began")
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(begin_and_end())
    waits_for(note, "cancelled")


@pytest.mark.slow
def test_a_server_that_dies_fails_its_episodes(tmp_path: Path) -> None:
    with framework_server("verifiers", "1", home=tmp_path) as dying:
        began = time.monotonic()
        group = play_on(dying, ["42"], ["42"], way="exits")
        assert f"verifiers at {dying.address}: the connection broke" in str(group.failure)
        dying.process.wait(10)
        group = play_on(dying, ["42"], ["42"])
        assert f"verifiers at {dying.address}: it can't be reached" in str(group.failure)
        assert time.monotonic() - began < 30


def test_a_server_that_stands_still_counts_as_dead(
    server: FrameworkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_agent, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(verifiers_agent, "SILENCE_S", 1.0)
    agent = kind_of(server.address).agent
    assert agent is not None

    async def hold() -> None:
        note = tmp_path / "note"
        playing = asyncio.create_task(agent.run({**ROW, "way": "hangs", "note": str(note)}, ACCESS))
        await asyncio.to_thread(waits_for, note, "began")
        server.process.suspend()
        with pytest.raises(AgentFailed, match="the connection broke"):
            await playing

    try:
        asyncio.run(hold())
    finally:
        server.process.resume()


def test_what_is_no_server_of_verifiers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_agent, "CONNECT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        group, _ = play(["42"], ["42"], kind=kind_of(address), row=ROW)
    assert f"verifiers at {address}: it does not answer within 1 seconds" in str(group.failure)


def test_hundreds_of_rollouts_are_played_at_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_agent, "CONNECT_S", 1.0)

    async def run(address: str) -> list[BaseException | Any]:
        agent = kind_of(address).agent
        assert agent is not None
        return await asyncio.gather(*(agent.run(ROW, ACCESS) for _ in range(400)), return_exceptions=True)

    with socket.create_server(("127.0.0.1", 0), backlog=400) as silent:
        failures = asyncio.run(run(f"tcp://127.0.0.1:{silent.getsockname()[1]}"))
    assert all("it does not answer within 1 seconds" in str(failure) for failure in failures)


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:5000", "tcp://127.0.0.1", "tcp://127.0.0.1:0", "tcp://a:65536", "tcp://:5000", ""]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"environment\.agent: .* is not the address of a server of verifiers"):
        kind_of(address)


@pytest.mark.parametrize("address", ["tcp://[::1]:5000", "tcp://host-1.example:5000", "ipc:///tmp/vf"])
def test_other_forms_of_addresses_are_taken(address: str) -> None:
    assert kind_of(address).agent is not None


def test_the_packages_that_it_needs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verifiers_agent.PACKAGES, "zmq_of_nobody", "pyzmq")
    with pytest.raises(ConfigError, match=r"need the package pyzmq: pip install 'rlpipe\[verifiers\]'"):
        kind_of("tcp://127.0.0.1:5000")


def trace(name: str, *, score: float | None, url: str = URL, trainable: bool = True) -> dict[str, Any]:
    agent = {"name": name, "trainable": trainable, "config": {"client": {"base_url": url}}}
    reward = None if score is None else {"score": score, "weight": 1.0}
    return {"trace": name, "set": {"agent": agent, "rewards": {"won": reward}, "stop_condition": "agent_completed"}}


def reward_of(*traces: dict[str, Any]) -> Any:
    rollout = ServedRollout(URL)
    for own in traces:
        rollout.add(own)
    kept = [{"id": own["trace"]} for own in traces if not own.get("discard")]
    return rollout.reward({"success": True, "head": {"ok": True, "errors": []}, "traces": kept})


def test_the_reward_is_the_mean_of_the_agents_that_the_policy_plays() -> None:
    foreign = trace("judge", score=9.0, url="https://elsewhere/v1", trainable=False)
    assert reward_of(trace("a", score=1.0), trace("b", score=0.5), foreign) == 0.75
    assert reward_of(foreign) is None


def test_an_attempt_that_the_server_gave_up_does_not_count() -> None:
    rollout = ServedRollout(URL)
    for delta in (trace("a", score=1.0), {"trace": "a", "discard": True}, trace("b", score=0.0)):
        rollout.add(delta)
    assert rollout.reward({"success": True, "head": {"ok": True, "errors": []}, "traces": [{"id": "b"}]}) == 0.0


def test_an_agent_that_is_not_to_be_trained_can_not_be_the_policy() -> None:
    with pytest.raises(AgentFailed, match="'judge' is not to be trained, but asks the run's policy"):
        reward_of(trace("a", score=1.0), trace("judge", score=1.0, trainable=False))


def test_a_reward_that_was_not_computed_is_named() -> None:
    with pytest.raises(AgentFailed, match=r"reward 'won' was not computed \(agent_completed\)"):
        reward_of(trace("a", score=None))
