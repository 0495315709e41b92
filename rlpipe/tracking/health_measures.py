"""Numbers that tell from a run's metrics whether it is well, for the health rules."""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import StatisticsError, correlation, fmean, median
from typing import Any

from rlpipe.configs.schema.root_config import Config

START, RECENT, LONG = 10, 10, 50
"""Steps at the start of a run, the latest steps, and those over which a connection is looked for."""
LEARNED = 0.98
"""Share of a correct answer's reward from which on groups with equal rewards mean that the task is solved."""
NOISE = 4.0
"""The smallest gain of reward by which a fall is measured, in mean changes from one step to the next."""
WITHOUT_GROUPS = frozenset({"reinforce", "reinforce_plus_plus", "remax", "gae"})
"""Advantages whose baseline is not the group, so that groups with equal rewards are trained on, too."""
FINITE = (
    "reward",
    "entropy",
    "kl",
    "sampling/logp_difference/mean",
    "sampling/importance_ratio/mean",
    "sampling/effective_ratio",
)
"""Metrics that always have a finite value; a loss or gradient without one is counted in ``bad_steps``."""
CHANCE = 3.5
"""Standard deviations of a difference between held-out results up to which it counts as chance."""


@dataclass
class RunHistory:
    """Metrics of a run by name: of its first steps, of as many latest ones, and of all its evaluations."""

    config: Config
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    latest: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=LONG)))
    evaluations: list[tuple[Mapping[str, float], float | None]] = field(default_factory=list)
    """Metrics of each evaluation, with the recent training reward, or the negative recent loss, at its time."""
    broken: dict[str, deque[bool]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=RECENT)))
    """Whether each of the ``FINITE`` metrics was infinite or not a number, in the latest steps."""
    num_steps: int = 0
    best_reward: float = -math.inf
    """Highest mean reward of as many steps as are recent."""
    worst_reward: float = math.inf
    """Lowest mean reward of a step."""
    reward_spread: float = 0.0
    """Highest mean standard deviation, in as many steps, of the rewards of one prompt's answers."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step, or of an evaluation; of values that are not finite numbers only that is kept.

        An evaluation replaces the last one if both are of the same ``step``.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        values = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if is_evaluation(values):
            if self.evaluations and self.evaluations[-1][0].get("step", -1) == values.get("step"):
                self.evaluations.pop()  # a resumed run evaluates the version that it begins with again
            self.evaluations.append((values, self.progress()))
        self.num_steps += "loss" in values
        for name in FINITE:
            if name in metrics:  # in a log, null stands for what is not finite
                self.broken[name].append(name not in values)
        for name, value in values.items():
            if len(self.first[name]) < LONG:
                self.first[name].append(value)
            self.latest[name].append(value)
        self.worst_reward = min(self.worst_reward, values.get("reward", math.inf))
        if "reward" in values and (recent := self.last("reward")) is not None:
            self.best_reward = max(self.best_reward, fmean(recent))
            self.reward_spread = max(self.reward_spread, fmean(self.last("reward_std") or [0.0]))

    @property
    def is_broken(self) -> bool:
        """Whether any of the ``FINITE`` metrics was not finite in the latest step."""
        return any(steps[-1] for steps in self.broken.values() if steps)

    def start(self, name: str) -> list[float]:
        """Return a metric's values of the first steps."""
        return self.first[name][:START]

    def last(self, name: str, steps: int = RECENT) -> list[float] | None:
        """Return a metric's values of the latest steps; None while there are fewer of them."""
        values = self.latest[name]
        return [*values][-steps:] if len(values) >= steps else None

    def typical(self, name: str, steps: int = RECENT) -> float | None:
        """Return the median of a metric over the latest steps; None while there are fewer of them."""
        values = self.last(name, steps)
        return None if values is None else median(values)

    def share(self, part: str, whole: str, steps: int) -> float | None:
        """Return the median of the quotient of two metrics over the latest steps."""
        numerators, denominators = self.last(part, steps), self.last(whole, steps)
        if numerators is None or denominators is None:
            return None
        return median(a / b if b else 0.0 for a, b in zip(numerators, denominators, strict=True))

    def growth(self, name: str, *, floor: float) -> float | None:
        """Return by which factor a metric is above that of the first steps, or above ``floor`` if that was higher."""
        recent = self.typical(name)
        if recent is None or len(self.latest[name]) < START + RECENT:
            return None
        return recent / max(median(self.start(name)), floor)

    def mean_change(self, name: str) -> float:
        """Return by how much a metric changes from one step to the next, on average over the latest steps."""
        return fmean([abs(after - before) for before, after in pairwise(self.latest[name])] or [0.0])

    def increase(self, counter: str, steps: int = RECENT) -> float | None:
        """Return by how much a number that only grows has grown in the latest steps."""
        values = self.last(counter, steps + 1)
        return None if values is None else values[-1] - values[0]

    def progress(self) -> float | None:
        """Return the mean training reward of the latest steps, or the negative loss where there are no rewards."""
        name, sign = ("reward", 1) if self.latest["reward"] else ("loss", -1)
        values = [*self.latest[name]][-RECENT:]
        return sign * fmean(values) if values else None


