"""An environment with a tool, a policy that says what a test writes, and turns sampled on an engine of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.session import Deadline, SampledTurn
from rlpipe.episodes.tools import Environment, Step, tool
from rlpipe.rollout.engine import Sample, build_rollout
from rlpipe.rollout.multi_turn import SEED_STEP
from rlpipe.types import GroupRequest, IntArray, Rollout

CALL = '<tool_call>\n{"name": "hint", "arguments": {"kind": "size"}}\n</tool_call>'


class Guess(Environment):
    """Guess a number; it notes whether it was closed."""

    def __init__(self, lowest: int = 1) -> None:
        self.lowest, self.num_closed = lowest, 0

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.number = int(row["number"])
        return f"{self.lowest}-32? (seed {seed})"

    async def step(self, action: str) -> Step:
        if not action.isdigit():
            return Step("say a number", reward=-0.1)
        if int(action) == self.number:
            return Step("right", reward=1.0, done=True)
        return Step("higher" if int(action) < self.number else "lower")

    @tool
    def hint(self, kind: str) -> str:
        "Give a hint."
        return f"{kind}: {'large' if self.number > 16 else 'small'}"

    def close(self) -> None:
        self.num_closed += 1


class ScriptedPolicy:
    """A policy that says given texts, and notes what it was asked with."""

    def __init__(self, template: ChatTemplate, said: Sequence[str], *, cut: Sequence[int] = ()) -> None:
        self._template, self._said, self._cut = template, said, cut
        self.contexts: list[IntArray] = []

    async def __call__(self, token_ids: IntArray, *, max_tokens: int, turn: int) -> SampledTurn:
        self.contexts.append(token_ids)
        own = self._template.token_ids(self._said[turn]).tolist()[:max_tokens]
        is_cut = turn in self._cut
        own += [] if is_cut else [self._template.tokenizer.eos_token_id]
        return SampledTurn(
            token_ids=own,
            logprobs=[-0.5] * len(own),
            policy_versions=[turn] * len(own),
            finish_reason="length" if is_cut else "stop",
        )


class ScriptedTurns:
    """Samples the turns of groups whose seed is 0: each sibling says its own texts, one after the other."""

    def __init__(self, template: ChatTemplate, said: Sequence[Sequence[str]]) -> None:
        self._template, self._said = template, said
        self.requests: list[GroupRequest] = []

    async def __call__(self, request: GroupRequest, _: Deadline) -> Rollout:
        await asyncio.sleep(0)
        self.requests.append(request)
        turn, sibling = divmod(request.seed // SEED_STEP, len(self._said))
        own = [*self._template.token_ids(self._said[sibling][turn]).tolist(), self._template.tokenizer.eos_token_id]
        sample = Sample(
            token_ids=own, logprobs=[-0.5] * len(own), policy_versions=[turn] * len(own), finish_reason="stop"
        )
        return build_rollout(request, 0, sample)
