"""Tests of what a confined program reaches, without the filter of system calls that a sandbox adds."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rlpipe.scoring.code_execution import passes_tests
from rlpipe.scoring.sandbox import confinement
from rlpipe.scoring.sandbox.confinement import (
    SCOPES_SINCE,
    describe_confinement,
    find_bwrap,
    find_obstacle,
    landlock_version,
)

LANDLOCK = pytest.mark.skipif(landlock_version() == 0, reason="this machine has no Landlock")
SCOPED = pytest.mark.skipif(landlock_version() < SCOPES_SINCE, reason="this machine's Landlock does not scope signals")
BWRAP = pytest.mark.skipif(find_bwrap() is None, reason="bubblewrap is not installed, or can't create namespaces here")


def runs(code: str) -> bool:
    """Return whether a program with this code comes to its end and then answers."""
    return passes_tests([f"{code}\ndef f(x): return x + 1"], ["assert f(1) == 2"]) == [1.0]


@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nassert np.arange(3).sum() == 3",
        "import tempfile\nwith tempfile.TemporaryFile() as file: file.write(b'x')",
        "open('own', 'w').write('x')\nassert open('own').read() == 'x'",
        "import os\nopen('own', 'w').close()\nos.mkdir('a')\nos.rename('own', 'a/b')",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', '1 + 1'], check=True)",
        "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
        "import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as pool: assert [*pool.map(abs, [-1])] == [1]",
        "import zoneinfo, json, re, hashlib, random, uuid, asyncio\nasyncio.run(asyncio.sleep(0))",
    ],
)
def test_ordinary_programs_work(code: str) -> None:
    assert runs(code)


@LANDLOCK
def test_files_of_others_are_out_of_reach(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    for code in (
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"import os\nos.listdir({str(tmp_path)!r})",
        f"import os\nos.remove({str(secret)!r})",
        f"import os\nos.symlink({str(secret)!r}, 'link')\nopen('link').read()",
        f"import os\nos.link({str(secret)!r}, 'link')",
        "open('/dev/shm/left', 'w')",
        "open('/proc/self/maps').read()",
        "open('/etc/shadow').read()",
        f"open({str(Path(__file__))!r}).read()",
        "import os\nos.listdir(os.path.expanduser('~root'))",
    ):
        assert not runs(code), code
    assert secret.read_text() == "42"
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@SCOPED
def test_signals_reach_own_processes_only() -> None:
    assert runs("import os, subprocess\nchild = subprocess.Popen(['/bin/sleep', '60'])\nchild.kill()\nchild.wait()")
    for number in (0, 9, 15, 19):
        assert not runs(f"import os\nos.kill(os.getppid(), {number})"), number
        assert not runs(f"import os\nos.kill({os.getpid()}, {number})"), number


@LANDLOCK
def test_sockets_of_others_are_out_of_reach() -> None:
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket() as tcp:
        abstract.bind(b"\0rlpipe-test-of-landlock")
        abstract.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        assert not runs("import socket\nsocket.socket(socket.AF_UNIX).connect(b'\\0rlpipe-test-of-landlock')")
        assert not runs(f"import socket\nsocket.create_connection(('127.0.0.1', {tcp.getsockname()[1]}))")
    assert not runs("import socket\nsocket.socket(socket.AF_UNIX)")
    assert runs("import socket\nleft, right = socket.socketpair()\nleft.send(b'x')\nassert right.recv(1) == b'x'")


@BWRAP
def test_bubblewrap_confines_where_there_is_no_landlock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(confinement, "landlock_version", lambda: 0)
    (tmp_path / "secret").write_text("42")
    assert runs("import numpy\nopen('own', 'w').write('x')\nassert open('own').read() == 'x'")
    for code in (
        f"open({str(tmp_path / 'secret')!r}).read()",
        f"open({str(Path(__file__))!r}).read()",
        "open('/proc/1/environ')",
        "open('/usr/new', 'w')",
    ):
        assert not runs(code), code
    assert "bubblewrap" in describe_confinement()


def test_a_machine_that_confines_no_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "landlock_version", lambda: 0)
    monkeypatch.setattr(confinement, "find_bwrap", lambda: None)
    assert "bubblewrap (bwrap) is not installed" in str(find_obstacle())


def test_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "42")
    assert not runs("import os\nos.environ['SECRET_KEY']")


def test_the_log_names_what_confines() -> None:
    assert describe_confinement().startswith("a filter of system calls")
    assert ("Landlock" in describe_confinement()) == (landlock_version() > 0)
