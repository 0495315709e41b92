"""Assembly of a step's batch from scored groups, and from groups that are replayed from earlier steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from operator import itemgetter

import numpy as np

from rlpipe.algorithms.advantages import AdvantageInputs, combine_rewards, estimate_advantages, turn_advantages
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.data.packing import pack_step
from rlpipe.types import (
    DIVERSITY,
    NO_VERSION,
    FloatArray,
    IntArray,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    StepRewards,
    TrainBatch,
)

EBFT = "ebft/"
"""Prefix of the metrics of EBFT's scorer."""
OWN_METRICS = (
    *(EBFT, "episodes/", "tools/", "tokens/sampled", "tokens/observed"),
    *("time/engine_wait", "time/environment", "time/tool"),
)
"""Prefixes of metrics that no reward function has logged."""
OTHER_GRADIENTS = ("clip_cov", "kl_cov", "dro", "m2po")
"""Losses in which a rollout with advantage 0 has a gradient, or changes that of others."""
NO_SPREAD = 1e-8
"""Standard deviation or difference below which rewards count as equal."""


def assemble_step(
    groups: Sequence[RolloutGroup],
    *,
    step: int,
    algorithm: AlgorithmConfig,
    learner: LearnerConfig,
    reward_weights: Mapping[str, float],
    seed: int,
    replayed: Sequence[RolloutGroup] = (),
    skip_zero_advantage: bool = False,
) -> list[TrainBatch]:
    """Set the advantages of a step's rollouts and pack them into one batch per rank, with the step's metrics.

    ``replayed`` groups of earlier steps are trained instead of as many of ``groups`` whose rewards are all equal,
    but metrics of rewards, lengths and staleness cover all ``groups``, and no others. With ``skip_zero_advantage``,
    rollouts whose advantage is 0 are counted in the denominators but left out of the batch, unless the loss reads them
    all the same. If the learner computes the advantages, the batches hold the rewards instead.
    """
    step_groups = [*_without_replaced(groups, len(replayed), algorithm, reward_weights), *replayed]
    trained = [replace(group, rollouts=group.sampled) for group in step_groups]
    in_learner = algorithm.learner_computes_advantages
    skip_zero_advantage = skip_zero_advantage and not in_learner
    baselines = _greedy_rewards(step_groups, reward_weights) if algorithm.samples_greedy else []
    rewards = set_advantages(trained, algorithm, reward_weights, baselines)
    ranges = number_tokens(rollout for group in trained for rollout in group)
    rollouts, pairs = [rollout for group in trained for rollout in group], []
    if algorithm.samples_pairs:
        pairs = pair_up(trained, without_truncated=algorithm.loss.mask_truncated)
        rollouts = pairs or [_without_loss(rollouts[0])]  # a step without any pair trains nothing
    elif algorithm.loss.mask_truncated:
        rollouts = [_without_loss(r) if r.status is RolloutStatus.TRUNCATED else r for r in rollouts]
    batches = pack_step(
        rollouts,
        step=step,
        num_ranks=learner.num_ranks,
        max_tokens=learner.max_tokens_per_microbatch,
        num_minibatches=algorithm.num_minibatches,
        num_epochs=algorithm.num_epochs_per_step,
        seed=seed + step,
        skip_zero_advantage=skip_zero_advantage and not _reads_every_rollout(algorithm.loss),
    )
    if algorithm.ebft.reward and algorithm.ebft.ce_coef:
        _add_truths(batches, trained, algorithm, learner, seed=seed + step)
    metrics = {
        **step_metrics([replace(group, rollouts=group.sampled) for group in groups], step),
        **_greedy_metrics(rewards),
        "num_tokens": float(sum(group.num_tokens for group in trained)),
        "num_completion_tokens": float(sum(group.num_loss_tokens for group in trained)),
        "groups/replayed": float(len(replayed)),
        **({"groups/paired": float(len(pairs))} if algorithm.samples_pairs else {}),
        "groups/skipped": float(sum(map(_is_flat, trained)) if skip_zero_advantage else 0),
    }
    if algorithm.ebft.reward and not in_learner:
        metrics["ebft/advantages_std"] = float(np.mean([_advantages_std(group) for group in trained]))
    for batch in batches:
        batch.metrics, batch.rewards, batch.group_ranges = metrics, rewards if in_learner else None, ranges
    if in_learner:
        _clear_advantages(trained)
    return batches


