"""Runs on three hosts, of which one dies, loses its cable for good, or is silent for a while."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_cases import Host, Hosts, three_hosts, wait_until
from run_cases import REWARDS_FILE, diagnosed, run_options, trained_steps
from signal_cases import assert_accounts_add_up, steps_done

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STEPS, GROUPS_PER_STEP = 30, 4
STEPS_BEFORE = 6
SILENCE_S = 8.0
START_S, OUTAGE_S, END_S = 300.0, 300.0, 300.0
QUICK_TO_NOTICE = {
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
}
"""The settings that docs/cluster.md recommends for the head: a host that is cut off counts as dead after 30 s."""
EVERYWHERE = '{"engine_host": 1, "rank_host": 1}'


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Yield a cluster in which each host has room for one of two engines and one of two learner ranks."""
    for option, value in QUICK_TO_NOTICE.items():
        monkeypatch.setenv(option, value)
    with three_hosts() as hosts:
        hosts.start_ray(EVERYWHERE)
        yield hosts


@pytest.fixture
def command(hosts: Hosts, tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> list[str]:
    """Return the command of a run with two engines and two ranks, slow enough to outlast a host's absence."""
    options = run_options(
        tiny_policy,
        prompts_file,
        tmp_path / "run",
        f"algorithm.num_steps={NUM_STEPS}",
        "checkpoint.every_steps=5",
        f"scoring.rewards.digits.path={REWARDS_FILE}:slow_digits",
        "rollout.num_engines=2",
        "rollout.resources={engine_host: 1}",
        "learner.strategy=fsdp2",
        "learner.num_ranks=2",
        "learner.resources={rank_host: 1}",
        f"cluster.address={hosts.ray_address}",
    )
    return [sys.executable, "-u", "-m", "rlpipe", "train", *options]


def kill(host: Host) -> None:
    host.kill()


def pull_cable(host: Host) -> None:
    host.pull_cable()


def be_silent(host: Host) -> None:
    host.pull_cable()
    time.sleep(SILENCE_S)
    host.plug_in()


def host_with_a_rank(hosts: Hosts) -> Host:
    """Return a host with a rank that is not the head, and preferably also has an engine."""
    found = [host for host in (hosts.second, hosts.third) if host.pids("ray::RayTrainWorker")]
    return next((host for host in found if host.pids("ray::RolloutActor")), found[0])


def begin(host: Host, command: list[str], output: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """Start the command on a host, wait until some steps are trained, and return its process and terminal log."""
    terminal = output.with_name("terminal.log")
    driver = host.start(*command, log=terminal)
    wait_until(lambda: steps_done(output) >= STEPS_BEFORE, driver, terminal, START_S)
    return driver, terminal


def assert_audit_is_clean(output: Path) -> None:
    audit = subprocess.run([sys.executable, "-m", "rlpipe", "audit", output], capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert_accounts_add_up(output, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    assert [row["step"] for row in trained_steps(output)] == list(range(1, NUM_STEPS + 1))


@pytest.mark.parametrize("outage", [kill, pull_cable, be_silent])
def test_a_run_continues_without_a_host(
    hosts: Hosts, command: list[str], tmp_path: Path, outage: Callable[[Host], None]
) -> None:
    output = tmp_path / "run"
    driver, terminal = begin(hosts.head, command, output)
    began, before = time.monotonic(), steps_done(output)
    outage(host_with_a_rank(hosts))

    figures: dict[str, float] = {}
    for num_steps in (1, 10):
        wait_until(lambda more=num_steps: steps_done(output) >= before + more, driver, terminal, OUTAGE_S)
        figures[f"seconds_until_{num_steps}_more"] = round(time.monotonic() - began, 1)
    assert driver.wait(END_S) == 0, terminal.read_text()
    assert_audit_is_clean(output)
    print(json.dumps({"outage": outage.__name__, **figures}))


def test_after_the_death_of_the_head_the_same_command_continues(
    hosts: Hosts, command: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    driver, terminal = begin(hosts.third, command, output)
    began = time.monotonic()
    hosts.head.kill()
    assert driver.wait(OUTAGE_S) == 1, terminal.read_text()
    print(json.dumps({"outage": "head", "seconds_until_the_error": round(time.monotonic() - began, 1)}))
    lines = terminal.read_text().splitlines()
    assert [line for line in lines if line.startswith("rlpipe: error: ")] == lines[-1:], "the error ends the output"
    assert f"HeadLost: {lines[-1].removeprefix('rlpipe: error: ')}; start the cluster again" in diagnosed(output)

    hosts.end()
    hosts.start_ray(EVERYWHERE)
    driver = hosts.head.start(*command, log=terminal)
    assert driver.wait(START_S + END_S) == 0, terminal.read_text()
    assert "resuming from" in terminal.read_text()
    assert_audit_is_clean(output)
