"""Tests of rewards in a sandbox: a bad function costs only its own call, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import isolation_cases
import pytest

from rlpipe.common.temporary_folders import remove_folder
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.errors import ConfigError, RewardImportError
from rlpipe.scoring.processes import descendants, list_processes, marked
from rlpipe.scoring.sandbox import sandbox_server
from rlpipe.scoring.sandbox.confinement import landlock_version
from rlpipe.scoring.sandbox.namespaces import usable_namespaces
from rlpipe.scoring.sandbox.sandbox import Sandbox, SandboxFailed, read_answer
from rlpipe.scoring.sandbox.seccomp import unsupported

pytestmark = pytest.mark.skipif(unsupported() is not None, reason="this machine has no filter of system calls")

LANDLOCK = pytest.mark.skipif(landlock_version() == 0, reason="this machine has no Landlock")
MOUNTS = pytest.mark.skipif(not usable_namespaces().has_mounts, reason="this machine lets a call mount nothing")
BOUNDED = pytest.mark.skipif(
    not usable_namespaces().limits_tasks and os.geteuid() == 0, reason="nothing bounds root's processes here"
)
CASES = isolation_cases.__file__
DEATHS_S = 20.0
MARK = "RLPIPE_TEST_OF_SANDBOX"


@pytest.fixture(scope="module")
def ray_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def sandbox(ray_folder: Path) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))  # of all processes that it starts
        patch.setenv("RAY_TMPDIR", str(ray_folder))
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


def marked_processes() -> set[int]:
    """Return the processes of the module's sandbox, wherever they are in the tree."""
    return marked(f"{MARK}={os.getpid()}", list_processes())


def only_server_left() -> bool:
    deadline = time.monotonic() + DEATHS_S
    while len(marked_processes()) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    return len(marked_processes()) == 1


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


def test_a_call_that_hangs_is_ended_with_all_that_it_started(sandbox: Sandbox) -> None:
    assert "longer than 0.5 seconds (timeout_s)" in reason(sandbox, "start_children_and_hang", None, "quick")
    assert only_server_left()


def test_a_daemon_ends_with_its_call(sandbox: Sandbox) -> None:
    assert values(sandbox, "start_daemon") == [1.0, 1.0]
    assert only_server_left()


@BOUNDED
def test_processes_that_double_end_with_their_call(sandbox: Sandbox) -> None:
    failure = reason(sandbox, "double_without_end")  # on busy cores the server may see the time first
    assert "more than 128 processes" in failure or "longer than 20 seconds" in failure
    assert only_server_left()


def test_processes_one_after_another_are_not_counted_together(sandbox: Sandbox) -> None:
    assert values(sandbox, "start_one_after_another") == [1.0, 1.0]


