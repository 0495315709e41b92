"""A gateway with an engine that answers from a script, and a client that talks to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai
from template_cases import made_tokenizer, shipped_templates

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.agent_session import AgentSession
from rlpipe.episodes.bridge import Bridge, turn_ends
from rlpipe.episodes.gateway import Gateway
from rlpipe.episodes.parsing import parse_hermes
from rlpipe.episodes.session import Episode, Rules, SampledTurn
from rlpipe.types import IntArray

TEMPLATES = dict(shipped_templates())
DATA = DataConfig(source="jsonl")
RULES = Rules(max_turns=6, max_tokens=100, max_model_len=3000, timeout_s=20, tool_timeout_s=5)
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}},
}


CALL = '<tool_call>\n{"name": "look", "arguments": {"at":  "home"}}\n</tool_call>'


@dataclass
class Scene:
    """A gateway with one episode, whose policy says given texts, each after a pause."""

    said: Sequence[str]
    pause_s: float = 0.0
    rules: Rules = RULES
    template_name: str = "trl/qwen2_5"
    contexts: list[IntArray] = field(default_factory=list)
    limits: list[int] = field(default_factory=list)
    stops: list[Sequence[str]] = field(default_factory=list)

    async def __aenter__(self) -> Scene:
        self.template = ChatTemplate(made_tokenizer(TEMPLATES[self.template_name]), DATA)
        bridge = Bridge(self.template, turn_ends(self.template, DATA))
        self.session = AgentSession(bridge=bridge, parser=parse_hermes, sample=self.sample, rules=self.rules)
        self.gateway = Gateway()
        await self.gateway.start()
        self.key = self.gateway.open(self.session)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.stop()

    async def sample(self, token_ids: IntArray, *, max_tokens: int, turn: int, stop: Sequence[str] = ()) -> SampledTurn:
        self.contexts.append(token_ids)
        self.limits.append(max_tokens)
        self.stops.append(stop)
        await asyncio.sleep(self.pause_s)
        own = [*self.template.token_ids(self.said[turn]).tolist(), self.template.tokenizer.eos_token_id]
        return SampledTurn(
            token_ids=own, logprobs=[-0.5] * len(own), policy_versions=[turn] * len(own), finish_reason="stop"
        )

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            **{"base_url": self.gateway.base_url, "api_key": self.key, "max_retries": 0, **options}
        )


def play(scene: Scene, program: Callable[[Scene], Awaitable[Any]]) -> tuple[Episode, Any]:
    async def run() -> tuple[Episode, Any]:
        async with scene:
            found = await program(scene)
            return scene.session.seal(), found

    return asyncio.run(run())
