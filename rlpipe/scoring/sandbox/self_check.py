"""Programs that try to break out of a sandbox, to see what holds on this machine (``rlpipe sandbox``)."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.errors import RunError
from rlpipe.scoring.processes import PROC, list_processes
from rlpipe.scoring.sandbox.sandbox import Sandbox, SandboxFailed

REWARD = RewardConfig(
    path="rlpipe.scoring.code_execution:passes_tests", isolation="sandbox", timeout_s=20, memory_gb=0.5
)
NAME = "tests"
ENDS = "\ndef answer():\n    return 42\n"
MARK = f"rlpipe_sandbox_check_{os.getpid()}"
READ_ENVIRONMENTS = """
import glob
def read(path):
    try:
        return open(path, errors="replace").read()
    except OSError:  # denied, or the process has ended meanwhile
        return ""
assert any("of a bystander" in read(path) for path in glob.glob("/proc/*/environ"))
"""


@dataclass(kw_only=True, frozen=True)
class Attempt:
    """Program that tries something that a sandbox forbids; it comes to its end only if that works."""

    name: str
    program: str
    did_harm: Callable[[], bool] = lambda: False
    """Whether it can be seen from outside that it worked."""


@contextmanager
def bystanders() -> Iterator[tuple[Path, int, int]]:
    """Yield a file of this user, the id of a process, and a port that is listened on, for programs to try."""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(["sleep", "600"], env={"SECRET": "of a bystander"}) as process,
    ):
        file = Path(folder) / "secret"
        file.write_text("of a bystander")
        try:
            yield file, process.pid, listener.getsockname()[1]
        finally:
            process.kill()


def list_attempts(file: Path, pid: int, port: int) -> list[Attempt]:
    """Return what is tried, against the given bystanders."""
    return [
        Attempt(name="read a file of this user", program=f"open({str(file)!r}).read()"),
        Attempt(
            name="change a file of this user",
            program=f"open({str(file)!r}, 'w').write('x')",
            did_harm=lambda: file.read_text() != "of a bystander",
        ),
        Attempt(name="read the environment of another process", program=READ_ENVIRONMENTS),
        Attempt(
            name="end another process",
            program=f"import os\nos.kill({pid}, 9)",
            did_harm=lambda: pid not in list_processes(),
        ),
        Attempt(name="see the variables of the run", program="import os\nos.environ['RLPIPE_SANDBOX_CHECK']"),
        Attempt(
            name="connect to a server of this machine",
            program=f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)",
        ),
        Attempt(name="open a socket to a local service", program="import socket\nsocket.socket(socket.AF_UNIX)"),
        Attempt(
            name="start 600 processes",
            program="import subprocess\n[subprocess.Popen(['sleep', '60']) for _ in range(600)]",
        ),
        Attempt(name="fill 2 GiB of memory", program="kept = bytearray(b'x') * 2**31"),
        Attempt(
            name="leave a process behind",
            program="import os\nif os.fork() == 0:\n    os.setsid()\n"
            f"    os.execv('/bin/sh', ['{MARK}', '-c', 'sleep 600; true'])\nraise SystemExit",
            did_harm=lambda: any(map(_has_mark, list_processes())),
        ),
    ]


def check_sandbox() -> Mapping[str, bool]:
    """Run all attempts in a sandbox, and return by name whether it held.

    Raises ``ConfigError`` if this machine has no sandbox, and ``RunError`` if not even an honest program works in it.
    """
    os.environ["RLPIPE_SANDBOX_CHECK"] = "1"
    sandbox = Sandbox({NAME: REWARD})
    try:
        if not _succeeds(sandbox, ""):
            raise RunError(
                "even a harmless program fails in the sandbox: its Python can't read the files that it needs"
            )
        with bystanders() as targets:
            attempts = list_attempts(*targets)
            successes = [_succeeds(sandbox, attempt.program) for attempt in attempts]
            # After all of them: a process that was ended takes a moment to be gone.
            return {
                attempt.name: not succeeded and not attempt.did_harm()
                for attempt, succeeded in zip(attempts, successes, strict=True)
            }
    finally:
        sandbox.close()


def _succeeds(sandbox: Sandbox, program: str) -> bool:
    columns = {"completions": [program + ENDS], "tests": [["assert answer() == 42"]]}
    try:
        return sandbox.call(NAME, columns, 1).values == [1.0]
    except SandboxFailed:
        return False


def _has_mark(pid: int) -> bool:
    try:
        return MARK.encode() in (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return False
