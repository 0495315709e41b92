"""An episode that is played in this process, for ``rlpipe episode``."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from transformers.utils.logging import disable_progress_bar

from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import open_run_prompts
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.data.row import UnusableRow
from rlpipe.data.row_view import ShownRow, find_row, split_row
from rlpipe.episodes.groups import open_player
from rlpipe.episodes.session import Deadline
from rlpipe.errors import ConfigError, DataError, EngineFailed, EnvironmentFailed
from rlpipe.rollout.engine_thread import EngineThread, open_engine
from rlpipe.run.prepare import prepare_run
from rlpipe.types import GroupRequest, Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def play_episode(config: Config, *, row: int, seed: int, temperature: float | None) -> list[ShownRow]:
    """Play an episode of the config's environment on a row, and return its sequences.

    Raises ``ConfigError`` if the config has no environment, ``DataError`` if there is no such row, and
    ``EnvironmentFailed`` if the environment fails.
    """
    if config.algorithm.kind != "rl" or not config.environment.is_used:
        raise ConfigError("the config plays no episodes: set environment.path, environment.tools or environment.agent")
    disable_progress_bar()
    config = replace(config, model=prepare_run(config).model)
    tokenizer = load_tokenizer(config.model)
    prompt = _prompt(config, tokenizer, row)
    request = GroupRequest(
        group_id=0,
        prompt=prompt,
        group_size=1,
        max_tokens=prompt.limit(config.rollout.sampling.max_tokens),
        temperature=config.rollout.sampling.temperature if temperature is None else temperature,
        seed=seed,
    )
    rollout = _play(config, request)
    assert rollout.episode is not None
    rewards = ", ".join(f"{reward:g}" for reward in rollout.episode.turn_rewards)
    shown = []
    for number, sequence in enumerate(rollout.sequences):
        pieces = split_row(sequence.token_ids, sequence.loss_mask, tokenizer)
        counts = f"{sequence.num_loss_tokens} of {len(sequence.token_ids)} tokens trained"
        end = f"end: {rollout.episode.end}; rewards of the turns: {rewards}; " if number == 0 else ""
        shown.append(ShownRow(name=f"row {row}, sequence {number}", summary=f"{end}{counts}", pieces=pieces))
    return shown


def _prompt(config: Config, tokenizer: PreTrainedTokenizerBase, row: int) -> Prompt:
    source, _ = open_run_prompts(config, config.model, tokenizer, require_usable_rows=False)
    ref = find_row(source, row)
    if ref is None:
        raise DataError(f"--row {row}: the data has fewer rows")
    try:
        return source.render(ref)
    except UnusableRow as problem:
        raise DataError(f"--row {row} is skipped: {problem.reason}") from None


def _play(config: Config, request: GroupRequest) -> Rollout:
    rollout_config, data = config.rollout, config.data
    engine = EngineThread(
        "episode",
        lambda: open_engine(
            "episode", config.model, rollout_config, config.weights, max_prompt_tokens=data.max_prompt_tokens
        ),
    )

    async def sample(request: GroupRequest, _: Deadline) -> Rollout:
        group = await asyncio.to_thread(engine.ask, request, config.environment.timeout_s)
        if group.failure is not None:
            raise EngineFailed(group.failure)
        return group.rollouts[0]

    async def play() -> Rollout:
        environment = replace(config.environment, on_error="raise")
        is_scored = bool(config.scoring.rewards)
        player, _ = open_player(replace(config, environment=environment), sample, is_scored=is_scored)
        await player.start()
        group = await player.play(request)
        if group.failure is not None:
            raise EnvironmentFailed(group.failure)
        return group.rollouts[0]

    try:
        return asyncio.run(play())
    finally:
        engine.stop()
