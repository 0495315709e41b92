"""Tests of credit by turns, on a problem whose episodes and gradient can be enumerated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest

from rlpipe.algorithms.advantages import turn_advantages

STOP, GO = 0.3, 0.7
"""Probabilities of the first turn: an episode stops, or goes on to a second turn."""
LEFT, RIGHT = 0.6, 0.4
"""Probabilities of the second turn."""
EPISODES = {
    # probability, gradient of the log-probs by the logits of STOP and LEFT in each turn, rewards of the turns
    "stop": (STOP, [(1 - STOP, 0.0)], [0.4]),
    "left": (GO * LEFT, [(-STOP, 0.0), (0.0, 1 - LEFT)], [-0.2, 1.0]),
    "right": (GO * RIGHT, [(-STOP, 0.0), (0.0, -LEFT)], [-0.2, -0.5]),
}
Credit = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float] | np.ndarray]]


def true_gradient() -> np.ndarray:
    """Return the gradient of the expected sum of rewards."""
    return np.sum(
        [chance * np.sum(gradients, 0) * sum(rewards) for chance, gradients, rewards in EPISODES.values()], axis=0
    )


def expected_gradient(credit: Credit, num_siblings: int) -> np.ndarray:
    """Return the mean, over all groups that may be drawn, of the gradient that the advantages give."""
    total = np.zeros(2)
    for group in product(EPISODES.values(), repeat=num_siblings):
        chance = np.prod([own[0] for own in group])
        advantages = credit([own[2] for own in group])
        for (_, gradients, _), values in zip(group, advantages, strict=True):
            total += chance * np.sum([np.multiply(one, float(v)) for one, v in zip(gradients, values, strict=True)], 0)
    return total / num_siblings


def over_the_living(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the returns minus the mean of the siblings that still play, in which the sibling itself counts."""
    returns = [np.cumsum(values[::-1])[::-1] for values in rewards]
    found = []
    for own in returns:
        baselines = [np.mean([other[turn] for other in returns if len(other) > turn]) for turn in range(len(own))]
        found.append([value - base for value, base in zip(own, baselines, strict=True)])
    return found


@pytest.mark.parametrize("num_siblings", [1, 2, 3, 4])
def test_the_expected_gradient_is_the_true_one(num_siblings: int) -> None:
    np.testing.assert_allclose(expected_gradient(turn_advantages, num_siblings), true_gradient(), atol=1e-6)


@pytest.mark.parametrize("num_siblings", [2, 3, 4])
def test_a_mean_over_the_living_siblings_turns_the_gradient(num_siblings: int) -> None:
    """Check the direction, as a factor would be no harm."""
    biased, true = expected_gradient(over_the_living, num_siblings), true_gradient()
    cosine = biased @ true / np.linalg.norm(biased) / np.linalg.norm(true)
    assert cosine < 1 - 1e-4


def test_a_turn_is_compared_with_the_same_turn_of_the_others() -> None:
    long, short, other = turn_advantages([[1.0, 2.0, 3.0], [4.0], [0.0, 1.0]])
    np.testing.assert_allclose(long, [6 - (4 + 1) / 2, 5 - (0 + 1) / 2, 3 - 0])
    np.testing.assert_allclose(short, [4 - (6 + 1) / 2])
    np.testing.assert_allclose(other, [1 - (6 + 4) / 2, 1 - (5 + 0) / 2])


def test_equal_siblings_have_no_advantage() -> None:
    assert not np.concatenate(turn_advantages([[0.5, 1.0]] * 4)).any()
    assert turn_advantages([]) == []
    np.testing.assert_allclose(turn_advantages([[0.5, 1.0]])[0], [1.5, 1.0])
