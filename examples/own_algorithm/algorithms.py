"""The advantage and the loss of the example: ranks within a group, and a policy gradient with a bounded weight."""

from __future__ import annotations

import numpy as np
import torch

from rlpipe.algorithms.advantages import AdvantageInputs
from rlpipe.algorithms.surrogates import SurrogateInputs, SurrogateOutput
from rlpipe.types import FloatArray


def ranks(rewards: list[FloatArray], inputs: AdvantageInputs, *, scale: float = 1.0) -> list[FloatArray]:
    """Return each rollout's place in its group, from -scale for the worst to scale for the best; 0 if all are equal."""
    return [scale * rank(group) for group in rewards]


def rank(rewards: FloatArray) -> FloatArray:
    """Return the share of the others that a rollout beats, less the share that beats it; ``nan`` beats nothing."""
    beats = np.sign(rewards[:, None] - rewards)  # [G, G]
    return np.nan_to_num(beats).sum(1) / max(len(rewards) - 1, 1)


def bounded(inputs: SurrogateInputs, *, bound: float = 2.0) -> SurrogateOutput:
    """Return -min(ρ, bound) a l of each token, with ρ = exp(l - p) without gradient."""
    ratio = torch.exp(inputs.logprobs - inputs.old_logprobs).detach()
    return SurrogateOutput(
        per_token=-ratio.clamp(max=bound) * inputs.advantages * inputs.logprobs,
        clipped_high=ratio > bound,
        metrics={"own/ratio": ratio},
    )
