"""A critic for generalized advantage estimates: a linear value head on the policy's last hidden states.

The states have no gradient, so the head is no part of the model: it is the same under every strategy, engines and
exported policies do not have it, and a checkpoint holds it beside the policy.

Shapes: K loss tokens of a micro batch, N those of the step, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlpipe.configs.schema.algorithm_config import CriticConfig
from rlpipe.learner.objectives import LearnerInputs
from rlpipe.learner.policy import Policy
from rlpipe.learner.strategies.sharding import Reduce

BETAS, EPS = (0.9, 0.999), 1e-8
"""Adam's constants for the head."""


class Critic:
    """Value head, with equal weights on all ranks, which must make the same calls of ``fit``.

    It begins with the value 0 for every state.
    """

    def __init__(self, policy: Policy, config: CriticConfig) -> None:
        self._policy, self._config = policy, config
        size = policy.module.causal_model.config.get_text_config().hidden_size
        self.weight = torch.zeros(size + 1, device=policy.device)  # [H + 1], the last one is the bias
        self.moments = torch.zeros(2, size + 1, device=policy.device)
        self.num_updates = torch.zeros(1, dtype=torch.int64)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, sharing their memory."""
        return {"critic.weight": self.weight, "critic.moments": self.moments, "critic.num_updates": self.num_updates}

    def values(self, inputs: LearnerInputs) -> Tensor:
        """Return the values ``[K]`` of the states before the loss tokens, in float32."""
        return _values(self._states(inputs), self.weight)

    def fit(self, updates: Sequence[Sequence[LearnerInputs]], values: Tensor, returns: Tensor) -> dict[str, float]:
        """Train the head once on each update's tokens, and return metrics.

        ``values`` and ``returns`` ``[N]`` are those of all loss tokens of the step; a return that is NaN does not
        count. The loss is that of PPO in verl and TRL: the mean of max((v - R)², (c - R)²) / 2, where c is v within
        ``value_clip`` of the value before the step.
        """
        losses, clipped = [], []
        for update in updates:
            rollouts = [inputs for inputs in update if not inputs.is_truth]
            sums = torch.zeros(len(self.weight) + 3, dtype=torch.float64, device=self.weight.device)
            for inputs in rollouts if self._policy.sharding.num_ranks > 1 else [p for p in rollouts if not p.is_empty]:
                sums += self._gradient(inputs, values, returns)
            sums = self._policy.sharding.reduce(sums, Reduce.SUM)
            mean = sums[:-1] / sums[-1].clamp(min=1)
            if sums[-1] and mean.isfinite().all():
                self._step(mean[:-2].to(self.weight))
            losses.append(mean[-2])
            clipped.append(mean[-1])
        return {
            "critic/loss": float(torch.stack(losses).mean()),
            "critic/clip_ratio": float(torch.stack(clipped).mean()),
        }

    def _gradient(self, inputs: LearnerInputs, values: Tensor, returns: Tensor) -> Tensor:
        """Return sums over a micro batch's tokens: the gradient ``[H + 1]``, the loss, clipped tokens, and tokens."""
        states, indices = self._states(inputs), torch.from_numpy(inputs.indices).to(values.device)
        target, old_values = returns[indices], values[indices]
        has_return = ~target.isnan()
        new_values = _values(states, self.weight).to(target.dtype)
        bound = torch.inf if self._config.value_clip is None else self._config.value_clip
        bounded = old_values + (new_values - old_values).clamp(-bound, bound)
        error, bounded_error = new_values - target, bounded - target
        is_clipped = has_return & (bounded_error.square() > error.square())
        squares = torch.maximum(error.square(), bounded_error.square()) / 2
        slopes = torch.where(has_return & ~is_clipped, error, 0).to(states.dtype)
        sums = [
            states.T @ slopes,
            slopes.sum()[None],
            torch.where(has_return, squares, 0).sum()[None],
            is_clipped.sum()[None],
            has_return.sum()[None],
        ]
        return torch.cat([value.double() for value in sums])

    def _states(self, inputs: LearnerInputs) -> Tensor:
        with self._policy.inference():
            return self._policy.module.read_states(inputs.row).float()

    def _step(self, gradient: Tensor) -> None:
        """Take a step of Adam."""
        self.num_updates += 1
        count = int(self.num_updates)
        for moment, beta, value in zip(self.moments, BETAS, (gradient, gradient.square()), strict=True):
            moment.lerp_(value, 1 - beta)
        mean, square = (moment / (1 - beta**count) for moment, beta in zip(self.moments, BETAS, strict=True))
        self.weight -= self._config.lr * mean / (square.sqrt() + EPS)


def _values(states: Tensor, weight: Tensor) -> Tensor:
    return states @ weight[:-1] + weight[-1]
