"""Distributions of seconds: parsing them, and drawing from them so that two simulations can share the draws."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng
from numpy.typing import NDArray

from rlpipe.errors import DataError, InputError

FORMS = "constant:S, uniform:A,B, exponential:MEAN, lognormal:MEAN,SIGMA or empirical:FILE"
BLOCK = 1024

Sampler = Callable[[Generator, int], NDArray[np.float64]]


@dataclass(kw_only=True, frozen=True)
class Distribution:
    """Distribution of the seconds that something takes; never negative."""

    text: str
    sample: Sampler
    mean: float
    factor: float = 1.0
    """Factor of its draws and its mean."""

    def scaled(self, factor: float) -> Distribution:
        return replace(self, factor=self.factor * factor)

    def __str__(self) -> str:
        scale = "" if self.factor == 1 else f" x {self.factor:.3g}"
        return f"{self.text}{scale} (mean {self.mean * self.factor:.3g} s)"


class Draws:
    """Numbered draws from a distribution.

    The n-th is the same in every simulation with this seed, in whatever order the draws are requested, so that
    simulations of two set-ups differ by nothing but the set-up.
    """

    def __init__(self, distribution: Distribution, seed: SeedSequence) -> None:
        self._distribution = distribution
        self._generator = default_rng(seed)
        self._drawn = array("d")

    def __getitem__(self, number: int) -> float:
        while number >= len(self._drawn):
            block = self._distribution.sample(self._generator, BLOCK) * self._distribution.factor
            self._drawn.frombytes(np.asarray(block, np.float64).tobytes())
        return self._drawn[number]


def parse_distribution(text: str, option: str) -> Distribution:
    """Return the distribution that ``option`` was given as ``text``; raise ``InputError`` if it is none."""
    kind, _, rest = text.partition(":")
    if kind == "empirical" and rest:
        return empirical(_read_seconds(Path(rest)), text)
    numbers = _numbers(rest)
    made = _from_numbers(kind, numbers) if numbers is not None else None
    if made is None:
        raise InputError(f"{option}: {text!r} is no distribution of seconds; write {FORMS}")
    sample, mean = made
    return Distribution(text=text, sample=sample, mean=mean)


def empirical(seconds: Sequence[float], text: str) -> Distribution:
    """Return the distribution of independent draws of the measured seconds, all with the same probability."""
    values = np.array(seconds, np.float64)
    return Distribution(text=text, sample=lambda generator, n: generator.choice(values, n), mean=float(values.mean()))


def _from_numbers(kind: str, numbers: Sequence[float]) -> tuple[Sampler, float] | None:
    """Return the sampler and the mean; None if the kind is unknown, or the numbers do not fit it."""
    match kind, numbers:
        case "constant", [seconds]:
            return (lambda generator, n: np.full(n, seconds)), seconds
        case "uniform", [low, high] if low <= high:
            return (lambda generator, n: generator.uniform(low, high, n)), (low + high) / 2
        case "exponential", [mean]:
            return (lambda generator, n: generator.exponential(mean, n)), mean
        case "lognormal", [mean, sigma] if mean > 0:
            log_median = math.log(mean) - sigma**2 / 2
            return (lambda generator, n: generator.lognormal(log_median, sigma, n)), mean
    return None


def _numbers(text: str) -> list[float] | None:
    """Return the comma-separated finite numbers of at least 0; None if there is anything else."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        return None
    return numbers if all(0 <= number < math.inf for number in numbers) else None


def _read_seconds(path: Path) -> list[float]:
    try:
        lines = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: can't be read ({error}); empirical:FILE needs a text file of seconds") from None
    seconds = [_numbers(line) for line in lines]
    for line, numbers in zip(lines, seconds, strict=True):
        if numbers is None or len(numbers) != 1:
            raise DataError(f"{path}: {line!r} is not a number of seconds of at least 0; write one number a line")
    if not lines:
        raise DataError(f"{path}: holds no number; write one number of seconds a line")
    return [number for numbers in seconds if numbers for number in numbers]
