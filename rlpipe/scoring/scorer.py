"""Calls the rewards of finished groups, checks what they answer, and writes the result into the rollouts."""

from __future__ import annotations

import asyncio
import inspect
import math
import sysconfig
import time
import traceback
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.configs.schema import RewardConfig
from rlpipe.errors import RewardFailed
from rlpipe.scoring.rewards import (
    Reward,
    RewardActor,
    RewardFunction,
    Signature,
    Tokenizer,
    check_reward,
    decode_completions,
    load_reward,
    read_signature,
)
from rlpipe.types import NO_VERSION, RolloutGroup

MAX_REASON_CHARS = 300
HIDDEN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL keeps from reward functions, because the arguments of the call carry them."""


@dataclass(kw_only=True, slots=True)
class GroupScores:
    """What some of the rewards said of one group; each reward is in ``scores`` or in ``failures``."""

    group_id: int
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    """For each reward one value per rollout."""
    failures: dict[str, str] = field(default_factory=dict)
    """For each failed reward the reason."""
    seconds: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of what the functions gave to ``log_metric``."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TrainerState:
    """The part of transformers' ``TrainerState`` that reward functions use to change with the progress of training."""

    global_step: int
    """The policy version that drew the group."""
    max_steps: int
    epoch: float


def ignore_extra(column: str, values: Sequence[Any]) -> None:
    """TRL's ``log_extra`` adds a column to its table of completions; here it does nothing."""


class _Call:
    """Everything that the rewards of one group may ask for, made once for all of them."""

    def __init__(self, group: RolloutGroup, tokenizer: Tokenizer, num_steps: int) -> None:
        self.group = group
        self.result = GroupScores(group_id=group.group_id)
        self._logged: dict[str, list[float]] = defaultdict(list)
        texts = decode_completions(tokenizer, group)
        chat = group.prompt.is_chat
        self.columns = sorted(set(group.prompt.task) - HIDDEN_COLUMNS)
        self.arguments: dict[str, Any] = {name: [group.prompt.task[name]] * len(group) for name in self.columns}
        self.arguments |= {
            "prompts": [group.prompt.prompt] * len(group),
            "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else texts,
            "completion_ids": [rollout.completion_ids.tolist() for rollout in group],
            "rollouts": group.rollouts,
            "trainer_state": _trainer_state(group, num_steps),
            "log_extra": ignore_extra,
            "log_metric": self._log_metric,
        }

    def _log_metric(self, name: str, value: float) -> None:
        self._logged[name].append(float(value))

    def finish(self) -> GroupScores:
        self.result.metrics = {name: sum(values) / len(values) for name, values in self._logged.items()}
        return self.result


def _trainer_state(group: RolloutGroup, num_steps: int) -> TrainerState:
    newest = max((rollout.newest_version for rollout in group), default=NO_VERSION)
    return TrainerState(global_step=max(newest, 0), max_steps=num_steps, epoch=float(group.prompt.epoch))


class _FunctionReward:
    """Calls a function by keyword with what its signature asks for."""

    def __init__(self, function: RewardFunction, kwargs: Mapping[str, Any], source: str) -> None:
        self._function = function
        self._kwargs = dict(kwargs)
        self._signature: Signature = read_signature(function, source)

    def __call__(self, call: _Call) -> Any:
        arguments = self._signature.choose(call.arguments) | self._kwargs
        missing = self._signature.required - set(arguments)
        if missing:
            raise LookupError(
                f"it needs {', '.join(sorted(missing))}, but the row's columns are: {', '.join(call.columns) or 'none'}"
            )
        return self._function(**arguments)


class _ActorReward:
    """Calls a RewardActor's ``score``."""

    def __init__(self, kind: type[RewardActor], kwargs: Mapping[str, Any], tokenizer: Tokenizer) -> None:
        self._actor = kind(**kwargs)
        self._actor.tokenizer = tokenizer
        self._actor.setup()

    def __call__(self, call: _Call) -> Any:
        return self._actor.score(call.group)


