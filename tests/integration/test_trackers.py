"""Trackers that need other processes: Weights & Biases offline, and Ray's metrics as Prometheus would read them."""

from __future__ import annotations

import math
import time
import urllib.request
from pathlib import Path

import pytest

from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking import open_trackers


def test_wandb_offline_needs_no_account_and_resumes_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = TrackingConfig(wandb=True, wandb_mode="offline", tensorboard=False, ray_metrics=False)
    for first_step in (0, 2):
        tracker = open_trackers(
            config, output=tmp_path, run_name="test", first_step=first_step, resolved_config={"seed": 0}
        )
        tracker.log(first_step, {"reward": 0.5, "grad_norm": math.nan})
        tracker.close()
        time.sleep(1.1)  # W&B names the folders of offline runs by the second
    folders = list((tmp_path / "wandb").glob("offline-run-*"))
    run_id = (tmp_path / "wandb_run_id.txt").read_text()
    assert len(folders) == 2
    assert all(folder.name.endswith(run_id) and list(folder.glob("*.wandb")) for folder in folders)


@pytest.mark.slow
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
