"""A run of a config from start to end: it starts the actors, trains, and shuts down in good order."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError

from rlpipe.actors.learner_setup import LearnerSetup
from rlpipe.actors.ray_internals import is_killed_on_stop
from rlpipe.actors.remote import get_remote, run_event_loop
from rlpipe.algorithms.plugins import record_code
from rlpipe.common import run_files
from rlpipe.common.signals import ONE_SIGNAL_S
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import open_run_prompts
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.data.render_rows import forward_logs
from rlpipe.errors import EngineFailed, Interrupted, LedgerLost, RunError, Unhealthy
from rlpipe.learner.checkpoint_files import list_checkpoints
from rlpipe.learner.workload import read_workload
from rlpipe.models.adapter import without_learner
from rlpipe.models.gguf_models import describe_gguf
from rlpipe.preload import preloading
from rlpipe.replay.store import ResumeState
from rlpipe.rollout.engine import resolve_engine
from rlpipe.run import precision, workers
from rlpipe.run.cluster import ResourceRequest, connect, end_actors, placement_groups, release_placement_groups
from rlpipe.run.controller import Controller
from rlpipe.run.engine_pool import EnginePool
from rlpipe.run.evaluation import Evaluator
from rlpipe.run.learner_group import end_learner, start_learner
from rlpipe.run.monitor import RunMonitor, watch_hosts
from rlpipe.run.prepare import (
    ResumePoint,
    RewardLike,
    Run,
    check_adapter_targets,
    check_base,
    check_context,
    check_evaluation,
    check_reward_columns,
    ended_summary,
    open_output,
    prepare_run,
    read_resume_point,
    refuse_if_held,
    run_start,
    set_others_aside,
)
from rlpipe.run.reporting import Reporter, cut_notice
from rlpipe.run.scoring_pools import GroupIds, ScoringDispatch
from rlpipe.run.workers import Workers
from rlpipe.scoring.scorer import GroupScores
from rlpipe.tracking.health import HealthFinding, HealthWatch
from rlpipe.tracking.jsonl import MAX_HELD_OUT, CompletionsLog, StepLog, num_steps_logged, read_rows
from rlpipe.tracking.outcome import recorded_outcome
from rlpipe.tracking.phases import PHASES, Start
from rlpipe.tracking.plot import plot_losses, plot_rewards
from rlpipe.tracking.progress import open_progress, print_summary, summarize_metrics, write_summary
from rlpipe.tracking.trackers import open_trackers
from rlpipe.types import Prompt

logger = logging.getLogger(__name__)
DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
HOOK_DRAIN_S = 10.0
"""Time that ``scoring.on_rollouts_scored`` has at the end of a run, in seconds."""
KILLED_ON_STOP = (
    "`ray job stop` would kill this run 3 seconds after its signal, before the checkpoint is written: submit it with "
    """--runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "1800"}}'"""
)
Result = TypeVar("Result")


def train(config: Config, rewards: Sequence[RewardLike] = ()) -> dict[str, Any]:
    """Train according to the config, and return the content of ``summary.json``.

    ``rewards`` are reward functions or ``RewardActor`` classes in addition to those of the config, each with weight 1
    under its ``__name__``. A run that has ended is left as it is. Raises ``InputError`` if the input is wrong,
    ``RunError`` if the run fails.
    """
    with PHASES.run() as phases:
        return _train(config, rewards, phases)


