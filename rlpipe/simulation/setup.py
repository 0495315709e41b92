"""Settings of a simulated run, and the durations of its parts, measured or given."""

from __future__ import annotations

import json
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator, SeedSequence, default_rng
from numpy.typing import NDArray

from rlpipe.common import run_files
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.configs.serving import published_kind
from rlpipe.errors import ConfigError, DataError, InputError
from rlpipe.replay.ledger.query import find_ledger, find_steps, reading
from rlpipe.rollout.engine import default_sequences
from rlpipe.scoring.pools import SHARED_POOL, resolve_pools

FORMS = "constant:S, uniform:A,B, exponential:MEAN, lognormal:MEAN,SIGMA or empirical:FILE"
BLOCK = 1024
MAX_SIGMA = 20.0
"""Largest sigma of a lognormal distribution: with it, single draws are of billions of medians."""

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
    simulations of two setups differ by nothing but the setup.
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
    kind, _, arguments = text.partition(":")
    if kind == "empirical" and arguments:
        return empirical(_read_seconds(Path(arguments)), text)
    numbers = _numbers(arguments)
    parsed = _from_numbers(kind, numbers) if numbers is not None else None
    if parsed is None:
        raise InputError(f"{option}: {text!r} is not a distribution of seconds; write {FORMS}")
    sample, mean = parsed
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
        case "lognormal", [mean, sigma] if mean > 0 and sigma <= MAX_SIGMA:
            log_median = math.log(mean) - sigma**2 / 2
            return (lambda generator, n: generator.lognormal(log_median, sigma, n)), mean
    return None


def _numbers(text: str) -> list[float] | None:
    """Return the comma-separated finite numbers of at least 0; None if there is anything else."""
    try:
        numbers = [float(field) for field in text.split(",")]
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
            raise DataError(f"{path}: {line!r} is not a number of seconds of at least 0; write one number per line")
    if not lines:
        raise DataError(f"{path}: has no numbers; write one number of seconds per line")
    return [number for numbers in seconds if numbers for number in numbers]


@dataclass(kw_only=True, frozen=True)
class Times:
    """Seconds that each part takes."""

    generate: Distribution
    """Seconds of a group that is alone on its engine."""
    score: Mapping[str, Distribution]
    """Seconds of a group in one process, by pool."""
    train: Distribution
    """Seconds of a step on the setup's ranks."""
    sync: Distribution
    """Seconds from a version's publication until every engine serves it."""


@dataclass(kw_only=True, frozen=True)
class Setup:
    """Sizes and times of a run's parts, as the simulation knows them."""

    num_engines: int
    groups_per_engine: int
    """Groups that an engine samples at one time; further ones wait in the engine."""
    slowdown: float
    """Ratio of a group's seconds on a full engine to those alone; in between, it is linear in the number of groups."""
    holds: bool
    """Whether an engine starts no group while a version waits to be loaded, and loads it once none runs."""
    pools: Mapping[str, int]
    """Processes of each scoring pool."""
    num_ranks: int
    groups_per_step: int
    group_size: int
    max_tokens: int
    max_staleness: int
    num_steps: int
    times: Times
    publish_every: int = 1
    """Steps from one published version to the next."""


def read_setup(config: Config, times: Times, *, groups_per_engine: int | None, slowdown: float) -> Setup:
    """Return the setup of a config; ``groups_per_engine`` overrides the value that follows from the config."""
    if config.algorithm.kind != "rl":
        raise ConfigError(f"algorithm.kind: {config.algorithm.kind} has no engines, so there is nothing to simulate")
    return Setup(
        num_engines=config.rollout.num_engines,
        groups_per_engine=groups_per_engine or groups_at_once(config.rollout, config.algorithm.completions_per_prompt),
        slowdown=slowdown,
        holds=holds_groups(config),
        pools=pool_sizes(config),
        num_ranks=config.learner.num_ranks,
        groups_per_step=config.algorithm.groups_per_step,
        group_size=config.algorithm.completions_per_prompt,
        max_tokens=config.rollout.sampling.max_tokens,
        max_staleness=config.replay.max_staleness,
        num_steps=config.algorithm.num_steps,
        times=times,
        publish_every=config.weights.every_steps,
    )


