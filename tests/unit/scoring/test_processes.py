"""A scoring process's memory limit, and the end of all processes that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import isolation_cases
import pytest

from rlpipe.scoring import processes
from rlpipe.scoring.processes import list_processes, read_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are those of Linux")

DEATHS_S = 20.0
SCORER = """
import sys
from scorer_cases import CharacterTokenizer, make_group
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.scoring.scorer import Scorer
from rlpipe.scoring.processes import start_reaper
from rlpipe.scoring.processes import MemoryLimit

start_reaper()
scorer = Scorer({"mine": RewardConfig(path=sys.argv[1] + ":behave")}, CharacterTokenizer())
scorer.limit_memory(MemoryLimit(option="scoring.memory_gb", gb=0.5))
for how in sys.argv[3:]:
    result = scorer.score([make_group("4", how=how, argument=sys.argv[2])])[0]
    print(how, result.scores.get("mine"), result.failures.get("mine"), flush=True)
"""


def run_scorer(folder: Path, *hows: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(isolation_cases.__file__).parent), str(Path(__file__).parent), *sys.path]
    program = f"import sys; sys.path[:0] = {paths!r}\n{SCORER}"
    command = [sys.executable, "-c", program, isolation_cases.__file__, str(folder), *hows]
    # Files, because children that outlive the process would keep pipes open.
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        code = subprocess.run(command, stdout=out, stderr=err, check=False, timeout=120).returncode
    return subprocess.CompletedProcess(command, code, (folder / "out").read_text(), (folder / "err").read_text())


def all_dead(folder: Path) -> bool:
    pids = {int(pid) for pid in (folder / "pids").read_text().split()}
    deadline = time.monotonic() + DEATHS_S
    while (living := list_processes().keys() & pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not living


def test_a_reward_that_allocates_without_end_fails_and_the_next_works(tmp_path: Path) -> None:
    lines = run_scorer(tmp_path, "grow", "well").stdout.splitlines()
    assert lines[0].startswith("grow None MemoryError (isolation_cases.py:")
    assert lines[0].endswith("its process may use scoring.memory_gb=0.5")
    assert lines[1] == "well [1.0] None"


@pytest.mark.slow
def test_a_process_that_memory_does_not_come_back_to_is_given_up(tmp_path: Path) -> None:
    done = run_scorer(tmp_path, "well", "hoard", "well")
    assert done.stdout == "well [1.0] None\n"
    assert "MemoryError: the memory of reward 'mine' is not freed" in done.stderr


@pytest.mark.covering(0)
@pytest.mark.parametrize("how", ["start_children_and_die", "start_children_and_fail"])
def test_children_of_a_scoring_process_end_with_it_or_with_the_failure(tmp_path: Path, how: str) -> None:
    run_scorer(tmp_path, how)
    assert all_dead(tmp_path)


def test_a_family_is_found_again_without_reading_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def note(pid: int) -> processes.Process | None:
        read.append(pid)
        return read_process(pid)

    monkeypatch.setattr(processes, "read_process", note)
    family = processes.ProcessTree()
    before = family.find()
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert family.find() - before == {child.pid, grandchild}
        assert os.getppid() in read
        family.find()
        read.clear()
        assert family.find() >= {child.pid, grandchild}
        assert os.getppid() not in read, "it was no descendant twice"
        os.kill(grandchild, signal.SIGKILL)
        child.wait()
    assert not family.find() & {child.pid, grandchild}


LOWER = """
import resource
from rlpipe.scoring.processes import set_limit
for kind, inherited in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 4096)):
    resource.setrlimit(kind, (inherited, inherited))
    set_limit(kind, 1)
    set_limit(kind, 2**30, 2**31)
    print(*resource.getrlimit(kind))
"""


def test_limits_that_the_host_has_lowered_are_kept() -> None:
    done = subprocess.run([sys.executable, "-c", LOWER], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "0", "1", "1"]