def _train(config: Config, rewards: Sequence[RewardLike], phases: Start) -> dict[str, Any]:
    started = time.monotonic()
    config = replace(config, algorithm=record_code(config.algorithm))
    refuse_if_held(config)
    start = read_resume_point(config)
    if (ended := ended_summary(config, start)) is not None:
        print(
            f"this run has ended after {start.step} steps, and nothing is left to do; to train further, increase "
            f"algorithm.num_steps, and for a new run choose another output than {config.output}"
        )
        print_summary({**ended, "files": {"policy": f"{config.output}/{run_files.POLICY}"}})
        return ended
    run = prepare_run(config, rewards)
    check_base(run)
    with open_output(run, start) as start, recorded_outcome(run.output):
        try:
            figures = _train_rl_with_copies(run, start) if config.algorithm.kind == "rl" else train_sft(run, start)
            metrics = run.output / run_files.METRICS
            seconds = round(time.monotonic() - started, 3)
            summary = {**summarize_metrics(metrics), **figures, **phases.summary(), "seconds": seconds}
            write_summary(run.output / run_files.SUMMARY, summary)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            raise RunError(
                f"{run.output} can't be written: {error}; {config.resume_command} continues once there is space"
            ) from None
    files = {"policy": run.output / run_files.POLICY}
    for name, plot in ((run_files.REWARD_PLOT, plot_rewards), (run_files.LOSS_PLOT, plot_losses)):
        if plot(metrics, run.output / name, config.name):
            files["plot"] = run.output / name
            break
    print_summary({**summary, "files": files})
    return summary


def _train_rl_with_copies(run: Run, start: ResumePoint) -> dict[str, Any]:
    """Run ``train_rl``; if the ledger is lost with its machine, run it again from the copy in the last checkpoint."""
    while True:
        try:
            return train_rl(run, start)
        except LedgerLost as loss:
            has_checkpoint = bool(list_checkpoints(run.output / run_files.CHECKPOINTS))
            resume = "auto" if has_checkpoint or run.config.resume == "never" else run.config.resume
            resume_point = read_resume_point(replace(run.config, resume=resume))
            start = replace(resume_point, messages=[f"{loss}; everything after the last checkpoint is lost"])


def train_rl(run: Run, start: ResumePoint) -> dict[str, Any]:
    """Train by reinforcement learning, and return the figures of the summary that are not in the metrics."""
    config = run.config
    notes: list[str] = []
    with PHASES.phase("reading the data"), forward_logs(notes.append, warnings=False):
        tokenizer = load_tokenizer(run.model)
        prompts, held_out = open_run_prompts(config, run.model, tokenizer)
    check_adapter_targets(run)
    check_context(run)
    check_reward_columns(run, [*held_out[:1], *prompts.examples()])
    engine = resolve_engine(config.rollout)
    needs = [*workers.generation_needs(config, run.rewards), *workers.learner_needs(config)]
    engines = workers.engine_needs(config)
    policy_needs = [*([] if config.rollout.dtype else engines), *workers.learner_needs(config)]
    with ExitStack() as stack:
        owns_cluster = stack.enter_context(_cluster(config, needs))
        # The ledger is opened before the models are loaded, because loading large ones takes minutes.
        stack.enter_context(workers.open_hook(run))
        replay = workers.start_replay(run)
        resume_state = _read_ledger(run, start, replay, num_rows=prompts.num_rows)
        # The ledger keeps the dtype that the user wrote: a run that resumes from it alone may settle on another type.
        ask = precision.ask_cluster(config.cluster, is_own=owns_cluster)
        run, types = precision.resolve_dtype(run, policy_needs, ask, begun=start.dtype)
        types += precision.engine_type_lines(run, engines, ask)
        run, served = precision.resolve_serving(run)
        run_workers = stack.enter_context(workers.open_workers(run, replay, cluster_is_own=owns_cluster))
        weights = workers.start_weights(config, run_workers.engines)
        start = set_others_aside(run.output, start)
        reporter = stack.enter_context(_reporter(run, start))
        for message in (*notes, *resume_state.messages, *types, *served):
            reporter.message(message)
        if notice := cut_notice(config.rollout.sampling):
            reporter.message(notice)
        setup = _learner_setup(run, start, replay, weights)

        async def run_controller() -> None:
            controller = Controller(
                run_workers,
                config,
                replay=replay,
                weights=weights,
                prompts=prompts,
                evaluator=_evaluator(run, held_out),
                reporter=reporter,
                resume_state=resume_state,
                first_step=start.step,
                num_steps_logged=num_steps_logged(run.output / run_files.METRICS, start.step),
            )
            reporter.found = keep_findings(replay, controller.stop)
            with stop_on_signals(controller.stop, config.resume_command):
                await controller.run(partial(start_learner, config, setup))

        _run(run_controller())
        _drain_hook(config, replay)
    return {
        "engine": engine,
        "tokens_per_second": reporter.tokens_per_second,
        "max_logprob_difference": reporter.max_logprob_difference,
        **({"adapter": str(run.output / run_files.POLICY)} if config.model.adapter.kind != "none" else {}),
    }


