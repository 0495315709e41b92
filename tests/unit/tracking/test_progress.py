"""The progress displays: the times of their output, and its content."""

from __future__ import annotations

import io
import logging
import math
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking import metric_text
from rlpipe.tracking.metric_text import RunProgress, format_duration, format_number
from rlpipe.tracking.progress import LiveProgress, NoProgress, PlainProgress, open_progress

METRICS = {
    "reward": 0.5,
    "completions/mean_length": 5.93,
    "staleness/mean": 0.9,
    "tokens_per_second": 12345.6,
    "time/generate": 0.8,
    "time/train": 0.25,
    "time/step": 1.0,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_plain(total: int, seconds_per_step: float, done: int = 0, **metrics: float) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock)
    progress.start(total, done)
    for step in range(done + 1, total + 1):
        clock.now += seconds_per_step
        progress.update(step, {**METRICS, **metrics})
    progress.close()
    return stream.getvalue().splitlines()


def steps_of(lines: list[str]) -> list[int]:
    return [int(line.split("/")[0].removeprefix("step ")) for line in lines]


def test_plain_line_says_everything() -> None:
    assert run_plain(3, 2.0)[1] == (
        "step 2/3  reward 0.500  length 5.9  staleness 0.9  tokens/s 12,346  s/step 2.00  "
        "time generate 0.80, train 0.25  ETA 0:02"
    )


def test_plain_short_runs_print_every_step() -> None:
    assert steps_of(run_plain(20, 0.1)) == list(range(1, 21))


def test_plain_fast_long_runs_print_some_steps_and_the_last() -> None:
    steps = steps_of(run_plain(1001, 0.1))
    assert steps[:20] == list(range(1, 21))
    assert steps[-1] == 1001
    assert len(steps) < 80
    assert max(b - a for a, b in pairwise(steps)) <= 21


def test_plain_slow_runs_print_every_step() -> None:
    assert len(run_plain(1000, 11.0)) == 1000


def test_plain_never_silent_for_long() -> None:
    steps = steps_of(run_plain(100_000 // 50, 4.0))
    assert max(b - a for a, b in pairwise(steps)) == 3


def test_plain_prints_the_first_steps_after_a_resume() -> None:
    assert steps_of(run_plain(1000, 0.1, done=901))[:20] == list(range(902, 922))


def test_plain_evaluation_is_printed_at_once() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, Clock())
    progress.start(1000)
    for step in range(24):
        progress.update(step, METRICS)
    before = stream.getvalue()
    progress.update(23, {"eval/accuracy": 0.71})
    assert "accuracy 0.710" in stream.getvalue().removeprefix(before)
    progress.update(23, {"eval/loss": 1.25})
    assert "held-out loss 1.250" in stream.getvalue().splitlines()[-1]
    progress.message("a message [with brackets]")
    assert stream.getvalue().endswith("a message [with brackets]\n")


def test_loss_is_shown_for_sft() -> None:
    stream = io.StringIO()
    progress = PlainProgress(stream, Clock())
    progress.start(10)
    progress.update(1, {"loss": 2.345678})
    assert stream.getvalue() == "step 1/10  loss 2.346  ETA -:--\n"


def test_eta_follows_the_recent_pace_without_the_first_step() -> None:
    clock = Clock()
    view = RunProgress(clock)
    view.start(total=101, done=0)
    clock.now += 60  # compiling
    view.update(1, {})
    assert view.eta_s is None
    for step in range(2, 52):
        clock.now += 2.0
        view.update(step, {})
    assert view.eta_s == pytest.approx(50 * 2.0)
    clock.now += 1.0
    assert view.eta_s == pytest.approx(99.0)
    assert view.elapsed_s == pytest.approx(161.0)


def test_eta_stands_still_during_an_outage() -> None:
    clock = Clock()
    view = RunProgress(clock)
    view.start(total=1000, done=0)
    for step in range(1, 41):
        clock.now += 2.0
        view.update(step, {})
    clock.now += 600.0
    assert view.eta_s == pytest.approx(959 * 2.0)


@pytest.mark.parametrize("steps_since", [1, 5, 10, 19])
def test_eta_does_not_take_an_outage_for_the_pace(steps_since: int) -> None:
    clock = Clock()
    view = RunProgress(clock)
    view.start(total=1000, done=0)
    for step in range(1, 41):
        clock.now += 200.0 if step == 41 - steps_since else 2.0
        view.update(step, {})
    assert view.eta_s == pytest.approx(960 * 2.0)


def test_eta_counts_steps_that_end_in_bursts_with_the_pauses_between() -> None:
    clock = Clock()
    view = RunProgress(clock)
    view.start(total=1000, done=0)
    for step in range(1, 41):
        clock.now += 5.8 if step % 3 == 0 else 0.1
        view.update(step, {})
    assert view.eta_s == pytest.approx(960 * 2.0, rel=0.25)


def test_second_update_of_a_step_is_not_a_step() -> None:
    clock = Clock()
    view = RunProgress(clock)
    view.start(total=10, done=0)
    for step in (1, 2, 3):
        clock.now += 1.0
        view.update(step, {"reward": float(step)})
        clock.now += 1.0
        view.update(step, {"eval/accuracy": 0.5})
    assert view.step_s == pytest.approx(2.0)
    assert len(view.sparkline()) == 3


def test_old_accuracy_says_its_step() -> None:
    view = RunProgress(Clock())
    view.start(total=10, done=0)
    view.update(1, {"eval/accuracy": 0.5})
    assert view.figures() == [("accuracy", "0.500")]
    view.update(2, {})
    assert ("accuracy", "0.500 (step 1)") in view.figures()


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 1.0], [0.0, math.nan, 1.0]])
def test_sparkline_bears_constant_and_missing_rewards(rewards: list[float]) -> None:
    view = RunProgress(Clock())
    view.start(total=10, done=0)
    for step, reward in enumerate(rewards, start=1):
        view.update(step, {"reward": reward})
    assert view.sparkline() in ("▁▁▁", "▁█")