def not_finite(run: RunHistory) -> dict[str, float]:
    """Return in how many of the latest steps each metric that should always be finite was not."""
    return {name: float(sum(run.broken[name])) for name in FINITE}


def is_evaluation(metrics: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in metrics)


Measure = Callable[[RunHistory], float | Mapping[str, float] | None]
"""Computes a rule's value, or one for each reward function by its name; None while it is not known."""


PENALTY = 0.01
"""Mean of a step below whose negative rewards count as penalties."""
REWARD_MEAN = re.compile(r"rewards/(.+)/mean")


def reward_of(metric: str) -> str | None:
    """Return the name of the reward whose mean a metric is; None for other metrics."""
    match = REWARD_MEAN.fullmatch(metric)
    return None if match is None else match[1]


def typical(name: str, steps: int = RECENT) -> Measure:
    return lambda run: run.typical(name, steps)


def is_asynchronous(config: Config) -> bool:
    return config.algorithm.kind == "rl" and config.replay.max_staleness > 0


def has_own_devices(config: Config) -> bool:
    """Return whether engines and learner could work at the same time without taking time from each other.

    They can if each has whole GPUs, or custom resources, and so hosts, that the other does not have.
    """
    engines, learner = config.rollout, config.learner
    have_gpus = engines.num_gpus >= 1 and learner.num_gpus >= 1
    have_hosts = bool(engines.resources and learner.resources) and not engines.resources.keys() & learner.resources
    return is_asynchronous(config) and (have_gpus or have_hosts)


def equal_rewards(run: RunHistory) -> float | None:
    """Return the share of groups with equal rewards; None where they have a signal, too, and once all is right."""
    accuracies, algorithm = run.latest["eval/accuracy"], run.config.algorithm
    has_signal = algorithm.group_size == 1 or algorithm.advantage.name in WITHOUT_GROUPS
    if (has_signal and not algorithm.samples_pairs) or (accuracies and accuracies[-1] >= LEARNED):
        return None
    return run.typical("frac_reward_zero_std")


def size_of_reward(run: RunHistory) -> float | None:
    """Return the mean size of rewards and of their spread; None where 0 may be the best, as penalties show."""
    rewards, spread = run.last("reward", 20), run.last("reward_std", 20)
    if rewards is None or spread is None or run.worst_reward < -PENALTY:
        return None
    return fmean(map(abs, rewards)) + fmean(spread)


def low_rewards(run: RunHistory) -> dict[str, float]:
    """Return the rewarded share of each reward function whose mean did not rise in the first steps.

    Functions without a positive weight are left out, and those with values below 0 or above 1, or with no value but 0,
    which may be penalties.
    """
    names = [name for metric in [*run.latest] if (name := reward_of(metric)) is not None]
    return {name: share for name in names if (share := _share_from_start(run, name)) is not None}


