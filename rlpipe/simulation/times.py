"""Times of a simulation: those that are given, and for the others those that a run has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import DataError, InputError
from rlpipe.simulation.distributions import Distribution, empirical, parse_distribution
from rlpipe.simulation.measured import Measured, read_measured, read_run_config, work_seconds
from rlpipe.simulation.setup import Times, groups_at_once, holds_groups, pool_sizes

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
        raise InputError("generation and training take 0 seconds, so that no time passes; give --generate or --train")
    return times


def _measured_times(config: Config, given: GivenTimes, run: Path, slowdown: float) -> Times:
    measured = read_measured(run)
    source = read_run_config(run) or config
    text = f"measured in {run}"
    if given.sync is None and holds_groups(source) and source.replay.max_staleness > 0:
        raise DataError(
            f"--from {run}: its engines held their groups while they waited for weights, and its sync times hold "
            "that wait; give --sync, the seconds of the transfer and the load alone"
        )
    places = groups_at_once(source.rollout, source.algorithm.group_size)
    generate = [
        seconds
        for spans in measured.on_engines
        for seconds in work_seconds(spans, groups_at_once=places, slowdown=slowdown)
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
        raise InputError(f"{option} is required, such as {option} lognormal:2,0.5, or --from and a run's folder")
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
    given: str | None, option: str, measured: Sequence[float], text: str, *, factor: float = 1.0
) -> Distribution:
    if given is not None:
        return parse_distribution(given, option)
    if not measured:
        raise DataError(f"{option}: nothing is {text} yet; give {option}")
    return empirical(measured, text).scaled(factor)


def _train_work(config: Config) -> float:
    """Return the rollouts of a step that each rank trains."""
    algorithm = config.algorithm
    return algorithm.groups_per_step * algorithm.group_size / config.learner.num_ranks