def train_sft(run: Run, start: ResumePoint) -> dict[str, Any]:
    """Train by supervised fine-tuning on the same learner group, without engines."""
    config = run.config
    needs = workers.learner_needs(config)
    with ExitStack() as stack:
        owns_cluster = stack.enter_context(_cluster(config, needs))
        ask = precision.ask_cluster(config.cluster, is_own=owns_cluster)
        run, types = precision.resolve_dtype(run, needs, ask, begun=start.dtype)
        with PHASES.phase("reading the data"):
            batches = workers.start_dataset(run, start)
        start = set_others_aside(run.output, start)
        reporter = stack.enter_context(_reporter(run, start))
        for message in types:
            reporter.message(message)
        setup = _learner_setup(run, start, batches, None)

        async def run_learner() -> None:
            monitor = RunMonitor(
                "dataset",
                batches,
                config.cluster,
                report=reporter.trained,
                show_message=reporter.message,
                first_step=start.step,
                # The health rules find again what they found in steps that are trained again; all else did happen.
                events=StepLog(run.output / run_files.EVENTS, start.step, repeated="health"),
            )
            stopped: list[RunError] = []

            async def stop(reason: RunError) -> None:
                stopped.append(reason)
                reporter.message(f"stopping after this step, with a checkpoint: {reason}")
                await monitor.stop_learner()

            reporter.found = keep_findings(batches, stop)
            async with asyncio.TaskGroup() as tasks:
                watching = [monitor.follow(), monitor.watch(), monitor.record_parts(run.output)]
                watching.append(watch_hosts(reporter.message, config))
                endless = [tasks.create_task(watch) for watch in watching]
                with stop_on_signals(stop, config.resume_command):
                    await start_learner(config, setup)
                    # With stop_loss, ranks that resume after the last step train none.
                    trains = config.algorithm.stop_loss is None or monitor.has_steps
                    if start.step < config.algorithm.num_steps and trains and not stopped:
                        with suppress(TimeoutError):  # ranks that resumed after the last step report none
                            async with asyncio.timeout(config.cluster.call_timeout_s):
                                await monitor.ended.wait()
                for task in endless:
                    task.cancel()
            if stopped:
                raise stopped[0]

        _run(run_learner())
    return {"tokens_per_second": reporter.tokens_per_second}


def keep_findings(batches: ActorHandle, stop: Callable[[RunError], Awaitable[None]]) -> Callable[[HealthFinding], None]:
    """Return a function that records what health rules find as events, and stops the run if they say so."""
    stopping: list[asyncio.Future[None]] = []

    def keep(finding: HealthFinding) -> None:
        batches.note.remote("health", finding.rule, finding.message)  # the terminal shows events
        if finding.stops:
            reason = Unhealthy(
                f"health.{finding.rule}.stop was reached; change it, or set it to null, to continue from the checkpoint"
            )
            stopping.append(asyncio.ensure_future(stop(reason)))

    return keep


