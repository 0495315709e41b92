"""One episode of an environment: the policy's turns, what answers them, and how it ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import numpy as np

from rlpipe.common.imports import describe_error
from rlpipe.episodes.bridge import Bridge, Unbridgeable
from rlpipe.episodes.graph import EpisodeGraph, Node
from rlpipe.episodes.parsing import ParsedTurn, Parser, read_calls, with_tools
from rlpipe.episodes.reasoning import close_reasoning
from rlpipe.episodes.tools import Environment, Tool, Toolbox, as_messages, as_step, call_anywhere, one_at_a_time
from rlpipe.types import ChatMessages, IntArray, RolloutStatus

MAX_MARK_TOKENS = 16
"""Tokens of the mark that begins reasoning at the end of a prompt, with the space after it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SampledTurn:
    """A turn as an engine sampled it, with the token that ended it."""

    token_ids: Sequence[int]  # [C]
    logprobs: Sequence[float]  # [C]
    policy_versions: Sequence[int]  # [C]
    finish_reason: str


class SampleTurn(Protocol):
    """A function that samples a turn of one episode."""

    async def __call__(
        self, token_ids: IntArray, *, max_tokens: int, turn: int, stop: Sequence[str] = ()
    ) -> SampledTurn:
        """Sample the turn with this number after the tokens ``[T]``; ``stop`` are further texts that end it."""


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
    history: str = "keep"
    """``keep``: earlier turns stay as they were sampled; ``template``: the chat template renders them again."""


@dataclass(kw_only=True, slots=True)
class Episode:
    """An episode that is over."""

    graph: EpisodeGraph = field(default_factory=EpisodeGraph)
    status: RolloutStatus = RolloutStatus.COMPLETED
    end: str = "done"
    """Reason of its end: ``done``, ``max_turns``, ``length`` (no token is left), ``timeout`` or ``failed``."""
    failure: str | None = None
    """Error of the environment or of an engine, or None."""
    opening: ChatMessages = field(default_factory=list)
    """Messages that the policy saw first."""
    messages: ChatMessages = field(default_factory=list)
    """Messages after the opening."""
    is_rewarded: bool = True
    """Whether the environment gave a reward, which may be 0."""
    branches_by_reason: Counter[str] = field(default_factory=Counter)
    """Number of times that a conversation had to be rendered anew, by reason."""

    invalid_calls: int = 0
    """Calls of tools in a wrong form, of tools that do not exist, or with wrong arguments."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that the episode waited, by what it waited for."""

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time within the context to ``seconds``; waits that overlap count each."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    @property
    def turn_rewards(self) -> list[float]:
        return [node.reward for node in self.graph.turns]

    def add_turn(self, parent: Node, parsed: ParsedTurn, sampled: SampledTurn) -> Node:
        """Add a turn that an engine sampled to the graph."""
        return self.graph.add_sampled(
            parent,
            [parsed.as_message()],
            np.array(sampled.token_ids, np.int32),
            logprobs=np.array(sampled.logprobs, np.float32),
            policy_versions=np.array(sampled.policy_versions, np.int32),
        )

    def end_early(self, end: str) -> None:
        self.status, self.end = RolloutStatus.TRUNCATED, end

    def fail(self, failure: str) -> None:
        self.status, self.end, self.failure = RolloutStatus.FAILED, "failed", failure


