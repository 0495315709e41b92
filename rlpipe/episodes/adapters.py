"""Environments of other libraries as rlpipe's: gymnasium's, and the classes of TRL's ``environment_factory``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from rlpipe.episodes.environment import Environment
from rlpipe.episodes.tools import FunctionTool, Observation, Step, call_anywhere
from rlpipe.errors import ConfigError

Show = Callable[[Any, Any], str]
"""Function of an environment and its observation that returns what the policy sees."""
Read = Callable[[str, Any], Any]
"""Function of the policy's text and the action space that returns an action; raises ``ValueError``."""
TRL_METHODS = ("reset", "get_reward")
"""Methods of TRL's environments that are no tools."""


def from_gymnasium(
    name: str, *, show: Show | None = None, read: Read | None = None, **options: Any
) -> type[Environment]:
    """Return gymnasium's environment ``name`` as an environment class; ``options`` go to ``gymnasium.make``.

    The policy sees the text that ``render_mode="ansi"`` renders, or else the observation. It answers with an action: a
    number for a discrete space, JSON for others. A row may have a ``seed``, and further options of ``make`` in a column
    ``make``. Raises ``ConfigError`` if gymnasium is not installed.
    """
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("gymnasium is not installed: pip install gymnasium") from None

    class GymnasiumEnvironment(Environment):
        def reset(self, row: Mapping[str, Any], seed: int) -> str:
            self._made = gymnasium.make(name, **{**options, **row.get("make", {})})
            observation, _ = self._made.reset(seed=row.get("seed", seed))
            return self._show(observation)

        def step(self, action: str) -> Step:
            try:
                taken = (read or read_action)(action, self._made.action_space)
            except ValueError as error:
                return Step(f"{error}; actions are {self._made.action_space}")
            observation, reward, is_terminal, is_truncated, _ = self._made.step(taken)
            return Step(self._show(observation), reward=float(reward), done=is_terminal or is_truncated)

        def _show(self, observation: Any) -> str:
            if show is not None:
                return show(self._made, observation)
            return str(self._made.render()) if self._made.render_mode == "ansi" else str(observation)

        def close(self) -> None:
            if hasattr(self, "_made"):
                self._made.close()

    return GymnasiumEnvironment


def read_action(text: str, space: Any) -> Any:
    """Return the action that a text names; raise ``ValueError`` if it is none of the space."""
    import numpy as np
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        action: Any = text
    else:
        try:
            action = json.loads(text)
            if not isinstance(space, spaces.Discrete):
                action = np.asarray(action, getattr(space, "dtype", None))
        except (TypeError, ValueError, RecursionError):
            raise ValueError(f"{text.strip()[:50]!r} is not an action") from None
    if not space.contains(action):
        raise ValueError(f"{text.strip()[:50]!r} is not an action")
    return action


def from_trl(factory: Callable[[], Any]) -> type[Environment]:
    """Return what TRL takes as ``environment_factory`` as an environment class.

    Its public methods are tools; the text that its ``reset`` returns for the row's columns is appended to the row's
    prompt; ``get_reward``, if there is one, gives the reward. Reward functions can't have the parameter
    ``environments``, as they run in other processes. Raises ``ConfigError`` if it has no ``reset``.
    """
    if not callable(getattr(factory(), "reset", None)):
        raise ConfigError(f"{getattr(factory, '__name__', factory)} has no method reset, which TRL's environments have")

    class TrlEnvironment(Environment):
        def __init__(self) -> None:
            self._made = factory()

        async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
            prompt = row.get("prompt", [{"role": "user", "content": ""}])
            *before, last = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            added = await call_anywhere(self._made.reset, **row)
            return [*before, last if added is None else {**last, "content": last["content"] + added}]

        async def final_reward(self) -> float:
            get_reward = getattr(self._made, "get_reward", None)
            return 0.0 if get_reward is None else float(await call_anywhere(get_reward))

        def tools(self) -> list[FunctionTool]:
            names = [name for name, _ in inspect.getmembers(type(self._made), predicate=inspect.isfunction)]
            return [
                FunctionTool(getattr(self._made, name))
                for name in names
                if name not in TRL_METHODS and not name.startswith("_")
            ]

    return TrlEnvironment