def evaluate(config: Config, *, adapter: str | None = None, rewards: Sequence[RewardLike] = ()) -> dict[str, float]:
    """Return the held-out metrics of the config's policy, or of that policy with the PEFT adapter in a folder."""
    features = replace(config.algorithm.ebft.features, weights="own")
    algorithm = replace(config.algorithm, ebft=replace(config.algorithm.ebft, features=features))
    model = replace(without_learner(config.model, adapter), dtype=config.engine_dtype)
    config = replace(config, model=model, algorithm=algorithm)
    run = prepare_run(config, rewards)
    tokenizer = load_tokenizer(run.model)
    _, held_out = open_run_prompts(config, run.model, tokenizer)
    check_evaluation(run, held_out)
    check_context(run)
    with _cluster(config, workers.generation_needs(config, run.rewards)) as owns_cluster:
        ask = precision.ask_cluster(config.cluster, is_own=owns_cluster)
        run, types = precision.resolve_dtype(run, workers.engine_needs(config), ask)
        for message in types:
            print(message, file=sys.stderr)
        run = precision.resolve_serving_alone(run)
        with workers.open_workers(run, cluster_is_own=owns_cluster) as run_workers:
            return _run(_evaluate_once(run, run_workers, held_out))


def _drain_hook(config: Config, replay: ActorHandle) -> None:
    """Wait up to ``HOOK_DRAIN_S`` for the hook to process the groups of the last steps."""
    if config.scoring.on_rollouts_scored is not None:
        with suppress(GetTimeoutError, RayActorError):
            ray.get(replay.drain_hook.remote(HOOK_DRAIN_S), timeout=2 * HOOK_DRAIN_S)


async def _evaluate_once(run: Run, run_workers: Workers, prompts: Sequence[Prompt]) -> dict[str, float]:
    evaluator = _evaluator(run, prompts)

    async def keep(groups: ObjectRef, group_ids: GroupIds) -> None:
        await evaluator.fetch(groups, group_ids, run.config.cluster.call_timeout_s)

    async def end(failure: EngineFailed) -> None:
        raise failure

    async def version_on_disk(name: str) -> int:
        return 0

    async def deliver(groups: ObjectRef, group_ids: GroupIds, scores: Sequence[Sequence[GroupScores]]) -> None:
        evaluator.scored(group_ids.values(), scores)

    flow = ScoringDispatch(
        run_workers.pools, generated=keep, stored=evaluator.kept, scored=deliver, num_generating=lambda: pool.num_groups
    )
    pool = EnginePool(
        run_workers.engines,
        cluster=run.config.cluster,
        start=run_workers.start_engine,
        load_newest=version_on_disk,
        collected=flow.collected,
        notice=lambda subject, message, kind="engine": logger.warning(message),
        give_up=end,
        episodes=run_workers.episodes,
    )
    requests, result = evaluator.start(version=0)
    async with asyncio.TaskGroup() as tasks:
        await run_workers.start(run.config.cluster.start_timeout_s)
        serving = tasks.create_task(pool.run())
        for name in run_workers.engines:
            pool.loaded(name, 0)
        pool.dispatch(requests)
        await result
        serving.cancel()
    return result.result().metrics


def _read_ledger(run: Run, start: ResumePoint, replay: ActorHandle, *, num_rows: int | None) -> ResumeState:
    """Make the replay actor open the ledger at the resume point, and return the state of the ledger."""
    cluster = run.config.cluster
    resume_state: ResumeState = get_remote(
        replay.start.remote(replace(run_start(run.config, start), num_rows=num_rows)),
        "the replay actor to open the ledger",
        within=cluster.start_timeout_s,
        option="cluster.start_timeout_s",
    )
    return resume_state


def _evaluator(run: Run, prompts: Sequence[Prompt]) -> Evaluator:
    return Evaluator(
        prompts,
        rewards=run.rewards,
        held_out=run.config.data.held_out,
        max_tokens=run.config.rollout.sampling.max_tokens,
    )


