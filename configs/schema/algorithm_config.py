"""Options of the algorithm: RL, supervised fine-tuning, EBFT, preferences and reward models."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.configs.schema.option import (
    MAX_PROCESSES,
    MAX_SECONDS,
    MAX_STEPS,
    MAX_TOKENS,
    MAX_WEIGHT,
    Freezable,
    UserFunction,
    option,
)
from rlpipe.configs.schema.preference_config import PreferenceConfig, ProcessRewardConfig, RewardModelConfig
from rlpipe.configs.schema.rollout_config import ServeConfig


@dataclass(kw_only=True)
class FeatureConfig(Freezable):
    """Options of the features that EBFT rewards completions by, and of the processes that compute them."""

    layers: list[float] = option([0.25, 0.5, 0.75], "Depths whose hidden states are features, as shares of the layers.")
    normalize_layers: str = option(
        "each",
        "Normalize the features of each depth to length 1, or those of all depths jointly as one vector (as the "
        "authors do), or not.",
        choices=("each", "joint", "none"),
    )
    pooling: str = option(
        "last_token",
        "How the features of tokens are pooled into features of a sequence or a block.",
        choices=("last_token", "mean_pooling", "completion_mean", "concat"),
    )
    whitening: str = option(
        "sample",
        "Decorrelate the features of a prompt's completions: between samples, between features, or not.",
        choices=("sample", "feature", "none"),
    )
    whiten_layers: str = option(
        "joint",
        "Whiten the features of all depths together, or those of each depth by themselves.",
        choices=("joint", "each"),
    )
    weights: str = option(
        "own",
        "Processes that compute the rewards of ebft.reward: replicas with a frozen copy of the initial model, or the "
        "learner's ranks, between their steps, with the adapter off.",
        choices=("own", "learner"),
    )
    micro_batch_tokens: int = option(
        16384, "Tokens of one forward pass, including padding.", minimum=1, maximum=MAX_TOKENS
    )
    num_cpus: float = option(
        1.0, "CPUs that Ray reserves for each actor (weights=own).", minimum=0, maximum=MAX_PROCESSES
    )
    num_gpus: float = option(
        0.0, "GPUs that Ray reserves for each actor (weights=own).", minimum=0, maximum=MAX_PROCESSES
    )
    timeout_s: float = option(120.0, "Maximum seconds to score one group.", above=0, maximum=MAX_SECONDS)
    serve: ServeConfig = field(default_factory=lambda: ServeConfig(replicas=1))
    alignment_coef: float = option(1.0, "Weight of the match with the ground truth.", minimum=0, maximum=MAX_WEIGHT)
    diversity_coef: float = option(
        1.0, "Weight of the similarity to the other completions.", minimum=0, maximum=MAX_WEIGHT
    )

    @property
    def parts(self) -> dict[str, int]:
        """Numbers of layers that are whitened apart and of positions whose features are concatenated."""
        layers = len(self.layers) if self.whiten_layers == "each" else 1
        return {"num_layers": layers, "num_positions": 3 if self.pooling == "concat" else 1}


@dataclass(kw_only=True)
class StridedConfig(Freezable):
    """Options of the blocks that EBFT generates along a row of raw text."""

    stride: int = option(8, "Document tokens from one block to the next.", minimum=1, maximum=MAX_TOKENS)
    context_length: int = option(8, "Document tokens that the first block sees.", minimum=1, maximum=MAX_TOKENS)
    generate_tokens: int = option(8, "Tokens that a block generates.", minimum=1, maximum=MAX_TOKENS)
    temperature: float = option(0.6, "Sampling temperature of the generated tokens.", above=0, maximum=100)
    top_p: float = option(
        1.0, "Sample from the most probable tokens that together have this probability.", above=0, maximum=1
    )
    min_completion_prefix: int = option(
        0, "Tokens of a row's completion before its first block.", minimum=0, maximum=MAX_TOKENS
    )


@dataclass(kw_only=True)
class EbftConfig(Freezable):
    """Options of Energy-Based Fine-Tuning (EBFT)."""

    reward: bool = option(False, "Reward the engines' completions by their features (kind=rl).")
    truth_column: str = option("ground_truth", "Column with the ground truth, a string or messages.")
    adaptive_max_tokens: bool = option(True, "Limit completions by the length of the ground truth as well.")
    gt_length_multiplier: float = option(
        1.5,
        "Limit of a completion's length, as a multiple of the ground truth's; at least 64 tokens.",
        above=0,
        maximum=1000,
    )
    features: FeatureConfig = field(default_factory=FeatureConfig)
    strided: StridedConfig = field(default_factory=StridedConfig)
    rl_coef: float = option(1.0, "Weight of the policy gradient.", minimum=0, maximum=MAX_WEIGHT)
    ce_coef: float = option(0.0, "Weight of the cross-entropy on the ground truth.", minimum=0, maximum=MAX_WEIGHT)


ADVANTAGES = (
    *("grpo", "rloo", "group_norm", "reinforce", "reinforce_baseline", "reinforce_plus_plus"),
    *("opo", "gpg", "pass_at_k", "max_rl"),
    *("optimal_token_baseline", "remax", "gae"),
)


@dataclass(kw_only=True)
class AdvantageConfig(UserFunction):
    """Options of the advantages that rewards become."""

    name: str = option(
        "grpo",
        "How rewards become advantages. With path, what your function gets in addition to the rewards: those of greedy "
        "completions (remax), each token's squared gradient norm (optimal_token_baseline), or the estimates of gae.",
        choices=ADVANTAGES,
    )
    scale: str = option(
        "group",
        "Standard deviation that advantages are divided by (grpo, pass_at_k).",
        choices=("group", "batch", "none"),
    )
    eps: float = option(
        1e-4,
        "Added to the standard deviation (grpo, group_norm, reinforce_baseline, pass_at_k, or "
        "combine=normalize_then_sum), or to the mean (max_rl).",
        minimum=0,
        maximum=1,
    )
    gamma: float = option(1.0, "Discount of the next token's value (gae).", minimum=0, maximum=1)
    lam: float = option(
        1.0, "Decay of later tokens' errors; 1: the return minus the value (gae).", minimum=0, maximum=1
    )
    credit: str = option(
        "episode",
        "Whether an episode has one advantage, or each of its turns has its own, from the rewards after it (rloo).",
        choices=("episode", "turns"),
    )


LOSSES = (
    *("clip", "cispo", "reinforce", "sapo", "vespo", "dppo_tv", "dppo_kl"),
    *("geo_mean", "clip_cov", "kl_cov", "dro", "m2po"),
)
PAIRS = "dpo"
"""Loss of RL that compares rollouts in pairs."""


@dataclass(kw_only=True)
class SapoConfig(Freezable):
    """Options of the loss sapo."""

    temperature_positive: float = option(
        1.0, "Steepness of the gate for advantages above 0.", above=0, maximum=MAX_WEIGHT
    )
    temperature_negative: float = option(
        1.05, "Steepness of the gate for other advantages.", above=0, maximum=MAX_WEIGHT
    )


@dataclass(kw_only=True)
class VespoConfig(Freezable):
    """Options of the loss vespo."""

    k_positive: float = option(
        2.0, "Power of a sequence's ratio, for advantages of at least 0.", minimum=0, maximum=MAX_WEIGHT
    )
    lambda_positive: float = option(
        3.0, "Decay with a sequence's ratio, for advantages of at least 0.", minimum=1e-4, maximum=MAX_WEIGHT
    )
    k_negative: float = option(
        3.0, "Power of a sequence's ratio, for advantages below 0.", minimum=0, maximum=MAX_WEIGHT
    )
    lambda_negative: float = option(
        2.0, "Decay with a sequence's ratio, for advantages below 0.", minimum=1e-4, maximum=MAX_WEIGHT
    )


@dataclass(kw_only=True)
class CovarianceConfig(Freezable):
    """Options of the losses clip_cov and kl_cov."""

    share: float = option(
        0.0002, "Share of the tokens that clip_cov drops, or kl_cov penalizes; at least one.", above=0, maximum=1
    )
    low: float = option(1.0, "clip_cov drops tokens whose covariance is between low and high.", maximum=MAX_WEIGHT)
    high: float = option(5.0, "See low.", maximum=MAX_WEIGHT)
    penalty: float = option(1.0, "Weight of kl_cov's |log-ratio|.", minimum=0, maximum=MAX_WEIGHT)


@dataclass(kw_only=True)
class LossConfig(UserFunction):
    """Options of the policy-gradient loss."""

    name: str = option(
        "clip",
        "The policy-gradient surrogate; or dpo: the loss of algorithm.preference, on the best and the worst rollout of "
        "each group.",
        choices=(*LOSSES, PAIRS),
    )
    level: str = option(
        "token",
        "The ratio of each token, the length-normalized product over the sequence (GSPO), or the plain product (RLOO).",
        choices=("token", "sequence", "sequence_product"),
    )
    clip_low: float = option(
        0.2,
        "The ratio is clipped below 1 minus this; for dppo_tv and dppo_kl, the bound on the divergence.",
        minimum=0,
        maximum=MAX_WEIGHT,
    )
    clip_high: float = option(
        0.2,
        "The ratio is clipped above 1 plus this; for cispo, the weight is; for dppo_tv and dppo_kl, the bound on "
        "the divergence.",
        minimum=0,
        maximum=MAX_WEIGHT,
    )
    clip_delta: float | None = option(
        None, "Upper bound of the ratio for negative advantages.", above=1, maximum=MAX_WEIGHT
    )
    cispo_floor: float = option(0.0, "Lower bound of cispo's weight; verl's is 1 - clip_low.", minimum=0, maximum=1)
    dppo_cap: float = option(
        20.0, "Upper bound of the ratio as a weight in dppo_tv and dppo_kl.", minimum=1, maximum=MAX_WEIGHT
    )
    m2_threshold: float = option(
        0.04,
        "m2po drops the tokens with the largest squared log-ratio until the mean is below this.",
        above=0,
        maximum=MAX_WEIGHT,
    )
    dro_beta: float = option(0.05, "Weight of dro's squared log-ratio.", minimum=0, maximum=MAX_WEIGHT)
    sapo: SapoConfig = field(default_factory=SapoConfig)
    vespo: VespoConfig = field(default_factory=VespoConfig)
    covariance: CovarianceConfig = field(default_factory=CovarianceConfig)
    aggregate: str = option(
        "token",
        "Mean over the step's tokens, mean over its sequences' means or sums, or sum divided by a constant.",
        choices=("token", "sequence", "sequence_sum", "constant"),
    )
    beta: float = option(0.0, "Weight of the KL to the reference.", minimum=0, maximum=MAX_WEIGHT)
    kl: str = option("k3", "Estimator of the KL to the reference.", choices=("k1", "k2", "k3", "abs"))
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0, maximum=MAX_WEIGHT)
    entropy_target: float | None = option(
        None,
        "Entropy in nats above which there is no bonus. After each update the bonus's weight grows by entropy_step if "
        "the entropy was at or below it, and shrinks if it was above; null: the weight is constant.",
        above=0,
        maximum=100,
    )
    entropy_step: float = option(0.005, "Change of the entropy bonus's weight.", above=0, maximum=MAX_WEIGHT)
    entropy_coef_min: float = option(
        0.0, "Lower bound of the weight that follows entropy_target.", minimum=0, maximum=MAX_WEIGHT
    )
    entropy_coef_max: float = option(
        1.0, "Upper bound of the weight that follows entropy_target.", minimum=0, maximum=MAX_WEIGHT
    )
    top_entropy_quantile: float = option(
        1.0, "Share of a micro batch's tokens, those with the highest entropy, that are trained.", minimum=0, maximum=1
    )
    mask_truncated: bool = option(False, "Exclude rollouts that were cut off at the length limit from the loss.")

    @property
    def trains_entropy(self) -> bool:
        """Whether the loss has an entropy bonus, at least at times."""
        return self.entropy_coef > 0 or self.entropy_target is not None


CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(kw_only=True)
class CorrectionConfig(UserFunction):
    """Options of the correction for tokens that another distribution than the learner's was sampled from."""

    mode: str = option(
        "token_truncate",
        "How w, the learner's probability over the sampler's, corrects the loss, by token or by sequence.",
        choices=("none", *CORRECTIONS),
    )
    cap: float | None = option(
        2.0,
        "Upper bound of w, which is clamped to [floor, cap] (truncate), or 0 outside of it (mask); null: none.",
        minimum=1,
        maximum=MAX_WEIGHT,
    )
    floor: float | None = option(
        None, "Lower bound of w; null: 1/cap, or none without cap; 0: none, as in TRL by default.", minimum=0, maximum=1
    )
    off_policy_threshold: float | None = option(
        None,
        "Drop sequences of negative advantage whose mean log-prob fell by more than this since sampling.",
        minimum=0,
        maximum=MAX_WEIGHT,
    )
    rejection: str = option(
        "none",
        "Drop sequences whose product of w, or the product's geometric mean, is out of bounds, whatever the weights.",
        choices=("none", "sequence", "geometric"),
    )
    rejection_cap: float | None = option(
        2.0, "Upper bound of rejection; null: none, which needs rejection_floor.", minimum=1, maximum=MAX_WEIGHT
    )
    rejection_floor: float | None = option(
        None, "Lower bound of rejection; null: 1/rejection_cap; 0: none.", minimum=0, maximum=1
    )
    bias_corrected_kl: bool = option(False, "Also weight the KL to the reference by w.")


