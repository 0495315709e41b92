"""Tests that the tokens of episodes are those that an engine sampled, and are scored as they were sampled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import adapted, forward_logprobs, load, model_config, publish_adapter, rollout_config
from template_cases import made_tokenizer, shipped_templates
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, set_seed

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.bridge import Bridge, check_bridge, turn_ends
from rlpipe.episodes.parsing import parse_hermes
from rlpipe.episodes.session import Episode, Rules, SampledTurn, Session
from rlpipe.episodes.tools import Environment, Step, tool
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.engine_thread import open_engine
from rlpipe.types import GroupRequest, IntArray, Prompt

TEMPLATES = dict(shipped_templates())
DATA = DataConfig(source="jsonl")
RULES = Rules(max_turns=5, max_tokens=24, max_model_len=900, timeout_s=300, tool_timeout_s=5)
PLANTED = ["<|im_end|>\n<|im_start|>system\n", "Где?", "{'a': 1}", "\n\n", "</tool_response>", "語🙂", " "]
NUM_EPISODES = 30


@pytest.fixture(scope="module", params=["trl/qwen2_5", pytest.param("trl/qwen3", marks=pytest.mark.slow)])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random model with one of the packages' chat templates."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = made_tokenizer(TEMPLATES[request.param])
    set_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Chatter(Environment):
    """An environment whose texts look like the template's own."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._rng = random.Random(seed)
        return self._text()

    def step(self, action: str) -> Step:
        return Step(self._text(), reward=float("a" in action))

    @tool
    def look(self) -> str:
        "Look around."
        return self._text()

    def _text(self) -> str:
        return "".join(self._rng.choices(PLANTED, k=4))


class Turns:
    """Turns of many episodes from one engine, which loads a version after some of them."""

    def __init__(self, engine: Engine, published: Any) -> None:
        self._engine, self._published = engine, published
        self._waiting: dict[int, asyncio.Future[SampledTurn]] = {}
        self._num_sampled = 0

    async def sample(self, token_ids: IntArray, *, max_tokens: int, turn: int) -> SampledTurn:
        own = self._num_sampled
        self._num_sampled += 1
        prompt = Prompt(prompt_id=own, epoch=0, token_ids=token_ids, prompt="", task={})
        self._waiting[own] = asyncio.get_running_loop().create_future()
        self._engine.submit(
            [GroupRequest(group_id=own, prompt=prompt, group_size=1, max_tokens=max_tokens, temperature=1.0, seed=own)]
        )
        return await self._waiting[own]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)
            is_due = self._published is not None and self._num_sampled > 2 * NUM_EPISODES
            if is_due and self._engine.prepare_load(self._published[0]):
                load(self._engine, self._published)
                self._published = None
            for group in self._engine.step() if self._engine.has_work else ():
                (rollout,) = group.rollouts
                sampled = rollout.loss_mask
                self._waiting.pop(group.group_id).set_result(
                    SampledTurn(
                        token_ids=rollout.token_ids[sampled].tolist(),
                        logprobs=rollout.logprobs[sampled].tolist(),
                        policy_versions=rollout.policy_versions[sampled].tolist(),
                        finish_reason=rollout.finish_reason,
                    )
                )


async def play(path: Path, engine: Engine, published: Any) -> list[Episode]:
    template = ChatTemplate(AutoTokenizer.from_pretrained(path), DATA)
    bridge = Bridge(template, turn_ends(template, DATA))
    assert not check_bridge(bridge).refused
    turns = Turns(engine, published)
    driving = asyncio.create_task(turns.run())
    sessions = [
        Session(Chatter(), [], bridge=bridge, parser=parse_hermes, sample=turns.sample, rules=RULES)
        for _ in range(NUM_EPISODES)
    ]
    playing = asyncio.gather(*(session.play({}, seed) for seed, session in enumerate(sessions)))
    await asyncio.wait([driving, playing], return_when=asyncio.FIRST_COMPLETED)
    driving.cancel()
    return await playing


def test_every_token_is_scored_as_it_was_sampled(path: Path) -> None:
    engine = open_engine(
        "engine-0",
        model_config(path, "lora"),
        rollout_config("hf", max_model_len=1024),
        WeightsConfig(on_update="inflight"),
        max_prompt_tokens=900,
    )
    first, second = adapted(path, 1), adapted(path, 2)
    load(engine, publish_adapter(first, 1))
    episodes = asyncio.run(play(path, engine, publish_adapter(second, 2)))
    policies = {1: first, 2: second}
    num_tokens, seen = 0, set()
    for episode in episodes:
        branches = episode.graph.branches()
        assert len(branches) == 1 + sum(episode.branches_by_reason.values())
        for branch in branches:
            versions = branch.policy_versions[branch.loss_mask]
            seen |= {*versions.tolist()}
            num_tokens += len(versions)
            for version in {*versions.tolist()}:
                found = forward_logprobs(policies[version], branch, 1.0)
                own = versions == version
                np.testing.assert_allclose(found[own], branch.logprobs[branch.loss_mask][own], atol=1e-4)
    assert seen == {1, 2}
    assert num_tokens > 1000
    assert all(len(episode.graph.turns) == 5 or episode.end == "length" for episode in episodes)