def test_live_display_shows_the_run() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    progress = LiveProgress(console, "quickstart", Clock())
    progress.start(60)
    progress.update(0, {"eval/accuracy": 0.4})
    for step in range(1, 31):
        progress.update(step, METRICS)
    progress.message("a message [with brackets]")
    progress.message("ratios 2:100:1")
    progress.close()
    screen = Console(file=io.StringIO(), width=120)
    screen.print(progress.render())
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    for part in ("quickstart", "30/60", "reward 0.500", "tokens/s 12,346", "accuracy 0.400 (step 0)", "train 0.25 s"):
        assert part in text
    assert "a message [with brackets]" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "ratios 2:100:1" in console.file.getvalue()  # type: ignore[attr-defined]  # no emoji
    assert "\x1b[?25h" in console.file.getvalue()  # type: ignore[attr-defined]  # the cursor is back


@pytest.mark.parametrize(
    ("kind", "stream", "expected"),
    [
        ("auto", io.StringIO(), PlainProgress),
        ("auto", Terminal(), LiveProgress),
        ("live", io.StringIO(), LiveProgress),
        ("plain", Terminal(), PlainProgress),
        ("none", Terminal(), NoProgress),
    ],
)
def test_display_fits_the_stream(
    kind: str, stream: io.StringIO, expected: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    progress = open_progress(TrackingConfig(progress=kind), run_name="run", stream=stream)
    assert type(progress) is expected


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_progress(TrackingConfig(), run_name="run", stream=Terminal())) is PlainProgress


def test_no_progress_logs_its_messages(caplog: pytest.LogCaptureFixture) -> None:
    progress = NoProgress()
    progress.start(3)
    progress.update(1, METRICS)
    with caplog.at_level(logging.INFO):
        progress.message("hf is used")
    progress.close()
    assert "hf is used" in caplog.text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-:--"), (0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (0.5, "0.500"), (-12.3456, "-12.346"), (0.00012345, "0.000123"), (12345, "1.23e+04")],
)
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_step_that_ends_while_the_display_is_drawn_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunProgress(Clock())
    state.update(1, METRICS)

    def reward_of(metric: str) -> None:
        state.update(2, {f"new/{metric}": 1.0})  # as the event loop does in the midst of what another thread draws

    monkeypatch.setattr(metric_text, "reward_of", reward_of)
    assert ("reward", "0.500") in state.figures()
