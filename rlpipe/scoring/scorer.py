"""Scoring of finished groups: calls their rewards, checks the values, and writes the result into the rollouts."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.errors import RewardFailed
from rlpipe.scoring.processes import MemoryLimit, ProcessSnapshot, lift_memory_limit
from rlpipe.scoring.rewards import (
    HIDDEN_COLUMNS,
    TASK_COLUMN,
    Reward,
    RewardActor,
    RewardFunction,
    Signature,
    Tokenizer,
    check_reward,
    decode_completions,
    ignore_extra,
    load_reward,
    read_signature,
    runs_code_of_models,
)
from rlpipe.scoring.sandbox.sandbox import Sandbox, SandboxFailed
from rlpipe.scoring.validation import check_scores, describe_exception, is_lack_of_memory
from rlpipe.types import NO_VERSION, ChatMessages, Rollout, RolloutGroup, RolloutStatus

if TYPE_CHECKING:
    from rlpipe.scoring.engine_chat import Chat

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class GroupScores:
    """Results of some of the rewards for one group; each reward is in ``scores`` or in ``failures``."""

    group_id: int
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    """One value per rollout, by reward."""
    failures: dict[str, str] = field(default_factory=dict)
    """Reason of failure, by failed reward."""
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the values that the functions gave to ``log_metric``."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerState:
    """Part of transformers' ``TrainerState`` that reward functions use to change with the progress of training."""

    global_step: int
    """Newest policy version that sampled the group."""
    max_steps: int
    epoch: float


class _RewardCall:
    """Arguments for the rewards of one group, made once for all of them, and their results.

    Episodes that failed are left out: they may have said nothing, and get rewards of 0 whatever a function returns.
    """

    def __init__(self, group: RolloutGroup, tokenizer: Tokenizer, num_steps: int) -> None:
        self._scored = [index for index, rollout in enumerate(group) if rollout.status is not RolloutStatus.FAILED]
        self._num_rollouts = len(group)
        self.group = group = replace(group, rollouts=[group.rollouts[index] for index in self._scored])
        self.result = GroupScores(group_id=group.group_id)
        self.ran_out: set[str] = set()
        """Rewards that failed for lack of memory."""
        self._logged: dict[str, list[float]] = defaultdict(list)
        texts = decode_completions(tokenizer, group)
        chat = group.prompt.is_chat
        self.columns = sorted(set(group.prompt.task) - HIDDEN_COLUMNS)
        self.arguments: dict[str, Any] = {name: [group.prompt.task[name]] * len(group) for name in self.columns}
        self.arguments |= {
            "prompts": [group.prompt.prompt] * len(group),
            "completions": [_messages(rollout, text) for rollout, text in zip(group, texts, strict=True)]
            if chat
            else texts,
            "completion_ids": [rollout.completion_ids.tolist() for rollout in group],
            "rollouts": group.rollouts,
            "trainer_state": _trainer_state(group, num_steps),
            "log_extra": ignore_extra,
            "log_metric": self.log_metric,
        }

    def log_metric(self, name: str, value: float) -> None:
        number = float(value)  # before the name is kept
        if math.isfinite(number):  # one other value would make the whole step's mean unknown
            self._logged[str(name)].append(number)

    def fail(self, name: str, error: BaseException) -> None:
        self.result.scores.pop(name, None)
        self.result.failures[name] = str(error) if isinstance(error, SandboxFailed) else describe_exception(error)
        if is_lack_of_memory(error):
            self.ran_out.add(name)

    def finish(self) -> GroupScores:
        self.result.metrics = {name: sum(values) / len(values) for name, values in self._logged.items()}
        if len(self.group) < self._num_rollouts:
            for name, values in self.result.scores.items():
                by_index = dict(zip(self._scored, values, strict=True))
                self.result.scores[name] = [by_index.get(index) for index in range(self._num_rollouts)]
        return self.result


def _messages(rollout: Rollout, text: str) -> ChatMessages:
    return [{"role": "assistant", "content": text}] if rollout.episode is None else rollout.episode.messages


def _trainer_state(group: RolloutGroup, num_steps: int) -> TrainerState:
    newest = max((rollout.newest_version for rollout in group), default=NO_VERSION)
    return TrainerState(global_step=max(newest, 0), max_steps=num_steps, epoch=float(group.prompt.epoch))