def _learner_setup(run: Run, start: ResumePoint, batches: ActorHandle, weights: ActorHandle | None) -> LearnerSetup:
    config = run.config
    return LearnerSetup(
        model=run.model,
        algorithm=config.algorithm,
        learner=config.learner,
        workload=read_workload(config),
        sampling=config.rollout.sampling,
        served_dtype=config.rollout.dtype,
        weights=config.weights,
        checkpoint=config.checkpoint,
        output=run.output,
        seed=config.seed,
        evaluate_every=config.data.held_out.every_steps,
        resume_from=start.checkpoint,
        resolved_config=to_tree(config),
        batches=batches,
        weights_actor=weights,
        call_timeout_s=config.cluster.call_timeout_s,
        start_timeout_s=config.cluster.start_timeout_s,
        step_timeout_s=config.cluster.step_timeout_s,
    )


def _run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run the event loop; of several errors, raise only the first."""
    try:
        return run_event_loop(main)
    except BaseExceptionGroup as group:
        error = _first_error(group)
    except RayActorError as death:
        error = death
    if isinstance(error, RayActorError):
        raise RunError(f"an actor of the run died: {error}") from None
    raise error


def _first_error(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextmanager
def _cluster(config: Config, needs: Sequence[ResourceRequest]) -> Iterator[bool]:
    """Join or start a cluster that the run fits on, and yield whether it was started; end the run's actors at exit."""
    joined = ray.is_initialized()
    actors_before = set(ray.util.list_named_actors()) if joined else set()
    placements_before = placement_groups() if joined else set()
    preloading.begin(config)
    try:
        with PHASES.phase("joining Ray" if joined or config.cluster.address else "starting Ray"):
            owns_cluster = connect(config.cluster, needs)
        yield owns_cluster
    finally:
        end_learner()
        if joined:
            end_actors(actors_before)
            release_placement_groups(placement_groups() - placements_before)
        else:
            ray.shutdown()
            preloading.end()


@contextmanager
def _reporter(run: Run, start: ResumePoint) -> Iterator[Reporter]:
    config = run.config
    tracker = open_trackers(
        config.tracking,
        output=run.output,
        run_name=config.name,
        first_step=start.step + 1 if start.checkpoint else 0,
        resolved_config=to_tree(config),
    )
    log, num_logged = partial(CompletionsLog, tokenizer=load_tokenizer(run.model)), config.tracking.log_completions
    completions = log(run.output / run_files.COMPLETIONS, num_groups=num_logged, first_step=start.step + 1)
    num_held_out = MAX_HELD_OUT if num_logged else 0  # the version that a run begins with is evaluated again
    evaluations = log(run.output / run_files.EVALUATIONS, num_groups=num_held_out, first_step=start.step)
    health = HealthWatch(config, read_rows(run.output / run_files.METRICS))
    reporter = Reporter(tracker, open_progress(config.tracking, run_name=config.name), completions, evaluations, health)
    reporter.start(config.algorithm.num_steps, start.step)
    further = (describe_gguf(config.model.path), KILLED_ON_STOP if is_killed_on_stop() else None)
    for message in (*start.messages, *(text for text in further if text is not None)):
        reporter.message(message)
    with reporter:
        yield reporter


STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(stop: Callable[[RunError], Awaitable[None]], again: str) -> Iterator[None]:
    """Call ``stop`` at the first signal within the block, and end the process at the second.

    ``again`` is the command that continues, in words.

    ``timeout`` and batch systems signal both the process and its group, which is one signal here. Needs a running
    event loop. In threads other than the main one, which can't receive signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Future[None]] = []
    received_at: float | None = None

    def receive(number: signal.Signals) -> None:
        nonlocal received_at
        before, received_at = received_at, time.monotonic()
        if before is not None and received_at - before < ONE_SIGNAL_S:
            return
        if stopping:
            # Skip Python's shutdown, in which a thread that waits in Ray may crash; Ray ends the driver's processes.
            print("rlpipe: interrupted", file=sys.stderr, flush=True)
            os._exit(Interrupted.exit_code)
        reason = Interrupted(f"stopped by {number.name}; {again} continues from the checkpoint")
        stopping.append(asyncio.ensure_future(stop(reason)))

    earlier = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
