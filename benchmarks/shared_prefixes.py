"""Tokens and time of a learner's step in which sequences share what they begin with, against the same with no sharing.

The sequences have the shapes of agents' episodes: histories that are compacted, histories whose thoughts are left out
later, and a tree. Those with no sharing are of the same lengths, and differ in their first token. Needs no Ray and no
engine. Run: ``python -m benchmarks.shared_prefixes``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from benchmarks.learner_speed import SHAPES, make_model
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.hardware.calibration import time_calls
from rlpipe.learner.policy import Policy, load_policy
from rlpipe.learner.step import Learner
from rlpipe.types import EpisodeTrace, Rollout, TrainBatch

FOLDER = Path("outputs/benchmarks/shared_prefixes")
MAX_TOKENS = 40_960


class Episode:
    """Sequences of random tokens; they share those of an earlier one where they say so."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._random, self._vocabulary = np.random.default_rng(seed), vocabulary
        self.sequences: list[tuple[np.ndarray, np.ndarray]] = []

    def text(self, length: int) -> np.ndarray:
        return self._random.integers(10, self._vocabulary, length).astype(np.int32)

    def add(self, *parts: tuple[np.ndarray, bool]) -> None:
        tokens = np.concatenate([part for part, _ in parts])
        mask = np.concatenate([np.full(len(part), is_sampled) for part, is_sampled in parts])
        self.sequences.append((tokens, mask))

    def rollout(self, group: int, sample: int) -> Rollout:
        first, *others = [_rollout(tokens, mask, group, sample) for tokens, mask in self.sequences]
        first.episode = EpisodeTrace(messages=[], reward=0.0, turn_rewards=[0.0], end="done", branches=others)
        return first


def _rollout(tokens: np.ndarray, mask: np.ndarray, group: int, sample: int) -> Rollout:
    return Rollout(
        group_id=group,
        sample_index=sample,
        prompt_id=group,
        task={},
        token_ids=tokens,
        loss_mask=mask,
        logprobs=np.zeros(len(tokens), np.float32),
        policy_versions=np.zeros(len(tokens), np.int32),
        advantages=np.ones(len(tokens), np.float32),
    )


def compacted(episode: Episode, prompt: np.ndarray) -> None:
    """Add a history that is replaced twice by its first turn and a summary."""
    first = (episode.text(120), True)
    for segment in range(3):
        turns = [
            (episode.text(length), is_sampled) for _ in range(5) for length, is_sampled in ((80, False), (120, True))
        ]
        kept = [(first[0], segment == 0)] + ([(episode.text(150), False)] if segment else [])
        episode.add((prompt, False), *kept, *turns)


def rewritten(episode: Episode, prompt: np.ndarray) -> None:
    """Add a history whose thoughts later prompts leave out, as templates of reasoning models do."""
    history = [prompt]
    for _ in range(16):
        answer = episode.text(40)
        episode.add(*((part, False) for part in history), (episode.text(60), True), (answer, True))
        history += [answer, episode.text(40)]


def parted(episode: Episode, prompt: np.ndarray) -> None:
    """Add eight answers that part from each other after a few sentences each."""
    trunk = episode.text(800)
    for index in range(8):
        shared = 100 * index
        episode.add((prompt, False), (trunk[:shared], False), (episode.text(800 - shared), True))


SHAPED: dict[str, Callable[[Episode, np.ndarray], None]] = {
    "compacted": compacted,
    "rewritten": rewritten,
    "tree": parted,
}


def make_rollouts(shape: str, vocabulary: int) -> list[Rollout]:
    """Return the two episodes of a group."""
    prompt = np.random.default_rng(0).integers(10, vocabulary, 400).astype(np.int32)
    rollouts = []
    for sample in range(2):
        episode = Episode(vocabulary, sample)
        SHAPED[shape](episode, prompt)
        rollouts.append(episode.rollout(0, sample))
    return rollouts


def told_apart(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the sequences as rollouts of groups of their own, which share nothing."""
    found = []
    for number, sequence in enumerate(sequence for rollout in rollouts for sequence in rollout.sequences):
        tokens = sequence.token_ids.copy()
        tokens[0] = number % 10
        tokens[1] = 10 + number // 10
        found.append(_rollout(tokens, sequence.loss_mask, number, 0))
    return found


def pack(rollouts: Sequence[Rollout]) -> TrainBatch:
    return pack_step(rollouts, step=0, num_ranks=1, max_tokens=MAX_TOKENS)[0]


def measure(shape: str, policy: Policy, vocabulary: int, steps: int) -> dict[str, float]:
    settings = LearnerConfig(max_tokens_per_microbatch=MAX_TOKENS)
    learner = Learner(policy, settings, AlgorithmConfig(num_steps=10_000))
    rollouts = make_rollouts(shape, vocabulary)
    batches = {"shared": pack(rollouts), "apart": pack(told_apart(rollouts))}
    tokens = {side: learner.train_step(batch)["tokens/run"] for side, batch in batches.items()}
    seconds: dict[str, list[float]] = {side: [] for side in batches}
    for _ in range(steps):
        for side, batch in batches.items():
            seconds[side].append(time_calls(lambda batch=batch: learner.train_step(batch), 1, policy.device))
    return {
        "tokens": int(tokens["apart"]),
        "fewer_tokens": round(1 - tokens["shared"] / tokens["apart"], 3),
        "speedup": round(median(seconds["apart"]) / median(seconds["shared"]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="number of steps of each side that are timed")
    parser.add_argument("--shapes", nargs="+", choices=SHAPED, default=[*SHAPED])
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, dtype = SHAPES[device.type], "bfloat16" if device.type == "cuda" else "float32"
    model = ModelConfig(path=str(make_model(shape, FOLDER / "model", getattr(torch, dtype))), dtype=dtype)
    policy = load_policy(model, LearnerConfig(), device)
    found = {name: measure(name, policy, shape.vocabulary, arguments.steps) for name in arguments.shapes}
    print(json.dumps({"device": device.type, **found}))


if __name__ == "__main__":
    main()
