"""Limits of a machine by control groups, read from hand-written files, and the threads of a rank below them."""

import os
from pathlib import Path

import pytest

from rlpipe.configs.schema.learner_config import LearnerConfig, Zero3Config
from rlpipe.hardware import cgroup
from rlpipe.hardware.cgroup import free_host_bytes, host_memory_bytes, learner_threads, num_cores


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_control_groups_has_all_of_itself(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory_bytes(tmp_path, tmp_path / "none") == physical
    assert num_cores(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))


def test_the_lowest_limit_above_the_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(own, "0::/jobs/one\n")
    write(tmp_path / "jobs/one/memory.max", "max\n")
    write(tmp_path / "jobs/memory.max", "5000000\n")
    write(tmp_path / "memory.max", "6000000\n")
    assert host_memory_bytes(tmp_path, own) == 5_000_000
    write(tmp_path / "jobs/one/cpu.max", "max 100000\n")
    write(tmp_path / "jobs/cpu.max", "50000 100000\n")
    assert num_cores(tmp_path, own) == 1
    write(own, "4:cpu,cpuacct:/job\n")
    write(tmp_path / "cpu/job/cpu.cfs_period_us", "100000\n")
    write(tmp_path / "cpu/job/cpu.cfs_quota_us", "-1\n")
    assert num_cores(tmp_path, own) == num_cores(tmp_path, tmp_path / "none")
    write(tmp_path / "cpu/job/cpu.cfs_quota_us", "100000\n")
    assert num_cores(tmp_path, own) == 1


def test_groups_of_the_first_version_limit_memory_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(own, "4:cpu,memory:/job\n1:cpu:/\n0::/\n")
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    physical = host_memory_bytes(tmp_path, tmp_path / "none")
    assert host_memory_bytes(tmp_path, own) == physical
    write(tmp_path / "memory/job/memory.limit_in_bytes", "7000000\n")
    assert host_memory_bytes(tmp_path, own) == 7_000_000


def test_what_a_group_has_taken_is_not_free_but_for_files(tmp_path: Path) -> None:
    own = tmp_path / "own"
    write(own, "0::/job\n")
    assert free_host_bytes(tmp_path, own) > 10**8
    write(tmp_path / "job/memory.max", "5000000\n")
    write(tmp_path / "job/memory.current", "3000000\n")
    assert free_host_bytes(tmp_path, own) == 2_000_000
    write(tmp_path / "job/memory.stat", "anon 2000000\ninactive_file 600000\nactive_file 400000\n")
    assert free_host_bytes(tmp_path, own) == 3_000_000
    write(own, "4:cpu,memory:/job\n")
    write(tmp_path / "memory/job/memory.limit_in_bytes", "7000000\n")
    write(tmp_path / "memory/job/memory.usage_in_bytes", "6000000\n")
    write(tmp_path / "memory/job/memory.stat", "total_inactive_file 500000\n")
    assert free_host_bytes(tmp_path, own) == 1_500_000


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        (LearnerConfig(num_cpus=2.5), 2),
        (LearnerConfig(num_cpus=0.5), 1),
        (LearnerConfig(num_gpus=1, num_cpus=2), 2),
        (LearnerConfig(num_gpus=1, num_cpus=2, offload="chunked"), 8),
        (LearnerConfig(num_gpus=1, num_cpus=12, offload="chunked"), 12),
        (LearnerConfig(num_gpus=1, num_cpus=2, offload="chunked", num_threads=3), 3),
        (LearnerConfig(num_gpus=0, num_cpus=2, offload="chunked"), 2),
        (LearnerConfig(num_gpus=1, strategy="zero3", zero3=Zero3Config(offload_optimizer=True)), 8),
        (LearnerConfig(num_gpus=1, strategy="zero3"), 1),
    ],
)
def test_the_host_that_updates_has_its_share_of_the_machine(
    learner: LearnerConfig, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a rank has the reserved threads, or its share of the machine's if the host updates a GPU's weights."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(cgroup, "num_cores", lambda: 16)
    assert learner_threads(learner) == expected
