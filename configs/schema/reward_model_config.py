"""Options of training reward models."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.configs.schema.option import CHARACTERS, MAX_WEIGHT, Freezable, option
from rlpipe.configs.schema.preference_config import PreferenceConfig


@dataclass(kw_only=True)
class RewardModelConfig(Freezable):
    margin_column: str | None = option(
        None, "Column with the margin by which the chosen completion's reward should exceed the rejected one's."
    )
    center_coef: float = option(
        0.0,
        "Weight of the mean of (chosen + rejected reward)², which centres rewards at 0.",
        minimum=0,
        maximum=MAX_WEIGHT,
    )

    @property
    def rows(self) -> str:
        """Name of the form that rows are rendered to."""
        return "rewards" if self.margin_column is None else f"rewards with {self.margin_column}"


@dataclass(kw_only=True)
class ProcessRewardConfig(Freezable):
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
