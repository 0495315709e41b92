"""Options of training reward models."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.configs.schema.option import MAX_WEIGHT, Freezable, option
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


RowOptions = PreferenceConfig | RewardModelConfig
"""Options of an algorithm that trains on rows of a form of its own."""