class Deadline:
    """Time limit of an episode, which is paused while no engine can answer it.

    A context manager that is entered once, and raises ``TimeoutError`` as ``asyncio.timeout`` does; its time begins
    then.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._limit = seconds, asyncio.timeout(None)
        self._is_running = False
        self._left_s: float | None = None
        self._num_stops = 0

    async def __aenter__(self) -> Deadline:
        self._is_running = True
        await self._limit.__aenter__()
        if self._num_stops:
            self._left_s = self._seconds
        else:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._seconds)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._is_running = False
        await self._limit.__aexit__(*error)

    @property
    def has_passed(self) -> bool:
        return self._limit.expired()

    def stop(self) -> None:
        """Pause the deadline until ``go_on`` was called as often."""
        self._num_stops += 1
        deadline = self._limit.when()
        if self._is_running and not self.has_passed and self._left_s is None and deadline is not None:
            self._left_s = deadline - asyncio.get_running_loop().time()
            self._limit.reschedule(None)

    def go_on(self) -> None:
        self._num_stops -= 1
        if self._is_running and not self.has_passed and self._left_s is not None and not self._num_stops:
            self._limit.reschedule(asyncio.get_running_loop().time() + self._left_s)
            self._left_s = None


class Session:
    """One episode while it is played; the schemas of the tools replace those of the bridge's template."""

    def __init__(
        self,
        environment: Environment,
        tools: Collection[Tool],
        *,
        bridge: Bridge,
        parser: Parser,
        sample: SampleTurn,
        rules: Rules,
        deadline: Deadline | None = None,
    ) -> None:
        self._deadline = deadline
        self.toolbox = Toolbox([*one_at_a_time(environment.tools()), *tools], timeout_s=rules.tool_timeout_s)
        self._template = bridge.template.with_tools(self.toolbox.schemas or None)
        self._bridge = replace(bridge, template=self._template)
        self._parser = with_tools(parser, self.toolbox.schemas)
        self._environment, self._sample, self._rules = environment, sample, rules

    async def play(self, row: Mapping[str, Any], seed: int) -> Episode:
        """Play an episode; a limit that it reaches truncates it, an exception fails it, and what was played is kept."""
        episode = Episode()
        deadline = self._deadline or Deadline(self._rules.timeout_s)
        try:
            async with deadline:
                await self._play(episode, row, seed)
        except Exception as error:  # noqa: BLE001 - environments raise anything
            if deadline.has_passed:
                episode.end_early("timeout")
            else:
                episode.fail(describe_error(error))
        finally:
            await self._end(episode)
        return episode

    async def _end(self, episode: Episode) -> None:
        """Ask for the final reward, and close the environment."""
        try:
            async with asyncio.timeout(self._rules.tool_timeout_s):
                if episode.failure is None and episode.graph.turns:
                    with episode.timed("environment"):
                        episode.graph.turns[-1].reward += _finite(await call_anywhere(self._environment.final_reward))
        except Exception as error:  # noqa: BLE001 - as above
            episode.fail(f"final_reward: {describe_error(error)}")
        try:
            async with asyncio.timeout(self._rules.tool_timeout_s):
                await call_anywhere(self._environment.close)
        except Exception as error:  # noqa: BLE001 - as above
            episode.fail(f"close: {describe_error(error)}")

    async def _play(self, episode: Episode, row: Mapping[str, Any], seed: int) -> None:
        with episode.timed("environment"):
            first = as_messages(await call_anywhere(self._environment.reset, row, seed), "reset's observation")
        episode.opening = self._template.with_system_prompt(first)
        node = episode.graph.observe(None, episode.opening, self._rendered(episode.opening))
        for turn in range(self._rules.max_turns):
            context = node.token_path()
            remaining_tokens = self._rules.max_model_len - len(context)
            if remaining_tokens <= 0:
                return self._end_for_length(episode, len(context))
            with episode.timed("engine_wait"):
                answer = await self._sample(
                    context, max_tokens=min(self._rules.max_tokens, remaining_tokens), turn=turn
                )
            text, is_cut = read_turn(answer, self._bridge, context), answer.finish_reason == "length"
            parsed = await read_calls(self._parser, text, f"{turn}c", is_cut=is_cut)
            num_left_out = 0
            if not self._template.takes_several_calls:
                parsed, num_left_out = replace(parsed, calls=parsed.calls[:1]), len(parsed.calls[1:])
            node = episode.add_turn(node, parsed, answer)
            episode.messages += node.messages
            if is_cut and len(answer.token_ids) >= remaining_tokens:
                return episode.end_early("length")
            with episode.timed("tool" if parsed.calls else "environment"):
                new, node.reward, is_done = await self._respond(episode, parsed, num_left_out)
            if not is_done and self._environment.call_timed_out:
                return episode.end_early("timeout")
            if is_done or turn + 1 == self._rules.max_turns:
                return None if is_done else episode.end_early("max_turns")
            node = self._continue(episode, node, parsed, new)
        return None

    def _end_for_length(self, episode: Episode, num_tokens: int) -> None:
        if episode.graph.turns:
            return episode.end_early("length")
        limit = self._rules.max_model_len
        raise ValueError(f"the first messages have {num_tokens} tokens, which leave no space in {limit}")

    async def _respond(
        self, episode: Episode, parsed: ParsedTurn, num_left_out: int
    ) -> tuple[ChatMessages, float, bool]:
        """Return the messages after a turn, its reward, and whether the episode is over.

        The result of the first call says how many further calls are left out.
        """
        if parsed.calls:
            results = await asyncio.gather(*map(self.toolbox.call, parsed.calls))
            episode.invalid_calls += num_left_out + sum(result.failure == "invalid" for result in results)
            if num_left_out:
                note = f"\n[the model's chat template takes one call in a turn; {num_left_out} more were not made]"
                results[0] = replace(results[0], text=f"{results[0].text}{note}")
            return (
                [
                    {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result.text}
                    for call, result in zip(parsed.calls, results, strict=True)
                ],
                sum(_finite(result.reward) for result in results),
                any(result.done for result in results),
            )
        step = as_step(await call_anywhere(self._environment.step, parsed.content))
        is_done = bool(step.done)
        return [] if is_done else as_messages(step.observation, "step's observation"), _finite(step.reward), is_done

    def _continue(self, episode: Episode, node: Node, parsed: ParsedTurn, new: ChatMessages) -> Node:
        """Add what follows a turn; after one that can't be bridged the conversation is rendered anew."""
        episode.messages += new
        conversation = [*episode.opening, *episode.messages]
        if self._rules.history == "template":
            rendered = self._rendered(conversation)
            added = tokens_after(node, rendered)
            if added is not None:
                return episode.graph.observe(node, new, added)
            episode.branches_by_reason["rewritten"] += 1
            return episode.graph.observe(None, conversation, rendered)
        try:
            suffix = self._bridge.suffix(parsed.as_message(), new)
        except Unbridgeable:
            episode.branches_by_reason["unbridgeable"] += 1
            return episode.graph.observe(None, conversation, self._rendered(conversation))
        return episode.graph.observe(node, new, suffix.after(node.token_ids, self._bridge))

    def _rendered(self, messages: ChatMessages) -> IntArray:
        try:
            return self._bridge.whole(messages)
        except Unbridgeable as error:
            raise ValueError(f"the conversation can't be rendered: {error}") from error


