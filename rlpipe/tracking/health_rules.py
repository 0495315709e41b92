"""The rules that tell from a run's metrics that something is wrong, with the likely causes and what to do about it.

The ranges are those that axolotl's documentation gives for GRPO, EBFT, SFT and preferences, where it has any; each was
held against runs that learned and runs that broke.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlpipe.common import run_files
from rlpipe.configs.schema.root_config import Config
from rlpipe.tracking import health_measures as measures
from rlpipe.tracking.health_measures import Measure, RunHistory, typical


@dataclass(frozen=True, kw_only=True)
class HealthRule:
    """A number that is computed after each step, and the limit from which it is unhealthy."""

    name: str
    measure: Measure
    warn: float | Callable[[Config], float]
    of_evaluations: bool = False
    """Whether it is checked after evaluations, not after steps."""
    is_above: bool = True
    """Whether values above the limit, not below it, are unhealthy."""
    message: str
    """A description of the problem, with ``{value}`` for the number, and ``{subject}`` for what has it."""
    causes: str
    fix: str

    def values(self, run: RunHistory) -> Mapping[str, float | None]:
        """Return the rule's values by what has them; a single one by the empty name if it is about the whole run."""
        measured = self.measure(run)
        return measured if isinstance(measured, Mapping) else {"": measured}

    def limit(self, config: Config) -> float:
        """Return the value from which on the rule warns in a run with this config."""
        override = config.health.get(self.name)
        if override is not None and override.warn is not None:
            return override.warn
        warn = self.warn(config) if callable(self.warn) else self.warn
        stop = None if override is None else override.stop
        return stop if stop is not None and self.is_beyond(warn, stop) else warn

    def is_beyond(self, value: float, limit: float) -> bool:
        return value >= limit if self.is_above else value <= limit

    def describe(self, value: float, subject: str) -> str:
        return f"{self.message.format(value=value, subject=subject)}. Likely: {self.causes}. Try: {self.fix}"


def _gradient_limit(config: Config) -> float:
    """Return the norm from which gradients are large: losses of whole completions have larger ones."""
    algorithm = config.algorithm
    if algorithm.kind not in ("rl", "ebft_strided") or algorithm.samples_pairs:
        return 100.0
    is_sum = algorithm.loss.aggregate == "sequence_sum"
    return 10.0 * (config.rollout.sampling.max_tokens if is_sum else 1)


