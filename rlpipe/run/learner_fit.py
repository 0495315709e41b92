"""Execution of the learner group by Ray Train, whose errors become rlpipe's own."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError

from rlpipe.actors.learner_setup import LearnerSetup
from rlpipe.actors.remote import describe_failure, get_answer
from rlpipe.actors.trainer import make_trainer
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import LearnerFailed, RlpipeError
from rlpipe.preload import preloading
from rlpipe.run import launch
from rlpipe.run.cluster import no_room, placement_groups, release_placement_groups

Started = Callable[[ActorHandle], None]


def fit(config: Config, setup: LearnerSetup, *, is_over: Event, started: Started) -> Exception | None:
    """Run the group until it ends, and return its error, or None; ``started`` is called with each controller."""
    try:
        _fit_until_over(config, setup, is_over, started)
    except WorkerGroupError as failure:
        return _learner_error(failure)
    except ControllerError as failure:
        return _controller_error(config, failure)
    except RlpipeError as failure:
        return failure
    except Exception as failure:  # noqa: BLE001 - the thread's boundary; raised again where it is awaited
        return LearnerFailed(f"the learner group failed: {failure}")
    return None


def _fit_until_over(config: Config, setup: LearnerSetup, is_over: Event, started: Started) -> None:
    others = placement_groups()
    while not is_over.is_set():
        trainer = make_trainer(
            setup,
            config.name,
            schedule_timeout_s=config.cluster.schedule_timeout_s,
            started=started,
            controller_variables=preloading.stage_variables("torch"),
            rank_variables=preloading.stage_variables("learner"),
        )
        try:
            trainer.fit()
        except ControllerError as failure:
            if not isinstance(failure.controller_failure, WorkerGroupStartupFailedError):
                raise
            cause = f"a rank did not start: {describe_failure(failure)}"
        except RayActorError as death:
            cause = f"Ray Train's controller: {describe_failure(death)}"
        else:
            return
        if is_over.is_set():
            return
        get_answer(
            setup.batches.learner_died.remote(cause),
            "the death of the learner group to be noted",
            within=config.cluster.call_timeout_s,
            option="cluster.call_timeout_s",
        )
        release_placement_groups(placement_groups() - others)


def _learner_error(failure: WorkerGroupError) -> RlpipeError:
    """Return rlpipe's own error among those of the ranks, or else a ``LearnerFailed`` with the tracebacks."""
    for error in failure.worker_failures.values():
        cause = getattr(error, "cause", error)
        if isinstance(cause, RlpipeError):
            return cause
    return LearnerFailed(f"the learner group failed: {failure}")


def _controller_error(config: Config, failure: ControllerError) -> RlpipeError:
    if isinstance(failure.controller_failure, WorkerGroupStartupTimeoutError):
        asked = {need.name: need.asked for need in launch.learner_needs(config)}
        return no_room(asked, config.cluster.schedule_timeout_s)
    return LearnerFailed(f"the learner group failed: {failure}")
