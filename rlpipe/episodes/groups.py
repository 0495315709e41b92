"""Episodes of one group, which are played side by side, as the rollouts that are scored and trained."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from rlpipe.common.imports import describe_error, message_of
from rlpipe.configs.schema.rollout_config import EnvironmentConfig, SamplingConfig
from rlpipe.configs.schema.root_config import Config, longest_conversation
from rlpipe.data.render.control_tokens import special_ids
from rlpipe.data.render.processor import load_tokenizer, read_end_ids
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.agent_session import AgentSession
from rlpipe.episodes.agents import CommandAgent, EndpointAccess
from rlpipe.episodes.bridge import Bridge, check_bridge, ends_within_turns, turn_ends, turn_starts
from rlpipe.episodes.builtin_tools import open_servers
from rlpipe.episodes.gateway import Gateway
from rlpipe.episodes.isolation import STARTS, isolate
from rlpipe.episodes.load_environment import EpisodeKind, close_tried, import_kind
from rlpipe.episodes.parsing import Parser, open_parser
from rlpipe.episodes.session import Deadline, Episode, Rules, SampledTurn, Session
from rlpipe.episodes.tools import Environment, FunctionTool, Toolbox, ToolUse, call_anywhere
from rlpipe.errors import ConfigError, EnvironmentFailed
from rlpipe.rollout.multi_turn import SEED_STEP
from rlpipe.types import (
    MAX_SEED,
    NO_TURN,
    NO_VERSION,
    EpisodeTrace,
    GroupRequest,
    IntArray,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)

logger = logging.getLogger(__name__)

MIN_SIBLINGS = 2
"""Episodes that a group must have left to be trained; a single one has nothing to be compared with."""

NO_REWARD = (
    "the program gave no reward, and the run has no reward functions: return a number, send POST /v1/reward, or let a "
    "command print a number, or an object of answer ids with numbers, as its last line"
)


class SampleTurnOfGroup(Protocol):
    """A function that samples a turn of a group's episode on the run's engines."""

    async def __call__(self, request: GroupRequest, deadline: Deadline, /) -> Rollout:
        """Sample one answer to the request's prompt, on the engine that its group is assigned to.

        The episode's deadline is stopped while there is no such engine.
        """


class GroupPlayer:
    """A player of groups' episodes; at most ``concurrency`` run at the same time."""

    def __init__(
        self,
        kind: EpisodeKind,
        config: EnvironmentConfig,
        *,
        bridge: Bridge,
        parser: Parser,
        max_model_len: int,
        sampling: SamplingConfig,
        sample: SampleTurnOfGroup,
        stop_token_ids: Sequence[int] = (),
        is_scored: bool = True,
    ) -> None:
        """Make a player; ``stop_token_ids`` end turns in addition to the tokens at which engines end an answer.

        ``is_scored`` says whether the run has reward functions; without any, a program has to give a reward.
        """
        self._kind, self._config, self._bridge, self._parser, self._sample = kind, config, bridge, parser, sample
        self._max_model_len = max_model_len
        self._sampling = replace(sampling, stop_token_ids=[*sampling.stop_token_ids, *stop_token_ids])
        self._sends_sampling = bool(stop_token_ids)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._gateway = Gateway(config.host, config.port or 0) if kind.agent is not None else None
        self._needs_reward = kind.agent is not None and not is_scored
        self._has_warned = False
        """Whether the user knows that a command's last line counts beside reward functions."""

    @property
    def base_url(self) -> str | None:
        """URL at which programs reach the policy, once started; None if no program plays."""
        return None if self._gateway is None else self._gateway.base_url

    async def start(self) -> None:
        """Open the gateway if programs play, and try the MCP servers; raise ``ConfigError`` if one can't be started."""
        if self._gateway is not None:
            await self._gateway.start()
        for remaining_starts in reversed(range(STARTS)):
            try:
                async with asyncio.timeout(self._config.timeout_s), open_servers(self._kind.servers) as served:
                    if self._kind.tools or served:
                        environment = await self._make_environment()
                        Toolbox([*environment.tools(), *self._kind.tools, *served], timeout_s=0)  # names may clash
                        await asyncio.to_thread(close_tried, environment, self._config.tool_timeout_s)
                    return
            except ConfigError:
                raise
            except Exception as error:
                if not remaining_starts or isinstance(error, TimeoutError):
                    commands = ", ".join(server.command[0] for server in self._kind.servers)
                    what = f"tools: the MCP server {commands}" if commands else f"path: {self._config.path}"
                    raise ConfigError(f"environment.{what} can't be started: {describe_error(error)}") from error

    async def play(self, request: GroupRequest) -> RolloutGroup:
        """Return the group of a request; raise ``EnvironmentFailed`` if an episode fails and that is to stop the run.

        Episodes that failed are left out, or count with a reward of 0, as ``environment.on_error`` says.
        """
        if request.prompt.images:
            failure = "the row has images, and episodes have texts only"
            if self._config.on_error == "raise":
                raise EnvironmentFailed(f"group {request.group_id} can't be played: {failure}")
            return RolloutGroup(group_id=request.group_id, prompt=request.prompt, rollouts=[], failure=failure)
        began = asyncio.get_running_loop().time()
        played = await asyncio.gather(*(self._play_episode(request, index) for index in range(request.group_size)))
        episodes = [episode for episode, _ in played]
        gives_reward = self._needs_reward or any(
            episode.is_rewarded and episode.failure is None for episode in episodes
        )
        for episode in episodes:
            # A program that was cut off may have given no reward; without one, its episode would not count.
            if episode.status is RolloutStatus.TRUNCATED:
                episode.is_rewarded |= gives_reward
            elif self._needs_reward and episode.failure is None and not episode.is_rewarded:
                episode.fail(NO_REWARD)
                episode.is_rewarded = True
        group = RolloutGroup(group_id=request.group_id, prompt=request.prompt, rollouts=[])
        group.generate_s = asyncio.get_running_loop().time() - began
        failures = [episode.failure for episode in episodes if episode.failure is not None]
        if failures and self._config.on_error == "raise":
            raise EnvironmentFailed(f"an episode of group {request.group_id} failed: {failures[0]}")
        indices = [
            index
            for index, episode in enumerate(episodes)
            if episode.failure is None or self._config.on_error == "zero"
        ]
        is_dropped = bool(failures) and self._config.on_error == "drop_group"
        if is_dropped or len(indices) < min(MIN_SIBLINGS, request.group_size):
            group.failure = f"{len(failures)} of {request.group_size} episodes failed, the first with: {failures[0]}"
            return group
        group.rollouts = [
            episode_rollout(request, number, episodes[index], has_reward=self._kind.has_reward)
            for number, index in enumerate(indices)
        ]
        opening = next((episodes[index].opening for index in indices if episodes[index].opening), [])
        group.prompt = replace(request.prompt, prompt=opening)
        group.logged = episode_metrics(episodes, [use for _, use in played])
        return group

    async def _sample_turn(
        self,
        request: GroupRequest,
        index: int,
        deadline: Deadline,
        token_ids: IntArray,
        *,
        max_tokens: int,
        turn: int,
        stop: Sequence[str] = (),
    ) -> SampledTurn:
        """Sample a turn of one of a group's episodes, with a seed of its own, on the engine of the group."""
        sends_sampling = stop or self._sends_sampling
        rollout = await self._sample(
            replace(
                request,
                prompt=replace(request.prompt.followed_by(token_ids), prompt="", task={}),
                group_size=1,
                max_tokens=max_tokens,
                seed=(request.seed + SEED_STEP * (turn * request.group_size + index)) % MAX_SEED,
                sampling=replace(self._sampling, stop=[*self._sampling.stop, *stop]) if sends_sampling else None,
            ),
            deadline,
        )
        mask = rollout.loss_mask
        return SampledTurn(
            token_ids=rollout.token_ids[mask].tolist(),
            logprobs=rollout.logprobs[mask].tolist(),
            policy_versions=rollout.policy_versions[mask].tolist(),
            finish_reason=rollout.finish_reason,
        )

    async def _play_episode(self, request: GroupRequest, index: int) -> tuple[Episode, Mapping[str, ToolUse]]:
        async with self._slots:
            deadline = Deadline(self._config.timeout_s)
            sample = partial(self._sample_turn, request, index, deadline)
            rules = Rules(
                max_turns=self._config.max_turns,
                max_tokens=request.max_tokens,
                max_model_len=self._max_model_len,
                timeout_s=self._config.timeout_s,
                tool_timeout_s=self._config.tool_timeout_s,
                history=self._config.history,
            )
            if self._gateway is not None:
                agent_session = AgentSession(bridge=self._bridge, parser=self._parser, sample=sample, rules=rules)
                return _with_turns(await self._run_agent(agent_session, request.prompt.task, deadline)), {}
            # Siblings, and the rewards after them, may get one row: an environment in a thread could change theirs.
            row = copy.deepcopy(request.prompt.task if self._kind.has_reward else {"prompt": request.prompt.prompt})
            starting = asyncio.timeout(self._config.timeout_s)
            played: tuple[Episode, Mapping[str, ToolUse]] | None = None
            try:
                async with AsyncExitStack() as stack:
                    async with starting:
                        served = await stack.enter_async_context(open_servers(self._kind.servers))
                        environment = await self._make_environment()
                    try:
                        session = Session(
                            environment,
                            [*self._kind.tools, *served],
                            bridge=self._bridge,
                            parser=self._parser,
                            sample=sample,
                            rules=rules,
                            deadline=deadline,
                        )
                    except Exception:  # as of its method `tools`
                        with suppress(Exception):
                            async with asyncio.timeout(self._config.tool_timeout_s):
                                await call_anywhere(environment.close)
                        raise
                    played = _with_turns(await session.play(row, request.seed)), session.toolbox.use
            except Exception as error:  # noqa: BLE001 - a server may not start, or an environment not be made
                if played is None:  # else only the end of a server went wrong
                    played = Episode(), {}
                    limit = f"its environment and MCP servers took longer than {self._config.timeout_s:g} seconds"
                    late = f"{limit} to start (environment.timeout_s)"
                    played[0].fail(late if starting.expired() else describe_error(error))
            return played

    async def _make_environment(self) -> Environment:
        """Return a new environment; one whose methods are no coroutines is made in a thread, as it may block."""
        make = self._kind.make
        return make() if getattr(make, "is_async", False) else await asyncio.to_thread(make)

    async def _run_agent(self, session: AgentSession, row: Mapping[str, Any], deadline: Deadline) -> Episode:
        assert self._gateway is not None
        assert self._kind.agent is not None
        episode = session.episode
        key = self._gateway.open(session)
        try:
            async with deadline:
                access = EndpointAccess(base_url=self._gateway.base_url, api_key=key)
                reward = await self._kind.agent.run(copy.deepcopy(row), access)
                is_line = isinstance(self._kind.agent, CommandAgent)
                if reward is not None and (not is_line or self._counts(reward, session)):
                    session.set_reward(reward)
        except Exception as error:  # noqa: BLE001 - programs raise anything
            if deadline.has_passed:
                episode.end_early("timeout")
            elif episode.status is RolloutStatus.COMPLETED:  # else it met a limit, and failed because of that
                text = f"{message_of(error)} {error.__cause__}"
                limits = [limit for message, limit in session.limits_met.items() if message in text]
                if limits:  # one of its conversations met it while another one continued
                    episode.end_early(limits[-1])
                else:
                    episode.fail(describe_error(error))
        finally:
            self._gateway.close(key)
        return session.seal()

    def _counts(self, last_line: float | Mapping[str, float], session: AgentSession) -> bool:
        """Return whether the last line of a command is its reward, and not a result such as ``{"answer": 42}``."""
        if session.is_rewarded:
            return False
        if isinstance(last_line, Mapping):
            return session.has_answers(last_line)
        if not self._needs_reward and self._config.weight and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the last line of the command, %s, counts as its reward beside the reward functions; if it is a "
                "result, set environment.weight=0, or print a line without a number after it",
                last_line,
            )
        return True


