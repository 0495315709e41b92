"""Metrics in files, through resumes, crashes and full disks; completions, summary and plot."""

from __future__ import annotations

import html
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from disk_cases import largest_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html

from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking.completion_table import CompletionTable
from rlpipe.tracking.jsonl import CompletionsLog, JsonlTracker, StepLog, num_steps_logged, read_rows, rows_of_step
from rlpipe.tracking.plot import plot_losses, plot_rewards, smooth
from rlpipe.tracking.progress import print_summary, summarize_metrics, write_summary
from rlpipe.tracking.service_trackers import TrackioTracker
from rlpipe.tracking.trackers import (
    BackgroundTracker,
    RayMetricsTracker,
    TensorBoardTracker,
    Trackers,
    open_trackers,
    prometheus_name,
)
from rlpipe.types import Prompt, Rollout, RolloutGroup

FILES_ONLY = TrackingConfig(ray_metrics=False, wandb=False)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 3), max_size=12),
    lengths=st.lists(st.integers(0, 60), min_size=36, max_size=36),
    is_cut=st.booleans(),
)
def test_rows_of_a_step_are_found_without_reading_the_others(
    tmp_path: Path, counts: list[int], lengths: list[int], is_cut: bool
) -> None:
    """Check steps without lines, lines of many lengths, and a last line that was cut off."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"")
    log, left = StepLog(path, 0), iter(lengths)
    for step, count in enumerate(counts):
        log.append(step, [{"text": "ä" * next(left)} for _ in range(count)])
    if is_cut:
        path.write_bytes(path.read_bytes()[:-3])
    for step in range(-1, len(counts) + 1):
        assert rows_of_step(path, step) == [row for row in read_rows(path) if row["step"] == step]
    assert rows_of_step(tmp_path / "none.jsonl", 1) == []


def log_steps(path: Path, first: int, last: int, value: float = 0.0) -> None:
    tracker = JsonlTracker(path, first)
    for step in range(first, last + 1):
        tracker.log(step, {"reward": value})
    tracker.close()


def rewards(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["reward"]) for row in read_rows(path)]


# metrics.jsonl


def test_each_step_is_one_line_that_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    tracker = JsonlTracker(path, 0)
    tracker.log(1, {"reward": np.float32(0.5), "time/train": 2})
    row = json.loads(path.read_text())
    assert row.pop("time") > 1.7e9
    assert row == {"step": 1, "reward": 0.5, "time/train": 2.0}


def test_values_that_json_lacks_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlTracker(path, 0).log(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    row = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.0)


def test_resumed_run_logs_no_step_twice(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 5, value=0.0)
    log_steps(path, 4, 6, value=1.0)
    assert rewards(path) == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]


def test_steps_that_a_dead_driver_had_not_read_are_known(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert num_steps_logged(path, 4) == 4, "another folder has them"
    tracker = JsonlTracker(path, 0)
    for step in range(1, 4):
        tracker.log(step, {"loss": 0.0})
    tracker.log(4, {"eval/accuracy": 0.5})
    assert num_steps_logged(path, 4) == 3
    assert num_steps_logged(path, 2) == 2


def test_new_run_in_an_old_folder_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 0, 5)
    log_steps(path, 0, 1, value=1.0)
    assert rewards(path) == [(0, 1), (1, 1)]


def test_line_cut_off_by_a_crash_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 3)
    path.write_bytes(path.read_bytes()[:-9])
    assert rewards(path) == [(1, 0), (2, 0)]
    log_steps(path, 3, 3, value=1.0)
    assert rewards(path) == [(1, 0), (2, 0), (3, 1)]
    assert path.read_bytes().count(b"\n") == 3


def test_a_resumed_run_keeps_what_happened_and_drops_what_its_rules_find_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for step, kind in ((4, "health"), (5, "death"), (6, "health"), (6, "checkpoint")):
        StepLog(path, 0, repeated="none").append(step, [{"kind": kind}])
    StepLog(path, 5, repeated="health")
    assert [(row["step"], row["kind"]) for row in read_rows(path)] == [(4, "health"), (5, "death"), (6, "checkpoint")]


def test_full_disk_warns_each_time_and_leaves_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, 0)
    tracker.log(1, {"reward": 0.0})
    with largest_file(path.stat().st_size + 10):
        tracker.log(2, {"reward": 0.0})
        tracker.log(3, {"reward": 0.0})
    tracker.log(4, {"reward": 0.0})
    assert rewards(path) == [(1, 0), (4, 0)]
    assert path.read_bytes().count(b"\n") == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "step 2 is missing" in caplog.text


# The other trackers


def wait_until(is_true: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FakeTracker:
    def __init__(self, broken: bool = False, gate: threading.Event | None = None) -> None:
        self.broken, self.closed, self.gate = broken, False, gate
        self.has_failed = False
        self.steps: list[int] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        if self.gate is not None:
            self.gate.wait()
        if self.broken:
            raise ConnectionError("no network")

    def close(self, *, failed: bool = False) -> None:
        self.closed, self.has_failed = True, failed


def test_failing_tracker_is_tried_again_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = FakeTracker(), FakeTracker(broken=True)
    trackers = Trackers([BackgroundTracker("bad", lambda: bad), BackgroundTracker("good", lambda: good)])
    trackers.log(1, {})
    trackers.log(2, {})
    wait_until(lambda: bad.steps == [1, 2])
    bad.broken = False
    trackers.log(3, {})
    trackers.close()
    assert (good.steps, good.closed) == ([1, 2, 3], True)
    assert (bad.steps, bad.closed) == ([1, 2, 3], True)
    assert [record.getMessage() for record in caplog.records] == [
        "bad tracking fails, the run continues: ConnectionError: no network",
        "bad tracking works again; it lacks 2 entries",
    ]


def test_a_tracker_that_hangs_delays_neither_steps_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rlpipe.tracking.trackers.CLOSE_TIMEOUT_S", 0.2)
    released = threading.Event()
    hanging = FakeTracker(gate=released)
    good = FakeTracker()
    trackers = Trackers([BackgroundTracker("hanging", lambda: hanging), BackgroundTracker("good", lambda: good)])
    for step in range(1, 4):
        trackers.log(step, {})
    trackers.close()
    assert (good.steps, good.closed) == ([1, 2, 3], True)
    assert hanging.steps == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "hanging tracking has not ended within 0.2 s, and may lack steps; metrics.jsonl has all"
    ]
    released.set()
    wait_until(lambda: hanging.closed)
    assert hanging.steps == [1, 2, 3]


def test_tracker_that_cannot_be_opened_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    tracker = open_trackers(FILES_ONLY, output=tmp_path, run_name="run", first_step=0, resolved_config={})
    tracker.log(1, {"reward": 1.0})
    tracker.close()
    assert rewards(tmp_path / "metrics.jsonl") == [(1, 1.0)]
    assert "TensorBoard tracking is off" in caplog.text


def test_tensorboard_has_the_same_names_and_steps(tmp_path: Path) -> None:
    tracker = open_trackers(FILES_ONLY, output=tmp_path, run_name="run", first_step=0, resolved_config={})
    tracker.log(1, {"reward": 0.5, "completions/mean_length": 6.0})
    tracker.log(2, {"reward": 0.75, "completions/mean_length": 7.0})
    # While the run is still going on: TensorBoard is opened on a thread of its own, and its reader needs a file.
    wait_until(lambda: list(tmp_path.glob("tensorboard/events*")) != [])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    wait_until(lambda: events.Reload().Tags()["scalars"] != [] and len(events.Scalars("reward")) == 2)
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 0.5), (2, 0.75)]
    assert [event.value for event in events.Scalars("completions/mean_length")] == [6.0, 7.0]
    tracker.close()


def test_reward_functions_named_like_other_columns_hide_none(tmp_path: Path) -> None:
    log = CompletionsLog(tmp_path / "c.jsonl", num_groups=1, tokenizer=CharacterTokenizer(), first_step=0)
    rows = log.log(3, [make_group(8, "4", "5")])
    for row in rows:
        row["rewards"] = {"exact": 0.5, "rewards/reward": 2.0, "reward": 3.0, "tokens": 4.0, "step": None}
    table = CompletionTable.of(3, rows)
    assert table.columns == [
        *("step", "prompt", "completion", "reward", "exact", "rewards/reward", "rewards/rewards/reward"),
        *("rewards/tokens", "rewards/step", "advantage", "tokens", "status"),
    ]
    columns = table.to_columns()
    assert len(columns) == len(table.columns)
    assert columns["reward"] == [row["reward"] for row in rows]
    assert columns["rewards/rewards/reward"] == [3.0, 3.0]
    assert columns["tokens"] == [row["num_tokens"] for row in rows]
    assert columns["step"] == [3, 3]


def test_tensorboard_has_the_completions_as_text(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path, 0)
    log = CompletionsLog(tmp_path / "c.jsonl", num_groups=1, tokenizer=CharacterTokenizer(), first_step=0)
    rows = log.log(3, [make_group(8, "4", "<b>|`*\n[x](javascript:alert(1))")])
    tracker.log_completions(CompletionTable.of(3, rows))
    tracker.close()
    (event,) = EventAccumulator(str(tmp_path)).Reload().Tensors("completions")
    assert event.step == 3
    shown = markdown_to_safe_html(event.tensor_proto.string_val[0])
    assert shown.count("<tr>") == 3
    assert "javascript:alert" in html.unescape(shown)
    assert "<b>" not in shown
    assert "href" not in shown


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    for first, last, value in ((1, 5, 0.0), (4, 6, 1.0)):
        tracker = TensorBoardTracker(tmp_path, first)
        for step in range(first, last + 1):
            tracker.log(step, {"reward": value})
        tracker.close()
    # Files are read in the order of their names, which contain the second and a per-process counter.
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [
        (1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("reward", "rlpipe_reward"),
        ("rewards/my reward/mean", "rlpipe_rewards_my_reward_mean"),
        ("clip_ratio/low_mean", "rlpipe_clip_ratio_low_mean"),
        ("p99.9%", "rlpipe_p99_9"),
    ],
)
def test_prometheus_names_are_valid(name: str, expected: str) -> None:
    assert prometheus_name(name) == expected


def test_ray_gauges_carry_the_runs_name() -> None:
    tracker = RayMetricsTracker("quickstart")
    tracker.log(1, {"rewards/mine/mean": 0.5})
    tracker.log(2, {"rewards/mine/mean": 0.6})
    gauges = [gauge.info for gauge in tracker._gauges.values()]
    assert [gauge["name"] for gauge in gauges] == ["rlpipe_step", "rlpipe_rewards_mine_mean"]
    assert all(gauge["default_tags"] == {"run": "quickstart"} for gauge in gauges)


class FakeTrackio(ModuleType):
    """The part of Trackio that begins runs, which it resumes by their names."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.names: list[str] = []

    def init(self, *, project: str, name: str, config: Mapping[str, Any], resume: str) -> None:
        assert resume == "allow"
        self.names.append(name)


