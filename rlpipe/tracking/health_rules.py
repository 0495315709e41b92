"""The rules that tell from a run's metrics that something is wrong, with the likely causes and what to do about it.

The ranges are those that axolotl's documentation gives for GRPO, EBFT, SFT and preferences, where it has any; each was
held against runs that learned and runs that broke.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import StatisticsError, correlation, fmean, median, pstdev
from typing import Any

from rlpipe.configs.schema.root_config import Config

START, RECENT, LONG = 10, 10, 50
"""Steps at the start of a run, the latest steps, and those over which a connection is looked for."""
LEARNED = 0.98
"""Share of a correct answer's reward from which on groups with equal rewards mean that the task is solved."""


NOISE = 2.0
"""Standard deviations of the first steps' rewards within which a gain is noise, if no prompt has several answers."""


@dataclass
class RunHistory:
    """Metrics of a run by name: of its first steps, of the latest ones, and of all its evaluations."""

    config: Config
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    latest: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=LONG)))
    evaluations: list[tuple[Mapping[str, float], float | None]] = field(default_factory=list)
    """Metrics of each evaluation, with the recent training reward, or the negative recent loss, at its time."""
    num_steps: int = 0
    best_reward: float = -math.inf
    """Highest mean reward of as many steps as are recent."""

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Add the metrics of a step, or of an evaluation; values that are not finite numbers are left out.

        An evaluation replaces the last one if both are of the same ``step``.
        """
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        values = {name: value for name, value in numbers.items() if math.isfinite(value)}
        if is_evaluation(values):
            if self.evaluations and self.evaluations[-1][0].get("step", -1) == values.get("step"):
                self.evaluations.pop()  # a resumed run evaluates the version that it begins with again
            self.evaluations.append((values, self.progress()))
        self.num_steps += "loss" in values
        for name, value in values.items():
            if len(self.first[name]) < START:
                self.first[name].append(value)
            self.latest[name].append(value)
        if "reward" in values and (recent := self.last("reward")) is not None:
            self.best_reward = max(self.best_reward, fmean(recent))

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
        parts, wholes = self.last(part, steps), self.last(whole, steps)
        if parts is None or wholes is None:
            return None
        return median(a / b if b else 0.0 for a, b in zip(parts, wholes, strict=True))

    def growth(self, name: str, *, floor: float) -> float | None:
        """Return by which factor a metric is above that of the first steps, or above ``floor`` if that was higher."""
        recent = self.typical(name)
        if recent is None or len(self.latest[name]) < START + RECENT:
            return None
        return recent / max(median(self.first[name]), floor)

    def increase(self, counter: str, steps: int = RECENT) -> float | None:
        """Return by how much a number that only grows has grown in the latest steps."""
        values = self.last(counter, steps + 1)
        return None if values is None else values[-1] - values[0]

    def progress(self) -> float | None:
        """Return the mean training reward of the latest steps, or the negative loss where there are no rewards."""
        name, sign = ("reward", 1) if self.latest["reward"] else ("loss", -1)
        values = [*self.latest[name]][-RECENT:]
        return sign * fmean(values) if values else None


def is_evaluation(metrics: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in metrics)


Measure = Callable[[RunHistory], float | None]


@dataclass(frozen=True, kw_only=True)
class HealthRule:
    """A number that is computed after each step, and the limit from which it is unhealthy."""

    name: str
    measure: Measure
    """None while it is not known."""
    warn: float | Callable[[Config], float]
    of_evaluations: bool = False
    """Whether it is checked after evaluations, not after steps."""
    is_above: bool = True
    """Whether values above the limit, not below it, are unhealthy."""
    message: str
    """A description of the problem, in which ``{value}`` stands for the measured number."""
    causes: str
    fix: str

    def limit(self, config: Config) -> float:
        """Return the value from which on the rule warns in a run with this config."""
        own = config.health.get(self.name)
        if own is not None and own.warn is not None:
            return own.warn
        return self.warn(config) if callable(self.warn) else self.warn

    def is_beyond(self, value: float, limit: float) -> bool:
        return value >= limit if self.is_above else value <= limit

    def describe(self, value: float) -> str:
        return f"{self.message.format(value=value)}. Likely: {self.causes}. Try: {self.fix}"


def typical(name: str, steps: int = RECENT) -> Measure:
    return lambda run: run.typical(name, steps)


def is_asynchronous(config: Config) -> bool:
    return config.algorithm.kind == "rl" and config.replay.max_staleness > 0


def has_own_devices(config: Config) -> bool:
    """Return whether engines and learner could work at the same time without taking time from each other."""
    return is_asynchronous(config) and config.rollout.num_gpus >= 1 and config.learner.num_gpus >= 1


def equal_rewards(run: RunHistory) -> float | None:
    """Return the share of groups with equal rewards; None for groups of one, and once everything is right."""
    accuracies = run.latest["eval/accuracy"]
    if run.config.algorithm.group_size == 1 or (accuracies and accuracies[-1] >= LEARNED):
        return None
    return run.typical("frac_reward_zero_std")


def size_of_reward(run: RunHistory) -> float | None:
    rewards, spread = run.last("reward", 20), run.last("reward_std", 20)
    return None if rewards is None or spread is None else fmean(map(abs, rewards)) + fmean(spread)


def lost_reward(run: RunHistory) -> float | None:
    """Return the share of the reward gained so far that is lost again; 0 if the gain was within the noise.

    The noise is that of the answers to one prompt, or, with one answer a prompt, that from one of the first steps to
    the next, which says nothing of how much they have learned together.
    """
    recent, first = run.last("reward"), run.first["reward"]
    if recent is None or len(run.latest["reward"]) < START + RECENT:
        return None
    gained, spread = run.best_reward - fmean(first), median(run.first["reward_std"] or [0.0])
    changes = [after - before for before, after in pairwise(first)]
    is_alone = run.config.algorithm.group_size == 1
    noise = max(spread / 3, NOISE * pstdev(changes) / math.sqrt(2)) if is_alone else spread / 3
    return (run.best_reward - fmean(recent)) / gained if gained > noise else 0.0


def length_drift(run: RunHistory) -> float | None:
    """Return by which factor completions have become longer, if rewards rise and fall with their length; else 1."""
    lengths, rewards = run.last("completions/mean_length", LONG), run.last("reward", LONG)
    growth = run.growth("completions/mean_length", floor=1.0)
    if lengths is None or rewards is None or growth is None:
        return None
    try:
        goes_along = correlation(lengths, rewards) > 0.7
    except StatisticsError:  # one of them is constant
        goes_along = False
    return growth if goes_along and fmean(rewards[-RECENT:]) > fmean(run.first["reward"]) else 1.0


def held_out_falls(run: RunHistory) -> float | None:
    """Return how far the last two evaluations together are below the best two, if training rewards have not fallen."""
    name = "eval/accuracy" if run.latest["eval/accuracy"] else "eval/reward"
    known = [(values[name], progress) for values, progress in run.evaluations if name in values]
    pairs = [((a + b) / 2, progress) for (a, _), (b, progress) in pairwise(known)]
    if len(pairs) < 2:
        return None
    best, then = max(pairs[:-1], key=lambda pair: pair[0])
    last, now = pairs[-1]
    return best - last if then is not None and now is not None and now >= then else 0.0


def overfitting(run: RunHistory) -> float | None:
    """Return by which share the held-out loss is above its lowest, if the training loss has not risen."""
    known = [(values["eval/loss"], progress) for values, progress in run.evaluations if "eval/loss" in values]
    if len(known) < 2:
        return None
    lowest, then = min(known[:-1], key=lambda entry: entry[0])
    last, now = known[-1]
    fell = then is None or (now is not None and now >= then)
    return (last - lowest) / abs(lowest) if fell and lowest else 0.0


def unpreferred(run: RunHistory) -> float | None:
    """Return the share of pairs whose chosen completion has the higher reward, over 20 steps after the warm-up.

    Pairs that the policy samples itself are ordered by reward, and new to it: about half is what to expect. KTO has no
    pairs, and begins with all completions on one side of its reference point.
    """
    values, algorithm = run.last("rewards/accuracies", 20), run.config.algorithm
    is_kto = algorithm.kind == "preference" and not algorithm.preference.takes_pairs
    is_warm = run.num_steps >= run.config.learner.schedule.warmup_steps + 20
    return None if values is None or algorithm.kind == "rl" or is_kto or not is_warm else fmean(values)


def kl_of_tokens(run: RunHistory) -> float | None:
    """Return the KL per token; None for preferences, whose KL is of whole completions."""
    algorithm = run.config.algorithm
    return None if algorithm.kind == "preference" or algorithm.samples_pairs else run.typical("kl", 5)


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


RULES = (
    HealthRule(
        name="equal_rewards",
        measure=equal_rewards,
        warn=0.9,
        message="all rewards are equal in {value:.0%} of the groups, so they give no learning signal",
        causes="prompts that are too hard or too easy, a reward with too few values, or a policy without variety",
        fix="easier or harder prompts, partial credit in the reward, a larger algorithm.group_size, a higher "
        "rollout.sampling.temperature, or replay.refill_attempts",
    ),
    HealthRule(
        name="no_reward",
        measure=size_of_reward,
        warn=0.01,
        is_above=False,
        message="nearly no completion of the last 20 steps was rewarded (mean {value:.2g})",
        causes="a reward that does not recognize the answers, or a task that is too hard for this model",
        fix="read completions.jsonl, test the reward on them, show the format in the prompt, or start from a model "
        "that is right sometimes",
    ),
    HealthRule(
        name="reward_falls",
        measure=lost_reward,
        warn=0.5,
        message="{value:.0%} of the reward that was gained is lost again",
        causes="a learning rate that is too high, a single huge update, or rollouts that are too old",
        fix="an earlier checkpoint (resume=PATH) with a lower learner.optimizer.lr or learner.max_grad_norm, or a "
        "lower replay.max_staleness",
    ),
    HealthRule(
        name="entropy_low",
        measure=typical("entropy", 5),
        warn=0.01,
        is_above=False,
        message="the policy has nearly no variety left (entropy {value:.2g} nats)",
        causes="a learning rate that is too high, too many steps, or a temperature below 1",
        fix="a lower learner.optimizer.lr, algorithm.loss.clip_high=0.28, algorithm.loss.entropy_coef, or "
        "algorithm.loss.beta",
    ),
    HealthRule(
        name="entropy_high",
        measure=lambda run: run.growth("entropy", floor=0.5),
        warn=2.5,
        message="the policy becomes random: its entropy is {value:.1f} times that of the first steps",
        causes="a learning rate that is too high, an entropy bonus, or engine log-probs that differ from the learner's",
        fix="a lower learner.optimizer.lr, a lower algorithm.loss.entropy_coef, or algorithm.loss.beta",
    ),
    HealthRule(
        name="gradient_norm",
        measure=typical("grad_norm", 5),
        warn=lambda config: 10.0 if config.algorithm.kind in ("rl", "ebft_strided") else 100.0,
        message="gradients are large (norm {value:.3g} before clipping)",
        causes="a learning rate that is too high, rewards of a large scale, or damaged rows",
        fix="a lower learner.optimizer.lr, a longer learner.schedule.warmup_steps, or a lower learner.max_grad_norm",
    ),
    HealthRule(
        name="skipped_updates",
        measure=lambda run: run.increase("bad_steps"),
        warn=2,
        message="{value:.0f} of the last 10 steps skipped an update, as its loss or gradient was not finite",
        causes="float16, an overflow in the model, or a reward or custom loss that returns huge numbers",
        fix="model.dtype=bfloat16 or float32, and a lower learner.optimizer.lr",
    ),
    HealthRule(
        name="clipping",
        measure=typical("clip_ratio/region_mean"),
        warn=0.3,
        message="{value:.0%} of the tokens are clipped, so the policy moves far within a step",
        causes="too many updates on the same rollouts, or a learning rate that is too high",
        fix="a lower algorithm.num_minibatches or algorithm.num_epochs_per_step, or a lower learner.optimizer.lr",
    ),
    HealthRule(
        name="kl",
        measure=kl_of_tokens,
        warn=2.0,
        message="the policy is far from the reference (KL {value:.2g} per token)",
        causes="a learning rate that is too high, or a KL penalty that is too weak",
        fix="a higher algorithm.loss.beta, or a lower learner.optimizer.lr",
    ),
    HealthRule(
        name="logprob_difference",
        measure=typical("sampling/logp_difference/mean", 5),
        warn=lambda config: 0.3 if is_asynchronous(config) else 0.1,
        message="engine and learner disagree: their log-probs of a token differ by {value:.2g} on average",
        causes="an engine in another precision, rollouts that are too old, or many updates per step",
        fix="model.dtype=float32 for a comparison, a lower replay.max_staleness, or "
        "algorithm.correction.mode=token_truncate",
    ),
    HealthRule(
        name="effective_samples",
        measure=typical("sampling/effective_ratio", 5),
        warn=0.5,
        is_above=False,
        message="few tokens count: their importance weights leave {value:.0%} of them effective",
        causes="rollouts that are too old, or an engine whose distribution differs from the learner's",
        fix="a lower replay.max_staleness, a lower learner.optimizer.lr, or algorithm.correction.off_policy_threshold",
    ),
    HealthRule(
        name="missing_logprobs",
        measure=typical("sampling/missing_ratio", 5),
        warn=0.01,
        message="the engine reports no log-prob for {value:.0%} of the tokens, which have no correction",
        causes="a sampling option that cuts the distribution, or a fault of the engine",
        fix="rollout.sampling without top_k, min_p and extra arguments, or another version of vLLM",
    ),
    HealthRule(
        name="truncated",
        measure=typical("completions/clipped_ratio"),
        warn=0.8,
        message="{value:.0%} of the completions are cut off at the limit, before their answer",
        causes="rollout.sampling.max_tokens is too low, or the policy no longer ends its answers",
        fix="a higher rollout.sampling.max_tokens, a chat template whose end the model knows, or a penalty for length",
    ),
    HealthRule(
        name="length_drift",
        measure=length_drift,
        warn=2.0,
        message="completions are {value:.1f} times as long as at first, and the reward follows their length",
        causes="a reward that grows with length, unless the task needs longer answers",
        fix="read the longest completions, and add a penalty for length, or use algorithm=dr_grpo",
    ),
    HealthRule(
        name="held_out_falls",
        measure=held_out_falls,
        of_evaluations=True,
        warn=0.08,
        message="held-out prompts get worse, by {value:.2f}, while the training reward does not",
        causes="reward hacking, or memorized prompts",
        fix="read completions with high rewards, stricter rewards, more prompts, or an earlier checkpoint",
    ),
    HealthRule(
        name="overfitting",
        measure=overfitting,
        of_evaluations=True,
        warn=0.1,
        message="the held-out loss is {value:.0%} above its lowest, while the training loss does not rise",
        causes="too many passes over too few rows",
        fix="fewer steps (algorithm.num_steps), an earlier checkpoint, a lower learner.optimizer.lr, or more rows",
    ),
    HealthRule(
        name="wrong_preferences",
        measure=unpreferred,
        warn=0.5,
        is_above=False,
        message="the chosen completion is preferred in only {value:.0%} of the pairs",
        causes="columns of chosen and rejected that are swapped, noisy labels, or a learning rate that is too low",
        fix="rlpipe data preview, a higher learner.optimizer.lr, or a lower algorithm.preference.beta",
    ),
    HealthRule(
        name="failed_groups",
        measure=failed_groups,
        warn=0.2,
        message="{value:.0%} of the groups of the last 10 steps failed",
        causes="a reward or an environment that raises errors or exceeds its timeout",
        fix="rlpipe inspect RUN --state DISCARDED, which shows the reasons",
    ),
    HealthRule(
        name="staleness",
        measure=used_staleness,
        warn=0.95,
        message="rollouts are as old as allowed ({value:.0%} of replay.max_staleness), and the learner never waits",
        causes="more engines than the learner needs",
        fix="a lower replay.max_staleness, which costs no time then, or fewer engines",
    ),
    HealthRule(
        name="learner_waits",
        measure=learner_waits,
        warn=0.8,
        message="the learner waits for rollouts {value:.0%} of the time",
        causes="too few or slow engines, or slow rewards",
        fix="more engines (rollout.num_engines) or scorers (scoring.num_processes); rlpipe simulate --from RUN",
    ),
    HealthRule(
        name="engines_wait",
        measure=learner_trains,
        warn=0.9,
        message="the learner trains {value:.0%} of the time, so engines wait for it",
        causes="too few learner ranks, or small micro batches",
        fix="more ranks (learner.num_ranks), a higher learner.max_tokens_per_microbatch, or fewer engines",
    ),
    HealthRule(
        name="ebft_alignment",
        measure=typical("ebft/alignment", 20),
        warn=0.1,
        is_above=False,
        message="features of samples and ground truths have little in common (cosine {value:.2g})",
        causes="layers that carry no useful features, or samples that are far from the texts",
        fix="other algorithm.ebft.features.layers, or a policy that was trained on such texts before",
    ),
    HealthRule(
        name="ebft_diversity",
        measure=typical("ebft/diversity"),
        warn=1.0,
        message="samples of a prompt are nearly the same (their features' similarity is {value:.2g})",
        causes="a policy that has collapsed onto one answer",
        fix="a higher algorithm.ebft.diversity_coef, or a higher rollout.sampling.temperature",
    ),
    HealthRule(
        name="ebft_cfm",
        measure=typical("ebft/cfm_loss"),
        warn=100.0,
        message="the distance of features from those of the ground truth is large (CFM loss {value:.3g})",
        causes="an unstable run, or features without a scale",
        fix="a lower learner.optimizer.lr, or features that are whitened",
    ),
)