def open_player(config: Config, sample: SampleTurnOfGroup, *, is_scored: bool = True) -> tuple[GroupPlayer, list[str]]:
    """Return a player of a config's environment, and what the user should know of its limits and the chat template.

    ``is_scored`` says whether the run has reward functions, from the config or from the caller.
    Raises ``ConfigError`` if the environment, a tool or the parser can't be used, and ``DataError`` if the model has no
    chat template.
    """
    environment = config.environment
    kind = isolate(import_kind(environment), environment, max_outage_s=config.cluster.max_outage_s)
    template = ChatTemplate(load_tokenizer(config.model), config.data)
    template.require()
    end_ids = turn_ends(template, config.data)
    engine_end_ids, special = _engine_ends(config, template), special_ids(template.tokenizer)
    starting_ids = end_ids & turn_starts(template, config.data)
    bridge = Bridge(template, end_ids, further_end_ids=engine_end_ids & special, starting_ids=starting_ids)
    bridge.refused = refused_messages(bridge, kind)
    parser = open_parser(environment.parser, template, has_tools=kind.has_tools)
    limit = longest_conversation(config)
    player = GroupPlayer(
        kind,
        environment,
        bridge=bridge,
        parser=parser,
        max_model_len=limit,
        sampling=config.rollout.sampling,
        sample=sample,
        # An engine that did not know the end marker, as with a base model, would sample the next message, too.
        stop_token_ids=sorted((end_ids & special) - engine_end_ids - ends_within_turns(template, end_ids)),
        is_scored=is_scored,
    )
    notes = [
        f"after {messages} the conversation is rendered anew, as a separate sequence: {reason}"
        for messages, reason in bridge.refused.items()
    ]
    if config.rollout.max_model_len is None:
        notes.append(
            f"a conversation ends after {limit} tokens (data.max_prompt_tokens + rollout.sampling.max_tokens), all its "
            "turns included; set rollout.max_model_len if that is too few"
        )
    return player, notes