def test_runs_of_one_name_in_two_folders_are_two_runs_of_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackio = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for folder in ("first", "second", "first"):
        TrackioTracker(tmp_path / folder, run_name="sums", project="p", config={})
    first, second, again = trackio.names
    assert first == again != second
    assert first.startswith("sums-")
    assert second.startswith("sums-")


# Completions


class CharacterTokenizer:
    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        return ["".join(chr(token) for token in sequence) for sequence in sequences]


def make_group(group_id: int, *texts: str) -> RolloutGroup:
    prompt = Prompt(prompt_id=7, epoch=0, token_ids=np.ones(1, dtype=np.int32), prompt="2 + 2 = ?", task={})
    rollouts = [
        Rollout(
            group_id=group_id,
            sample_index=index,
            prompt_id=7,
            task={},
            token_ids=np.array([1, *map(ord, text)], dtype=np.int32),
            loss_mask=np.arange(len(text) + 1) > 0,
            logprobs=np.zeros(len(text) + 1, dtype=np.float32),
            policy_versions=np.array([-1] + [3] * len(text), dtype=np.int32),
            advantages=np.full(len(text) + 1, 0.5 - index, dtype=np.float32),
            rewards={"exact": 1.0 - index, "style": None},
            reward=1.0 - index,
        )
        for index, text in enumerate(texts)
    ]
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts)


