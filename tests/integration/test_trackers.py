"""Services that track runs: what each has received, and Ray's metrics as Prometheus would read them."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from run_cases import read_jsonl, run_options, trained_steps
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking.completion_table import CompletionTable
from rlpipe.tracking.service_trackers import MlflowTracker
from rlpipe.tracking.trackers import open_trackers

ROWS = [
    {
        "prompt": [{"role": "user", "content": "2 + 2 = ?"}],
        "completion": text,
        "reward": reward,
        "rewards": {"exact": reward, "style": None},
        "advantage": reward - 0.5,
        "num_tokens": len(text),
        "status": "completed",
    }
    for text, reward in (("4", 1.0), ("<script>alert(1)</script>", 0.0))
]


def track_twice(output: Path, **services: Any) -> None:
    """Log two steps with completions, the second in a process that resumes."""
    config = TrackingConfig(tensorboard=False, ray_metrics=False, **services)
    for step in (1, 2):
        tracker = open_trackers(
            config, output=output, run_name="test", first_step=step, resolved_config={"seed": 0, "name": "test"}
        )
        tracker.log(
            step, {"reward": 0.5 * step, "grad_norm": math.nan, "logged/acc@1 (%)": 0.25, "logged/a//./b:é/": 1.0}
        )
        tracker.log_completions(CompletionTable.of(step, ROWS))
        tracker.close()
        time.sleep(1.1)  # W&B names the folders of offline runs by the second


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Return what the file of an offline run has of each logged step: records with a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("*.wandb")
    data, at, found = path.read_bytes(), 7, []
    while at < len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        assert kind == 1, "a record in several parts"
        record = Record.FromString(data[at + 7 : at + 7 + length])
        at += 7 + length
        if record.WhichOneof("record_type") == "history":
            values = {".".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            found.append({name: json.loads(value) for name, value in values.items()})
    return found


def test_wandb_offline_needs_no_account_and_resumes_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    track_twice(tmp_path, wandb=True, wandb_mode="offline")
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb_run_id.txt").read_text()
    assert len(folders) == 2
    assert all(folder.name.endswith(run_id) and list(folder.glob("*.wandb")) for folder in folders)
    logged = [row for folder in sorted(folders) for row in wandb_history(folder) if "reward" in row]
    assert [(row["step"], row["reward"], row["logged/acc@1 (%)"]) for row in logged] == [(1, 0.5, 0.25), (2, 1.0, 0.25)]
    (first, second) = (json.loads(path.read_text()) for path in sorted(tmp_path.glob("wandb/**/*.table.json")))
    assert first["columns"] == second["columns"]
    assert first["columns"][:4] == ["step", "prompt", "completion", "reward"]
    assert [row[2] for row in first["data"]] == ["4", "<script>alert(1)</script>"]


def test_mlflow_has_metrics_parameters_and_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track_twice(tmp_path, mlflow=True, project="sums")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "test")
    assert run.data.params == {"seed": "0", "name": "test"}
    assert [(entry.step, entry.value) for entry in client.get_metric_history(run.info.run_id, "reward")] == [
        (1, 0.5),
        (2, 1.0),
    ]
    assert run.data.metrics.keys() == {"reward", "logged/acc_1 ___", "logged/a/b:é"}
    tables = [entry.path for entry in client.list_artifacts(run.info.run_id, "completions")]
    assert tables == ["completions/step_000001.json", "completions/step_000002.json"]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, tables[0])).read_text())
    assert table["columns"][:4] == ["step", "prompt", "completion", "reward"]
    assert [row[2] for row in table["data"]] == ["4", "<script>alert(1)</script>"]


def test_metrics_whose_name_begins_with_that_of_another_reach_the_files_of_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = MlflowTracker(tmp_path, run_name="test", project="p", config={})
    tracker.log(1, {"reward/greedy": 1.0})  # the names are those of a batch that also has the shorter ones
    names = ("entropy", "entropy/coef", "kl", "kl/in_reward", "reward", "reward/greedy", "rewards/sum/mean")
    tracker.log(2, dict.fromkeys(names, 0.5))
    (folder,) = tmp_path.glob("mlruns/*/*/metrics")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    dotted = {"entropy.coef", "kl.in_reward", "reward.greedy", "rewards/sum/mean"}
    assert files == {"entropy", "kl", "reward", *dotted}


def test_mlflow_knows_that_a_run_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = TrackingConfig(tensorboard=False, ray_metrics=False, mlflow=True)
    options = {"output": tmp_path, "run_name": "test", "first_step": 0, "resolved_config": {"scoring.acc@1": 1}}
    open_trackers(config, **options).close(failed=True)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("rlpipe").experiment_id])
    assert (run.info.status, run.data.params) == ("FAILED", {"scoring.acc_1": "1"})


def test_trackio_has_metrics_and_completions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    track_twice(tmp_path, trackio=True, project="sums")
    track_twice(tmp_path / "other", trackio=True, project="sums")
    (database,) = (tmp_path / "trackio").glob("sums*.db")
    name = (tmp_path / "trackio_run_name.txt").read_text()
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (name,)
        ).fetchall()
        names = connection.execute("SELECT DISTINCT run_name FROM metrics").fetchall()
    assert len(names) == 2
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, metrics["reward"]) for step, metrics in logged if "reward" in metrics] == [(1, 0.5), (2, 1.0)]
    tables = {step: metrics["completions"]["_value"] for step, metrics in logged if "completions" in metrics}
    assert list(tables) == [1, 2]
    assert [*tables[1][0]][:4] == ["step", "prompt", "completion", "reward"]
    assert [(row["step"], row["completion"]) for row in tables[2]] == [(2, "4"), (2, "<script>alert(1)</script>")]


@pytest.mark.ray
@pytest.mark.slow
def test_a_run_reports_the_same_to_all_services(
    tiny_policy: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # for the reader below
    mlflow, *_ = (pytest.importorskip(name) for name in ("mlflow", "wandb", "trackio"))
    services = ("tensorboard=true", "wandb=true", "wandb_mode=offline", "mlflow=true", "trackio=true", "project=all")
    options = [f"tracking.{option}" for option in (*services, "log_completions=2")]
    command = run_options(tiny_policy, prompts_file, tmp_path, "algorithm.num_steps=2", *options)
    unset = ("MLFLOW_TRACKING_URI", "WANDB_API_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment["TRACKIO_DIR"] = str(tmp_path / "trackio")  # which trackio reads when it is imported
    subprocess.run([sys.executable, "-m", "rlpipe", "train", *command], check=True, env=environment)
    expected = [(row["step"], pytest.approx(row["reward"])) for row in trained_steps(tmp_path)]
    assert len(expected) == 2
    texts = {row["completion"] for row in read_jsonl(tmp_path / "completions.jsonl")}

    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert [(row["step"], row["reward"]) for row in wandb_history(folder) if "reward" in row] == expected
    tables = [json.loads(path.read_text()) for path in folder.glob("**/*.table.json")]
    assert {row[2] for table in tables for row in table["data"]} == texts

    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("all").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward")
    assert [(entry.step, entry.value) for entry in history] == expected
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("mlruns/**/completions/*.json")]
    assert {row[2] for table in tables for row in table["data"]} == texts

    (database,) = (tmp_path / "trackio").glob("all*.db")
    with closing(sqlite3.connect(database)) as connection:
        rows = [(step, json.loads(text)) for step, text in connection.execute("SELECT step, metrics FROM metrics")]
    assert [(step, metrics["reward"]) for step, metrics in rows if "reward" in metrics] == expected
    found = [row for _, metrics in rows for row in metrics.get("completions", {}).get("_value", [])]
    assert {row["completion"] for row in found} == texts

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == expected


@pytest.mark.ray
@pytest.mark.slow
def test_ray_serves_the_metrics_to_prometheus(tmp_path: Path) -> None:
    import ray

    started_here = not ray.is_initialized()
    if started_here:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        config = TrackingConfig(tensorboard=False)
        tracker = open_trackers(config, output=tmp_path, run_name="test", first_step=0, resolved_config={})
        tracker.log(3, {"rewards/mine/mean": 0.25, "grad_norm": math.nan})
        here = ray.get_runtime_context().get_node_id()
        node = next(node for node in ray.nodes() if node["NodeID"] == here)
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        line = wait_for_line(url, "ray_rlpipe_rewards_mine_mean{", timeout_s=60)
        assert 'run="test"' in line
        assert line.endswith(" 0.25")
        tracker.close()
    finally:
        if started_here:
            ray.shutdown()


def wait_for_line(url: str, start: str, timeout_s: float) -> str:
    """Return the first line of a page that begins with ``start``, and reload the page until there is one."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with urllib.request.urlopen(url, timeout=10) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(start):
                    return line
        time.sleep(0.5)
    raise AssertionError(f"no line begins with {start!r} at {url} within {timeout_s} s")