def _engine_ends(config: Config, template: ChatTemplate) -> set[int]:
    """Return the tokens at which the engines end an answer by the model's files and the run's config."""
    end_id = template.tokenizer.eos_token_id
    return {*read_end_ids(config.model), *config.rollout.sampling.stop_token_ids} | ({end_id} - {None})


def refused_messages(bridge: Bridge, kind: EpisodeKind) -> dict[str, str]:
    """Return the kinds of messages that no bridge leads over, with reasons, in a template with the episode's tools.

    Tools of servers and of programs are not known yet; another one stands for them.
    """
    unknown = [FunctionTool(_look).schema] if kind.servers or kind.agent is not None else []
    refused: dict[str, str] = {}
    for schemas in [[], unknown] if kind.agent is not None else [[*kind.schemas, *unknown]]:
        refused |= check_bridge(replace(bridge, template=bridge.template.with_tools(schemas or None))).refused
    return refused


def _look(at: str) -> str:
    """Look at a place.

    Args:
        at: the place
    """
    return at


_SLOW_START = ": raise environment.timeout_s, or lower environment.concurrency if many start at the same time"


def _with_turns(episode: Episode) -> Episode:
    """Fail an episode in which the policy was not asked, or did not answer in time: it has nothing to train."""
    if not episode.graph.turns and episode.failure is None:
        episode.fail(f"it ended without a turn of the policy ({episode.end}){_SLOW_START * (episode.end == 'timeout')}")
    return episode


