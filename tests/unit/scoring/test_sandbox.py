"""Tests of rewards in a sandbox: a bad function costs only its own call, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import isolation_cases
import pytest

from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.errors import ConfigError
from rlpipe.scoring.processes import descendants, list_processes
from rlpipe.scoring.sandbox.sandbox import Sandbox, SandboxFailed, read_answer
from rlpipe.scoring.sandbox.seccomp import unsupported

pytestmark = pytest.mark.skipif(unsupported() is not None, reason="this machine has no filter of system calls")

CASES = isolation_cases.__file__
DEATHS_S = 20.0


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    shared = Sandbox(
        {
            "behave": RewardConfig(path=f"{CASES}:behave", isolation="sandbox", timeout_s=20, memory_gb=0.5),
            "quick": RewardConfig(path=f"{CASES}:behave", isolation="sandbox", timeout_s=0.5, memory_gb=0.5),
            "waits": RewardConfig(path=f"{CASES}:waits", isolation="sandbox", timeout_s=20),
        }
    )
    yield shared
    shared.close()


def values(sandbox: Sandbox, how: str, argument: Any = None) -> list[Any]:
    arguments = {"completions": ["a", "b"], "how": [how] * 2, "argument": [argument] * 2}
    return sandbox.call("behave", arguments, 2).values


def reason(sandbox: Sandbox, how: str, argument: Any = None, name: str = "behave") -> str:
    arguments = {"completions": ["a", "b"], "how": [how] * 2, "argument": [argument] * 2}
    with pytest.raises(SandboxFailed) as caught:
        sandbox.call(name, arguments, 2)
    assert values(sandbox, "well") == [1.0, 1.0], "the next call works"
    return str(caught.value)


def own_processes() -> set[int]:
    return descendants([os.getpid()], list_processes())


def all_dead(pids: list[int]) -> bool:
    deadline = time.monotonic() + DEATHS_S
    while (living := list_processes().keys() & set(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not living


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_async_functions_and_logged_metrics_work(sandbox: Sandbox) -> None:
    answer = sandbox.call("waits", {"completions": ["a", "b"], "log_metric": print}, 2)
    assert answer.values == [0.5, 0.5]
    assert answer.logged == [("size", 2.0)]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("segfault", "died of SIGSEGV"),
        ("abort", "died of SIGABRT"),
        ("leave", "wrote no answer, but b''"),
        ("sys_exit", "SystemExit: enough (isolation_cases.py:"),
        ("interrupt", "KeyboardInterrupt (isolation_cases.py:"),
        ("nothing_to_show", "it returned 3 values for 2 completions"),
        ("grow", "its sandbox may use memory_gb=0.5"),
        ("share_memory", "used more than memory_gb=0.5 together"),
        ("fork_without_end", "more than 128 processes"),
        ("write_nonsense", "wrote no answer, but b'\\x80\\x04nonsense'"),
        ("write_without_end", "bytes as its answer"),
        ("kill_parent", "PermissionError"),
        ("kill_own_group", "died of SIGKILL"),
        ("raise_limits", "not allowed to raise maximum limit"),
    ],
)
def test_what_a_call_does_costs_that_call_alone(sandbox: Sandbox, how: str, words: str) -> None:
    server = own_processes()
    assert words in reason(sandbox, how)
    assert own_processes() == server, "nothing stays, and the server is the same"


def test_a_call_that_hangs_is_ended_with_all_that_it_started(sandbox: Sandbox, tmp_path: Path) -> None:
    assert "longer than 0.5 seconds (timeout_s)" in reason(sandbox, "start_children_and_hang", str(tmp_path), "quick")
    assert all_dead([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_a_daemon_ends_with_its_call(sandbox: Sandbox, tmp_path: Path) -> None:
    assert values(sandbox, "start_daemon", str(tmp_path)) == [1.0, 1.0]
    assert all_dead([int((tmp_path / "pids").read_text())])


def test_there_is_no_network(sandbox: Sandbox, listener: socket.socket) -> None:
    assert isolation_cases.reach_by_program(port_of(listener), 1) == [1.0], "it can be reached from outside"
    listener.accept()[0].close()
    assert "PermissionError" in reason(sandbox, "reach", port_of(listener))
    assert values(sandbox, "reach_by_program", port_of(listener)) == [0.0, 0.0]
    assert values(sandbox, "try_families") == [0.0, 0.0]
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_signals_reach_own_children_only(sandbox: Sandbox) -> None:
    assert values(sandbox, "end_own_child") == [1.0, 1.0]
    bystander = os.fork()
    if bystander == 0:
        time.sleep(60)
        os._exit(0)
    assert "PermissionError" in reason(sandbox, "kill_all")
    assert os.waitpid(bystander, os.WNOHANG) == (0, 0)
    os.kill(bystander, signal.SIGKILL)
    os.waitpid(bystander, 0)


def test_alarms_work(sandbox: Sandbox) -> None:
    assert values(sandbox, "use_alarm") == [1.0, 1.0]


def test_files_have_a_largest_size(sandbox: Sandbox, tmp_path: Path) -> None:
    assert "File too large" in reason(sandbox, "write_file", str(tmp_path))


def test_random_numbers_differ_from_call_to_call(sandbox: Sandbox) -> None:
    assert values(sandbox, "draw") != values(sandbox, "draw")


def test_a_dead_server_costs_one_call_and_is_replaced() -> None:
    sandbox = Sandbox({"behave": RewardConfig(path=f"{CASES}:behave", isolation="sandbox")})
    before = own_processes()
    assert values(sandbox, "well") == [1.0, 1.0]
    children = own_processes()
    assert children == before
    newest = max(children, key=lambda pid: list_processes()[pid].started)
    os.kill(newest, signal.SIGKILL)
    assert "server of its sandbox died" in reason(sandbox, "well")
    sandbox.close()


def test_answers_are_never_trusted() -> None:
    good = read_answer(b'{"values": [1.0, null], "logged": [["n", 2.0]]}')
    assert (good.values, good.logged) == ([1.0, None], [("n", 2.0)])
    forged: list[Any] = [None, [], {"values": 1}, {"values": [], "logged": [["n", "2"]]}, {"values": [], "logged": [2]}]
    for written in (b"", b"[" * 10**6, b"\xff", *(json.dumps(answer).encode() for answer in forged)):
        with pytest.raises(SandboxFailed, match="wrote no answer, but"):
            read_answer(written)
    with pytest.raises(SandboxFailed, match=r"^two lines$"):
        read_answer(b'{"failure": "two\\nlines"}')


def test_a_machine_that_cannot_filter_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'riscv64'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"isolation=sandbox of right can't be used on this machine: .*x86_64 or aarch64, .*riscv64; set process",
    ):
        Sandbox({"right": RewardConfig(path=f"{CASES}:behave", isolation="sandbox")})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.setattr("rlpipe.scoring.sandbox.sandbox.FROZEN_AFTER_S", 0.5)
    reward = RewardConfig(path=f"{CASES}:behave", isolation="sandbox", timeout_s=1, memory_gb=0.5)
    return Sandbox({"behave": reward})


def test_a_frozen_server_is_replaced_and_costs_one_call(impatient: Sandbox) -> None:
    frozen = impatient._server
    os.kill(frozen.pid, signal.SIGSTOP)
    with pytest.raises(SandboxFailed, match="another takes its place"):
        values(impatient, "well")
    assert frozen.poll() == -signal.SIGKILL
    assert values(impatient, "well") == [1.0, 1.0]
    impatient.close()


def test_closing_ends_a_frozen_server(impatient: Sandbox) -> None:
    os.kill(impatient._server.pid, signal.SIGSTOP)
    impatient.close()
    assert impatient._server.poll() == -signal.SIGKILL