def _without_replaced(
    groups: Sequence[RolloutGroup], num_replaced: int, algorithm: AlgorithmConfig, reward_weights: Mapping[str, float]
) -> list[RolloutGroup]:
    """Return the groups without the first ones whose rewards are all equal, which get advantages of 0."""
    flat = [group for group in groups if not has_signal(group, algorithm, reward_weights)] if num_replaced else []
    replaced = flat[:num_replaced]
    for rollout in (rollout for group in replaced for rollout in group):
        _write_advantages(rollout, np.zeros((), np.float32))
    return [group for group in groups if not any(group is flat_group for flat_group in replaced)]


def pair_up(groups: Iterable[RolloutGroup], *, without_truncated: bool) -> list[Rollout]:
    """Return the best rollout of each group, with the worst one in ``rejected``; of equal ones the first.

    A group whose rewards are all equal makes no pair. ``without_truncated`` leaves out what was cut off at the length
    limit.
    """
    pairs = []
    for group in groups:
        rewarded = [
            (rollout.reward, rollout)
            for rollout in group
            if rollout.reward is not None and np.isfinite(rollout.reward) and rollout.num_loss_tokens
            if not (without_truncated and rollout.status is RolloutStatus.TRUNCATED)
        ]
        if not rewarded:
            continue
        best, worst = (choose(rewarded, key=itemgetter(0)) for choose in (max, min))
        if best[0] - worst[0] > NO_SPREAD:
            pairs.append(_marked(best[1], 1.0, rejected=_marked(worst[1], -1.0)))
    return pairs


def _marked(rollout: Rollout, sign: float, rejected: Rollout | None = None) -> Rollout:
    advantages = np.where(rollout.loss_mask, sign, 0).astype(np.float32)
    return replace(rollout, advantages=advantages, rejected=rejected)


def _reads_every_rollout(loss: LossConfig) -> bool:
    """Return whether rollouts with advantage 0 matter to the loss, by a gradient or by comparison with others."""
    has_terms = loss.beta > 0 or loss.trains_entropy
    return has_terms or loss.path is not None or loss.name in OTHER_GRADIENTS or loss.top_entropy_quantile < 1


def _add_truths(
    batches: Sequence[TrainBatch],
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmConfig,
    learner: LearnerConfig,
    *,
    seed: int,
) -> None:
    """Add the ground truths of the step's groups to its mini batches."""
    packed = pack_step(
        [_truth_rollout(group) for group in groups],
        step=batches[0].step,
        num_ranks=learner.num_ranks,
        max_tokens=learner.max_tokens_per_microbatch,
        num_minibatches=algorithm.num_minibatches,
        num_epochs=algorithm.num_epochs_per_step,
        seed=seed,
    )
    for batch, truths in zip(batches, packed, strict=True):
        for mini_batch, truth in zip(batch.mini_batches, truths.mini_batches, strict=False):
            mini_batch.truth = truth


def _truth_rollout(group: RolloutGroup) -> Rollout:
    """Return the prompt with its ground truth as a rollout that no policy sampled."""
    token_ids, mask = group.prompt.with_truth()
    return Rollout(
        group_id=group.group_id,
        sample_index=len(group),
        prompt_id=group.prompt.prompt_id,
        task={},
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.full(len(mask), NO_VERSION, np.int32),
        advantages=mask.astype(np.float32),
    )


