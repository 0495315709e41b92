"""Speed of episodes through Ray, against a bare loop over vLLM that samples the same turns, and two further figures.

``environment`` and ``http`` are shares of the bare loop's rate, for episodes of an environment and of a program that
uses OpenAI's client. ``gateway_ms`` is the gateway's CPU time for a request. ``schedule`` is the ideal time of episodes
whose environment takes 0 to 10 times as long as a turn, over the measured one, with an engine that always takes the
same time. Run: ``python -m benchmarks.episodes``. With ``--memory 20000`` it plays so many episodes of both kinds
instead, with turns that take no time, and prints by which share the memory grows of the process that plays them; for
``processes`` with those of its environments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from heapq import heapreplace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import psutil
import ray
import torch
from openai import AsyncOpenAI

import rlpipe
from rlpipe.actors.episodes import EpisodeActor, EpisodeSetup
from rlpipe.actors.rollout import TURNS, RolloutActor
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config, longest_conversation
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.agent_session import AgentSession
from rlpipe.episodes.agents import EndpointAccess
from rlpipe.episodes.bridge import Bridge, turn_ends
from rlpipe.episodes.gateway import Gateway
from rlpipe.episodes.groups import open_player
from rlpipe.episodes.parsing import parse_text
from rlpipe.episodes.session import Deadline, Rules, SampledTurn
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.rollout.engine import Sample, build_rollout, engine_threads
from rlpipe.types import NO_TURN, GroupRequest, IntArray, Prompt, Rollout, RolloutGroup

FOLDER = Path("outputs/benchmarks/episodes")
NUM_TURNS, TURN_TOKENS, GROUP_SIZE = 5, 24, 8
CONCURRENCY = 256
"""Episodes that are played at a time, if nothing else is asked for."""
TURN_S = 0.5
"""Seconds of a turn in the comparison with an ideal schedule: 256 at a time are then 12,000 tokens a second."""
SETTLED_AFTER = 0.1
"""Share of the episodes after which allocators and caches have reached their size."""


class Talk(rlpipe.Environment):
    """Answer each turn with a few words; a row may have the seconds that each answer takes."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._waits = iter(row.get("waits", ()))
        self._left = NUM_TURNS
        return "Say something, and go on."

    async def step(self, action: str) -> rlpipe.Step:
        self._left -= 1
        await asyncio.sleep(next(self._waits, 0.0))
        return rlpipe.Step("And then?", done=not self._left)


