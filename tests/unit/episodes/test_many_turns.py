"""Test that no turn of many is tokenized again: random bytes, calls with odd spaces, and calls that are cut off."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from episode_cases import ScriptedTurns
from player_cases import TEMPLATES, agent_kind, player_of, request_of
from template_cases import made_tokenizer

import rlpipe
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.agents import EndpointAccess
from rlpipe.episodes.load_environment import EpisodeKind
from rlpipe.episodes.session import Deadline
from rlpipe.rollout.engine import Sample, build_rollout
from rlpipe.rollout.multi_turn import SEED_STEP
from rlpipe.types import GroupRequest, Rollout

GROUP_SIZE, NUM_TURNS = 8, 25
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "number"}}},
    },
}


async def talk(row: dict[str, Any], episode: EndpointAccess) -> float:
    """Play as a program does that sends back what its client has made of each answer."""
    messages: list[Any] = [{"role": "user", "content": "Look around."}]
    async with openai.AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for _ in range(NUM_TURNS):
            found = await client.chat.completions.create(model="any", messages=messages, tools=[TOOL])
            said = found.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            calls = said.tool_calls or []
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "a {'wall'} é"} for call in calls]
            if not calls:
                messages.append({"role": "user", "content": "Где?\n\n 語🙂 <|im_end|>"})
    return 1.0


class RandomTurns(ScriptedTurns):
    """Samples tokens as no tokenizer would split their text, and keeps them by sibling."""

    def __init__(self, template: ChatTemplate, seed: int) -> None:
        super().__init__(template, [])
        self._rng = random.Random(seed)
        self.sampled: dict[int, list[int]] = defaultdict(list)
        self.kinds: Counter[str] = Counter()

    async def __call__(self, request: GroupRequest, _: Deadline) -> Rollout:
        await asyncio.sleep(0)
        kind = self._rng.choice(["tokens", "call", "cut call", "several calls"])
        self.kinds[kind] += 1
        own, is_cut = self._tokens(kind), kind == "cut call" or self._rng.random() < 0.1
        if not is_cut:
            own.append(self._template.tokenizer.eos_token_id)
        self.sampled[request.seed // SEED_STEP % GROUP_SIZE] += own
        sample = Sample(
            token_ids=own,
            logprobs=[-0.5] * len(own),
            policy_versions=[1] * len(own),
            finish_reason="length" if is_cut else "stop",
        )
        return build_rollout(request, 0, sample)

    def _tokens(self, kind: str) -> list[int]:
        if kind == "tokens":  # parts of characters among them
            special = {*self._template.tokenizer.all_special_ids}
            ids = [token for token in range(len(self._template.tokenizer)) if token not in special]
            return self._rng.choices(ids, k=self._rng.randint(1, 12))
        texts = ["Well. ", *(self._call() for _ in range(1 + 2 * (kind == "several calls")))]
        text = "\n".join(texts)
        if kind == "cut call":
            text = text[: self._rng.randint(8, len(text) - 1)]
        cuts = sorted(self._rng.choices(range(1, len(text)), k=4))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return [token for part in parts if part for token in self._template.token_ids(part).tolist()]

    def _call(self) -> str:
        given = {"at": self._rng.choice(["a\tb", "é\"'", "{}", ""]), "n": self._rng.choice([1, 1.0, 1e300, -0.0])}
        space = self._rng.choice(["", " ", "  ", "\n", "\t "])
        arguments = json.dumps(
            given, ensure_ascii=self._rng.random() < 0.5, separators=(f"{space},{space}", f":{space}")
        )
        return f'<tool_call>{space}{{"name":{space}"look",{space}"arguments": {arguments}}}{space}</tool_call>'


class Wander(rlpipe.Environment):
    """Answer as the program above does, to calls and to texts."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        return "Look around."

    @rlpipe.tool
    def look(self, at: str, n: float) -> str:
        """Look."""
        return "a {'wall'} é"

    def step(self, action: str) -> rlpipe.Step:
        return rlpipe.Step("Где?\n\n 語🙂 <|im_end|>")


KINDS = {
    "agent": lambda: agent_kind(f"{__file__}:talk"),
    "environment": lambda: EpisodeKind(make=Wander, tools=[], has_reward=True),
}


@pytest.mark.parametrize(
    ("kind", "name", "num_groups"),
    [
        ("agent", "trl/qwen2_5", 1),
        ("environment", "trl/qwen3", 1),
        pytest.param("agent", "trl/qwen2_5", 50, marks=pytest.mark.slow),
        pytest.param("agent", "trl/qwen3", 12, marks=pytest.mark.slow),
        pytest.param("agent", "trl/gemma4", 12, marks=pytest.mark.slow),
        pytest.param("environment", "trl/qwen2_5", 12, marks=pytest.mark.slow),
    ],
)
def test_no_turn_is_tokenized_again(kind: str, name: str, num_groups: int) -> None:
    template = ChatTemplate(made_tokenizer(TEMPLATES[name]), DataConfig(source="jsonl"))
    num_turns, kinds = 0, Counter[str]()
    for number in range(num_groups):
        turns = RandomTurns(template, number)
        options = {"max_model_len": 20_000, "max_turns": NUM_TURNS, "timeout_s": 300.0}
        player, _ = player_of([], kind=KINDS[kind](), name=name, sample=turns, **options)

        async def play(player: Any = player) -> Any:
            await player.start()
            return await player.play(request_of({}, group_size=GROUP_SIZE))

        group = asyncio.run(play())
        assert group.failure is None
        assert group.logged["episodes/branches"] == 1.0
        for sibling, rollout in enumerate(group):
            assert rollout.token_ids[rollout.loss_mask].tolist() == turns.sampled[sibling]
        num_turns += sum(turns.kinds.values())
        kinds += turns.kinds
    assert num_turns == num_groups * GROUP_SIZE * NUM_TURNS
    assert len(kinds) == 4
