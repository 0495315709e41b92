"""Rewards written by users, as functions with TRL's signature or ``RewardActor`` classes: loading and checks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlpipe.common.imports import import_object
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import RewardImportError
from rlpipe.scoring.toolbox import completion_text
from rlpipe.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from rlpipe.scoring.engine_chat import Chat

RewardFunction = Callable[..., Any]

COMPLETION_ARGUMENTS = frozenset({"completions", "completion_ids", "rollouts"})
"""Parameters through which a function sees the policy's completions."""
PROVIDED = COMPLETION_ARGUMENTS | {"prompts", "trainer_state", "log_extra", "log_metric"}
"""Parameters that every call can fill; all others are data-set columns or the config's kwargs."""
HIDDEN_COLUMNS = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass to reward functions, because other arguments of the call carry them."""
TASK_COLUMN = "reasoning_gym_task"
"""Column with the name of a row's task of reasoning-gym."""
ON_REQUEST = frozenset({"rollouts"})
"""Parameters that a function receives only if it names them; a bare ``**kwargs`` is not enough."""


def ignore_extra(column: str, values: Sequence[Any]) -> None:
    """Do nothing; TRL's ``log_extra`` adds a column to its table of completions."""


class Tokenizer(Protocol):
    """Part of a tokenizer that scoring needs."""

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]: ...


def decode_completions(tokenizer: Tokenizer, rollouts: Iterable[Rollout]) -> list[str]:
    """Return the completion texts of a group, or of some rollouts, without special tokens."""
    return tokenizer.batch_decode([r.completion_ids.tolist() for r in rollouts], skip_special_tokens=True)


ENVIRONMENT_PATH = "rlpipe.scoring.rewards:environment"


def environment(rollouts: Sequence[Rollout]) -> list[float | None]:
    """Return the rewards that the run's environment gave."""
    return [None if rollout.episode is None else rollout.episode.reward for rollout in rollouts]