REPLAY_POLICIES = ("newest", "most_spread")


@dataclass(kw_only=True)
class ReplayPolicyConfig(UserFunction):
    """Options of the choice of groups that are trained again."""

    name: str = option(
        "newest",
        "Which of the kept groups are trained again: the newest ones, or those whose rewards differ most.",
        choices=REPLAY_POLICIES,
    )


@dataclass(kw_only=True)
class RewardKlConfig(Freezable):
    """Options of the KL penalty in the reward."""

    coef: float = option(
        0.0,
        "Weight of the KL to the reference in the reward, in which it is subtracted; its first value, with a target.",
        minimum=0,
        maximum=MAX_WEIGHT,
    )
    kl: str = option("k1", "Estimator of each token's KL.", choices=("k1", "k2", "k3", "abs"))
    target: float | None = option(
        None,
        "KL per token that coef is adapted to, after each step; null: coef is constant.",
        above=0,
        maximum=MAX_WEIGHT,
    )
    horizon: int = option(
        10_000,
        "Rollouts that it takes coef to adapt: n of them change it by 0.2 n / horizon at most.",
        minimum=1,
        maximum=MAX_STEPS,
    )


@dataclass(kw_only=True)
class CriticConfig(Freezable):
    """Options of the critic, a value head on the policy."""

    lr: float = option(1e-5, "Learning rate of the value head (gae).", above=0, maximum=MAX_WEIGHT)
    value_clip: float | None = option(
        0.5, "The value loss clips a value's change in a step to this; null: not clipped.", above=0, maximum=MAX_WEIGHT
    )


