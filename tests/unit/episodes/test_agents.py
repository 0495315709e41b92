"""Tests of commands that play episodes: what is left of them, and how long they are waited for."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlpipe.common.temporary_folders import remove_folder
from rlpipe.episodes import agents
from rlpipe.episodes.agents import AgentFailed, CommandAgent, EarlierProcesses, EndpointAccess
from rlpipe.scoring.processes import read_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what is left is found in /proc")

ACCESS = EndpointAccess(base_url="http://127.0.0.1:9/v1", api_key="key-of-this-episode")
DEATH_S = 10.0
LEAVE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + ".part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".part", sys.argv[1])
        time.sleep(600)
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""
"""Program that leaves a daemon in another session, which holds the pipes to its output open."""
HANG = "time.sleep(600)"


def command(pid_file: Path, then: str) -> list[str]:
    return [sys.executable, "-c", LEAVE + then, str(pid_file)]


def is_dead(pid_file: Path) -> bool:
    deadline, pid = time.monotonic() + DEATH_S, int(pid_file.read_text())
    while read_process(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    return read_process(pid) is None


def test_a_daemon_that_a_command_leaves_is_not_waited_for_and_ends_with_it(tmp_path: Path) -> None:
    pid_file, began = tmp_path / "pid", time.monotonic()
    reward = asyncio.run(CommandAgent(command(pid_file, "print('so'); print(0.5)")).run({}, ACCESS))
    assert reward == 0.5
    assert is_dead(pid_file)
    assert time.monotonic() - began < 60, "the daemon sleeps for 600 s"


def test_a_daemon_of_a_command_that_fails_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(AgentFailed, match=r"ended with exit code 3: no more$"):
        asyncio.run(CommandAgent(command(tmp_path / "pid", "sys.stderr.write('no more'); sys.exit(3)")).run({}, ACCESS))
    assert is_dead(tmp_path / "pid")


def test_a_daemon_of_a_command_that_is_cancelled_ends_with_it(tmp_path: Path) -> None:
    async def cancel() -> None:
        playing = asyncio.create_task(CommandAgent(command(tmp_path / "pid", HANG)).run({}, ACCESS))
        while not (tmp_path / "pid").exists():
            await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancel())
    assert is_dead(tmp_path / "pid")


def test_a_command_that_reads_no_row_and_writes_without_end_is_read_to_its_last_line() -> None:
    program = "for number in range(300_000): print('x' * 20)\nprint({'a': 1})\nprint('0.25')"
    row = {"text": "y" * 2**20}
    assert asyncio.run(CommandAgent([sys.executable, "-c", program]).run(row, ACCESS)) == 0.25


def test_daemons_of_commands_end_with_a_killed_process(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from rlpipe.episodes.agents import EndpointAccess, CommandAgent
from rlpipe.scoring.processes import start_reaper
start_reaper()
access = EndpointAccess(base_url="http://127.0.0.1:9/v1", api_key="another")
asyncio.run(CommandAgent({command(tmp_path / "pid", HANG)!r}).run({{}}, access))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ) as played:
        while not (tmp_path / "pid").exists():
            assert played.poll() is None
            time.sleep(0.02)
        os.kill(played.pid, signal.SIGKILL)
    assert is_dead(tmp_path / "pid")


def test_a_commands_folder_is_removed_alongside_the_other_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[tuple[str, bool]] = []

    def remove(folder: str) -> None:
        removed.append((folder, threading.current_thread() is threading.main_thread()))
        remove_folder(folder)

    monkeypatch.setattr(agents, "remove_folder", remove)
    program = "import os; os.mkdir('a'); open('a/b', 'w'); os.chmod('a', 0); print(0.5)"
    command = [sys.executable, "-c", f"import os; os.chdir(os.environ['HOME']); {program}"]
    assert asyncio.run(CommandAgent(command).run({}, ACCESS)) == 0.5
    ((folder, is_on_the_loop),) = removed
    assert not is_on_the_loop
    assert not os.path.exists(folder)


def test_an_id_that_is_used_again_is_no_earlier_process() -> None:
    earlier = EarlierProcesses()
    time.sleep(0.03)  # the starts of processes are known in hundredths of a second
    with subprocess.Popen([sys.executable, "-c", HANG]) as later:
        earlier._pids.add(later.pid)
        found = earlier.find()
        later.kill()
    assert later.pid not in found
    assert os.getppid() in found