def has_signal(group: RolloutGroup, algorithm: AlgorithmConfig, reward_weights: Mapping[str, float]) -> bool:
    """Return whether the group's rewards differ: their sums, or any that is normalized, or credited, by itself."""
    columns = [[rollout.reward for rollout in group]]
    if algorithm.combine == "normalize_then_sum":
        names = [name for name in group.rollouts[0].rewards if reward_weights.get(name)]
        columns = [[rollout.rewards.get(name) for rollout in group] for name in names]
    if algorithm.advantage.credit == "turns":
        credited = _credited_turns(_rewarded(group), reward_weights)
        columns = [list(turn) for turn in zip_longest(*credited, fillvalue=0.0)]
    return any(np.std(_numbers_or_nan(column)) >= NO_SPREAD for column in columns)


def _rewarded(group: RolloutGroup) -> list[Rollout]:
    return [rollout for rollout in group if rollout.reward is not None]


def _is_flat(group: RolloutGroup) -> bool:
    """Return whether all of the group's advantages are 0."""
    return not any(sequence.advantages is not None and sequence.advantages.any() for sequence in group.sequences)


def _advantages_std(group: RolloutGroup) -> float:
    return float(np.std([rollout.advantages[0] for rollout in group if rollout.advantages is not None]))


def _without_loss(rollout: Rollout) -> Rollout:
    """Return a copy of the rollout in which no token is trained."""
    episode = rollout.episode
    if episode is not None:
        episode = replace(episode, branches=[_without_loss(branch) for branch in episode.branches])
    return replace(rollout, loss_mask=np.zeros_like(rollout.loss_mask), episode=episode)


def set_advantages(
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmConfig,
    reward_weights: Mapping[str, float],
    baselines: Sequence[float] = (),
) -> StepRewards:
    """Write each rollout's advantage to all its tokens, or the advantages of its turns to theirs; return the rewards.

    The groups are without their greedy rollouts, whose rewards are ``baselines``. If the learner computes the
    advantages, zeros stand for them.
    """
    step_rewards = _step_rewards(groups, algorithm, reward_weights, baselines)
    if algorithm.advantage.credit == "turns":
        for group in groups:
            _credit_turns(group, reward_weights)
        return step_rewards
    inputs = AdvantageInputs(
        config=algorithm.advantage,
        num_tokens=step_rewards.num_tokens,
        pairwise=step_rewards.pairwise,
        baselines=step_rewards.baselines,
        groups=groups,
    )
    estimated: Sequence[FloatArray | list[FloatArray]]
    if algorithm.learner_computes_advantages:
        estimated = [np.zeros(len(rewards), np.float32) for rewards in step_rewards.rewards]
    else:
        estimated = estimate_advantages(step_rewards.rewards, inputs)
    for group, advantages in zip(groups, estimated, strict=True):
        for rollout, advantage in zip(group, advantages, strict=True):
            _write_advantages(rollout, np.asarray(advantage))
    return step_rewards


def _step_rewards(
    groups: Sequence[RolloutGroup],
    algorithm: AlgorithmConfig,
    reward_weights: Mapping[str, float],
    baselines: Sequence[float],
) -> StepRewards:
    """Return the combined rewards of the groups, and what else advantages depend on."""
    names = list(reward_weights)
    weights = np.array(list(reward_weights.values()), np.float32)
    rewards = [
        combine_rewards(_reward_table(group.rollouts, names), weights, algorithm.combine, algorithm.advantage.eps)
        for group in groups
    ]
    pairwise = None
    if algorithm.ebft.reward:
        tables = [_reward_table(group.rollouts, [DIVERSITY]) for group in groups]
        pairwise = [np.nan_to_num(table[:, 0]) * reward_weights[DIVERSITY] for table in tables]
    counts = [_loss_tokens(group) for group in groups]
    return StepRewards(rewards=rewards, num_tokens=counts, pairwise=pairwise, baselines=baselines)


