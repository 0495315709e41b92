"""One episode of a program that asks for chat completions, each of which is a turn of the policy."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from rlpipe.episodes.bridge import Bridge, Unbridgeable
from rlpipe.episodes.chat_request import ChatQuestion, RequestRefused
from rlpipe.episodes.graph import Branching, Continuation, Known, Node, locate
from rlpipe.episodes.parsing import MAX_CALLS, ParsedTurn, Parser, parse_text, read_calls, with_tools
from rlpipe.episodes.session import Episode, Rules, SampledTurn, SampleTurn, close_thoughts, read_text, tokens_after
from rlpipe.scoring.validation import unwrapped
from rlpipe.types import ChatMessages, IntArray, RolloutStatus


@dataclass(slots=True, eq=False)
class ChatAnswer:
    """An answer that was sampled; it is part of the episode once the program has received it."""

    id: str
    parsed: ParsedTurn
    finish_reason: str
    num_prompt_tokens: int
    num_tokens: int
    continuation: Continuation
    context: IntArray
    """Tokens that the request adds."""
    sampled: SampledTurn
    tools: str
    branching: str | None
    """Reason why its conversation begins anew, if it does and is not the first one."""
    is_whole: bool
    """Whether it says all that was sampled: no stop of the request, and no limit on calls, has cut it off."""
    fills_room: bool
    """Whether it was cut off because its conversation has no tokens left."""
    node: Node | None = None
    """The turn in the graph, once it was delivered."""
    counted: str | None = None
    """Reason that it is counted with, among the others that were delivered."""


@dataclass(slots=True)
class _Asked:
    answer: asyncio.Task[ChatAnswer]
    listeners: list[Callable[[], bool]] = field(default_factory=list)
    """For each request that is to get the answer, whether the program still waits for it."""
    num_received: int = 0

    @property
    def is_given_up(self) -> bool:
        return not self.num_received and not any(listens() for listens in self.listeners)


class AgentSession:
    """The graph of one program's conversations; a request after ``seal`` is refused."""

    def __init__(self, *, bridge: Bridge, parser: Parser, sample: SampleTurn, rules: Rules) -> None:
        self._bridge, self._parser, self._sample, self._rules = bridge, parser, sample, rules
        self.episode = Episode()
        self.is_rewarded = False
        """Whether a reward was set: also rewards of no answer at all, which is 0."""
        self.rewards: dict[str, float] = {}
        """Rewards of answers, by their ids, and of the whole episode, by an empty one."""
        self.conversations: dict[str, ChatMessages] = {}
        """Conversations up to the answers that further requests may name, by the answers' ids."""
        self.items: dict[str, Mapping[str, Any]] = {}
        """Parts of answers that further requests may name, by their ids."""
        self._received: list[ChatAnswer] = []
        self._known: Known = {}
        self._tools: dict[int, str] = {}
        """Tools and template options of conversations, by the id in memory of their first node."""
        self._asked: dict[str, list[_Asked]] = {}
        """Equal requests that are being answered or were, by their digest."""
        self._num_to_retry: Counter[str] = Counter()
        """Requests that an engine failed to answer, and that a program may send again, by their digest."""
        self.limits_met: dict[str, str] = {}
        """Limits that refused requests, by the messages; another conversation of the program may go on."""
        self._num_sampled = 0
        self._is_sealed = False
        self._bridges: dict[str, Bridge] = {}
        """Bridges by the tools and template options of requests; each keeps what it has found out."""
        self._parsers: dict[str, Parser] = {}

    @property
    def is_sealed(self) -> bool:
        return self._is_sealed

    def set_reward(self, reward: Any) -> None:
        """Set the episode's reward, a number, or rewards of answers, by their ids; raise ``RequestRefused``."""
        rewards = reward if isinstance(reward, dict) else {"": reward}
        unknown = {*rewards} - {"", *(answer.id for answer in self._received)}
        if unknown:
            raise RequestRefused(400, "invalid", f"there is no answer {', '.join(map(repr, sorted(unknown)))}")
        self.rewards = {answer_id: _finite(value) for answer_id, value in rewards.items()}
        self.is_rewarded = True

    def has_answers(self, ids: Collection[str]) -> bool:
        """Return whether one of these is the id of an answer."""
        return not {*ids}.isdisjoint(answer.id for answer in self._received)

    def seal(self) -> Episode:
        """End the episode: what was not received is dropped, and further requests are refused.

        Rewards of answers become those of their turns; the reward of the episode that of its last turn.
        """
        self._is_sealed = True
        for answer in self._received:
            assert answer.node is not None, "it was received"
            answer.node.reward = self.rewards.get(answer.id, 0.0)
        if "" in self.rewards and self._received:
            self.episode.graph.turns[-1].reward = self.rewards[""]
        self.episode.is_rewarded = self.is_rewarded or self.episode.failure is not None
        if self._received:
            if self._received[-1].fills_room and self.episode.status is RolloutStatus.COMPLETED:
                self.episode.end_early("length")
            path, opening = self.episode.graph.turns[-1].path(), self.episode.opening
            messages = [message for node in path for message in node.messages]
            has_opening = messages[: len(opening)] == opening  # a new branch may have another opening
            self.episode.messages = messages[len(opening) :] if has_opening else messages
        for pending in chain.from_iterable(self._asked.values()):
            pending.answer.cancel()
        return self.episode

    async def ask(
        self, question: ChatQuestion, *, is_retry: bool, listens: Callable[[], bool] = lambda: True
    ) -> ChatAnswer:
        """Return the policy's answer; a retry, or the question of an answer that was lost, gets the first one's.

        ``listens`` tells whether the program still waits for the answer. Equal questions of a program that waits for
        all their answers are several turns.
        """
        if self._is_sealed:
            raise RequestRefused(409, "sealed", "the episode is over")
        digest = question.digest
        equal = self._asked.get(digest, [])
        valid = [pending for pending in reversed(equal) if not _has_failed(pending.answer)]
        pending = next((pending for pending in valid if pending.is_given_up), None)
        # A retry gets the newest answer; if one has failed, the policy is asked again.
        if pending is None and is_retry and valid and len(valid) == len(equal) and not self._num_to_retry[digest]:
            pending = valid[0]
        else:
            self._require_turn()
        if pending is None:
            self._num_to_retry[digest] -= is_retry and self._num_to_retry[digest] > 0
            pending = _Asked(asyncio.ensure_future(self._answer(question)))
            self._asked.setdefault(digest, []).append(pending)
            pending.answer.add_done_callback(partial(self._forget_failed, digest, pending))
        pending.listeners.append(listens)
        return await asyncio.shield(pending.answer)

    def _require_turn(self) -> None:
        """Raise ``RequestRefused`` if the program has received, or waits for, as many answers as it may have."""
        num_turns = sum(not asked.is_given_up for asked in chain.from_iterable(self._asked.values()))
        if num_turns >= self._rules.max_turns:
            raise self._end_at_limit("max_turns", "max_turns", f"the episode has had its {self._rules.max_turns} turns")

    def _forget_failed(self, digest: str, pending: _Asked, answer: asyncio.Task[ChatAnswer]) -> None:
        """Forget a request without an answer: a program may go on asking, whatever it is told."""
        if not _has_failed(answer):
            return
        self._asked[digest].remove(pending)
        if not self._asked[digest]:
            del self._asked[digest]
        if not answer.cancelled() and not isinstance(answer.exception(), RequestRefused):
            self._num_to_retry[digest] += 1

    def received(self, question: ChatQuestion, answer: ChatAnswer) -> None:
        """Add an answer to the graph, as the program receives it; the next request may come before it all is sent."""
        self._request(question, answer).num_received += 1
        if answer.node is not None or self._is_sealed:
            return
        node = answer.continuation.node
        if node is None and answer.branching is None:  # asked before any answer was received
            branching = locate(self.episode.graph, answer.continuation.new).branching
            answer.counted = None if branching is Branching.FIRST else branching
        else:
            answer.counted = answer.branching
        observed = self.episode.graph.observe(node, answer.continuation.new, answer.context)
        if node is None:
            self._tools[id(observed)] = answer.tools
            self.episode.opening = self.episode.opening or answer.continuation.new
        if answer.counted is not None:
            self.episode.branches_by_reason[answer.counted] += 1
        self._received.append(answer)
        answer.node = self.episode.add_turn(observed, answer.parsed, answer.sampled)
        answer.node.is_whole = answer.is_whole

    def lost(self, question: ChatQuestion, answer: ChatAnswer) -> None:
        """Take an answer back that no request has brought to the program; if it asks again, it gets the same one."""
        if answer.node is None or self._is_sealed or answer.node not in self.episode.graph.leaves:
            return
        pending = self._request(question, answer)
        pending.num_received -= 1
        if pending.num_received:
            return
        self.episode.graph.remove_turn(answer.node)
        self._known.clear()  # its keys are ids of objects, which other objects may get later
        self._received.remove(answer)
        if answer.counted is not None:
            self.episode.branches_by_reason -= Counter([answer.counted])
        answer.node = None
        roots = (node for node in self.episode.graph.nodes if node.parent is None)
        self.episode.opening = next((root.messages for root in roots), [])

    def _request(self, question: ChatQuestion, answer: ChatAnswer) -> _Asked:
        answered = (
            pending
            for pending in self._asked[question.digest]
            if pending.answer.done() and not _has_failed(pending.answer)
        )
        return next(pending for pending in answered if pending.answer.result() is answer)

    async def _answer(self, question: ChatQuestion) -> ChatAnswer:
        if question.tools and self._parser is parse_text:
            message = "no known parser reads the calls of the policy's chat template: set environment.parser"
            raise RequestRefused(400, "unsupported", message)
        tools = json.dumps([question.tools, question.template_options], sort_keys=True)
        bridge, parser = self._bridge_of(question, tools), self._parser_of(question.tools, tools)
        continuation = locate(
            self.episode.graph,
            question.messages,
            known=self._known,
            begins=lambda node: self._tools.get(id(node)) == tools,
        )
        continuation, added, branching = self._continue(continuation, question.messages, bridge)
        context = added if continuation.node is None else np.concatenate([continuation.node.token_path(), added])
        remaining_tokens = self._rules.max_model_len - len(context)
        if remaining_tokens <= 0:
            limit = self._rules.max_model_len
            message = f"this run's maximum context length is {limit} tokens; the conversation has {len(context)}"
            raise self._end_at_limit("length", "context_length_exceeded", message)
        limit = min(self._rules.max_tokens, remaining_tokens, question.max_tokens or remaining_tokens)
        if self.episode.end == "length":  # the program has shortened its conversation
            self.episode.status, self.episode.end = RolloutStatus.COMPLETED, "done"
        number, self._num_sampled = self._num_sampled, self._num_sampled + 1
        with self.episode.timed("engine_wait"):
            sampled = await self._sample(context, max_tokens=limit, turn=number, stop=question.stop)
        text = full_text = read_text(sampled, bridge)
        for stop in question.stop:
            text = text.partition(stop)[0]
        is_whole = text == full_text
        is_cut = not is_whole or sampled.finish_reason == "length"
        if is_cut:
            text = close_thoughts(text, bridge, context)
        parsed = await read_calls(parser, text, f"{number}c", is_cut=is_cut)
        max_calls = MAX_CALLS if bridge.template.takes_several_calls else 1
        if surplus := parsed.calls[max_calls:]:
            self.episode.invalid_calls += len(surplus)
            parsed, is_whole = replace(parsed, calls=parsed.calls[:max_calls]), False
        if num_invalid := sum(call.problem is not None for call in parsed.calls):
            self.episode.invalid_calls += num_invalid
            parsed = parse_text(text, "")  # the program gets a malformed call as a text
        return ChatAnswer(
            id=f"{question.id_prefix}{number}",
            parsed=parsed,
            finish_reason=sampled.finish_reason,
            num_prompt_tokens=len(context),
            num_tokens=len(sampled.token_ids),
            continuation=continuation,
            context=added,
            sampled=sampled,
            tools=tools,
            branching=branching,
            is_whole=is_whole,
            fills_room=sampled.finish_reason == "length" and len(sampled.token_ids) >= remaining_tokens,
        )

    def _end_at_limit(self, limit: str, code: str, message: str) -> RequestRefused:
        self.limits_met[message] = limit
        self.episode.end_early(limit)
        return RequestRefused(400, code, message)

    def _continue(
        self, continuation: Continuation, messages: ChatMessages, bridge: Bridge
    ) -> tuple[Continuation, IntArray, str | None]:
        """Return what a conversation continues, the tokens that it adds, and the reason if it is a new branch."""
        node, reason = continuation.node, continuation.branching
        if node is not None and self._rules.history == "template":
            rendered = self._rendered(messages, bridge)
            added = tokens_after(node, rendered)
            if added is not None:
                return continuation, added, None
            return Continuation(node=None, new=messages), rendered, Branching.REWRITTEN.value
        if node is not None:
            try:
                return (
                    continuation,
                    bridge.suffix(node.messages[-1], continuation.new).after(node.token_ids, bridge),
                    None,
                )
            except Unbridgeable:
                continuation = Continuation(node=None, new=messages)
        rendered = self._rendered(messages, bridge)
        if reason is Branching.FIRST:
            return continuation, rendered, None
        return continuation, rendered, "unbridgeable" if reason is None else reason.value

    def _rendered(self, messages: ChatMessages, bridge: Bridge) -> IntArray:
        try:
            return bridge.whole(messages)
        except Unbridgeable as error:
            raise RequestRefused(400, "invalid", f"the conversation can't be rendered: {error}") from error

    def _parser_of(self, tools: Sequence[Any], key: str) -> Parser:
        if key not in self._parsers:
            try:
                self._parsers[key] = with_tools(self._parser, tools) if tools else parse_text
            except Exception as error:  # parsers of other libraries check the schemas
                raise RequestRefused(400, "invalid", f"the parser of calls can't take the tools: {error}") from error
        return self._parsers[key]

    def _bridge_of(self, question: ChatQuestion, key: str) -> Bridge:
        if key not in self._bridges:
            template = self._bridge.template.with_tools(list(question.tools)).with_options(question.template_options)
            self._bridges[key] = replace(self._bridge, template=template)
        return self._bridges[key]


def _finite(value: Any) -> float:
    """Return a number of Python, numpy or torch, or a truth value, as a float; raise ``RequestRefused`` for others."""
    number = unwrapped(value)
    if isinstance(number, int | float):
        with suppress(OverflowError):  # an integer too large for a float
            if math.isfinite(number):
                return float(number)
    raise RequestRefused(400, "invalid", f"the reward {value!r:.50} is not a finite number")


def _has_failed(answer: asyncio.Task[ChatAnswer]) -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