class _Reward(Protocol):
    in_process: bool
    """Whether the reward's code runs in this process, where it may leave timers, handlers or children."""
    together: Callable[[Sequence[RolloutGroup]], Any] | None
    """Function that scores several groups together, if the reward has one."""

    def __call__(self, call: _RewardCall) -> Any: ...


class _FunctionReward:
    """Reward function, called by keyword with the arguments that its signature accepts."""

    in_process = True
    together: Callable[[Sequence[RolloutGroup]], Any] | None = None

    def __init__(self, function: RewardFunction, kwargs: Mapping[str, Any], source: str) -> None:
        self._function = function
        self._kwargs = dict(kwargs)
        self._signature: Signature = read_signature(function, source)

    def arguments(self, call: _RewardCall) -> dict[str, Any]:
        arguments = self._signature.choose(call.arguments) | self._kwargs
        missing = self._signature.required - set(arguments)
        if missing:
            raise LookupError(
                f"it needs {', '.join(sorted(missing))}, but the row's columns are: {', '.join(call.columns) or 'none'}"
            )
        return arguments

    def __call__(self, call: _RewardCall) -> Any:
        arguments = self.arguments(call)
        if runs_code_of_models(self._function, arguments.get(TASK_COLUMN, ())):
            raise ValueError("it runs code that the model wrote; set its isolation to sandbox")
        return self._function(**arguments)


class _SandboxedReward(_FunctionReward):
    """Reward function that is called in a sandboxed process of its own."""

    in_process = False

    def __init__(self, name: str, function: RewardFunction, config: RewardConfig, sandbox: Sandbox) -> None:
        super().__init__(function, config.kwargs, config.path)
        self._name, self._sandbox, self._timeout_s = name, sandbox, config.timeout_s
        self._scores_each = getattr(function, "scores_each", False)
        by_default = getattr(inspect.signature(function).parameters.get("timeout_s"), "default", 0)
        part_s = config.kwargs.get("timeout_s", by_default)
        self._part_s: float = part_s if isinstance(part_s, int | float) else 0
        """Seconds that the function itself allows for a part of a completion, such as a test."""

    def __call__(self, call: _RewardCall) -> Any:
        arguments = self.arguments(call)
        if self._scores_each or runs_code_of_models(self._function, arguments.get(TASK_COLUMN, ())):
            return self._score_each(call, arguments)
        return self._score(call, arguments, len(call.group))

    def _score(
        self, call: _RewardCall, arguments: Mapping[str, Any], num_values: int, timeout_s: float | None = None
    ) -> list[Any]:
        answer = self._sandbox.call(self._name, arguments, num_values, timeout_s)
        for metric, value in answer.logged:
            call.log_metric(metric, value)
        return answer.values

    def _score_each(self, call: _RewardCall, arguments: Mapping[str, Any]) -> list[Any]:
        """Score each completion in a call of its own; a call whose process crashes or takes too long scores 0.

        Each call may take its share of the group's time, and what the calls before it have left of theirs; if one took
        longer, as when the sandbox starts again, the others share what is left.
        """
        deadline, count, values = time.monotonic() + self._timeout_s, len(call.group), list[Any]()
        self._warn_of_small_shares(count)
        for index in range(count):
            call_arguments = {
                name: value[index : index + 1] if name in call.arguments and isinstance(value, list) else value
                for name, value in arguments.items()
            }
            remaining_s, num_after = max(0.0, deadline - time.monotonic()), count - index - 1
            limit_s = max(remaining_s - num_after * self._timeout_s / count, remaining_s / (num_after + 1))
            try:
                values += self._score(call, call_arguments, 1, timeout_s=limit_s)
                crashed = False
            except SandboxFailed as failure:
                if not failure.is_crash:
                    raise
                values.append(0.0)
                crashed = True
            call.log_metric(f"{self._name}/crashed", float(crashed))
        return values

    def _warn_of_small_shares(self, count: int) -> None:
        """Warn once if a completion's share of the time is smaller than what the function allows for a part of it."""
        if self._timeout_s < count * self._part_s:
            logger.warning(
                "reward %r: each of %d completions has %.3g seconds, less than its kwargs.timeout_s=%g, and scores 0 "
                "if it takes longer; set its timeout_s to %g or more",
                *(self._name, count, self._timeout_s / count, self._part_s, count * self._part_s),
            )
            self._part_s = 0


