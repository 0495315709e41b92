"""Tests that the check of the sandbox tries what it says, and reports what it sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlpipe.cli import main
from rlpipe.scoring.processes import list_processes
from rlpipe.scoring.sandbox import self_check
from rlpipe.scoring.sandbox.confinement import find_obstacle
from rlpipe.scoring.sandbox.sandbox import Answer
from rlpipe.scoring.sandbox.self_check import _has_mark, bystanders, list_attempts

pytestmark = pytest.mark.skipif(find_obstacle() is not None, reason="this machine has no sandbox")


def test_every_attempt_works_outside_of_a_sandbox(tmp_path: Path) -> None:
    with bystanders() as targets:
        attempts = {attempt.name: attempt for attempt in list_attempts(*targets)}
        del attempts["start 600 processes"], attempts["fill 2 GiB of memory"]  # nothing would end them here
        for attempt in attempts.values():
            assert not attempt.did_harm()
            done = subprocess.run(
                [sys.executable, "-c", attempt.program],
                cwd=tmp_path,
                env={**os.environ, "RLPIPE_SANDBOX_CHECK": "1"},
                stderr=subprocess.DEVNULL,  # a pipe would be waited for
            )
            assert done.returncode == 0, attempt.name
            if attempt.name.startswith(("change", "end", "leave")):
                deadline = time.monotonic() + 30  # a process that was ended takes a moment to be gone
                while not attempt.did_harm():
                    assert time.monotonic() < deadline, attempt.name
                    time.sleep(0.01)
    for pid in filter(_has_mark, list_processes()):
        os.kill(pid, signal.SIGKILL)


def test_the_sandbox_of_this_machine_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("programs are confined by a filter of system calls")
    with bystanders() as targets:
        assert lines == [f"held    {attempt.name}" for attempt in list_attempts(*targets)]


def test_what_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def call(self: object, name: str, columns: dict[str, list[str]], num_values: int) -> Answer:
        works = columns["completions"][0].startswith(self_check.ENDS) or "AF_UNIX" in columns["completions"][0]
        return Answer(values=[float(works)], logged=[])

    monkeypatch.setattr(self_check.Sandbox, "call", call)
    assert main(["sandbox"]) == 1
    output = capsys.readouterr()
    assert "FAILED  open a socket to a local service" in output.out
    assert output.err == "rlpipe: error: the sandbox is not secure: a program could open a socket to a local service\n"