def episode_rollout(request: GroupRequest, index: int, episode: Episode, *, has_reward: bool) -> Rollout:
    """Return an episode as a rollout; an episode in which nothing was sampled has the tokens of its opening, if any."""
    rewards = [0.0] * len(episode.turn_rewards) if episode.failure is not None else episode.turn_rewards
    rollout = Rollout(
        group_id=request.group_id,
        sample_index=index,
        prompt_id=request.prompt.prompt_id,
        task=request.prompt.task,
        status=episode.status,
        finish_reason=episode.end,
        **_opening_arrays(episode),
    )
    sequences = [
        replace(
            rollout,
            token_ids=branch.token_ids,
            loss_mask=branch.loss_mask,
            logprobs=branch.logprobs,
            policy_versions=branch.policy_versions,
            turns=branch.turns,
        )
        for branch in episode.graph.branches()
    ]
    first, *branches = sequences or [rollout]
    trace = EpisodeTrace(
        messages=episode.messages,
        reward=float(sum(rewards)) if has_reward and episode.is_rewarded else None,
        turn_rewards=rewards,
        end=episode.end,
        branches=branches,
    )
    return replace(first, episode=trace)


def _opening_arrays(episode: Episode) -> dict[str, Any]:
    token_ids = episode.graph.nodes[0].token_ids if episode.graph.nodes else np.zeros(1, np.int32)
    length = len(token_ids)
    return {
        "token_ids": token_ids,
        "loss_mask": np.zeros(length, np.bool_),
        "logprobs": np.zeros(length, np.float32),
        "policy_versions": np.full(length, NO_VERSION, np.int32),
        "turns": np.full(length, NO_TURN, np.int32),
    }


def episode_metrics(episodes: Sequence[Episode], uses: Sequence[Mapping[str, ToolUse]]) -> dict[str, float]:
    """Return means over a group's episodes: turns, tokens, sequences, ends, branches, seconds and tool calls."""
    metrics = {
        "episodes/turns": _mean([len(episode.graph.turns) for episode in episodes]),
        "episodes/branches": _mean([len(episode.graph.branches()) for episode in episodes]),
        "episodes/truncated": _mean([episode.status is RolloutStatus.TRUNCATED for episode in episodes]),
        "episodes/failed": _mean([episode.failure is not None for episode in episodes]),
        "tools/invalid": _mean([episode.invalid_calls for episode in episodes]),
    }
    nodes = [node for episode in episodes for node in episode.graph.nodes]
    metrics["tokens/sampled"] = sum(int(node.loss_mask.sum()) for node in nodes) / len(episodes)
    metrics["tokens/observed"] = sum(int((~node.loss_mask).sum()) for node in nodes) / len(episodes)
    for activity in sorted({activity for episode in episodes for activity in episode.seconds}):
        metrics[f"time/{activity}"] = _mean([episode.seconds.get(activity, 0.0) for episode in episodes])
    reasons = Counter[str]()
    for episode in episodes:
        reasons.update(episode.branches_by_reason)
    metrics |= {f"episodes/branches/{reason}": count / len(episodes) for reason, count in sorted(reasons.items())}
    for name in sorted({name for use in uses for name in use}):
        tool_uses = [use[name] for use in uses if name in use]
        metrics[f"tools/{name}/calls"] = _mean([use.calls for use in tool_uses])
        metrics[f"tools/{name}/errors"] = _mean([use.errors for use in tool_uses])
        metrics[f"tools/{name}/timeouts"] = _mean([use.timeouts for use in tool_uses])
        metrics[f"tools/{name}/seconds"] = _mean([use.seconds for use in tool_uses])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
