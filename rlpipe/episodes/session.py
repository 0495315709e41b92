"""One episode of an environment: the policy's turns, what answers them, and how it ends."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from rlpipe.data.row import UnusableRow
from rlpipe.episodes.bridge import Bridge, Unbridgeable
from rlpipe.episodes.environment import Environment, as_messages, tools_of
from rlpipe.episodes.graph import EpisodeGraph, Node
from rlpipe.episodes.parsing import ParsedTurn, Parser
from rlpipe.episodes.tools import Tool, Toolbox
from rlpipe.types import ChatMessages, IntArray, RolloutStatus

Value = TypeVar("Value")


@dataclass(kw_only=True, slots=True, frozen=True)
class DrawnTurn:
    """A turn as an engine drew it, with the token that ended it."""

    token_ids: Sequence[int]  # [C]
    logprobs: Sequence[float]  # [C]
    policy_versions: Sequence[int]  # [C]
    finish_reason: str


class Draw(Protocol):
    async def __call__(self, token_ids: IntArray, *, max_tokens: int, turn: int) -> DrawnTurn:
        """Draw the turn with this number behind the tokens ``[T]``."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rules:
    """Limits of an episode."""

    max_turns: int
    max_tokens: int
    """Tokens of one turn."""
    max_model_len: int
    """Tokens of a conversation."""
    timeout_s: float
    tool_timeout_s: float


@dataclass(kw_only=True, slots=True)
class Episode:
    """An episode that is over."""

    graph: EpisodeGraph
    reward: float = 0.0
    status: RolloutStatus = RolloutStatus.COMPLETED
    end: str = "done"
    """Reason of its end: ``done``, ``max_turns``, ``length`` (no token is left) or ``timeout``."""
    messages: ChatMessages = field(default_factory=list)
    num_turns: int = 0
    branches_by_reason: dict[str, int] = field(default_factory=dict)
    """Number of times that a conversation had to be rendered anew, by reason."""


class Session:
    """Plays one episode; the schemas of the tools replace those of the bridge's template.

    An exception of the environment is raised by ``play``, after the environment has been closed.
    """

    def __init__(
        self,
        environment: Environment,
        tools: Collection[Tool],
        *,
        bridge: Bridge,
        parser: Parser,
        draw: Draw,
        rules: Rules,
    ) -> None:
        self.toolbox = Toolbox([*tools_of(environment), *tools], timeout_s=rules.tool_timeout_s)
        self._template = bridge.template.with_tools(self.toolbox.schemas or None)
        self._bridge = replace(bridge, template=self._template)
        self._environment, self._parser, self._draw, self._rules = environment, parser, draw, rules

    async def play(self, row: Mapping[str, Any], seed: int) -> Episode:
        """Play an episode; a limit that it reaches truncates it, and what was played counts."""
        episode = Episode(graph=EpisodeGraph())
        limit = asyncio.timeout(self._rules.timeout_s)
        try:
            async with limit:
                await self._play(episode, row, seed)
        except TimeoutError:
            if not limit.expired():
                raise
            _truncate(episode, "timeout")
        finally:
            await _value(self._environment.close())
        return episode

    async def _play(self, episode: Episode, row: Mapping[str, Any], seed: int) -> None:
        first = as_messages(await _value(self._environment.reset(row, seed)))
        episode.messages = self._template.with_system_prompt(first)
        node = episode.graph.observe(None, episode.messages, self._rendered(episode.messages))
        for turn in range(self._rules.max_turns):
            context = node.token_path()
            room = min(self._rules.max_tokens, self._rules.max_model_len - len(context))
            if room <= 0:
                return _truncate(episode, "length")
            answer = await self._draw(context, max_tokens=room, turn=turn)
            parsed = self._parser(self._text(answer), f"{turn}c")
            episode.messages = [*episode.messages, parsed.as_message()]
            episode.num_turns = turn + 1
            if answer.finish_reason == "length" and len(context) + len(answer.token_ids) >= self._rules.max_model_len:
                _add(episode, node, parsed, answer)
                return _truncate(episode, "length")
            new, reward, is_done = await self._respond(parsed)
            episode.reward += reward
            if is_done or turn + 1 == self._rules.max_turns:
                _add(episode, node, parsed, answer, reward=reward)
                return None if is_done else _truncate(episode, "max_turns")
            node = self._go_on(episode, node, parsed, answer, new, reward)
        return None

    async def _respond(self, parsed: ParsedTurn) -> tuple[ChatMessages, float, bool]:
        """Return the messages after a turn, its reward, and whether the episode is over."""
        if parsed.calls:
            results = await asyncio.gather(*map(self.toolbox.call, parsed.calls))
            return (
                [
                    {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
                    for call, result in zip(parsed.calls, results, strict=True)
                ],
                0.0,
                False,
            )
        step = await _value(self._environment.step(parsed.content))
        return as_messages(step.observation), step.reward, step.done

    def _go_on(
        self, episode: Episode, node: Node, parsed: ParsedTurn, answer: DrawnTurn, new: ChatMessages, reward: float
    ) -> Node:
        """Add a turn and what follows it; behind a turn that can't be bridged the conversation is rendered anew."""
        episode.messages = [*episode.messages, *new]
        try:
            suffix = self._bridge.suffix(parsed.as_message(), new)
        except Unbridgeable:
            _add(episode, node, parsed, answer, reward=reward)
            episode.branches_by_reason["unbridgeable"] = episode.branches_by_reason.get("unbridgeable", 0) + 1
            return episode.graph.observe(None, episode.messages, self._rendered(episode.messages))
        is_open = not len(answer.token_ids) or answer.token_ids[-1] not in self._bridge.end_ids
        closing = np.array([suffix.end_id], np.int32) if is_open else None
        drawn = _add(episode, node, parsed, answer, reward=reward, end_ids=closing)
        return episode.graph.observe(drawn, new, suffix.token_ids)

    def _rendered(self, messages: ChatMessages) -> IntArray:
        try:
            return self._template.token_ids(self._template.text(messages, add_generation_prompt=True))
        except UnusableRow as error:
            raise ValueError(f"the conversation can't be rendered: {error}") from error

    def _text(self, answer: DrawnTurn) -> str:
        """Return a turn's text without its end token."""
        token_ids = list(answer.token_ids)
        if token_ids and token_ids[-1] in self._bridge.end_ids:
            token_ids.pop()
        return cast(str, self._template.tokenizer.decode(token_ids, skip_special_tokens=False))


def _add(
    episode: Episode,
    node: Node,
    parsed: ParsedTurn,
    answer: DrawnTurn,
    *,
    reward: float | None = None,
    end_ids: IntArray | None = None,
) -> Node:
    drawn = episode.graph.draw(
        node,
        [parsed.as_message()],
        np.array(answer.token_ids, np.int32),
        logprobs=np.array(answer.logprobs, np.float32),
        policy_versions=np.array(answer.policy_versions, np.int32),
        end_ids=end_ids,
    )
    drawn.reward = reward
    return drawn


def _truncate(episode: Episode, end: str) -> None:
    episode.status, episode.end = RolloutStatus.TRUNCATED, end


async def _value(found: Value | Awaitable[Value]) -> Value:
    return await found if inspect.isawaitable(found) else cast(Value, found)