def _share_from_start(run: RunHistory, name: str) -> float | None:
    """Return a function's rewarded share at first or now, whichever is larger; None for one that has risen."""
    mean, std = f"rewards/{name}/mean", f"rewards/{name}/std"
    means, stds, early = run.last(mean, 20), run.last(std, 20), run.first[mean]
    config = run.config.scoring.rewards.get(name)
    if means is None or stds is None or len(early) < LONG or (config is not None and config.weight <= 0):
        return None
    early_share, late_share = _rewarded_share(run.start(mean), run.start(std)), _rewarded_share(means, stds)
    return (
        None
        if early_share is None or not late_share or _correlation(range(LONG), early) > 0.2
        else max(early_share, late_share)
    )


def _rewarded_share(means: Sequence[float], stds: Sequence[float]) -> float | None:
    """Return (Σ r)² / (n Σ r²), the share of completions with a reward if all of these are equal.

    The mean alone has no scale: 0.08 is much for a bonus of 0.1. None if there must be values below 0 or above 1.
    """
    mean, square = fmean(means), fmean(m * m + s * s for m, s in zip(means, stds, strict=True))
    if mean < 0 or square > mean * (1 + 1e-3):
        return None
    return mean * mean / square if square else 0.0


def lost_reward(run: RunHistory) -> float | None:
    """Return how far the reward is below its best, as a share of what it had gained.

    A small gain counts as the standard deviation of the rewards of one prompt's answers, or as several times the usual
    change from one step to the next: a reward that rises slowly also falls by half of a small gain now and then.
    """
    recent = run.last("reward")
    if recent is None or len(run.latest["reward"]) < START + RECENT:
        return None
    scale = max(run.best_reward - fmean(run.start("reward")), run.reward_spread, NOISE * run.mean_change("reward"))
    return (run.best_reward - fmean(recent)) / scale if scale else 0.0


def length_drift(run: RunHistory) -> float | None:
    """Return by which factor completions have become longer, if rewards rise and fall with their length; else 1."""
    lengths, rewards = run.last("completions/mean_length", LONG), run.last("reward", LONG)
    growth = run.growth("completions/mean_length", floor=1.0)
    if lengths is None or rewards is None or growth is None:
        return None
    is_correlated = _correlation(lengths, rewards) > 0.7
    return growth if is_correlated and fmean(rewards[-RECENT:]) > fmean(run.start("reward")) else 1.0


def _correlation(a: Sequence[float], b: Sequence[float]) -> float:
    try:
        return correlation(a, b)
    except StatisticsError:  # one of them is constant
        return 0.0


def held_out_falls(run: RunHistory) -> float | None:
    """Return how far the last two evaluations together are below the best two, if training rewards have not fallen.

    A fall that so few prompts may show by chance counts as 0. An accuracy that never changes says nothing; then it is
    the fall of the reward, as a share of twice its standard deviation, which is 1 for rewards of 0 and 1.
    """
    results = _held_out(run, "eval/accuracy")
    is_accuracy = len({round(value, 9) for value, *_ in results}) > 1
    results = results if is_accuracy else _held_out(run, "eval/reward")
    pairs = [((a + b) / 2, min(m, n), progress) for (a, m, _), (b, n, progress) in pairwise(results)]
    if len(pairs) < 2:
        return None
    best, best_scored, best_progress = max(pairs[:-1], key=lambda pair: pair[0])
    last, last_scored, last_progress = pairs[-1]
    mean = (best + last) / 2
    reward_spread = max(run.reward_spread, NOISE * run.mean_change("reward"))
    spread = math.sqrt(mean * (1 - mean)) if is_accuracy else reward_spread
    # The means of two evaluations each have half of one's variance, and their difference has twice theirs.
    by_chance = CHANCE * spread / math.sqrt(min(best_scored, last_scored))
    has_progress = best_progress is not None and last_progress is not None and last_progress >= best_progress
    unit = 1.0 if is_accuracy else 2 * spread
    return (best - last) / unit if has_progress and unit and best - last > by_chance else 0.0


