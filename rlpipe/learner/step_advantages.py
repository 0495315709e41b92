"""Advantages that depend on the log-probs of policy and reference, which the learner computes before a step's updates.

Shapes: N loss tokens of the step, on all ranks; K loss tokens of a micro batch; G rollouts of a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlpipe.algorithms.advantages import AdvantageInputs, TokenValues, estimate_advantages, generalized_advantages
from rlpipe.algorithms.corrections import correct
from rlpipe.algorithms.losses import KlCoefficient, estimate_kl
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.learner.critic import Critic
from rlpipe.learner.objectives import LearnerInputs, Reference
from rlpipe.learner.policy import Policy
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.types import FloatArray, StepRewards

Tokens = NDArray[np.float64]


class StepAdvantages:
    """Advantages of the rollouts of a step, which may be on any rank; all ranks must make the same calls."""

    def __init__(
        self,
        policy: Policy,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        reference: Reference | None,
        *,
        coefficient: KlCoefficient,
        critic: Critic | None,
        temperature: float,
    ) -> None:
        self._policy, self._chunk_tokens, self._algorithm = policy, learner.logprob_chunk_tokens, algorithm
        self._reference = reference if algorithm.reward_kl.coef else None
        self._coefficient, self._critic, self._temperature = coefficient, critic, temperature
        self._needs_energies = algorithm.advantage.name == "optimal_token_baseline"

    def assign(self, rewards: StepRewards, updates: Sequence[Sequence[LearnerInputs]]) -> dict[str, float]:
        """Write the advantages to the inputs of all updates, train the critic, and return metrics of KL and critic.

        The first pass over the rollouts gives their log-probs and values. If any of these is not finite, all advantages
        are NaN, so that the step counts as a bad one.
        """
        first_pass = updates[: len(updates) // self._algorithm.num_epochs_per_step]
        tokens = self._read_tokens(int(sum(map(np.sum, rewards.num_tokens))), first_pass)
        kl, energies, values = tokens
        config = self._algorithm.advantage
        penalties = None if self._reference is None else _split(self._coefficient.value * kl, rewards)
        estimates = None
        if self._critic is not None:
            estimates = generalized_advantages(rewards.rewards, _split(values, rewards), penalties, config)
        inputs = AdvantageInputs(
            config=config,
            num_tokens=rewards.num_tokens,
            pairwise=rewards.pairwise,
            baselines=rewards.baselines,
            penalties=penalties,
            energies=_split(energies, rewards) if self._needs_energies else None,
            estimates=estimates,
        )
        is_bad = not np.isfinite(tokens).all()
        if is_bad:  # the user's function is not to blame
            advantages = np.full(tokens.shape[1], np.nan, np.float32)
        else:
            advantages = self._spread_over_tokens(estimate_advantages(rewards.rewards, inputs), rewards)
        for micro_batch in (micro_batch for update in updates for micro_batch in update if not micro_batch.is_truth):
            micro_batch.advantages = torch.from_numpy(advantages[micro_batch.indices]).to(micro_batch.advantages.device)
        metrics = {} if estimates is None or is_bad else self._fit_critic(values, estimates, updates)
        return metrics if self._reference is None else metrics | self._update_coefficient(kl, rewards)

    def _fit_critic(
        self, values: Tokens, estimates: TokenValues, updates: Sequence[Sequence[LearnerInputs]]
    ) -> dict[str, float]:
        """Train the critic on the sums of values and advantages, as verl and TRL do."""
        assert self._critic is not None, "values are a critic's"
        returns = values + np.concatenate([*(rollout for group in estimates for rollout in group), np.zeros(0)])
        has_return = ~np.isnan(returns)
        spread = float(returns[has_return].var()) if has_return.any() else 0.0
        metrics = self._critic.fit(
            updates, *(torch.from_numpy(array).to(self._policy.device) for array in (values, returns))
        )
        metrics["critic/value"] = float(values[has_return].mean()) if has_return.any() else 0.0
        if spread:
            metrics["critic/explained_variance"] = 1 - float((returns - values)[has_return].var()) / spread
        return metrics

    def _read_tokens(self, num_tokens: int, updates: Sequence[Sequence[LearnerInputs]]) -> Tokens:
        """Return the KL, the energy and the value of all tokens of the step ``[3, N]``; 0 for what is not needed."""
        local_tokens = np.zeros((3, num_tokens))
        for number, update in enumerate(updates):
            for inputs in update:
                if inputs.is_truth or (inputs.is_empty and self._policy.sharding.num_ranks == 1):
                    continue
                local_tokens[:2, inputs.indices] = (
                    torch.stack(self._read_micro_batch(inputs, is_first=number == 0)).cpu().numpy()
                )
                if self._critic is not None:
                    local_tokens[2, inputs.indices] = self._critic.values(inputs).cpu().numpy()
        tokens: Tokens = self._policy.sharding.reduce(torch.from_numpy(local_tokens), Reduce.SUM).cpu().numpy()
        return tokens

    def _read_micro_batch(self, inputs: LearnerInputs, *, is_first: bool) -> tuple[Tensor, Tensor]:
        """Return the KL and the energy of a micro batch's tokens ``[K]``, and keep the log-probs for the updates."""
        with self._policy.inference():
            module = self._policy.module
            if self._needs_energies:
                logprobs, energies = module.energies(inputs.row, self._temperature, self._chunk_tokens)
                energies = energies * self._correction_factors(inputs, logprobs).square()
            else:
                logprobs, _ = module.logprobs(inputs.row, self._temperature, self._chunk_tokens)
                energies = torch.zeros_like(logprobs)
        if not is_first:  # the first update begins with these weights
            inputs.old_logprobs = logprobs
        if self._reference is None:
            return torch.zeros_like(logprobs), energies
        reference = self._reference.logprobs(inputs.row, temperature=self._temperature, chunk_tokens=self._chunk_tokens)
        if self._algorithm.loss.beta:
            inputs.ref_logprobs = reference
        return estimate_kl(reference - logprobs, self._algorithm.reward_kl.kl), energies

    def _correction_factors(self, inputs: LearnerInputs, logprobs: Tensor) -> Tensor:
        """Return the factors of the off-policy correction ``[K]``, by which the tokens' gradients are multiplied."""
        log_weights = torch.where(inputs.sampling_logprobs.isnan(), 0, logprobs - inputs.sampling_logprobs)
        mask, nothing = torch.ones_like(logprobs, dtype=torch.bool), torch.zeros_like(logprobs)
        metrics = MetricSums(num_tokens=mask.sum())
        return correct(log_weights, nothing, mask, inputs.sequence_ids, self._algorithm.correction, metrics).surrogate

    def _spread_over_tokens(
        self, advantages: Sequence[FloatArray | list[FloatArray]], rewards: StepRewards
    ) -> FloatArray:
        """Return the advantages of all tokens of the step ``[N]``."""
        token_advantages = [np.zeros(0, np.float32)]
        for group, counts in zip(advantages, rewards.num_tokens, strict=True):
            token_advantages += [
                np.broadcast_to(advantage, count) for advantage, count in zip(group, counts.tolist(), strict=True)
            ]
        return np.concatenate(token_advantages)

    def _update_coefficient(self, kl: Tokens, rewards: StepRewards) -> dict[str, float]:
        """Adapt the coefficient to the mean over the rollouts of each one's mean KL, as verl does."""
        means = [float(rollout_kl.mean()) for group in _split(kl, rewards) for rollout_kl in group if len(rollout_kl)]
        mean = float(np.mean(means)) if means else 0.0
        metrics = {"kl/in_reward": mean, "kl/coefficient": self._coefficient.value}
        self._coefficient.follow(mean, len(means))
        return metrics


def _split(tokens: Tokens, rewards: StepRewards) -> list[list[Tokens]]:
    """Return the values of each rollout's loss tokens, by group."""
    ends: Iterator[int] = iter(np.cumsum(np.concatenate(rewards.num_tokens)).tolist())
    return [
        [tokens[end - count : end] for count, end in zip(counts.tolist(), ends, strict=False)]
        for counts in rewards.num_tokens
    ]
