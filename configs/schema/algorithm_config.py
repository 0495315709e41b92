"""Options of the algorithm: its steps, advantage, loss, correction and reference."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.configs.schema.ebft_config import EbftConfig
from rlpipe.configs.schema.option import Freezable, option


@dataclass(kw_only=True)
class AdvantageConfig(Freezable):
    name: str = option(
        "grpo",
        "How rewards become advantages.",
        choices=("grpo", "rloo", "group_norm", "reinforce", "reinforce_baseline"),
    )
    scale: str = option("group", "Standard deviation that divides them (grpo).", choices=("group", "batch", "none"))
    eps: float = option(1e-4, "Added to the standard deviation.", minimum=0)


@dataclass(kw_only=True)
class LossConfig(Freezable):
    name: str = option("clip", "The policy-gradient surrogate.", choices=("clip", "cispo", "reinforce"))
    level: str = option(
        "token",
        "The ratio of each token, the length-normalised product over the sequence (GSPO), or the plain product (RLOO).",
        choices=("token", "sequence", "sequence_product"),
    )
    clip_low: float = option(0.2, "The ratio is clipped below 1 minus this.", minimum=0)
    clip_high: float = option(
        0.2, "The ratio is clipped above 1 plus this; for cispo its bound is 1 plus this.", minimum=0
    )
    clip_delta: float | None = option(None, "Upper bound of the ratio for negative advantages.", above=1)
    aggregate: str = option(
        "token",
        "Mean over the step's tokens, over its sequences' means, or over a constant.",
        choices=("token", "sequence", "constant"),
    )
    beta: float = option(0.0, "Weight of the KL to the reference (k3).", minimum=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0)
    mask_truncated: bool = option(False, "Rollouts cut off at the length limit do not count in the loss.")


@dataclass(kw_only=True)
class CorrectionConfig(Freezable):
    mode: str = option(
        "token_truncate",
        "What becomes of w, the learner's probability over the sampler's, of a token or a whole sequence.",
        choices=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    cap: float = option(2.0, "Bounds w to [1/cap, cap] (truncate), or drops what is outside (mask).", minimum=1)
    off_policy_threshold: float | None = option(
        None,
        "Drop sequences of negative advantage whose mean log-prob fell by more than this since sampling.",
        minimum=0,
    )
    bias_corrected_kl: bool = option(False, "Weigh the KL to the reference in the same way.")


@dataclass(kw_only=True)
class ReferenceConfig(Freezable):
    sync_steps: int = option(0, "Move the frozen copy of full training every so many steps; 0: never.", minimum=0)
    mixup: float = option(0.6, "Share of the new weights in each such move.", above=0, maximum=1)


@dataclass(kw_only=True)
class AlgorithmConfig(Freezable):
    kind: str = option(
        "rl",
        "Reinforcement learning; supervised fine-tuning; or EBFT on blocks of raw text, without engines.",
        choices=("rl", "sft", "ebft_strided"),
    )
    num_steps: int = option(100, "Steps to train.", minimum=1)
    stop_loss: float | None = option(None, "SFT ends once the mean loss of its last ten steps is below this.", above=0)
    groups_per_step: int = option(8, "Prompts of a step; for SFT, rows of a step.", minimum=1)
    group_size: int = option(8, "Rollouts of a prompt.", minimum=1)
    num_epochs_per_step: int = option(1, "Passes over the step's rollouts.", minimum=1)
    num_minibatches: int = option(1, "Optimizer updates of each pass.", minimum=1)
    combine: str = option(
        "sum_then_normalize",
        "Weighted sum of the rewards first, or their normalisation first (GDPO).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    ebft: EbftConfig = field(default_factory=EbftConfig)