def groups_at_once(rollout: RolloutConfig, group_size: int) -> int:
    """Return the groups that an engine samples at one time; vLLM begins one if a single sequence slot is free."""
    name = "max_batch_size" if rollout.engine == "hf" else "max_num_seqs"
    value = rollout.engine_args.get(name, default_sequences(rollout))
    try:
        limit = int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"rollout.engine_args.{name}={value!r:.50} is not a number of sequences") from None
    return max(1, limit // group_size) if rollout.engine == "hf" else -(-limit // group_size)


def holds_groups(config: Config) -> bool:
    """Return whether full weights are loaded in place, once no sequence runs that began with the old weights."""
    return published_kind(config.model, config.weights) != "lora" and config.weights.on_update == "wait"


def pool_sizes(config: Config) -> dict[str, int]:
    """Return the processes of each scoring pool; rewards that are only passed in Python count as one shared pool."""
    sizes = {name: pool.max_size for name, pool in resolve_pools(config).items()}
    return sizes or {SHARED_POOL: config.scoring.num_processes}


Spans = NDArray[np.float64]  # [groups, 2]: from, until


@dataclass(kw_only=True, frozen=True)
class Measured:
    """Measured seconds by part, in the order of groups and steps; empty if the run has measured nothing yet."""

    on_engines: list[Spans]
    """Times at which each engine received its groups, and at which they were generated."""
    score: list[float]
    """Seconds of scoring each group, summed over the pools."""
    train: list[float]
    sync: list[float]


def read_measured(run: Path) -> Measured:
    """Read the ledger and the metrics of ``run``, even during the run.

    Raises ``DataError`` if there is no ledger, or it can't be read.
    """
    try:
        path = find_ledger(run)
    except DataError as error:
        raise DataError(f"--from needs the folder of a run: {error}") from None
    with reading(path) as ledger:
        generated = ledger.rows(
            "SELECT engine, generated_at - generate_s, generated_at FROM groups "
            "WHERE generate_s IS NOT NULL AND generated_at IS NOT NULL ORDER BY group_id"
        )
        score = [seconds for (seconds,) in ledger.rows("SELECT score_s FROM groups WHERE score_s IS NOT NULL")]
        steps = [step.metrics for step in find_steps(ledger)]
    by_engine: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for engine, received_at, generated_at in generated:
        by_engine[engine].append((received_at, generated_at))
    return Measured(
        on_engines=[np.array(spans, np.float64) for spans in by_engine.values()],
        score=score,
        train=_column(steps, "time/train"),
        sync=_column(_logged(run if run.is_dir() else run.parent), "time/sync"),
    )


def _logged(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the run's ``metrics.jsonl``, which has what is known only after a step; skip damaged ones."""
    path, rows = folder / run_files.METRICS, []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, RecursionError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def read_run_config(run: Path) -> Config | None:
    """Return the config that a run was started with, or None if none is in its folder, or beside its ledger."""
    path = (run if run.is_dir() else run.parent) / run_files.CONFIG
    return load_config(file=path, need_files=False) if path.is_file() else None


def work_seconds(spans: Spans, *, groups_at_once: int, slowdown: float) -> list[float]:
    """Return the seconds that groups of one engine would have taken alone: without waiting, and without the others."""
    sampled = _without_wait(spans, groups_at_once)
    starts, ends = np.sort(sampled[:, 0]), np.sort(sampled[:, 1])
    edges = np.unique(sampled)
    running = np.searchsorted(starts, edges, "right") - np.searchsorted(ends, edges, "right")
    stretch = 1 + (slowdown - 1) * np.maximum(running - 1, 0) / max(groups_at_once - 1, 1)
    work = np.concatenate([[0.0], np.cumsum(np.diff(edges) / stretch[:-1])])
    seconds = np.interp(sampled[:, 1], edges, work) - np.interp(sampled[:, 0], edges, work)
    return np.maximum(seconds, 0.0).tolist()


def _without_wait(spans: Spans, groups_at_once: int) -> Spans:
    """Return the spans without the wait: groups begin in the order of receipt, each as soon as a slot is free."""
    busy_until: list[float] = []
    sampled = spans[np.argsort(spans[:, 0], kind="stable")].copy()
    for span in sampled:
        if len(busy_until) >= groups_at_once:
            span[0] = min(max(span[0], heappop(busy_until)), span[1])
        heappush(busy_until, span[1])
    return sampled


def _column(steps: Sequence[Mapping[str, float | None]], metric: str) -> list[float]:
    values = (step.get(metric) for step in steps)
    return [value for value in values if isinstance(value, int | float) and 0 <= value < math.inf]


NOTHING = "constant:0"


@dataclass(kw_only=True, frozen=True)
class GivenTimes:
    """Times given on the command line."""

    generate: str | None = None
    score: Sequence[str] = ()
    """Distributions for every pool, or with ``POOL=`` for one pool; of several, the last one counts."""
    train: str | None = None
    sync: str | None = None
    run: Path | None = None
    """Folder of a run, from whose ledger the times that are not given are read."""


def read_times(config: Config, given: GivenTimes, *, slowdown: float) -> Times:
    """Return the times of the parts of ``config``; raise ``InputError`` if one is neither given nor measured."""
    times = _given_times(config, given) if given.run is None else _measured_times(config, given, given.run, slowdown)
    if not times.generate.mean + times.train.mean:
        raise InputError("generation and training take 0 seconds, so no time passes; set --generate or --train")
    return times


def _measured_times(config: Config, given: GivenTimes, run: Path, slowdown: float) -> Times:
    measured = read_measured(run)
    source = read_run_config(run) or config
    text = f"measured in {run}"
    if given.sync is None and holds_groups(source) and source.replay.max_staleness > 0:
        raise DataError(
            f"--from {run}: its engines held their groups while they waited for weights, so its sync times include "
            "that wait; set --sync to the seconds of the transfer and the load alone"
        )
    slots = groups_at_once(source.rollout, source.algorithm.completions_per_prompt)
    generate = [
        seconds
        for spans in measured.on_engines
        for seconds in work_seconds(spans, groups_at_once=slots, slowdown=slowdown)
    ]
    return Times(
        generate=_choose(given.generate, "--generate", generate, text),
        score=_measured_scores(config, source, given, measured, text),
        train=_choose(given.train, "--train", measured.train, text, factor=_train_work(config) / _train_work(source)),
        sync=_choose(given.sync, "--sync", measured.sync, text),
    )


def _given_times(config: Config, given: GivenTimes) -> Times:
    return Times(
        generate=_require(given.generate, "--generate"),
        score=_given_scores(config, given, parse_distribution(NOTHING, "--score")),
        train=_require(given.train, "--train"),
        sync=parse_distribution(given.sync or NOTHING, "--sync"),
    )


def _require(text: str | None, option: str) -> Distribution:
    if text is None:
        raise InputError(f"{option} is required, such as {option} lognormal:2,0.5, or --from with a run's folder")
    return parse_distribution(text, option)


def _given_scores(config: Config, given: GivenTimes, default: Distribution) -> dict[str, Distribution]:
    scores = dict.fromkeys(pool_sizes(config), default)
    for text in given.score:
        pool, equals, distribution = text.partition("=")
        if not equals or ":" in pool:  # a path may hold "=" too
            scores = dict.fromkeys(scores, parse_distribution(text, "--score"))
        elif pool in scores:
            scores[pool] = parse_distribution(distribution, "--score")
        else:
            raise InputError(f"--score {text}: there is no scoring pool {pool}; the pools are {', '.join(scores)}")
    return scores


def _measured_scores(
    config: Config, source: Config, given: GivenTimes, measured: Measured, text: str
) -> Mapping[str, Distribution]:
    """Return the scoring times by pool; a ledger has only their sum, of which each pool takes an equal share here."""
    if given.score and not measured.score:
        return _given_scores(config, given, parse_distribution(NOTHING, "--score"))
    default = _choose(None, "--score", measured.score, text, factor=1 / len(pool_sizes(source)))
    return _given_scores(config, given, default)


def _choose(
    explicit: str | None, option: str, measured: Sequence[float], text: str, *, factor: float = 1.0
) -> Distribution:
    if explicit is not None:
        return parse_distribution(explicit, option)
    if not measured:
        raise DataError(f"{option}: nothing is {text} yet; set {option}")
    return empirical(measured, text).scaled(factor)


def _train_work(config: Config) -> float:
    """Return the rollouts of a step that each rank trains."""
    algorithm = config.algorithm
    return algorithm.groups_per_step * algorithm.group_size / config.learner.num_ranks