class _ActorReward:
    """Reward of a ``RewardActor``, called through its ``score``."""

    in_process = True

    def __init__(
        self, kind: type[RewardActor], kwargs: Mapping[str, Any], tokenizer: Tokenizer, chat: Chat | None
    ) -> None:
        self._actor = kind(**kwargs)
        self._actor.tokenizer, self._actor.chat = tokenizer, chat
        self._actor.setup()
        defined = kind.score_groups is not RewardActor.score_groups
        self.together: Callable[[Sequence[RolloutGroup]], Any] | None = self._actor.score_groups if defined else None

    def __call__(self, call: _RewardCall) -> Any:
        return self._actor.score(call.group)


class Scorer:
    """Scorer of groups with one process's rewards.

    ``callables`` holds rewards that were passed as objects; their config's path is not imported. ``num_steps`` is the
    value of ``trainer_state.max_steps``; through ``chat`` a ``RewardActor`` may ask the run's engines. Call the scorer
    from a thread without a running event loop. It has no timeouts: the caller ends a process that takes too long.
    Raises ``RewardImportError`` for a reward that can't be used, and ``RewardFailed`` for a ``RewardActor`` that can't
    be set up.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        tokenizer: Tokenizer,
        callables: Mapping[str, Reward] | None = None,
        num_steps: int = 0,
        chat: Chat | None = None,
    ) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self._num_steps = num_steps
        self._runner: asyncio.Runner | None = None
        self._limit: MemoryLimit | None = None
        self._allowed_bytes = 0
        sandboxed = {name: config for name, config in rewards.items() if config.isolation == "sandbox"}
        self._sandbox = Sandbox(sandboxed) if sandboxed else None
        callables = callables or {}
        self._rewards = {name: self._open(name, config, callables.get(name)) for name, config in rewards.items()}

    def limit_memory(self, limit: MemoryLimit) -> None:
        """Set the memory limit of this process, once its rewards are loaded."""
        self._limit, self._allowed_bytes = limit, limit.apply()

    def _open(self, name: str, config: RewardConfig, reward_function: Reward | None) -> _Reward:
        if reward_function is None:
            reward, source = load_reward(config.path, config.kwargs), config.path
        else:
            check_reward(reward_function, config.kwargs, name)
            reward, source = reward_function, name
        if self._sandbox is not None and config.isolation == "sandbox":
            return _SandboxedReward(name, reward, config, self._sandbox)
        if not isinstance(reward, type):
            return _FunctionReward(reward, config.kwargs, source)
        try:
            return _ActorReward(reward, config.kwargs, self._tokenizer, self._chat)
        except Exception as error:
            raise RewardFailed(f"reward {name!r} ({source}) can't be set up: {describe_exception(error)}") from error

    def score(self, groups: Sequence[RolloutGroup]) -> list[GroupScores]:
        """Return the scores of each group, in order; the ``async`` rewards of all groups run concurrently.

        Raises ``MemoryError`` once the process holds so much memory that further calls would fail.
        """
        waiting: list[Awaitable[bool]] = []
        calls = [_RewardCall(group, self._tokenizer, self._num_steps) for group in groups]
        scored = [call for call in calls if len(call.group)]
        for name, reward in self._rewards.items():
            if reward.together is not None and len(scored) > 1:
                _score_together(name, reward.together, scored)
        for call in calls:
            if not len(call.group):
                call.result.scores = {name: [] for name in self._rewards}
            for name, reward in self._rewards.items():
                if name not in call.result.scores:
                    waiting += _begin(name, reward, call)
                    self._check_memory(call)
        if waiting:
            self._run(waiting)
            for call in calls:
                self._check_memory(call)
        return [call.finish() for call in calls]

    def _run(self, waiting: list[Awaitable[bool]]) -> None:
        async def gather() -> list[bool]:
            return await asyncio.gather(*waiting)

        # One loop for the process's life, because the clients in users' rewards are bound to the loop they first use.
        self._runner = self._runner or asyncio.Runner()
        before = ProcessSnapshot()
        failed = True
        try:
            failed = any(self._runner.run(gather()))
        finally:
            before.undo()
            if failed:
                before.end_children()

    def _check_memory(self, call: _RewardCall) -> None:
        """Add the limit to failures for lack of memory; raise ``MemoryError`` if the memory taken is not freed."""
        for name in call.ran_out if self._limit is not None else ():
            assert self._limit is not None
            call.result.failures[name] += f"; its process may use {self._limit}"
            gc.collect()
            if self._limit.is_exhausted(self._allowed_bytes):
                lift_memory_limit()  # else no memory is left to report the failure
                raise MemoryError(f"the memory of reward {name!r} is not freed: {call.result.failures[name]}")
        call.ran_out.clear()

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        if self._sandbox is not None:
            self._sandbox.close()


def _score_together(name: str, score: Callable[[Sequence[RolloutGroup]], Any], calls: Sequence[_RewardCall]) -> None:
    """Record the scores of all groups at once, or of none if that fails; they are then scored one by one."""
    started = time.perf_counter()
    before = ProcessSnapshot()
    try:
        try:
            returned = list(score([call.group for call in calls]))
            checked = [check_scores(scores, len(call.group)) for scores, call in zip(returned, calls, strict=True)]
        finally:
            before.undo()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - user code may raise anything
        before.undo()
        logger.warning("reward %r can't score %d groups together: %s", name, len(calls), describe_exception(error))
        before.end_children()
        return
    seconds = (time.perf_counter() - started) / len(calls)
    for call, scores in zip(calls, checked, strict=True):
        call.result.scores[name], call.result.seconds[name] = scores, seconds


def _begin(name: str, reward: _Reward, call: _RewardCall) -> list[Awaitable[bool]]:
    """Call a reward and record its scores, or return what must be awaited for them."""
    started = time.perf_counter()
    before = ProcessSnapshot()
    try:
        try:
            returned = reward(call)
            if inspect.isawaitable(returned):
                return [_finish(name, returned, call)]
            call.result.scores[name] = check_scores(returned, len(call.group))
        finally:
            before.undo()
    except KeyboardInterrupt:
        raise  # this process is being ended
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; the reason is reported
        before.undo()  # an alarm may have rung before the first undo
        call.fail(name, error)
        if reward.in_process:
            before.end_children()
    call.result.seconds[name] = time.perf_counter() - started
    return []


async def _finish(name: str, pending: Awaitable[Any], call: _RewardCall) -> bool:
    """Await a reward's values and record its scores; return whether it failed."""
    started = time.perf_counter()
    try:
        call.result.scores[name] = check_scores(await pending, len(call.group))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; the reason is reported
        call.fail(name, error)
    call.result.seconds[name] = time.perf_counter() - started
    return name in call.result.failures