@LANDLOCK
def test_a_call_writes_to_its_temporary_folder_only(sandbox: Sandbox, tmp_path: Path) -> None:
    assert "writes only to its temporary folder" in reason(sandbox, "write_elsewhere", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_call_reads_nothing_of_other_processes(sandbox: Sandbox) -> None:
    command, environment = ["sh", "-c", "echo; read line"], {"SECRET": "of another process"}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()  # its environment can be read
            assert b"of another process" in Path(f"/proc/{other.pid}/environ").read_bytes()
            assert values(sandbox, "find_in_environments", "of another process") == [0.0, 0.0]
        finally:
            other.kill()


@MOUNTS
def test_a_call_sees_no_other_processes(sandbox: Sandbox) -> None:
    assert values(sandbox, "look_at_processes") == [0.0, 0.0]


@MOUNTS
def test_a_call_sees_no_sockets_of_ray(sandbox: Sandbox, ray_folder: Path) -> None:
    sockets = ray_folder / "ray" / "session_1" / "sockets"
    sockets.mkdir(parents=True)
    (sockets / "raylet").touch()
    (sockets.parent / "file").touch()
    assert values(sandbox, "count_files", str(sockets)) == [0.0, 0.0]
    assert values(sandbox, "count_files", str(sockets.parent)) == [2.0, 2.0]


@MOUNTS
def test_temporary_files_are_bounded_together(sandbox: Sandbox) -> None:
    assert "No space left on device" in reason(sandbox, "fill_folder")


@MOUNTS
def test_nothing_of_a_call_is_left_to_the_next(sandbox: Sandbox) -> None:
    assert values(sandbox, "leave_files") == [1.0, 1.0]
    assert values(sandbox, "leave_files") == [1.0, 1.0]
    assert not list(Path(sandbox._folder.path).iterdir())


@pytest.mark.skipif(not usable_namespaces().flags, reason="this machine allows no namespaces")
def test_shared_memory_is_that_of_the_call(sandbox: Sandbox) -> None:
    assert values(sandbox, "share_segment") == [1.0, 1.0]
    assert values(sandbox, "share_segment") == [1.0, 1.0], "what the first call made is gone"


def test_folders_are_removed_whatever_is_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    deep = folder
    monkeypatch.chdir(tmp_path)
    for _ in range(1500):  # deeper than Python's own removal can go
        deep.mkdir()
        os.chdir(deep)
        deep = Path("deep")
    os.chdir(tmp_path)
    folder.chmod(0)
    remove_folder(str(folder))
    assert not folder.exists()


def test_there_is_no_memory_without_a_limit(sandbox: Sandbox) -> None:
    assert "Function not implemented" in reason(sandbox, "make_memory_file")
    assert values(sandbox, "add_key") == [-1.0, -1.0]


def test_signals_of_files_stay_with_the_call(sandbox: Sandbox) -> None:
    assert "PermissionError" in reason(sandbox, "own_signals", os.getpid())


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


def test_files_have_a_largest_size(sandbox: Sandbox) -> None:
    assert "File too large" in reason(sandbox, "write_file")


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


def test_a_call_without_memory_for_its_answer_leaves_none_to_the_next(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(text: bytes) -> Any:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(json, "loads", loads)
    with pytest.raises(MemoryError):
        values(sandbox, "well")
    assert values(sandbox, "well") == [1.0, 1.0]


def test_answers_are_never_trusted() -> None:
    good = read_answer(b'{"values": [1.0, null], "logged": [["n", 2.0]]}')
    assert (good.values, good.logged) == ([1.0, None], [("n", 2.0)])
    forged: list[Any] = [None, [], {"values": 1}, {"values": [], "logged": [["n", "2"]]}, {"values": [], "logged": [2]}]
    for written in (b"", b"[" * 10**6, b"\xff", *(json.dumps(answer).encode() for answer in forged)):
        with pytest.raises(SandboxFailed, match="wrote no answer, but"):
            read_answer(written)
    with pytest.raises(SandboxFailed, match=r"^two lines$"):
        read_answer(b'{"failure": "two\\nlines"}')


def test_a_machine_on_which_the_trial_dies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("not allowed to raise maximum limit")

    assert sandbox_server.try_confinement() is None
    monkeypatch.setattr(sandbox_server, "lock_in", refuse)
    assert sandbox_server.try_confinement() == "not allowed to raise maximum limit"
    monkeypatch.setattr(sandbox_server, "lock_in", lambda *_: os._exit(3))
    assert sandbox_server.try_confinement() == "a process that was confined for a try ended with exit code 3"


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
    frozen, folder = impatient._server, impatient._folder.path
    os.kill(frozen.pid, signal.SIGSTOP)
    with pytest.raises(SandboxFailed, match="died; the next call"):
        values(impatient, "well")
    assert frozen.poll() == -signal.SIGKILL
    assert not Path(folder).exists()
    assert values(impatient, "well") == [1.0, 1.0]
    impatient.close()


def test_closing_ends_a_frozen_server(impatient: Sandbox) -> None:
    os.kill(impatient._server.pid, signal.SIGSTOP)
    impatient.close()
    assert impatient._server.poll() == -signal.SIGKILL


def test_a_function_whose_import_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rlpipe.scoring.sandbox.sandbox.START_TIMEOUT_S", 3.0)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.raises(RewardImportError, match=r"isolation=sandbox of slow: .*import the functions within 3 seconds"):
        Sandbox({"slow": RewardConfig(path=f"{tmp_path / 'slow.py'}:f", isolation="sandbox")})
