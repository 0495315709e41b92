"""Options of algorithms that train on rows of their own: preferences, reward models and process reward models."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.configs.schema.option import CHARACTERS, MAX_WEIGHT, Freezable, UserFunction, option

WITHOUT_REFERENCE = ("orpo", "simpo", "cpo")
PAIR_LOSSES = (
    *("dpo", "ipo", "hinge", "robust", "exo", "nca_pair", "sppo", "apo_zero", "apo_down"),
    *WITHOUT_REFERENCE,
)


@dataclass(kw_only=True)
class PreferenceConfig(UserFunction):
    """Options of learning from preferences."""

    loss: str = option(
        "dpo",
        "The loss of pairs of a chosen and a rejected completion; for kto, of completions that are good or bad. With "
        "path, the built-in loss of pairs whose reference your function has.",
        choices=(*PAIR_LOSSES, "kto"),
    )
    beta: float = option(
        0.1, "Scale of the log-ratios; for orpo, weight of the odds ratio.", above=0, maximum=MAX_WEIGHT
    )
    label_smoothing: float = option(
        0.0, "Share of labels that are wrong (dpo, robust, exo, simpo, cpo).", minimum=0, maximum=0.5
    )
    margin: float = option(
        0.0, "Target margin between chosen and rejected completion (simpo).", minimum=0, maximum=MAX_WEIGHT
    )
    cross_entropy_coef: float = option(
        0.0, "Weight of the chosen completions' cross-entropy, added to the loss.", minimum=0, maximum=MAX_WEIGHT
    )
    desirable_weight: float = option(1.0, "Weight of good completions (kto).", minimum=0, maximum=MAX_WEIGHT)
    undesirable_weight: float = option(1.0, "Weight of bad completions (kto).", minimum=0, maximum=MAX_WEIGHT)

    precompute_ref_log_probs: bool = option(
        False,
        "Compute the reference's log-probs of all rows once, before the first step, and keep them in data.cache; no "
        "reference is in memory while training.",
    )

    @property
    def needs_reference(self) -> bool:
        return self.loss not in WITHOUT_REFERENCE

    @property
    def runs_reference(self) -> bool:
        """Whether the reference runs in each step."""
        return self.needs_reference and not self.precompute_ref_log_probs

    @property
    def takes_pairs(self) -> bool:
        return self.loss != "kto"

    @property
    def rows(self) -> str:
        """Name of the form that rows are rendered to."""
        return "pairs" if self.takes_pairs else "labelled"


@dataclass(kw_only=True)
class RewardModelConfig(Freezable):
    """Options of training a reward model on preferences."""

    margin_column: str | None = option(
        "margin",
        "Column with the margin by which the chosen completion's reward should exceed the rejected one's; rows without "
        "a column margin have none, a column of another name must be there; null: no margins.",
    )
    center_coef: float = option(
        0.0,
        "Weight of the mean of (chosen + rejected reward)², which centers rewards at 0.",
        minimum=0,
        maximum=MAX_WEIGHT,
    )

    @property
    def rows(self) -> str:
        """Name of the form that rows are rendered to."""
        return "rewards" if self.margin_column is None else f"rewards with {self.margin_column}"


@dataclass(kw_only=True)
class ProcessRewardConfig(Freezable):
    """Options of training a process reward model on labelled steps."""

    steps_column: str = option("completions", "Column with the list of a row's steps.")
    labels_column: str = option("labels", "Column with the list of the steps' labels, which are true for good steps.")
    separator: str = option("\n\n", "Text after each step, as in StepReward.", text=CHARACTERS)
    step_token: str | None = option(
        None,
        "Text after each step in place of the separator (Qwen's process reward models: <extra_0>).",
        text=CHARACTERS,
    )

    @property
    def mark(self) -> str:
        """Text after each step, at whose end the step's value is read."""
        return self.step_token or self.separator

    @property
    def rows(self) -> str:
        """Name of the form that rows are rendered to."""
        return f"steps {self.steps_column} with {self.labels_column}, each before {self.mark!r}"


RowOptions = PreferenceConfig | RewardModelConfig | ProcessRewardConfig
"""Options of an algorithm that trains on rows of a form of its own."""
