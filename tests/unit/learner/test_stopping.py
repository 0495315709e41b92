"""Tests that supervised fine-tuning stops at a mean loss, not at a lucky step."""

import math

from rlpipe.learner.step import WINDOW, LossTarget


def steps_until_reached(target: LossTarget, losses: list[float]) -> int | None:
    return next((step for step, loss in enumerate(losses, start=1) if target.reached(loss)), None)


def test_a_single_good_step_does_not_stop_the_run() -> None:
    assert steps_until_reached(LossTarget(0.5), [1.0] * 20 + [0.0] + [1.0] * 20) is None


def test_the_mean_of_the_window_stops_the_run() -> None:
    assert steps_until_reached(LossTarget(0.5), [1.0] * 20 + [0.1] * 20) == 20 + 6
    assert steps_until_reached(LossTarget(0.5), [0.1] * 20) == WINDOW


def test_without_a_target_nothing_stops() -> None:
    assert steps_until_reached(LossTarget(None), [0.0] * 30) is None


def test_a_loss_that_is_not_finite_does_not_stop_the_run() -> None:
    assert steps_until_reached(LossTarget(0.5), [math.nan] + [0.1] * (WINDOW - 1)) is None