def _greedy_rewards(groups: Sequence[RolloutGroup], reward_weights: Mapping[str, float]) -> list[float]:
    """Return the weighted reward of each group's greedy completion, NaN if it has none."""
    weights = np.array(list(reward_weights.values()), np.float32)
    greedy = [[rollout for rollout in group if rollout.is_greedy] for group in groups]
    tables = [_reward_table(rollouts, list(reward_weights)) for rollouts in greedy]
    combined = [combine_rewards(table, weights, "sum_then_normalize", 0.0) for table in tables]
    return [float(rewards[0]) if len(rewards) else np.nan for rewards in combined]


def number_tokens(rollouts: Iterable[Rollout]) -> dict[int, range]:
    """Write to each sequence the index of its first loss token among all, and return the range of each group.

    The rollouts of a group follow each other.
    """
    ranges: dict[int, range] = {}
    count = 0
    for sequence in (sequence for rollout in rollouts for sequence in rollout.sequences):
        sequence.first_index = count
        count += sequence.num_loss_tokens
        start = ranges[sequence.group_id].start if sequence.group_id in ranges else sequence.first_index
        ranges[sequence.group_id] = range(start, count)
    return ranges


def _clear_advantages(groups: Sequence[RolloutGroup]) -> None:
    """Remove the zeros that stood for the advantages in the batch, so that nothing records them."""
    for sequence in (sequence for group in groups for sequence in group.sequences):
        sequence.advantages = None


def _loss_tokens(group: RolloutGroup) -> IntArray:
    """Return the number of loss tokens of each rollout ``[G]``, in all branches of an episode."""
    counts = [sum(sequence.num_loss_tokens for sequence in rollout.sequences) for rollout in group]
    return np.array(counts, np.int32)


def _write_advantages(rollout: Rollout, advantages: FloatArray) -> None:
    """Write one advantage to all tokens, or one for each loss token, those of an episode's branches in turn."""
    start = 0
    for sequence in rollout.sequences:
        if not advantages.ndim:
            sequence.advantages = np.full(len(sequence.token_ids), advantages, np.float32)
            continue
        end = start + sequence.num_loss_tokens
        sequence.advantages = np.zeros(len(sequence.token_ids), np.float32)
        sequence.advantages[sequence.loss_mask], start = advantages[start:end], end


def _credited_turns(rewarded: Sequence[Rollout], reward_weights: Mapping[str, float]) -> list[list[float]]:
    """Return the rewards of each episode's turns; what reward functions give counts for its last turn."""
    weight, rewards = reward_weights.get("environment", 0.0), []
    for rollout in rewarded:
        turn_rewards = np.zeros(0) if rollout.episode is None else weight * np.array(rollout.episode.turn_rewards)
        if len(turn_rewards):
            turn_rewards[-1] += (rollout.reward or 0.0) - turn_rewards.sum()
        rewards.append(turn_rewards.tolist())
    return rewards


def _credit_turns(group: RolloutGroup, reward_weights: Mapping[str, float]) -> None:
    """Write each turn's advantage to its tokens.

    Episodes without a reward get advantages of 0, and count in no other's; one that is the only one left gets 0, too.
    """
    for sequence in group.sequences:
        sequence.advantages = np.zeros(len(sequence.token_ids), np.float32)
    rewarded = _rewarded(group)
    if len(rewarded) == 1 < len(group):
        return
    rewards = _credited_turns(rewarded, reward_weights)
    for rollout, advantages in zip(rewarded, turn_advantages(rewards), strict=True):
        for sequence in rollout.sequences:
            if sequence.advantages is not None and sequence.turns is not None:
                sequence.advantages[sequence.loss_mask] = advantages[sequence.turns[sequence.loss_mask]]


def _reward_table(rollouts: Sequence[Rollout], names: list[str]) -> FloatArray:
    """Return the rewards of rollouts, with NaN where a reward skipped one."""
    rows = [[rollout.rewards.get(name) for name in names] for rollout in rollouts]
    values = [[np.nan if r is None else r for r in row] for row in rows]
    return np.array(values, np.float32).reshape(len(rollouts), len(names))  # [G, R]


