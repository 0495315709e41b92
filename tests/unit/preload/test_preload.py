"""Workers that are forked from preloaded processes: the requests that they take, and the state of a worker."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlpipe.configs.compose import load_config
from rlpipe.preload import client, server
from rlpipe.preload.preloading import Preloading, stages_of, starts_cluster

PLAIN = ["--language=PYTHON", "default_worker.py", "--node-id=1"]


def context(**entries: object) -> str:
    return f"--serialized-runtime-env-context={json.dumps(entries)}"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (PLAIN, {"env_vars": {}}),
        ([context(env_vars={"A": "1"}), *PLAIN], {"env_vars": {"A": "1"}}),
        ([context(py_executable=sys.executable), *PLAIN], {"env_vars": {}}),
        ([context(py_executable="uv run"), *PLAIN], None),
        ([context(command_prefix=["cd x &&"]), *PLAIN], None),
        ([context(env_vars={"PYTHONPATH": "/x"}), *PLAIN], None),
        (["--language=JAVA", "x"], None),
    ],
)
def test_what_more_than_variables_is_asked_for_ray_starts_itself(
    arguments: list[str], expected: dict[str, dict[str, str]] | None
) -> None:
    assert client._runtime_env(arguments) == expected


def test_without_preloaded_processes_ray_starts_the_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(client.FOLDER, str(tmp_path))
    assert not client._request_fork(PLAIN)
    monkeypatch.delenv(client.FOLDER)
    assert not client._request_fork(PLAIN)


@pytest.mark.parametrize("answer", [b"+", b"-", b""])
def test_a_worker_that_is_turned_away_is_started_by_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes
) -> None:
    monkeypatch.setenv(client.FOLDER, str(tmp_path))
    monkeypatch.setenv(client.STAGE, "learner")
    listener = server._listen(tmp_path / "learner")
    received = {}

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            size, fds, _, _ = socket.recv_fds(connection, 4, 3)
            received.update(json.loads(server._read(connection, int.from_bytes(size, "big"))))
            for fd in fds:
                os.close(fd)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    assert client._request_fork([context(), *PLAIN]) == (answer == b"+")
    thread.join()
    listener.close()
    assert received["arguments"] == ["default_worker.py", "--node-id=1"]
    assert received["folder"] == str(Path.cwd())
    assert received["environment"][client.STAGE] == "learner"


def test_stages_come_after_their_parents() -> None:
    assert server._with_parents(["engine"]) == ["actor", "torch", "engine"]
    assert server._with_parents([]) == ["actor"]
    for name, stage in server.STAGES.items():
        assert stage.parent is None or [*server.STAGES].index(stage.parent) < [*server.STAGES].index(name)


def test_ray_is_hidden_while_libraries_load() -> None:
    before = sys.modules.get("ray")
    with server.without_ray(), pytest.raises(ImportError):
        __import__("ray")
    assert sys.modules.get("ray") is before


def test_a_worker_has_its_variables_and_those_that_imports_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    monkeypatch.setattr(server, "_base_environment", before)
    try:
        os.environ["SET_BY_AN_IMPORT"] = "1"
        server._set_environment({"OF_THE_WORKER": "2"})
        assert dict(os.environ) == {"OF_THE_WORKER": "2", "SET_BY_AN_IMPORT": "1"}
        server._set_environment({"OF_ANOTHER": "3"})
        assert dict(os.environ) == {"OF_ANOTHER": "3", "SET_BY_AN_IMPORT": "1"}
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_workers_of_another_cluster_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_set_environment", lambda environment: None)
    with socket.socket(socket.AF_UNIX) as listener:
        served = server.Server(listener, ray_modules=())
        first = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7"}
        assert not served._serves({"RAY_JOB_ID": "01000000"})
        assert served._serves(first)
        assert served._serves({**first, "OTHER": "x"})
        assert not served._serves({**first, "RAY_RAYLET_PID": "8"})


def config(*overrides: str) -> list[str]:
    options = ["experiment=quickstart", "rollout.engine=hf", *overrides]
    return stages_of(load_config(options, need_files=False))


def test_what_a_run_needs_is_preloaded_and_no_torch_alongside_gpus() -> None:
    assert config() == ["learner", "learner"]
    assert config("algorithm=sft") == ["learner"]
    assert config("learner.num_gpus=1") == ["actor"]
    assert config("rollout.num_gpus=1") == ["actor"]


def test_a_run_that_joins_a_cluster_preloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = ["experiment=quickstart", "cluster.address=auto"]
    assert not starts_cluster(load_config(options, need_files=False))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert not starts_cluster(load_config(options[:1], need_files=False))


def test_processes_that_do_not_end_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.preload.preloading.END_TIMEOUT_S", 0.2)
    preloading = Preloading([])
    os.kill(preloading._server.pid, signal.SIGSTOP)
    preloading.end()
    assert preloading._server.poll() == -signal.SIGKILL


@pytest.mark.parametrize("modules", ["rlpipe.actors.dataset, rlpipe.actors.replay", "rlpipe.run.controller"])
def test_processes_without_weights_start_fast(modules: str) -> None:
    heavy = {"torch", "transformers", "datasets", "pandas", "ray.serve", "fastapi", "aiohttp"}
    code = f"import sys, {modules}; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