class Scorer:
    """Scores groups with one process's rewards.

    ``callables`` holds rewards that were handed over as objects; their config's path is not imported. ``num_steps``
    is what ``trainer_state.max_steps`` says. Call it from a thread without a running event loop. It knows no
    timeouts: the caller ends a process that takes too long. Raises ``RewardImportError`` for a reward that can't be
    used, and ``RewardFailed`` for a ``RewardActor`` that can't be set up.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        tokenizer: Tokenizer,
        callables: Mapping[str, Reward] | None = None,
        num_steps: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._num_steps = num_steps
        self._runner: asyncio.Runner | None = None
        callables = callables or {}
        self._rewards = {name: self._open(name, config, callables.get(name)) for name, config in rewards.items()}

    def _open(self, name: str, config: RewardConfig, given: Reward | None) -> Callable[[_Call], Any]:
        if given is None:
            reward, source = load_reward(config.path, config.kwargs), config.path
        else:
            check_reward(given, config.kwargs, name)
            reward, source = given, name
        if not isinstance(reward, type):
            return _FunctionReward(reward, config.kwargs, source)
        try:
            return _ActorReward(reward, config.kwargs, self._tokenizer)
        except Exception as error:
            raise RewardFailed(f"reward {name!r} ({source}) can't be set up: {describe_exception(error)}") from error

    def score(self, groups: Sequence[RolloutGroup]) -> list[GroupScores]:
        """The scores of each group, in order; the ``async`` rewards of all groups run concurrently."""
        waiting: list[Awaitable[None]] = []
        calls = [_Call(group, self._tokenizer, self._num_steps) for group in groups]
        for call in calls:
            for name, reward in self._rewards.items():
                waiting += _begin(name, reward, call)
        if waiting:
            self._run(waiting)
        return [call.finish() for call in calls]

    def _run(self, waiting: list[Awaitable[None]]) -> None:
        async def gather() -> None:
            await asyncio.gather(*waiting)

        # One loop for the process's life, because the clients that users hold are bound to theirs.
        self._runner = self._runner or asyncio.Runner()
        self._runner.run(gather())

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()


def _begin(name: str, reward: Callable[[_Call], Any], call: _Call) -> list[Awaitable[None]]:
    """Records a function's scores, or returns what must be awaited for them."""
    started = time.perf_counter()
    try:
        returned = reward(call)
        if inspect.isawaitable(returned):
            return [_finish(name, returned, call)]
        call.result.scores[name] = check_scores(returned, len(call.group))
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the reason is reported
        call.result.failures[name] = describe_exception(error)
    call.result.seconds[name] = time.perf_counter() - started
    return []


async def _finish(name: str, pending: Awaitable[Any], call: _Call) -> None:
    started = time.perf_counter()
    try:
        call.result.scores[name] = check_scores(await pending, len(call.group))
    except Exception as error:  # noqa: BLE001 - user code may raise anything; the reason is reported
        call.result.failures[name] = describe_exception(error)
    call.result.seconds[name] = time.perf_counter() - started


def check_scores(returned: Any, group_size: int) -> list[float | None]:
    """What a reward returned, as finite floats and None; raises ``TypeError`` or ``ValueError`` for anything else."""
    if not hasattr(returned, "__iter__") or isinstance(returned, str | bytes | Mapping | set):
        raise TypeError(f"it returned a {type(returned).__name__}; return a list of one number per completion")
    values = list(returned)
    if len(values) != group_size:
        raise ValueError(f"it returned {len(values)} values for {group_size} completions; return one per completion")
    return [_check_value(value, index) for index, value in enumerate(values)]


def _check_value(value: Any, index: int) -> float | None:
    if value is None:
        return None
    if not isinstance(value, bool | int | float) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, bool | int | float):
        raise TypeError(f"value {index} is {_shortened(repr(value), 60)}, not a number")
    if not math.isfinite(value):
        raise ValueError(f"value {index} is {value}; return a finite number, or None to leave the completion out")
    return float(value)


def describe_exception(error: BaseException) -> str:
    """Type and message of an exception in one line, with the last line of the user's own code that it passed."""
    message = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {message}" if message else type(error).__name__
    frame = _user_frame(error)
    place = f" ({Path(frame.filename).name}:{frame.lineno})" if frame else ""
    return _shortened(reason, MAX_REASON_CHARS) + place


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    own = [frame for frame in frames if not frame.filename.startswith((*libraries, "<frozen"))]
    return next(reversed(own or frames), None)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def apply_scores(group: RolloutGroup, scores: Sequence[GroupScores], rewards: Mapping[str, RewardConfig]) -> None:
    """Writes each rollout's ``rewards`` and their weighted sum, and does with failures what the config says.

    ``scores`` come from the processes that share the group's rewards; a reward that none of them answered counts as
    failed. A sum leaves out None; without any value it is None. Raises ``RewardFailed`` where ``fail`` is ``raise``.
    """
    values: dict[str, list[float | None]] = {}
    failures: dict[str, str] = {}
    for part in scores:
        values |= part.scores
        failures |= part.failures
        group.logged |= part.metrics
    failures |= {name: "it was not scored" for name in rewards if name not in values and name not in failures}
    for name, reason in failures.items():
        values[name] = _substitute(name, reason, group, rewards[name])
    for index, rollout in enumerate(group):
        rollout.rewards = {name: values[name][index] for name in rewards}
        rollout.reward = None if group.failure else _weighted_sum(rollout.rewards, rewards)
    group.score_s = sum(sum(part.seconds.values()) for part in scores)


def _substitute(name: str, reason: str, group: RolloutGroup, config: RewardConfig) -> list[float | None]:
    """The values of a failed reward; marks or raises as its config says."""
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