def _greedy_metrics(rewards: StepRewards) -> dict[str, float]:
    """Return the mean reward of the greedy completions, if there are any."""
    values = [value for value in rewards.baselines if not np.isnan(value)]
    return {"reward/greedy": float(np.mean(values))} if values else {}


def step_metrics(groups: Sequence[RolloutGroup], step: int) -> dict[str, float]:
    """Return rewards, completion lengths, staleness (in versions) and times (in seconds) of a step's groups."""
    rollouts = [rollout for group in groups for rollout in group]
    return {
        **reward_metrics(groups),
        **_length_metrics(rollouts),
        **_staleness_metrics(groups, step),
        "time/generate": float(np.mean([group.generate_s for group in groups])),
        "time/score": float(np.mean([group.score_s for group in groups])),
    }


def reward_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return the rewards' mean and standard deviation, and the share of groups whose rewards are all equal."""
    rollouts = [rollout for group in groups for rollout in group]
    totals = _numbers_or_nan([rollout.reward for rollout in rollouts])
    spreads = [float(np.std(_numbers_or_nan([rollout.reward for rollout in group]))) for group in groups]
    metrics = {
        "reward": float(np.mean(totals)),
        "reward_std": float(np.mean(spreads)),
        "frac_reward_zero_std": float(np.mean([spread < NO_SPREAD for spread in spreads])),
    }
    for name in sorted({name for rollout in rollouts for name in rollout.rewards}):
        values = _numbers_or_nan([rollout.rewards.get(name) for rollout in rollouts])
        metrics[f"rewards/{name}/mean"] = float(np.mean(values))
        metrics[f"rewards/{name}/std"] = float(np.std(values))
    for name in sorted({name for group in groups for name in group.logged}):
        key = name if name.startswith(OWN_METRICS) else f"logged/{name}"
        metrics[key] = float(np.mean([group.logged[name] for group in groups if name in group.logged]))
    return metrics


def _numbers_or_nan(values: Sequence[float | None]) -> list[float]:
    """Return the values that are not None, or a single NaN if all are, so that their mean is NaN."""
    return [value for value in values if value is not None] or [float("nan")]


def _length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    lengths = np.array([len(rollout.completion_ids) for rollout in rollouts])
    # Other limits of episodes, such as that of their turns, are not of tokens: episodes/truncated counts them.
    cut = np.array([rollout.finish_reason == "length" for rollout in rollouts])
    metrics = _length_statistics("completions", lengths)
    metrics["completions/clipped_ratio"] = float(np.mean(cut))
    if not cut.all():
        metrics |= _length_statistics("completions/terminated", lengths[~cut])
    return metrics


def _length_statistics(prefix: str, lengths: np.ndarray) -> dict[str, float]:
    statistics = {"mean": lengths.mean(), "min": lengths.min(), "max": lengths.max()}
    return {f"{prefix}/{name}_length": float(value) for name, value in statistics.items()}


def _staleness_metrics(groups: Sequence[RolloutGroup], step: int) -> dict[str, float]:
    # An episode may fail before its first token, which leaves no version.
    staleness = [step - group.oldest_version for group in groups if group.oldest_version != NO_VERSION] or [0]
    spreads = [_version_spread(rollout) for group in groups for rollout in group]
    return {
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": float(np.max(staleness)),
        "staleness/mixed_ratio": float(np.mean(np.array(spreads) > 0)),
        "staleness/spread": float(np.mean(spreads)),
    }


def _version_spread(rollout: Rollout) -> int:
    """Return how many versions lie between the oldest and the newest that sampled a rollout, in all its branches."""
    sampled = [sequence.policy_versions[sequence.loss_mask] for sequence in rollout.sequences]
    ends = [end for versions in sampled if len(versions) for end in (versions.min(), versions.max())]
    return int(max(ends) - min(ends)) if ends else 0
