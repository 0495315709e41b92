"""One training step: gradients over micro batches, and the optimizer's update."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import reduce
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlpipe.algorithms.corrections import with_effective_ratio
from rlpipe.algorithms.losses import EntropyBonus, KlCoefficient
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.algorithms.preferences import labelled_means, solution_means
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.errors import LearnerFailed
from rlpipe.learner.critic import Critic
from rlpipe.learner.objectives import (
    RUN,
    SHARED,
    Inputs,
    Objective,
    PolicyGradient,
    SupervisedObjective,
    make_reference,
)
from rlpipe.learner.policy import Policy
from rlpipe.learner.preference_objective import (
    KtoObjective,
    PairObjective,
    Preferences,
    RewardModelObjective,
    StepLabelObjective,
)
from rlpipe.learner.step_advantages import StepAdvantages
from rlpipe.learner.strategies.optimizer import clipping_scale, learning_rate_factor
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.learner.strided_objective import Strided
from rlpipe.learner.workload import REWARD_HEADS, num_sequences
from rlpipe.offload.planner.planner import AMORTISING_SEQUENCES, describe_small_update
from rlpipe.types import NO_GROUP, FloatArray, HalfArray, MiniBatch, TrainBatch

LOSSES = ("loss", "ebft/rl_loss", "ebft/ce_loss", "preference/cross_entropy")
"""Metrics that are totals of an update; a step reports their mean over its updates."""
MAX_GROUPS_NAMED = 8
"""Maximum number of groups named in the error that ends a run after repeated non-finite steps."""


class Learner:
    """One rank of the learner group; all ranks must make the same calls of methods that take a batch.

    ``temperature`` is the engines' sampling temperature, which divides the logits; ``max_completion_tokens`` is the
    divisor of the constant aggregate; ``seed`` is for the learner's own sampling (strided EBFT).
    """

    def __init__(
        self,
        policy: Policy,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float = 1.0,
        max_completion_tokens: int = 1,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.num_steps_done = 0
        self.num_bad_steps = 0
        self.bad_steps_in_row = 0
        self.entropy_bonus = EntropyBonus(algorithm.loss)
        self.kl_coefficient = KlCoefficient(algorithm.reward_kl)
        self._bad_groups: set[int] = set()
        self._config = learner
        self._algorithm = algorithm
        self.updates = policy.sharding.make_updates(policy.trainable_parameters(), learner.optimizer)
        self.reference = make_reference(policy, algorithm)
        self._objective = self._make_objective(temperature, max_completion_tokens, seed)
        self.critic = Critic(policy, algorithm.critic) if algorithm.has_critic else None
        self._credit = self._make_credit(temperature) if algorithm.learner_computes_advantages else None
        self._note_small_updates()

    def _note_small_updates(self) -> None:
        sequences = num_sequences(self._algorithm) // self._algorithm.num_minibatches
        if self._config.offload == "chunked" and sequences < AMORTISING_SEQUENCES:
            self.policy.sharding.notes.append(
                f"learner.offload=chunked: {describe_small_update(sequences)} (algorithm.groups_per_step)"
            )

    def _make_objective(self, temperature: float, max_completion_tokens: int, seed: int) -> Objective[Any]:
        policy, learner, algorithm, reference = self.policy, self._config, self._algorithm, self.reference
        if algorithm.kind == "sft":
            return SupervisedObjective(policy, learner)
        if algorithm.compares_pairs:
            sampling_temperature = temperature if algorithm.samples_pairs else None
            return PairObjective(policy, learner, algorithm.preference, reference, temperature=sampling_temperature)
        if algorithm.kind == "preference":
            return KtoObjective(policy, learner, algorithm.preference, reference)
        if algorithm.kind == "reward_model":
            return RewardModelObjective(policy, learner, algorithm.reward_model)
        if algorithm.kind == "process_reward_model":
            return StepLabelObjective(policy, learner)
        if algorithm.kind == "ebft_strided":
            assert reference is not None, "make_reference makes the feature network"
            return Strided(policy, learner, algorithm, reference, seed=seed)
        return PolicyGradient(
            policy,
            learner,
            algorithm,
            reference if algorithm.loss.beta else None,
            bonus=self.entropy_bonus,
            temperature=temperature,
            max_completion_tokens=max_completion_tokens,
        )

    def _make_credit(self, temperature: float) -> StepAdvantages:
        return StepAdvantages(
            self.policy,
            self._config,
            self._algorithm,
            self.reference,
            coefficient=self.kl_coefficient,
            critic=self.critic,
            temperature=temperature,
        )

    def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """Train on the batch, with one update per mini batch, and return the step's metrics on all ranks.

        An update whose loss or gradient is not finite on any rank is skipped on all ranks, and has no part in the
        metrics unless all of the step's are skipped. Raises ``LearnerFailed`` after ``max_bad_steps`` steps in a row
        with such an update; it names the groups of the last step.
        """
        started = time.perf_counter()
        self._bad_groups.clear()
        self._objective.begin(batch.step)
        learning_rate = self._set_learning_rate()
        updates = [self._objective.prepare(mini_batch) for mini_batch in batch.mini_batches]
        credit_metrics: dict[str, float] = {}
        if self._credit is not None:
            assert batch.rewards is not None, "batches come with rewards if the learner computes advantages"
            credit_metrics = self._credit.assign(batch.rewards, updates)
        for inputs in (inputs for update in updates[1:] for inputs in update):  # the first has the initial weights
            self._objective.store_old_logprobs(inputs)
        entropy_weight = self.entropy_bonus.weight
        done = [self._update(*update) for update in zip(batch.mini_batches, updates, strict=True)]
        applied = [(norm, sums) for norm, sums in done if math.isfinite(norm)]
        self._end_step(batch.step, bad=len(applied) < len(done))
        norms, sums = zip(*(applied or done), strict=True)
        values = self._values(reduce(_merge, sums), num_updates=len(norms))
        if self._algorithm.loss.entropy_target is not None:
            values["entropy/coef"] = entropy_weight
        return {
            **values,
            **credit_metrics,
            "grad_norm": sum(norms) / len(norms),
            "learning_rate": learning_rate,
            "bad_steps": float(self.num_bad_steps),
            "time/train": time.perf_counter() - started,
        }

    def token_differences(self, batch: TrainBatch) -> dict[int, HalfArray]:
        """Return the learner's log-probs of the step's loss tokens minus those of the engine, by group.

        The learner's are those before the step; tokens that it left out have NaN. All ranks must call this once after
        ``train_step`` or ``compare`` of a batch from ``assemble_step``. Empty for objectives other than RL.
        """
        total = max((indices.stop for indices in batch.group_ranges.values()), default=0)
        if not total or not isinstance(self._objective, PolicyGradient):
            return {}
        differences = torch.full((total,), -math.inf)
        for indices, values in self._objective.differences:
            differences[torch.from_numpy(indices)] = values.float().cpu()
        self._objective.differences.clear()
        differences = self.policy.sharding.reduce(differences, Reduce.MAX).cpu()
        limit = torch.finfo(torch.half).max
        half_differences = (
            differences.masked_fill(differences == -math.inf, math.nan).clamp(-limit, limit).half().numpy()
        )
        return {
            group_id: half_differences[indices.start : indices.stop] for group_id, indices in batch.group_ranges.items()
        }

    def reference_logprobs(self, mini_batches: Sequence[MiniBatch]) -> dict[bytes, FloatArray]:
        """Return the reference's log-probs of all loss tokens by the keys of their sequences (``keyed_sequences``).

        The reference is the policy itself before any step, without a new adapter. All ranks must have equally many mini
        batches.
        """
        assert isinstance(self._objective, Preferences), "only preferences have precomputed log-probs"
        logprobs: dict[bytes, FloatArray] = {}
        for mini_batch in mini_batches:
            logprobs |= self._objective.reference_logprobs(mini_batch)
            if mini_batch.mismatched is not None:
                logprobs |= self._objective.reference_logprobs(mini_batch.mismatched)
        return logprobs

    def compare(self, batch: TrainBatch) -> dict[str, float]:
        """Return the loss and the differences to the sampling log-probs with the current weights, without training."""
        self._objective.begin(batch.step)
        return self._measure(self._objective, batch.mini_batches)

    def evaluate(self, held_out: Sequence[MiniBatch]) -> dict[str, float]:
        """Return the loss and metrics of held-out rows, with ``eval/`` before their names.

        ``eval/loss`` is the mean negative log-likelihood of their loss tokens, in nats, or the loss of preferences
        or of a reward model.
        """
        has_own_loss = self._algorithm.kind in ("preference", *REWARD_HEADS)
        objective = self._objective if has_own_loss else SupervisedObjective(self.policy, self._config)
        values = self._measure(objective, held_out)
        return {f"eval/{name}": value for name, value in values.items() if not name.startswith("tokens/")}

    def _measure(self, objective: Objective[Any], mini_batches: Sequence[MiniBatch]) -> dict[str, float]:
        """Return an objective's loss and metrics with the current weights."""
        sums: MetricSums | None = None
        for mini_batch in mini_batches:
            for inputs in objective.prepare(mini_batch):
                with self.policy.inference():
                    sums = _merge(sums, objective.loss(mini_batch, inputs).metrics)
        return self._values(sums, num_updates=len(mini_batches))

    def _update(self, mini_batch: MiniBatch, update: Sequence[Inputs]) -> tuple[float, MetricSums | None]:
        """Run one optimizer update; return the gradient's norm before clipping (not finite if it was skipped)."""
        if not mini_batch.num_loss_tokens or not update:
            return 0.0, None
        alone = self.policy.sharding.num_ranks == 1
        to_run = [inputs for inputs in update if not (alone and inputs.is_empty)]
        sums: MetricSums | None = None
        losses = []
        for index, inputs in enumerate(to_run):
            output = self._objective.loss(mini_batch, inputs)
            self.updates.backward(output.loss, last=index + 1 == len(to_run))
            losses.append(output.loss.detach())
            sums = _merge(sums, output.metrics)
        assert sums is not None, "a mini batch with loss tokens has micro batches"
        norm = self._apply_gradients(sums.totals["loss"])
        if self._algorithm.loss.entropy_target is not None and "entropy" in sums.means:  # not when fine-tuning
            self._follow_entropy(sums)
        if not math.isfinite(norm):
            self._bad_groups |= self._find_bad_groups(to_run, torch.stack(losses))
        return norm, sums

    def _follow_entropy(self, sums: MetricSums) -> None:
        """Let the entropy bonus take note of the mean entropy of an update's trained tokens, on all ranks."""
        trained_entropy = sums.means.get("entropy/trained_mean", sums.means["entropy"])
        local_sums = torch.stack([trained_entropy.double(), sums.num_tokens.double()])
        total, num_tokens = self.policy.sharding.reduce(local_sums, Reduce.SUM).tolist()
        self.entropy_bonus.follow(total / max(num_tokens, 1))

    def _find_bad_groups(self, update: Sequence[Inputs], losses: Tensor) -> set[int]:
        """Return the groups, on any rank, of the micro batches whose ``losses`` are not finite.

        If all losses are finite, only the gradient is not, and all groups of the update are candidates.
        """
        sharding = self.policy.sharding
        bad = ~losses.isfinite()
        if not sharding.reduce(bad.any().float(), Reduce.MAX):
            bad = torch.ones_like(bad)
        local_groups = {
            int(g) for inputs, is_bad in zip(update, bad.tolist(), strict=True) if is_bad for g in inputs.group_ids
        }
        first = sorted(local_groups - {NO_GROUP})[: MAX_GROUPS_NAMED + 1]
        all_groups = torch.full((sharding.num_ranks, MAX_GROUPS_NAMED + 1), NO_GROUP)
        all_groups[sharding.rank, : len(first)] = torch.tensor(first, dtype=all_groups.dtype)
        return set(sharding.reduce(all_groups, Reduce.MAX).flatten().tolist()) - {NO_GROUP}

    def _apply_gradients(self, loss: Tensor) -> float:
        squared = self.updates.squared_norm()
        local_sums = torch.stack([squared, loss.to(squared.dtype).to(squared.device)])
        squared_sum, loss_sum = self.policy.sharding.reduce(local_sums, Reduce.SUM).tolist()
        if not math.isfinite(loss_sum) or not math.isfinite(squared_sum):
            self.updates.drop()
            return math.nan
        norm = math.sqrt(squared_sum)
        self.updates.apply(clipping_scale(norm, self._config.max_grad_norm))
        return norm

    def _set_learning_rate(self) -> float:
        factor = learning_rate_factor(self._config.schedule, self.num_steps_done, self._algorithm.num_steps)
        learning_rate = self._config.optimizer.peak_lr * factor
        self.updates.set_learning_rate(learning_rate)
        return learning_rate

    def _end_step(self, step: int, *, bad: bool) -> None:
        self.num_steps_done += 1
        self.num_bad_steps += bad
        self.bad_steps_in_row = self.bad_steps_in_row + 1 if bad else 0
        if self.bad_steps_in_row >= self._config.max_bad_steps:
            groups = sorted(self._bad_groups)
            named = ", ".join(map(str, groups[:MAX_GROUPS_NAMED])) + (" ..." if len(groups) > MAX_GROUPS_NAMED else "")
            noun = "groups" if self._algorithm.kind == "rl" else "rows"
            raise LearnerFailed(
                f"step {step}: the loss or gradient was not finite in {self.bad_steps_in_row} steps in a row "
                f"(learner.max_bad_steps), last in {noun} {named}; inspect them, or try a "
                "lower learner.optimizer.lr"
            )
        if self.reference is not None:
            self.reference.end_step(self.num_steps_done)

    def _values(self, sums: MetricSums | None, *, num_updates: int) -> dict[str, float]:
        """Return the metrics over all ranks, with losses as means over the step's updates."""
        if sums is None:
            return {"loss": 0.0}
        operations = (Reduce.SUM, Reduce.MIN, Reduce.MAX)
        over_ranks = self.policy.sharding.reduce
        sums.load(*(over_ranks(tensor, operation) for tensor, operation in zip(sums.state(), operations, strict=True)))
        values = with_effective_ratio(sums.values())
        if SHARED in values:
            values["tokens/shared_ratio"] = values[SHARED] / (values[RUN] + values.pop(SHARED))
        if not self._algorithm.preference.takes_pairs and self._algorithm.kind == "preference":
            values = labelled_means(values)
        if self._algorithm.kind == "process_reward_model":
            values = solution_means(values)
        return values | {name: value / num_updates for name, value in values.items() if name in LOSSES}


def _merge(sums: MetricSums | None, other: MetricSums | None) -> MetricSums | None:
    if sums is None or other is None:
        return sums or other
    sums.merge(other)
    return sums


WINDOW = 10


class LossTarget:
    """A target for the mean loss of the last ``WINDOW`` steps; without a target it is never reached."""

    def __init__(self, target: float | None) -> None:
        self._target = target
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def reached(self, loss: float) -> bool:
        """Add the next step's loss, and return whether the mean is below the target.

        A loss that is not finite prevents this for ``WINDOW`` steps.
        """
        self._losses.append(loss)
        return self.is_met

    @property
    def is_met(self) -> bool:
        return self._target is not None and len(self._losses) == WINDOW and fmean(self._losses) < self._target

    @property
    def losses(self) -> list[float | None]:
        """The last losses for a checkpoint, which has no NaN; ``restore`` takes them back."""
        return [loss if math.isfinite(loss) else None for loss in self._losses]

    def restore(self, losses: Iterable[float | None]) -> None:
        self._losses.extend(math.nan if loss is None else loss for loss in losses)