def test_completions_of_the_first_groups_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    log = CompletionsLog(path, num_groups=1, tokenizer=CharacterTokenizer(), first_step=0)
    log.log(4, [make_group(8, "4", "è"), make_group(9, "6")])
    first, second = read_rows(path)
    assert first == {
        "step": 4,
        "group_id": 8,
        "sample_index": 0,
        "prompt_id": 7,
        "prompt": "2 + 2 = ?",
        "completion": "4",
        "rewards": {"exact": 1.0, "style": None},
        "reward": 1.0,
        "advantage": 0.5,
        "policy_version": 3,
        "num_tokens": 1,
        "status": "completed",
        "finish_reason": "stop",
    }
    assert (second["completion"], second["advantage"]) == ("è", -0.5)


def test_completions_are_forgotten_on_resume_like_metrics(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    for first_step in (1, 2):
        log = CompletionsLog(path, num_groups=1, tokenizer=CharacterTokenizer(), first_step=first_step)
        for step in (first_step, first_step + 1):
            log.log(step, [make_group(8, "4")])
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_a_group_is_described_by_its_last_message_if_it_has_one(tmp_path: Path) -> None:
    log = CompletionsLog(tmp_path / "c.jsonl", num_groups=0, tokenizer=CharacterTokenizer(), first_step=0)
    described = make_group(8, "4")
    parts = [{"type": "image"}, {"type": "text", "text": "How many?"}]
    for prompt, text in (([], ""), ([{"role": "user", "content": parts}], "How many?"), ("2 + 2 = ?", "2 + 2 = ?")):
        described.prompt = replace(described.prompt, prompt=prompt)
        assert log.describe(described).endswith(f"{text} -> 4  (reward 1)")


def test_no_completions_file_where_none_are_wanted(tmp_path: Path) -> None:
    log = CompletionsLog(tmp_path / "c.jsonl", num_groups=0, tokenizer=CharacterTokenizer(), first_step=0)
    log.log(1, [make_group(8, "4")])
    assert list(tmp_path.iterdir()) == []


# Summary and plot


@pytest.fixture
def metrics_path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, 0)
    tracker.log(0, {"eval/accuracy": 0.25})
    for step in range(1, 41):
        reward = math.nan if step == 20 else step / 40
        phases = {"time/train": 0.5, "time/generate": 1.0, "time/step": 1.2}
        tracker.log(step, {"reward": reward, "staleness/mean": 0.5, "staleness/max": step % 3, **phases})
    tracker.log(40, {"eval/accuracy": 0.75})
    return path