class RewardActor(ABC):
    """Reward with state, such as a model, a client or a GPU; each of its processes holds one instance.

    The config's ``kwargs`` go to the constructor. ``tokenizer`` and ``chat`` are available from ``setup`` on.
    """

    tokenizer: Tokenizer
    chat: Chat | None = None
    """Interface to the run's engines; None if there are none."""
    has_dtype = False
    """Whether the reward loads a model in the type that ``dtype`` names."""
    dtype: str
    """Type of the model's weights, or ``auto``; available from the constructor on."""
    source: str
    """Folder or hub id of the model; available from the constructor on."""

    @classmethod  # noqa: B027 - most subclasses need none
    def check_run(cls, model: ModelConfig, kwargs: Mapping[str, Any]) -> None:
        """Raise ``ConfigError`` if a run of this model can't have the reward; called before anything starts."""

    def setup(self) -> None:  # noqa: B027 - most subclasses need none
        """Prepare the instance; called once in every process, before the first group."""

    @abstractmethod
    def score(self, group: RolloutGroup) -> list[float | None]:
        """Return one value per rollout, or None to leave this reward out of a rollout's sum; may be ``async``."""

    def score_groups(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        """Return the values of several groups, scored together; a subclass may define this.

        If it raises, each group is scored alone by ``score``.
        """
        raise NotImplementedError(f"{type(self).__name__} scores groups one by one")

    def texts(self, group: RolloutGroup) -> list[str]:
        """Return the answers of a group, one per rollout: a completion's text, without special tokens.

        In an episode, the answer is the policy's last message that has text, or an empty text.
        """
        texts = iter(decode_completions(self.tokenizer, (rollout for rollout in group if rollout.episode is None)))
        return [
            next(texts) if rollout.episode is None else completion_text(rollout.episode.messages) for rollout in group
        ]


Reward = RewardFunction | type[RewardActor]


@dataclass(kw_only=True, slots=True, frozen=True)
class Signature:
    """Parameters that a reward function accepts by keyword."""

    named: frozenset[str]
    required: frozenset[str]
    takes_all: bool
    """Whether the function has ``**kwargs``."""

    def choose(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the ``available`` arguments that the function receives."""
        if not self.takes_all:
            return {name: value for name, value in available.items() if name in self.named}
        return {name: value for name, value in available.items() if name in self.named or name not in ON_REQUEST}


def read_signature(function: RewardFunction, source: str) -> Signature:
    """Return a function's signature; raise ``RewardImportError`` if it can't be called by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise RewardImportError(
            f"reward {source} has no readable signature; wrap it in a function (completions, answer, **columns)"
        ) from None
    for parameter in parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise RewardImportError(
                f"reward {source} has the positional-only parameter {parameter.name!r}, but rewards are called by "
                "keyword; remove the '/' from its signature"
            )
    by_keyword = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Signature(
        named=frozenset(p.name for p in by_keyword),
        required=frozenset(p.name for p in by_keyword if p.default is p.empty),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def check_reward(reward: Any, kwargs: Mapping[str, Any], source: str) -> None:
    """Raise ``RewardImportError`` if ``reward`` can't be used as one; ``source`` names it in the message."""
    if inspect.isclass(reward):
        _check_class(reward, kwargs, source)
    elif not callable(reward):
        raise RewardImportError(
            f"reward {source} is a {type(reward).__name__}, not a function or RewardActor subclass; name one of these"
        )
    else:
        _check_function(reward, kwargs, source)


def _check_class(reward: type, kwargs: Mapping[str, Any], source: str) -> None:
    if not issubclass(reward, RewardActor):
        raise RewardImportError(
            f"reward {source} is a class, but not a RewardActor; derive it from rlpipe.RewardActor, "
            "or name an instance that can be called"
        )
    if inspect.isabstract(reward):
        raise RewardImportError(f"reward {source} does not define score(self, group); add it")
    try:
        inspect.signature(reward).bind(**kwargs)
    except TypeError as error:
        raise RewardImportError(
            f"reward {source} can't be created from kwargs {dict(kwargs)}: {error}; fix kwargs"
        ) from None


def _check_function(reward: RewardFunction, kwargs: Mapping[str, Any], source: str) -> None:
    signature = read_signature(reward, source)
    if not signature.takes_all and not signature.named & COMPLETION_ARGUMENTS:
        raise RewardImportError(
            f"reward {source} can't see what the policy wrote: its parameters are ({_listed(signature.named)}); "
            "add 'completions'"
        )
    unknown = set() if signature.takes_all else set(kwargs) - signature.named
    if unknown:
        raise RewardImportError(
            f"reward {source} has no parameter {_listed(unknown)}, which kwargs sets; "
            f"its parameters are ({_listed(signature.named)})"
        )
    reserved = set(kwargs) & PROVIDED
    if reserved:
        raise RewardImportError(f"reward {source}: {_listed(reserved)} comes from the run; remove it from kwargs")


def load_reward(path: str, kwargs: Mapping[str, Any] | None = None) -> Reward:
    """Import the reward at ``package.module:name`` or ``path/to/file.py:name``.

    The reward is a function, a callable object or a ``RewardActor`` subclass. Raises ``RewardImportError`` if it can't
    be imported, or can't be used as a reward with the config's ``kwargs``.
    """
    reward = import_object(path, what="reward", error=RewardImportError)
    check_reward(reward, kwargs or {}, path)
    return reward


def missing_columns(reward: Reward, kwargs: Mapping[str, Any], columns: Iterable[str]) -> list[str]:
    """Return the required parameters that neither the run, nor ``kwargs``, nor the data-set ``columns`` can fill."""
    if inspect.isclass(reward):
        return []
    available = PROVIDED | set(kwargs) | (set(columns) - HIDDEN_COLUMNS)
    return sorted(read_signature(reward, repr(reward)).required - available)


def runs_code_of_models(reward: Reward, tasks: Iterable[Any]) -> bool:
    """Return whether a reward runs what models write, for rows of any of these tasks of reasoning-gym."""
    sandboxed = getattr(reward, "sandboxed_tasks", ())
    return getattr(reward, "needs_sandbox", False) or any(task in sandboxed for task in tasks)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
