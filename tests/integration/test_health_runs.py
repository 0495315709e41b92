"""Health rules in whole runs: they stop one with a checkpoint, from which it goes on, and are events of its ledger."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_cases import make_config, read_jsonl, supervised_options, trained_steps
from signal_cases import ledger_of

import rlpipe
from rlpipe.errors import Unhealthy

pytestmark = pytest.mark.ray
RUN = ("algorithm.num_steps=13", "algorithm.groups_per_step=2", "health.truncated.warn=0.2")


def test_a_run_is_stopped_with_a_checkpoint_and_continues(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopping = make_config(tiny_policy, prompts_file, tmp_path, *RUN, "health.truncated.stop=0.3")
    with pytest.raises(Unhealthy, match=r"health\.truncated\.stop was reached"):
        rlpipe.train(stopping)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name in ("step_000010", "step_000011", "step_000012")
    assert "of the completions are cut off at the limit" in capfd.readouterr().out
    events = [event for event in ledger_of(tmp_path).events() if event.kind == "health"]
    assert [event.subject for event in events] == ["truncated"]
    assert "health.truncated.stop is 0.3" in events[0].message

    rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *RUN))
    assert [row["step"] for row in trained_steps(tmp_path)] == list(range(1, 14))
    assert "cut off at the limit" not in capfd.readouterr().out, "it was told already"


@pytest.mark.slow
def test_a_supervised_run_is_stopped_too(local_ray: None, tiny_policy: Path, tmp_path: Path) -> None:
    options = supervised_options(tiny_policy, tmp_path / "rows.jsonl", tmp_path / "run", "health.gradient_norm.stop=0")
    with pytest.raises(Unhealthy, match=r"health\.gradient_norm\.stop was reached"):
        rlpipe.train(rlpipe.load_config(options))
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) < 60
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert [event["kind"] for event in events if event["subject"] == "gradient_norm"] == ["health"]