def test_summary_of_metrics(metrics_path: Path) -> None:
    summary = summarize_metrics(metrics_path)
    assert summary == {
        "steps": 40,
        "reward_start": pytest.approx(5.5 / 40),
        "reward_end": pytest.approx(35.5 / 40),
        "eval_accuracy_start": 0.25,
        "eval_accuracy_end": 0.75,
        "staleness_mean": 0.5,
        "staleness_max": 2.0,
        "time": {"generate": 40.0, "train": 20.0},
    }


def test_summary_is_written_whole_and_printed(
    metrics_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra = {"engine": "vllm", "seconds": 61, "files": {"adapter": tmp_path / "adapter"}}
    summary = summarize_metrics(metrics_path) | extra
    write_summary(tmp_path / "summary.json", summary)
    assert json.loads((tmp_path / "summary.json").read_text())["eval_accuracy_end"] == 0.75
    assert not list(tmp_path.glob("*.tmp"))
    print_summary(summary)
    printed = capsys.readouterr().out
    assert "40 in 1:01 on vllm" in printed
    assert "0.250 -> 0.750" in printed
    assert str(tmp_path / "adapter") in printed


def test_summary_of_an_empty_run_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_summary(summarize_metrics(tmp_path / "metrics.jsonl"))
    assert capsys.readouterr().out.split() == ["steps", "0"]


def test_plot_is_a_png(metrics_path: Path, tmp_path: Path) -> None:
    assert plot_rewards(metrics_path, tmp_path / "reward.png", "A run")
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_a_run_without_rewards_is_not_written(tmp_path: Path) -> None:
    log_path = tmp_path / "metrics.jsonl"
    JsonlTracker(log_path, 0).log(1, {"loss": 1.0})
    assert not plot_rewards(log_path, tmp_path / "reward.png", "SFT")
    assert not (tmp_path / "reward.png").exists()


def test_plot_of_losses_is_a_png(tmp_path: Path) -> None:
    for name, metrics in {
        "sft": {"loss": 1.0, "grad_norm": 0.1},
        "dpo": {"loss": 0.7, "rewards/accuracies": 0.5, "eval/rewards/accuracies": 0.6, "rewards/margins": 0.1},
        "steps": {"loss": 0.7, "rewards/accuracies": 0.5, "rewards/first_errors": 0.4},
        "ebft": {"loss": 0.0, "ebft/ce_loss": 1.0, "ebft/alignment": 0.1, "ebft/diversity": 0.1, "ebft/cfm_loss": 1.0},
    }.items():
        rows = [
            {"step": 0, "eval/loss": 2.0},
            *({"step": step, **metrics} for step in (1, 2)),
            {"step": 2, "eval/loss": 1},
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert plot_losses(tmp_path / "metrics.jsonl", tmp_path / f"{name}.png", name)
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_plot_of_a_run_without_losses_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert not plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "nothing")
    assert not (tmp_path / "loss.png").exists()


def test_plot_of_a_single_step(tmp_path: Path) -> None:
    JsonlTracker(tmp_path / "metrics.jsonl", 0).log(1, {"reward": 1.0})
    assert plot_rewards(tmp_path / "metrics.jsonl", tmp_path / "reward.png", "One step")


def test_smooth_is_a_centred_mean_that_keeps_constants() -> None:
    assert smooth(np.array([0.0, 3.0, 6.0, 3.0])).tolist() == [1.5, 3.0, 4.0, 4.5]
    assert smooth(np.full(100, 0.25)) == pytest.approx(np.full(100, 0.25))


def test_half_an_emoji_in_a_row_is_written_as_its_escape(tmp_path: Path) -> None:
    StepLog(tmp_path / "log.jsonl", 0).append(1, [{"prompt": [{"role": "user", "content": "x", "name": "\ud83d"}]}])
    assert b"\\ud83d" in (tmp_path / "log.jsonl").read_bytes()
    (row,) = read_rows(tmp_path / "log.jsonl")
    assert row["prompt"][0]["name"] == "\ud83d"


def test_half_an_emoji_does_not_cost_the_table() -> None:
    row = {"prompt": "\ud83d?", "completion": "\ud83d", "reward": 1.0, "rewards": {}, "advantage": 0.0}
    table = CompletionTable.of(1, [{**row, "num_tokens": 1, "status": "completed"}])
    assert table.rows[0][1:3] == ["\\ud83d?", "\\ud83d"]
    table.to_markdown().encode()


def test_trackers_are_told_that_a_run_has_failed() -> None:
    tracker = FakeTracker()
    trackers = Trackers([BackgroundTracker("fake", lambda: tracker)])
    trackers.close(failed=True)
    assert tracker.has_failed
