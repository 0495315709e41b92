"""The phases before a run's first step, on the terminal and in its summary."""

import io

import pytest

from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking.jsonl import show_beginning
from rlpipe.tracking.phases import Phases


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def test_each_phase_is_named_when_it_begins_and_timed_when_it_ends(clock: Clock, stream: io.StringIO) -> None:
    phases = Phases(clock)
    phases.show(TrackingConfig(progress="plain"), began=99.0, stream=stream)
    with phases.run() as start:
        with phases.phase("starting Ray"):
            clock.now += 3.0
        phases.begin("loading the learner")
        clock.now += 2.0
        phases.first_step()
    assert stream.getvalue().splitlines() == [
        "   1.0 s  starting Ray",
        "   4.0 s  starting Ray: took 3.0 s",
        "   4.0 s  loading the learner",
        "   6.0 s  loading the learner: took 2.0 s",
        "   6.0 s  first step, 6.0 s after the start",
    ]
    assert start.summary() == {"first_step_s": 6.0, "startup": {"starting Ray": 3.0, "loading the learner": 2.0}}


def test_a_run_within_another_has_phases_of_its_own(clock: Clock, stream: io.StringIO) -> None:
    phases = Phases(clock)
    phases.show(TrackingConfig(progress="plain"), stream=stream)
    with phases.run() as outer:
        phases.begin("warming up")
        with phases.run() as inner:
            phases.begin("loading the learner")
            clock.now += 1.0
            phases.first_step()
            assert phases.active() == {"warming up": 1.0}
        phases.end("warming up")
        clock.now += 1.0
        phases.first_step()
    assert inner.summary() == {"first_step_s": 1.0, "startup": {"loading the learner": 1.0}}
    assert outer.summary() == {"first_step_s": 2.0, "startup": {"warming up": 1.0}}


def test_nothing_is_shown_where_nothing_is_asked_for(clock: Clock, stream: io.StringIO) -> None:
    phases = Phases(clock)
    phases.show(TrackingConfig(progress="none"), stream=stream)
    with phases.run(), phases.phase("starting Ray"):
        pass
    assert stream.getvalue() == ""


def test_a_display_takes_the_lines_over(clock: Clock, stream: io.StringIO) -> None:
    phases, lines = Phases(clock), []
    phases.show(TrackingConfig(progress="live"), stream=stream)
    with phases.run():
        phases.hand_over(lines.append)
        phases.begin("loading engine rollout-0")
        clock.now += 2.0
        assert phases.describe() == "loading engine rollout-0 (2 s)"
        phases.end("loading engine rollout-0")
    assert lines == ["   0.0 s  loading engine rollout-0", "   2.0 s  loading engine rollout-0: took 2.0 s"]


def test_after_a_run_nothing_is_written_to_its_stream(clock: Clock, stream: io.StringIO) -> None:
    phases = Phases(clock)
    phases.show(TrackingConfig(progress="plain"), stream=stream)
    with phases.run():
        phases.begin("loading the learner")
    stream.close()
    with phases.run() as start, phases.phase("reading the data"):
        clock.now += 1.0
    assert phases.active() == {}
    assert start.seconds == {"reading the data": 1.0}


def test_a_run_that_never_began_leaves_nothing_to_the_next(clock: Clock, stream: io.StringIO) -> None:
    phases = Phases(clock)
    phases.show(TrackingConfig(progress="plain"), stream=stream)
    phases.hide()
    stream.close()
    clock.now += 5.0
    with phases.run() as start:
        phases.first_step()
    assert start.first_step_s == 0.0


def test_a_run_that_trained_nothing_has_no_start_in_its_summary(clock: Clock) -> None:
    with Phases(clock).run() as start:
        pass
    assert start.summary() == {}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("27+45=", "27+45="),
        ("a\nb\tc", "a\\nb\\tc"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\u202eabc", "\\u202eabc"),
        ("x" * 100, "x" * 80 + "…"),
        ("\n" * 100, "\\n" * 40 + "…"),
        ("日本", "日本"),
    ],
)
def test_what_a_model_wrote_can_not_steer_the_terminal(text: str, shown: str) -> None:
    assert show_beginning(text) == shown