RULES = (
    HealthRule(
        name="equal_rewards",
        measure=measures.equal_rewards,
        warn=0.9,
        message="all rewards are equal in {value:.0%} of the groups, so they give no learning signal",
        causes="prompts that are too hard or too easy, a reward with too few values, or a policy without variety",
        fix="easier or harder prompts, partial credit in the reward, a larger algorithm.group_size, a higher "
        "rollout.sampling.temperature, or replay.refill_attempts",
    ),
    HealthRule(
        name="no_reward",
        measure=measures.size_of_reward,
        warn=0.01,
        is_above=False,
        message="nearly no completion of the last 20 steps was rewarded (mean {value:.2g})",
        causes="a reward that does not recognize the answers, or a task that is too hard for this model",
        fix=f"read {run_files.COMPLETIONS}, test the reward on them, show the format in the prompt, or start from a "
        "model that is right sometimes",
    ),
    HealthRule(
        name="low_reward",
        measure=measures.low_rewards,
        warn=0.15,
        is_above=False,
        message="only {value:.0%} of the completions earn the reward {subject}, which did not rise in 50 steps",
        causes="a reward function that does not recognize the answers, or an aim that the policy never reaches",
        fix=f"the function on its own, with texts of {run_files.COMPLETIONS}; partial credit; an example in the prompt",
    ),
    HealthRule(
        name="reward_falls",
        measure=measures.lost_reward,
        warn=0.5,
        message="the reward is below its best by {value:.0%} of its gain, spread or noise, whichever is largest",
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
        warn=_gradient_limit,
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
        name="not_finite",
        measure=measures.not_finite,
        warn=3,
        message="{subject} was infinite or not a number in {value:.0f} of the last 10 steps, so no rule can judge it",
        causes="a policy that has broken down, engine and learner that have nothing in common, or rewards that are "
        "not numbers",
        fix="an earlier checkpoint (resume=PATH) with a lower learner.optimizer.lr; model.dtype=float32",
    ),
    HealthRule(
        name="clipping",
        measure=typical("clip_ratio/region_mean"),
        # The narrow bounds that ratios of sequences need are left by half of the tokens in runs that learn (GSPO).
        warn=lambda config: 0.3 if config.algorithm.loss.level == "token" else 0.8,
        message="{value:.0%} of the tokens are clipped, so the policy moves far within a step",
        causes="too many updates on the same rollouts, or a learning rate that is too high",
        fix="a lower algorithm.num_minibatches or algorithm.num_epochs_per_step, or a lower learner.optimizer.lr",
    ),
    HealthRule(
        name="kl",
        measure=measures.kl_of_tokens,
        warn=2.0,
        message="the policy is far from the reference (KL {value:.2g} per token)",
        causes="a learning rate that is too high, or a KL penalty that is too weak",
        fix="a higher algorithm.loss.beta, or a lower learner.optimizer.lr",
    ),
    HealthRule(
        name="logprob_difference",
        measure=typical("sampling/logp_difference/mean", 5),
        warn=lambda config: 0.3 if measures.is_asynchronous(config) else 0.1,
        message="engine and learner disagree: their log-probs of a token differ by {value:.2g} on average",
        causes="an engine in another precision, rollouts that are too old, or many updates per step",
        fix="model.dtype=float32 for a comparison, a lower replay.max_staleness, or "
        "algorithm.correction.mode=token_truncate",
    ),
    HealthRule(
        name="importance_mean",
        measure=measures.off_importance,
        warn=0.1,
        message="importance weights are {value:.2g} away from 1 on average, where their mean should be",
        causes="an engine that samples from another distribution than it reports, or rollouts that are too old",
        fix="rollout.sampling without top_k, top_p and min_p, model.dtype=float32 for a comparison, or a lower "
        "replay.max_staleness",
    ),
    HealthRule(
        name="importance_min",
        measure=typical("sampling/importance_ratio/min", 20),
        warn=0.1,
        is_above=False,
        message="the learner hardly writes some tokens that the engine has sampled (smallest weight {value:.2g})",
        causes="rollouts that are too old, updates that are too large, or an engine in another precision",
        fix="a lower replay.max_staleness, a lower learner.optimizer.lr, or algorithm.correction.off_policy_threshold",
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
        measure=measures.truncated,
        warn=0.8,
        message="{value:.0%} of the completions are cut off at the limit, before their answer",
        causes="rollout.sampling.max_tokens is too low, or the policy no longer ends its answers",
        fix="a higher rollout.sampling.max_tokens, a chat template whose end the model knows, or a penalty for length",
    ),
    HealthRule(
        name="length_drift",
        measure=measures.length_drift,
        warn=2.0,
        message="completions are {value:.1f} times as long as at first, and the reward follows their length",
        causes="a reward that grows with length, unless the task needs longer answers",
        fix="read the longest completions, and add a penalty for length, or use algorithm=dr_grpo",
    ),
    HealthRule(
        name="held_out_falls",
        measure=measures.held_out_falls,
        of_evaluations=True,
        warn=0.08,
        message="held-out prompts get worse, by {value:.2f}, while the training reward does not",
        causes="reward hacking, or memorized prompts",
        fix="read completions with high rewards, stricter rewards, more prompts, or an earlier checkpoint",
    ),
    HealthRule(
        name="overfitting",
        measure=measures.overfitting,
        of_evaluations=True,
        warn=0.1,
        message="the held-out loss is {value:.0%} above its lowest, while the training loss does not rise",
        causes="too many passes over too few rows",
        fix="fewer steps (algorithm.num_steps), an earlier checkpoint, a lower learner.optimizer.lr, or more rows",
    ),
    HealthRule(
        name="wrong_preferences",
        measure=measures.unpreferred,
        warn=0.5,
        is_above=False,
        message="the chosen completion is preferred in only {value:.0%} of the pairs",
        causes="columns of chosen and rejected that are swapped, noisy labels, or a learning rate that is too low",
        fix="rlpipe data preview, a higher learner.optimizer.lr, or a lower algorithm.preference.beta",
    ),
    HealthRule(
        name="failed_groups",
        measure=measures.failed_groups,
        warn=0.2,
        message="{value:.0%} of the groups of the last 10 steps failed",
        causes="a reward or an environment that raises errors or exceeds its timeout",
        fix="rlpipe inspect RUN --state DISCARDED, which shows the reasons",
    ),
    HealthRule(
        name="staleness",
        measure=measures.used_staleness,
        warn=0.95,
        message="rollouts are as old as allowed ({value:.0%} of replay.max_staleness), and the learner never waits",
        causes="more engines than the learner needs",
        fix="a lower replay.max_staleness, which costs no time then, or fewer engines",
    ),
    HealthRule(
        name="learner_waits",
        measure=measures.learner_waits,
        warn=0.8,
        message="the learner waits for rollouts {value:.0%} of the time",
        causes="too few or slow engines, or slow rewards",
        fix="more engines (rollout.num_engines) or scorers (scoring.num_processes); rlpipe simulate --from RUN",
    ),
    HealthRule(
        name="engines_wait",
        measure=measures.learner_trains,
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
        warn=measures.similarity_of_copies,
        message="samples of a prompt are nearly the same (their features' similarity is {value:.2g})",
        causes="a policy that has collapsed onto one answer",
        fix="a higher algorithm.ebft.features.diversity_coef, or a higher sampling temperature: "
        "rollout.sampling.temperature, or algorithm.ebft.strided.temperature",
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