async def talk(row: Mapping[str, Any], episode: EndpointAccess) -> float:
    """Say the same as ``Talk`` by OpenAI's client."""
    messages: list[Any] = [{"role": "user", "content": "Say something, and go on."}]
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for _ in range(NUM_TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            messages += [
                answer.choices[0].message.model_dump(exclude_none=True),
                {"role": "user", "content": "And then?"},
            ]
    return 0.0


async def talk_plainly(row: Mapping[str, Any], episode: EndpointAccess) -> float:
    """Say the same without a client's own caches, which would count as growth of the process."""
    messages: list[Any] = [{"role": "user", "content": "Say something, and go on."}]
    headers = {"Authorization": f"Bearer {episode.api_key}"}
    async with aiohttp.ClientSession(headers=headers) as client:
        for _ in range(NUM_TURNS):
            body = {"model": "policy", "messages": messages}
            async with client.post(f"{episode.base_url}/chat/completions", json=body) as answer:
                messages.append((await answer.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": "And then?"})
    return 0.0


WAYS = {
    "environment": "environment.path=benchmarks.episodes:Talk",
    "http": "environment.agent=benchmarks.episodes:talk",
}


def make_config(*options: str, concurrency: int = CONCURRENCY) -> Config:
    path = FOLDER / "policy"
    if not path.exists():
        make_tiny_policy(path)
    return load_config(
        [
            *("data=jsonl", f"data.path={__file__}", f"model.path={path}", "model=full", "model.dtype=float32"),
            *("rollout.engine=vllm", "rollout.num_cpus=1", f"rollout.sampling.max_tokens={TURN_TOKENS}"),
            *("data.max_prompt_tokens=400", "environment.timeout_s=600", f"environment.concurrency={concurrency}"),
            *(f"environment.max_turns={NUM_TURNS}", *options),
        ],
        need_files=False,
    )


def make_requests(config: Config, num_groups: int, rows: Sequence[Mapping[str, Any]] = ()) -> list[GroupRequest]:
    return [
        GroupRequest(
            group_id=group,
            prompt=Prompt(
                prompt_id=group, epoch=0, token_ids=np.zeros(0, np.int32), prompt="", task=rows[group] if rows else {}
            ),
            group_size=1 if rows else GROUP_SIZE,
            max_tokens=config.rollout.sampling.max_tokens,
            temperature=1.0,
            seed=group,
        )
        for group in range(num_groups)
    ]


class Through:
    """The engine and the process of episodes of a run, as Ray actors."""

    def __init__(self, concurrency: int) -> None:
        groups, config = {TURNS: 8}, make_config()
        self.engine = ray.remote(concurrency_groups=groups)(RolloutActor).options(max_concurrency=4).remote("engine")
        self._concurrency = concurrency
        ray.get(self.engine.start.remote(config.model, config.rollout, config.weights, longest_conversation(config)))

    def play(self, num_groups: int, *options: str) -> tuple[float, list[RolloutGroup]]:
        """Return the seconds of episodes, and their groups."""
        config = make_config(*options, concurrency=self._concurrency)
        setup = EpisodeSetup(config=config, engines={"engine": self.engine}, folder=".")
        actor: Any = ray.remote(EpisodeActor).options(max_concurrency=1000).remote("episodes")
        ray.get(actor.start.remote(setup))
        found: list[RolloutGroup] = []
        groups: list[RolloutGroup] = []
        # The first are a warm-up, and start a process for each episode that is played at one time.
        for requests in (make_requests(config, self._concurrency // GROUP_SIZE), make_requests(config, num_groups)):
            found, groups, began = [], [], time.perf_counter()
            ray.get(actor.play.remote(requests, "engine"))
            while len(found) < len(requests):
                received = [group.group_id for group in groups]
                _, groups = ray.get(actor.collect.remote(5.0, 64, received))
                found += groups
            seconds = time.perf_counter() - began
        ray.kill(actor)
        failures = {group.failure for group in found} - {None}
        assert not failures, failures
        return seconds, found


def turns_of(groups: Sequence[RolloutGroup]) -> list[list[tuple[list[int], int]]]:
    """Return the prompt and the number of sampled tokens of each turn of each episode."""
    episodes = []
    for rollout in (rollout for group in groups for rollout in group):
        assert rollout.turns is not None
        own = []
        for turn in sorted({*rollout.turns.tolist()} - {NO_TURN}):
            indices = np.flatnonzero(rollout.turns == turn)
            own.append((rollout.token_ids[: indices[0]].tolist(), len(indices)))
        episodes.append(own)
    return episodes


def run_bare(file: Path, concurrency: int) -> None:
    """Sample the turns of a file by a loop over vLLM, and print the seconds."""
    from rlpipe.rollout.vllm.vllm_options import engine_args, sampling_args  # isort: split
    from vllm import EngineArgs, SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.v1.engine.llm_engine import LLMEngine

    episodes: list[list[tuple[list[int], int]]] = json.loads(file.read_text())
    config = make_config(WAYS["environment"])
    torch.set_num_threads(engine_threads(config.rollout))  # as many as the engine of the run has
    args = engine_args(config.model, config.rollout, config.weights, longest_conversation(config))
    engine = LLMEngine.from_engine_args(EngineArgs(**args))
    options = {**sampling_args(config.rollout.sampling), "ignore_eos": True}

    def sample(chosen: Sequence[list[tuple[list[int], int]]]) -> float:
        waiting, open_turns = list(enumerate(chosen)), 0
        began = time.perf_counter()

        def start(episode: int, turn: int) -> None:
            token_ids, count = chosen[episode][turn]
            params = SamplingParams(min_tokens=count, max_tokens=count, seed=episode, **options)
            engine.add_request(f"{episode}/{turn}", tokens_input(token_ids), params)

        while waiting or open_turns:
            while waiting and open_turns < concurrency:
                start(waiting.pop(0)[0], 0)
                open_turns += 1
            for output in engine.step():
                episode, turn = map(int, output.request_id.split("/"))
                if turn + 1 < len(chosen[episode]):
                    start(episode, turn + 1)
                else:
                    open_turns -= 1
        return time.perf_counter() - began

    sample(episodes[:16])
    print(json.dumps(sample(episodes)))
    engine.engine_core.shutdown()


def measure_bare(groups: Sequence[RolloutGroup], concurrency: int) -> float:
    file = FOLDER / "turns.json"
    file.write_text(json.dumps(turns_of(groups)))
    command = [sys.executable, "-m", "benchmarks.episodes", "--bare", str(file), "--concurrency", str(concurrency)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


FIXED_TURN = Sample(
    token_ids=[20] * TURN_TOKENS,
    logprobs=[-1.0] * TURN_TOKENS,
    policy_versions=[0] * TURN_TOKENS,
    finish_reason="length",
)
"""The turn of an engine that takes no time."""


async def instant(token_ids: IntArray, *, max_tokens: int, turn: int, stop: Sequence[str] = ()) -> SampledTurn:
    return SampledTurn(
        token_ids=FIXED_TURN.token_ids,
        logprobs=FIXED_TURN.logprobs,
        policy_versions=FIXED_TURN.policy_versions,
        finish_reason=FIXED_TURN.finish_reason,
    )


async def measure_gateway(num_episodes: int) -> float:
    """Return the CPU milliseconds of this process for a request that a client in another process makes."""
    config = make_config("environment.agent=benchmarks.episodes:talk")
    template = ChatTemplate(load_tokenizer(config.model), config.data)
    bridge = Bridge(template, turn_ends(template, config.data))
    rules = Rules(max_turns=NUM_TURNS, max_tokens=TURN_TOKENS, max_model_len=4000, timeout_s=600, tool_timeout_s=10)
    gateway = Gateway()
    await gateway.start()
    keys = [
        gateway.open(AgentSession(bridge=bridge, parser=parse_text, sample=instant, rules=rules))
        for _ in range(num_episodes)
    ]
    command = [sys.executable, "-m", "benchmarks.episodes", "--client", gateway.base_url]
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert client.stdout is not None
    await client.stdout.readline()  # it has imported its libraries
    began = time.process_time()
    await client.communicate(json.dumps(keys).encode())
    cpu_s = time.process_time() - began
    assert client.returncode == 0
    await gateway.stop()
    return 1000 * cpu_s / (num_episodes * NUM_TURNS)


async def run_client(base_url: str) -> None:
    """Play the episodes whose keys standard input has, 32 at a time."""
    import openai  # noqa: F401 - before the clock runs

    print("ready", flush=True)
    keys, permits = json.loads(sys.stdin.read()), asyncio.Semaphore(32)

    async def play(key: str) -> None:
        async with permits:
            await talk({}, EndpointAccess(base_url=base_url, api_key=key))

    await asyncio.gather(*map(play, keys))


async def measure_memory(num_episodes: int, concurrency: int, *options: str) -> float:
    """Return the growth of memory while episodes are played, over its size after the first of them.

    Memory is that of this process and of those that it has started, shared pages counted once.
    """

    async def sample(request: GroupRequest, _: Deadline) -> Rollout:
        return build_rollout(request, 0, FIXED_TURN)

    def used() -> int:
        own = psutil.Process()
        return sum(process.memory_full_info().pss for process in (own, *own.children(recursive=True)))

    config = make_config(*options, concurrency=concurrency)
    player, _ = open_player(config, sample)
    await player.start()
    settled, waves = 0, num_episodes // concurrency
    for wave in range(waves):
        groups = await asyncio.gather(*map(player.play, make_requests(config, concurrency // GROUP_SIZE)))
        assert not [group.failure for group in groups if group.failure]
        if wave == round(SETTLED_AFTER * waves):
            settled = used()
    return used() / settled - 1


async def measure_schedule(num_episodes: int, concurrency: int) -> float:
    """Return the ideal time of episodes with slow answers, over the measured one."""
    random = np.random.default_rng(0)
    waits = np.clip(random.lognormal(0.0, 1.0, (num_episodes, NUM_TURNS)), 0, 10) * TURN_S
    config = make_config(WAYS["environment"], concurrency=concurrency)

    async def sample(request: GroupRequest, _: Deadline) -> Rollout:
        await asyncio.sleep(TURN_S)
        return build_rollout(request, 0, FIXED_TURN)

    player, _ = open_player(config, sample)
    await player.start()
    await asyncio.gather(*map(player.play, make_requests(config, concurrency, [{} for _ in range(concurrency)])))
    requests = make_requests(config, num_episodes, [{"waits": own} for own in waits.tolist()])
    began = time.perf_counter()
    await asyncio.gather(*map(player.play, requests))
    seconds = time.perf_counter() - began
    free_at = [0.0] * concurrency
    for own in waits.sum(1) + NUM_TURNS * TURN_S:  # in the order of their requests
        heapreplace(free_at, free_at[0] + own)
    return max(free_at) / seconds


def measure(num_episodes: int, repeats: int, concurrency: int) -> None:
    gateway_ms = asyncio.run(measure_gateway(num_episodes))
    schedule = asyncio.run(measure_schedule(num_episodes, concurrency))
    print(f"gateway: {gateway_ms:.2f} ms a request; schedule: {schedule:.3f}", flush=True)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    through = Through(concurrency)
    shares: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, option in WAYS.items():
            seconds, groups = through.play(num_episodes // GROUP_SIZE, option)
            bare_s = measure_bare(groups, concurrency)
            print(f"{way}: {seconds:.1f} s, a bare loop {bare_s:.1f} s", flush=True)
            shares[way].append(bare_s / seconds)
    ray.shutdown()
    result = {
        "episodes": num_episodes,
        **{way: round(median(own), 3) for way, own in shares.items()},
        "gateway_ms": round(gateway_ms, 2),
        "schedule": round(schedule, 3),
    }
    print(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=CONCURRENCY, help="episodes that are played at a time")
    parser.add_argument("--memory", type=int, metavar="EPISODES", help="measure memory over so many episodes instead")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare is not None:
        run_bare(arguments.bare, arguments.concurrency)
    elif arguments.client is not None:
        asyncio.run(run_client(arguments.client))
    elif arguments.memory is not None:
        in_thread, plainly = "environment.isolation=thread", "environment.agent=benchmarks.episodes:talk_plainly"
        ways = {way: [option, in_thread] for way, option in WAYS.items()} | {"http": [plainly, in_thread]}
        ways["processes"] = [WAYS["environment"]]
        growth = {
            way: asyncio.run(measure_memory(arguments.memory, arguments.concurrency, *options))
            for way, options in ways.items()
        }
        print(json.dumps({"episodes": arguments.memory, **{way: round(own, 4) for way, own in growth.items()}}))
    else:
        measure(arguments.episodes, arguments.repeats, arguments.concurrency)


if __name__ == "__main__":
    main()
