"""The messages about hosts that are silent, answer again or are lost, and about the lines that Ray prints meanwhile."""

from __future__ import annotations

import asyncio
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import ray_logging

from rlpipe.actors.ray_internals import Host, hide_lines
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import HeadLost
from rlpipe.run import monitor
from rlpipe.run.monitor import REPEATED_LINES, SILENT_AFTER_S, HostWatch, describe_actors

HOSTS = {
    "a": Host(address="10.0.0.1", port=6379, is_head=True),
    "b": Host(address="10.0.0.2", port=7000),
    "c": Host(address="10.0.0.3", port=7000),
}
ACTORS = {"a": ["replay", "weights"], "b": ["rollout-0", "learner rank", "learner rank"]}


class Cluster:
    """A watch with a manual clock, for which all hosts but the silent ones answer."""

    def __init__(self) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self.watch = HostWatch(self.said.append, clock=lambda: self.now)
        self.watch.listed(HOSTS, ACTORS)

    def pass_time(self, seconds: float, silent: str = "") -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            for node in self.watch.hosts:
                if node not in silent:
                    self.watch.heard(node)
            self.watch.check()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_silent_host_is_named_once_with_what_it_runs_and_so_is_its_return(cluster: Cluster) -> None:
    cluster.pass_time(60)
    cluster.pass_time(SILENT_AFTER_S - 1, silent="b")
    assert not cluster.said
    cluster.pass_time(20, silent="b")
    (line,) = cluster.said
    assert line.startswith("host 10.0.0.2 has been silent since ")
    assert line.endswith("; it ran 2 x learner rank, rollout-0")
    cluster.pass_time(60)
    assert cluster.said[1:] == ["host 10.0.0.2 answers again, after 25 s"]


def test_a_short_silence_is_not_mentioned(cluster: Cluster) -> None:
    for _ in range(5):
        cluster.pass_time(SILENT_AFTER_S - 1, silent="b")
        cluster.pass_time(2)
    assert not cluster.said


def test_a_lost_host_is_named_with_its_silence(cluster: Cluster) -> None:
    cluster.pass_time(40, silent="b")
    cluster.watch.listed({node: HOSTS[node] for node in "ac"}, {"a": ["replay", "weights", "rollout-0"]})
    cluster.pass_time(60)
    assert cluster.said[1:] == [
        "host 10.0.0.2 is lost to Ray, after 40 s of silence; it ran 2 x learner rank, rollout-0, "
        "now restarting elsewhere"
    ]


def test_a_host_that_ends_at_once_takes_one_line(cluster: Cluster) -> None:
    cluster.pass_time(1, silent="b")
    cluster.watch.listed({"a": HOSTS["a"]}, {})
    (line,) = cluster.said
    assert line.startswith("host 10.0.0.2 is lost to Ray; it ran 2 x learner rank")


def test_what_a_silent_host_ran_is_not_forgotten_while_it_is_silent(cluster: Cluster) -> None:
    cluster.pass_time(2, silent="b")
    cluster.watch.listed(HOSTS, {"a": ["replay"]})
    cluster.pass_time(10, silent="b")
    assert cluster.said[0].endswith("; it ran 2 x learner rank, rollout-0")


def test_other_peoples_hosts_are_not_mentioned(cluster: Cluster) -> None:
    cluster.pass_time(60, silent="c")
    cluster.watch.listed({node: HOSTS[node] for node in "ab"}, ACTORS)
    assert not cluster.said


def test_the_heads_silence_is_counted(cluster: Cluster) -> None:
    cluster.pass_time(10, silent="b")
    assert cluster.watch.head_silent_s == 0
    cluster.pass_time(30, silent="a")
    assert cluster.watch.head_silent_s == 30
    assert "host 10.0.0.1 (Ray's head) has been silent since " in cluster.said[-1]
    cluster.pass_time(1)
    assert cluster.watch.head_silent_s == 0


def test_actors_are_counted_by_name() -> None:
    assert describe_actors(["replay", "learner rank", "learner rank"]) == "2 x learner rank, replay"


@pytest.mark.parametrize(
    ("message", "is_shown"),
    [
        ("Task ReplayActor.beat failed. There are infinite retries remaining, so the task will be retried.", 0),
        ("Task rlpipe.actors.weights.WeightsActor.publish failed. There are 2 retries remaining, so", 0),
        (
            "The node with node id: d00f and address: 10.0.0.2 has been marked dead because the "
            "detector has missed too many heartbeats from it.",
            0,
        ),
        ("A worker died or was killed while executing a task by an unexpected system error.", 1),
        ("Task ReplayActor.beat failed with an error that is not retried", 1),
    ],
)
def test_rays_own_lines_of_an_outage_are_left_out_and_no_others(message: str, is_shown: int) -> None:
    hide_lines(REPEATED_LINES)
    (batch, *_) = ray_logging.stdout_deduplicator.deduplicate({"lines": [message], "pid": "raylet", "is_err": False})
    assert len(batch["lines"]) == is_shown


def test_a_driver_that_stood_still_does_not_give_up_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(gcs_address="127.0.0.1:1")
    monkeypatch.setattr(monitor.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(monitor, "_guard_head", lambda *_: None)
    for name, value in (("PROBE_S", 0.2), ("SILENT_AFTER_S", 1.5)):
        monkeypatch.setattr(monitor, name, value)
    monkeypatch.setenv(monitor.HEAD_OPTION, "3.2")

    async def watch() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        head = Host(address="127.0.0.1", port=server.sockets[0].getsockname()[1], is_head=True)

        async def ask() -> tuple[dict[str, Host], dict[str, list[str]]]:
            return {"a": head}, {}

        monkeypatch.setattr(monitor, "_list_actors", ask)
        watching = asyncio.create_task(monitor.watch_hosts(said.append, Config(output="none")))
        await asyncio.sleep(0.5)
        time.sleep(4.0)
        await asyncio.sleep(0.5)
        assert not watching.done()
        assert not said
        server.close()
        await server.wait_closed()
        with pytest.raises(HeadLost, match="the same command continues"):
            await watching

    said: list[str] = []
    asyncio.run(watch())
    assert len(said) == 1


@pytest.mark.parametrize(("silent_s", "answers", "ends"), [(59, False, False), (61, True, False), (61, False, True)])
def test_a_process_ends_if_its_head_was_silent_for_too_long_and_still_does_not_answer(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    silent_s: float,
    answers: bool,
    ends: bool,
) -> None:
    """Check that a head which answers counts as living: the process was suspended, and has heard nobody."""
    codes: list[int] = []
    monkeypatch.setattr(monitor.os, "_exit", codes.append)
    rounds = iter([False, True])
    stopped: Any = SimpleNamespace(wait=lambda timeout: next(rounds))
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = Host(address="127.0.0.1", port=server.getsockname()[1], is_head=True)
        cluster.watch.listed({"d": head}, {})
        cluster.now += silent_s
        if not answers:
            server.close()
        lost, recorded = HeadLost("the head is gone"), list[bool]()
        monitor._guard_head(cluster.watch, 60.0, lost, lambda: recorded.append(True), stopped)
    assert recorded == [True] * ends
    assert codes == [HeadLost.exit_code] * ends
    assert capsys.readouterr().err == "rlpipe: error: the head is gone\n" * ends