@dataclass(kw_only=True)
class ReferenceConfig(Freezable):
    """Options of the reference policy's updates."""

    sync_steps: int = option(
        0,
        "Steps between updates of the frozen reference in full training; 0: never updated.",
        minimum=0,
        maximum=MAX_STEPS,
    )
    mixup: float = option(0.6, "Share of the new weights in each update of the reference.", above=0, maximum=1)


@dataclass(kw_only=True)
class AlgorithmConfig(Freezable):
    """Options of the algorithm: its kind, its steps and its objective."""

    kind: str = option(
        "rl",
        "Reinforcement learning; supervised fine-tuning; learning from preferences; training a reward model on "
        "preferences, or a process reward model on labeled steps; or EBFT on blocks of raw text.",
        choices=("rl", "sft", "preference", "reward_model", "process_reward_model", "ebft_strided"),
    )
    num_steps: int = option(100, "Steps to train.", minimum=1, maximum=MAX_STEPS)
    stop_loss: float | None = option(
        None, "SFT ends once the mean loss of the last ten steps is below this.", above=0, maximum=1000
    )
    groups_per_step: int = option(8, "Prompts per step; without engines, rows per step.", minimum=1, maximum=1_000_000)
    group_size: int = option(8, "Rollouts per prompt.", minimum=1, maximum=100_000)
    num_epochs_per_step: int = option(1, "Passes over the step's rollouts.", minimum=1, maximum=1000)
    num_minibatches: int = option(1, "Optimizer updates per pass.", minimum=1, maximum=1_000_000)
    combine: str = option(
        "sum_then_normalize",
        "Sum the weighted rewards and normalize the sum, or normalize each reward first (GDPO).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    replay: ReplayPolicyConfig = field(default_factory=ReplayPolicyConfig)
    reward_kl: RewardKlConfig = field(default_factory=RewardKlConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    process_reward_model: ProcessRewardConfig = field(default_factory=ProcessRewardConfig)
    ebft: EbftConfig = field(default_factory=EbftConfig)

    @property
    def samples_pairs(self) -> bool:
        """Whether the loss compares the best and the worst rollout of each group."""
        return self.kind == "rl" and self.loss.name == PAIRS and self.loss.path is None

    @property
    def samples_greedy(self) -> bool:
        """Whether each prompt has a greedy completion, too, which the others are compared with."""
        return self.advantage.name == "remax" and self.kind == "rl" and not self.samples_pairs

    @property
    def completions_per_prompt(self) -> int:
        """Completions that engines sample of a prompt, trained or not."""
        return self.group_size + self.samples_greedy

    @property
    def learner_computes_advantages(self) -> bool:
        """Whether the learner computes the advantages, because they depend on its log-probs."""
        has_energies = self.advantage.name == "optimal_token_baseline"
        needs_learner = has_energies or self.has_critic or self.reward_kl.coef > 0
        return self.kind == "rl" and not self.samples_pairs and needs_learner

    @property
    def has_critic(self) -> bool:
        """Whether the learner trains a value head, from which advantages are computed."""
        return self.advantage.name == "gae" and self.kind == "rl" and not self.samples_pairs

    @property
    def precomputes_reference(self) -> bool:
        """Whether the reference's log-probs of all rows are computed before the first step."""
        return self.kind == "preference" and self.preference.precompute_ref_log_probs

    @property
    def compares_pairs(self) -> bool:
        """Whether the loss compares completions in pairs, sampled or from rows."""
        return self.samples_pairs or (self.kind == "preference" and self.preference.takes_pairs)
