"""Players of episodes, with a scripted engine, and the groups that they play."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from episode_cases import Guess, ScriptedTurns
from template_cases import made_tokenizer, shipped_templates

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.rollout_config import EnvironmentConfig, SamplingConfig
from rlpipe.data.render.template import ChatTemplate
from rlpipe.episodes.bridge import Bridge, check_bridge, turn_ends
from rlpipe.episodes.groups import GroupPlayer
from rlpipe.episodes.load_environment import EpisodeKind, import_kind
from rlpipe.episodes.parsing import parse_hermes
from rlpipe.types import GroupRequest, Prompt, RolloutGroup

TEMPLATES = dict(shipped_templates())
DATA = DataConfig(source="jsonl")
KIND = EpisodeKind(make=Guess, tools=[], has_reward=True)


def play(
    *said: Sequence[str],
    kind: EpisodeKind = KIND,
    name: str = "trl/qwen2_5",
    row: dict[str, Any] | None = None,
    prompt: Any = (),
    **options: Any,
) -> tuple[RolloutGroup, ScriptedTurns]:
    player, turns = player_of(said, kind=kind, name=name, **options)
    request = request_of({"number": 20} if row is None else row, prompt=list(prompt), group_size=len(said))

    async def run() -> RolloutGroup:
        await player.start()
        return await player.play(request)

    return asyncio.run(run()), turns


def player_of(
    said: Sequence[Sequence[str]],
    *,
    kind: EpisodeKind,
    name: str = "trl/qwen2_5",
    max_model_len: int = 4000,
    run_stop: Sequence[str] = (),
    sample: ScriptedTurns | None = None,
    stop_token_ids: Sequence[int] = (),
    is_scored: bool = True,
    **options: Any,
) -> tuple[GroupPlayer, ScriptedTurns]:
    template = ChatTemplate(made_tokenizer(TEMPLATES[name]), DATA)
    bridge = Bridge(template, turn_ends(template, DATA))
    bridge.refused = check_bridge(bridge).refused
    turns = sample or ScriptedTurns(template, said)
    player = GroupPlayer(
        kind,
        EnvironmentConfig(**{"max_turns": 5, "timeout_s": 20.0, **options}),
        bridge=bridge,
        parser=parse_hermes,
        max_model_len=max_model_len,
        sampling=SamplingConfig(stop=[*run_stop]),
        sample=turns,
        stop_token_ids=stop_token_ids,
        is_scored=is_scored,
    )
    return player, turns


def request_of(row: dict[str, Any], *, group_size: int, prompt: Sequence[Any] = ()) -> GroupRequest:
    asked = Prompt(prompt_id=4, epoch=0, token_ids=np.zeros(0, np.int32), prompt=list(prompt), task=row)
    return GroupRequest(
        group_id=7, prompt=asked, group_size=group_size, max_tokens=200, temperature=0.7, seed=0, min_version=3
    )


def agent_kind(agent: Any) -> EpisodeKind:
    return import_kind(EnvironmentConfig(agent=agent))