def _held_out(run: RunHistory, name: str) -> list[tuple[float, float, float | None]]:
    """Return each evaluation's mean over the prompts that could be scored, their number, and the training's progress.

    The number is infinite in logs that lack it; there, evaluations with failures are left out.
    """
    results = []
    for values, progress in run.evaluations:
        if name not in values:
            continue
        mean, failed = values[name], values.get("eval/num_failed", 0.0)
        prompts = values.get("eval/num_prompts", math.inf)
        scored = prompts - failed
        if failed and not 0 < scored < math.inf:
            continue
        if failed and name == "eval/accuracy":  # failures count as wrong in it
            mean = min(mean * prompts / scored, 1.0)  # rounding would take some above it
        results.append((mean, scored, progress))
    return results


def overfitting(run: RunHistory) -> float | None:
    """Return by which share the held-out loss is above its lowest, if the training loss has not risen."""
    evaluated = [(values["eval/loss"], progress) for values, progress in run.evaluations if "eval/loss" in values]
    if len(evaluated) < 2:
        return None
    lowest, best_progress = min(evaluated[:-1], key=lambda entry: entry[0])
    last, last_progress = evaluated[-1]
    fell = best_progress is None or (last_progress is not None and last_progress >= best_progress)
    return (last - lowest) / abs(lowest) if fell and lowest else 0.0


def unpreferred(run: RunHistory) -> float | None:
    """Return the share of pairs whose chosen completion has the higher reward, over 20 steps after the warm-up.

    Pairs that the policy samples itself are ordered by reward, and new to it: about half is what to expect. KTO has no
    pairs, and begins with all completions on one side of its reference point; process rewards judge steps.
    """
    values, algorithm = run.last("rewards/accuracies", 20), run.config.algorithm
    is_kto = algorithm.kind == "preference" and not algorithm.preference.takes_pairs
    is_warm = run.num_steps >= run.config.learner.schedule.warmup_steps + 20
    has_pairs = algorithm.kind not in ("rl", "process_reward_model") and not is_kto
    return fmean(values) if values is not None and has_pairs and is_warm else None


def truncated(run: RunHistory) -> float | None:
    """Return the share of truncated completions; None where each row has a limit by its ground truth, as in EBFT."""
    ebft = run.config.algorithm.ebft
    return None if ebft.reward and ebft.adaptive_max_tokens else run.typical("completions/clipped_ratio")


def kl_of_tokens(run: RunHistory) -> float | None:
    """Return the KL per token, of the loss or of the reward; None for preferences, whose KL is of whole completions."""
    algorithm = run.config.algorithm
    if algorithm.kind == "preference" or algorithm.samples_pairs:
        return None
    return run.typical("kl" if run.latest["kl"] else "kl/in_reward", 5)


def off_importance(run: RunHistory) -> float | None:
    """Return by how much the mean importance weight differs from 1, its expectation."""
    mean = run.typical("sampling/importance_ratio/mean", 5)
    return None if mean is None else abs(mean - 1)


def similarity_of_copies(config: Config) -> float:
    """Return the similarity of features from which on samples of a prompt are nearly the same.

    Copies have a similarity of 1, and of 1/n if the features of n samples are whitened over the samples.
    """
    is_whitened = config.algorithm.ebft.features.whitening == "sample"
    return 0.8 / config.algorithm.group_size if is_whitened else 0.99


def failed_groups(run: RunHistory) -> float | None:
    failed = run.increase("groups/failed")
    return None if failed is None else failed / (failed + RECENT * run.config.algorithm.groups_per_step)


def used_staleness(run: RunHistory) -> float | None:
    """Return the share of the allowed staleness that rollouts have while the learner never waits for them."""
    waits, staleness = run.share("time/wait", "time/step", 20), run.typical("staleness/mean", 20)
    if waits is None or staleness is None or run.config.replay.max_staleness < 2 or not has_own_devices(run.config):
        return None
    return staleness / run.config.replay.max_staleness if waits < 0.02 else 0.0


def learner_waits(run: RunHistory) -> float | None:
    return run.share("time/wait", "time/step", 20) if has_own_devices(run.config) else None


def learner_trains(run: RunHistory) -> float | None:
    return run.share("time/train", "time/step", 20) if has_own_devices(run.config) else None
