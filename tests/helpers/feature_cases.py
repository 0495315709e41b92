"""EBFT's rewards and advantages in plain NumPy and float64, written with loops, for the tests of all folders."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def unit(vector: Array) -> Array:
    return vector / np.sqrt(sum(value * value for value in vector))


def join_reference(layers: list[Array], normalize: str) -> Array:
    """Join a token's hidden states of several depths, as ``normalize_layers`` says."""
    joined = np.concatenate([unit(layer) if normalize == "each" else layer for layer in layers])
    return unit(joined) if normalize == "joint" else joined


def whiten_reference(samples: Array, truth: Array, method: str) -> tuple[Array, Array]:
    """Whiten with eigenvectors of the Gram matrices instead of an SVD."""
    count = len(samples)
    if method == "none":
        return np.stack([unit(x) for x in samples]), np.stack([unit(truth)] * count)
    gram = samples @ samples.T if method == "sample" else samples.T @ samples
    values, vectors = np.linalg.eigh(gram)
    matrix = np.zeros_like(gram)
    for value, vector in zip(values, vectors.T, strict=True):
        if value > (1e-5**2) * values.max():
            matrix += np.outer(vector, vector) / np.sqrt(value)
    if method == "sample":
        return matrix @ samples, matrix @ np.stack([truth] * count)
    return samples @ matrix, np.stack([truth @ matrix] * count)


def whiten_layers_reference(
    samples: Array, truth: Array, method: str, layers: int, positions: int = 1
) -> tuple[Array, Array]:
    """Whiten each layer by itself; its features stand at each of the positions."""
    width = samples.shape[1] // (layers * positions)
    x, y = [], []
    for layer in range(layers):
        own = [(place * layers + layer) * width + index for place in range(positions) for index in range(width)]
        one, other = whiten_reference(samples[:, own], truth[own], method)
        x.append(one / np.sqrt(layers))
        y.append(other / np.sqrt(layers))
    return np.concatenate(x, axis=1), np.concatenate(y, axis=1)


def score_reference(samples: Array, truth: Array, method: str) -> tuple[list[float], list[float], float]:
    return score_whitened(*whiten_reference(samples, truth, method))


def score_whitened(x: Array, y: Array) -> tuple[list[float], list[float], float]:
    count = len(x)
    alignment = [float(unit(x[j]) @ unit(y[j])) for j in range(count)]
    diversity = [sum(float(x[j] @ x[k]) for k in range(count) if k != j) / max(count - 1, 1) for j in range(count)]
    difference = sum(x[j] for j in range(count)) / count - sum(y[j] for j in range(count)) / count
    return alignment, diversity, float(sum(value * value for value in difference))


def baseline_reference(alignment: Array, products: Array, align_coef: float, diversity_coef: float) -> list[float]:
    """Return the spec's advantages a_j, with the mean over the pairs without j computed pair by pair."""
    count = len(alignment)
    diversity = [sum(products[j, k] for k in range(count) if k != j) / (count - 1) for j in range(count)]
    advantages = []
    for j in range(count):
        reward = 2 * align_coef * alignment[j] - 2 * diversity_coef * diversity[j]
        others = [k for k in range(count) if k != j]
        base_alignment = sum(alignment[k] for k in others) / len(others)
        pairs = [products[k, m] for k in others for m in others if k < m]
        base_diversity = sum(pairs) / len(pairs) if pairs else 0.0
        advantages.append(reward - (2 * align_coef * base_alignment - 2 * diversity_coef * base_diversity))
    return advantages
