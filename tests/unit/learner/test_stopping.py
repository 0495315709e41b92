"""Tests that supervised fine-tuning stops at a mean loss, not at a lucky step."""

import json
import math

from rlpipe.learner.step import WINDOW, LossTarget


def steps_until_reached(target: LossTarget, losses: list[float]) -> int | None:
    return next((step for step, loss in enumerate(losses, start=1) if target.reached(loss)), None)


def test_a_single_good_step_does_not_stop_the_run() -> None:
    assert steps_until_reached(LossTarget(0.5), [1.0] * 20 + [0.0] + [1.0] * 20) is None


def test_the_mean_of_the_window_stops_the_run() -> None:
    assert steps_until_reached(LossTarget(0.5), [1.0] * 20 + [0.1] * 20) == 20 + 6
    assert steps_until_reached(LossTarget(0.5), [0.1] * 20) == WINDOW


def test_the_window_outlives_a_restart() -> None:
    target, again = LossTarget(0.5), LossTarget(0.5)
    assert steps_until_reached(target, [math.nan] + [0.1] * 5) is None
    again.restore(json.loads(json.dumps(target.losses)))
    rest = [0.1] * 20
    assert steps_until_reached(again, rest) == steps_until_reached(target, rest) == 5
    after = LossTarget(0.5)
    after.restore(again.losses)
    assert after.is_met
    assert not LossTarget(0.5).is_met


def test_without_a_target_nothing_stops() -> None:
    assert steps_until_reached(LossTarget(None), [0.0] * 30) is None


def test_a_loss_that_is_not_finite_does_not_stop_the_run() -> None:
    assert steps_until_reached(LossTarget(0.5), [math.nan] + [0.1] * (WINDOW - 1)) is None