def apply_scores(group: RolloutGroup, scores: Sequence[GroupScores], rewards: Mapping[str, RewardConfig]) -> None:
    """Write each rollout's ``rewards`` and their weighted sum, and handle failures as the config says.

    ``scores`` come from the processes that share the group's rewards; a reward that none of them scored counts as
    failed. A sum leaves out None values, and is None if there is no other. The rewards of an episode that failed are 0,
    whatever it has said until then. Raises ``RewardFailed`` for a failure whose ``fail`` is ``raise``.
    """
    values: dict[str, list[float | None]] = {}
    failures: dict[str, str] = {}
    for pool_scores in scores:
        values |= pool_scores.scores
        failures |= pool_scores.failures
        group.logged |= pool_scores.metrics
    failures |= {name: "it was not scored" for name in rewards if name not in values and name not in failures}
    for name, reason in failures.items():
        values[name] = _substitute(name, reason, group, rewards[name])
    for index, rollout in enumerate(group):
        has_failed = rollout.status is RolloutStatus.FAILED
        rollout.rewards = {name: 0.0 if has_failed else values[name][index] for name in rewards}
        rollout.reward = None if group.failure else _weighted_sum(rollout.rewards, rewards)
    group.score_s = sum(sum(pool_scores.seconds.values()) for pool_scores in scores)


def _substitute(name: str, reason: str, group: RolloutGroup, config: RewardConfig) -> list[float | None]:
    """Return the values of a failed reward; mark the group as failed, or raise, as the reward's config says."""
    if config.fail == "zero":
        return [0.0] * len(group)
    message = f"reward {name!r} failed: {reason}"
    if config.fail == "raise":
        raise RewardFailed(f"group {group.group_id} (row {group.prompt.prompt_id}): {message}")
    group.failure = f"{group.failure}; {message}" if group.failure else message
    return [None] * len(group)


def _weighted_sum(values: Mapping[str, float | None], rewards: Mapping[str, RewardConfig]) -> float | None:
    terms = [rewards[name].weight * value for name, value in values.items() if value is not None]
    return math.fsum(terms) if terms else None
