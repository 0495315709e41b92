"""Trial calls of a run's reward functions on answers to its first rows, in a process of their own, before a run."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing.connection import Connection

import numpy as np

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.doctor.observations import Observation, ok, problem, warning
from rlpipe.scoring.pools import FEATURE_PATH
from rlpipe.scoring.processes import start_reaper
from rlpipe.scoring.rewards import ENVIRONMENT_PATH, load_reward
from rlpipe.scoring.scorer import GroupScores, Scorer
from rlpipe.types import NO_VERSION, IntArray, Prompt, Rollout, RolloutGroup

SUBJECT = "reward calls"
START_S = 120.0
"""Seconds that the process has to import the rewards."""
FIX = "fix it, or return None for an answer that it can't judge"


def called_rewards(rewards: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """Return the functions among the rewards: classes may need a GPU, a server or the run's engines."""
    candidates = {
        name: config for name, config in rewards.items() if config.path not in (FEATURE_PATH, ENVIRONMENT_PATH)
    }
    return {name: config for name, config in candidates.items() if not isinstance(load_reward(config.path), type)}


def call_rewards(
    rewards: Mapping[str, RewardConfig], model: ModelConfig, prompts: Sequence[Prompt], eos_id: int | None
) -> Iterator[Observation]:
    """Yield what each function gives to an empty answer and to one that repeats the prompt's end, or why it fails.

    A function that ends its process, or takes longer than its ``timeout_s``, is the last one that is called.
    """
    groups = [group for number, prompt in enumerate(prompts) for group in _answered(2 * number, prompt, eos_id)]
    context = multiprocessing.get_context("spawn")
    results, sender = context.Pipe(duplex=False)
    process = context.Process(target=_score, args=(sender, rewards, model, groups), name=SUBJECT)
    process.start()
    sender.close()
    try:
        for name, config in rewards.items():
            try:
                _receive(results, START_S)
                scores = [_receive(results, config.timeout_s) for _ in groups]
            except TimeoutError as error:
                yield problem(SUBJECT, f"{name}: no value after {error} s (scoring.rewards.{name}.timeout_s)", FIX)
                return
            except EOFError:
                process.join()
                yield problem(SUBJECT, f"{name} ended its process ({_ending(process.exitcode)})", FIX)
                return
            yield _describe(name, config, scores)
    finally:
        process.kill()
        process.join()
        results.close()


def _answered(number: int, prompt: Prompt, eos_id: int | None) -> Iterator[RolloutGroup]:
    """Yield the prompt with empty answers, and with some that repeat its end."""
    end = np.asarray([] if eos_id is None else [eos_id], np.int32)
    for group_id, answer in enumerate([end, np.concatenate([prompt.token_ids[-16:], end])], start=number):
        rollouts = [_rollout(group_id, index, prompt, answer) for index in range(2)]  # some compare a group's answers
        yield RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts)


def _rollout(group_id: int, index: int, prompt: Prompt, answer: IntArray) -> Rollout:
    token_ids = np.concatenate([prompt.token_ids, answer]).astype(np.int32)
    is_drawn = np.arange(len(token_ids)) >= len(prompt.token_ids)
    return Rollout(
        group_id=group_id,
        sample_index=index,
        prompt_id=prompt.prompt_id,
        task=prompt.task,
        token_ids=token_ids,
        loss_mask=is_drawn,
        logprobs=np.zeros(len(token_ids), np.float32),
        policy_versions=np.where(is_drawn, 0, NO_VERSION).astype(np.int32),
    )


def _score(
    results: Connection, rewards: Mapping[str, RewardConfig], model: ModelConfig, groups: Sequence[RolloutGroup]
) -> None:
    """Send None once a reward is ready, and then its result for each group."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what rewards print is no line of the report
    start_reaper()
    tokenizer = load_tokenizer(model)
    with suppress(BrokenPipeError):
        for name, config in rewards.items():
            scorer = Scorer({name: config}, tokenizer)
            results.send(None)
            for group in groups:
                results.send(scorer.score([group])[0])
            scorer.close()


def _receive(results: Connection, limit_s: float) -> GroupScores:
    """Return the next result; raise ``TimeoutError`` with the limit, or ``EOFError`` if the process has ended."""
    if not results.poll(limit_s):
        raise TimeoutError(f"{limit_s:g}")
    result: GroupScores = results.recv()
    return result


def _ending(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _failures(groups: Sequence[GroupScores]) -> Iterator[str]:
    return (reason for group in groups for reason in group.failures.values())


def _describe(name: str, config: RewardConfig, scores: Sequence[GroupScores]) -> Observation:
    on_empty, on_texts = ([*_failures(groups)] for groups in (scores[::2], scores[1::2]))
    if failures := on_texts or on_empty:
        subject = "answers" if on_texts else "empty answers"
        text = f"{name} failed on {subject} to {len(failures)} of the first {len(scores) // 2} rows: {failures[0]}"
        stops = len(on_texts) == len(scores) // 2 or config.fail == "raise"
        return (problem if stops else warning)(SUBJECT, text, FIX)
    values = (chain.from_iterable(group.scores[name] for group in groups) for groups in (scores[::2], scores[1::2]))
    empty, repeated = (_range([value for value in numbers if value is not None]) for numbers in values)
    return ok(SUBJECT, f"{name} gives {empty} to an empty answer, {repeated} to one that repeats the question")


def _range(values: Sequence[float]) -> str:
    if not values:
        return "nothing"
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"
