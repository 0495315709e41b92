"""A job submitted to a cluster of two nodes, with the engine on one and the learner on the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from run_cases import HOLDS_LOGP_TO, free_ports, trained_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
RUNNING = "Ray runtime started"
LIST_ACTORS = (
    "import json, sys; from ray.util.state import list_actors; "
    "print(json.dumps([[a.name, a.class_name, a.node_id] for a in list_actors(sys.argv[1], detail=True, limit=1000)]))"
)
LIST_NODES = (
    "import json, sys; from ray.util.state import list_nodes; "
    "print(json.dumps({n.node_id: n.resources_total for n in list_nodes(sys.argv[1], detail=True)}))"
)


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the environment of a user with an active virtual environment who joins clusters with a token."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    return {**kept, "PATH": f"{SCRIPTS}:{kept['PATH']}", "RAY_AUTH_MODE": "token"}


@contextmanager
def ray_node(options: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """Run a Ray node in its own process group, and kill the group on exit."""
    node = start_node(options, environment, log)
    if has_died(node, log):  # Ray's limit of 30 s may be too short while other tests use the cores
        kill_group(node)
        node = start_node(options, environment, log)
    try:
        wait_for_text(log, RUNNING, node, timeout_s=120)
        yield
    finally:
        kill_group(node)


def start_node(options: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    command = ["ray", "start", *options, "--block", "--num-cpus=4", "--disable-usage-stats"]
    with log.open("w") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


def has_died(node: subprocess.Popen[bytes], log: Path, timeout_s: float = 120) -> bool:
    """Return whether the node ends before it is running."""
    deadline = time.monotonic() + timeout_s
    while node.poll() is None and RUNNING not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    return node.poll() is not None


def kill_group(node: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(node.pid, signal.SIGKILL)
    node.wait()


def wait_for_text(log: Path, text: str, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, f"no {text!r} within {timeout_s} s: {log.read_text()}"
        time.sleep(0.2)


def short_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)


@pytest.fixture(scope="module")
def dashboard(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the dashboard address of a cluster of two nodes, one for engines and one for learners."""
    logs = tmp_path_factory.mktemp("cluster")
    port, dashboard_port, client_port, *agent_ports = free_ports(5)
    # Two nodes sharing a folder would overwrite each other's job files; socket paths have to be short.
    with short_folder() as folder, short_folder() as second_folder:
        head = [
            "--head",
            f"--port={port}",
            f"--dashboard-port={dashboard_port}",
            f"--ray-client-server-port={client_port}",
            f"--dashboard-agent-listen-port={agent_ports[0]}",
            f"--temp-dir={folder}",
            '--resources={"learner_node": 1}',
        ]
        joining = [
            f"--address=127.0.0.1:{port}",
            f"--dashboard-agent-listen-port={agent_ports[1]}",
            f"--temp-dir={second_folder}",
            '--resources={"engine_node": 1}',
        ]
        with ray_node(head, environment, logs / "head.log"), ray_node(joining, environment, logs / "second.log"):
            yield f"http://127.0.0.1:{dashboard_port}"


def ask(code: str, dashboard: str, environment: dict[str, str]) -> Any:
    """Return the JSON that ``code`` prints in another process, because this one may have joined another cluster."""
    command = [sys.executable, "-c", code, dashboard]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_job_with_engine_and_learner_on_two_nodes(
    dashboard: str, environment: dict[str, str], tiny_policy: Path, tmp_path: Path
) -> None:
    command = ["ray", "job", "submit", f"--address={dashboard}", "--working-dir=.", "--"]
    command += [
        *("rlpipe", "train", "experiment=quickstart"),
        f"model.path={tiny_policy}",
        "algorithm.num_steps=3",
        "algorithm.groups_per_step=4",
        "data.held_out.size=4",
        "rollout.engine=hf",
        "rollout.num_threads=1",
        "rollout.resources={engine_node: 1}",
        "learner.num_threads=1",
        "learner.resources={learner_node: 1}",
        "learner.schedule.warmup_steps=0",
        "cluster.schedule_timeout_s=300",
        f"output={tmp_path}",
    ]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 3/3" in done.stdout
    assert [row["step"] for row in trained_steps(tmp_path)] == [1, 2, 3]
    assert json.loads((tmp_path / "summary.json").read_text())["max_logprob_difference"] <= HOLDS_LOGP_TO
    nodes = ask(LIST_NODES, dashboard, environment)
    actors = ask(LIST_ACTORS, dashboard, environment)
    assert len(nodes) == 2
    assert {name for name, _, _ in actors} >= {"rollout-0", "scorer-0", "replay", "weights"}
    assert all("engine_node" in nodes[node] for name, _, node in actors if name == "rollout-0")
    learners = [node for _, kind, node in actors if kind == "RayTrainWorker"]
    assert len(learners) == 1
    assert "learner_node" in nodes[learners[0]]