def _finite(reward: float) -> float:
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}; give a finite number")
    return float(reward)


def tokens_after(node: Node, rendered: IntArray) -> IntArray | None:
    """Return the tokens of a rendered conversation after a node; None if it does not begin with the node's tokens."""
    path_ids = node.token_path()
    return rendered[len(path_ids) :] if np.array_equal(rendered[: len(path_ids)], path_ids) else None


def read_turn(sampled: SampledTurn, bridge: Bridge, context: IntArray) -> str:
    """Return a turn's text, without its end token; the thoughts of one that was cut off within them are closed.

    A turn that ended by itself is not taken for thoughts alone.
    """
    text = read_text(sampled, bridge)
    return close_thoughts(text, bridge, context) if sampled.finish_reason == "length" else text


def read_text(sampled: SampledTurn, bridge: Bridge) -> str:
    """Return all of a turn's text, without its end token."""
    token_ids = list(sampled.token_ids)
    if bridge.has_ended(token_ids):
        token_ids.pop()
    return _decode(bridge, token_ids)


def close_thoughts(text: str, bridge: Bridge, context: IntArray) -> str:
    """Return the text of a turn that was cut off, with its thoughts closed; they may begin at the context's end."""
    return close_reasoning(text, _decode(bridge, context[-MAX_MARK_TOKENS:]))


def _decode(bridge: Bridge, token_ids: list[int] | IntArray) -> str:
    return cast(str, bridge.template.tokenizer.decode(token_ids, skip_special_tokens=False))
