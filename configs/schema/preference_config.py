"""Options of preference learning."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.configs.schema.option import MAX_WEIGHT, Freezable, option

PAIR_LOSSES = (
    *("dpo", "ipo", "hinge", "robust", "exo", "nca_pair", "sppo", "apo_zero", "apo_down"),
    *("orpo", "simpo", "cpo"),
)
"""Losses of pairs; the last three need no reference."""


@dataclass(kw_only=True)
class PreferenceConfig(Freezable):
    loss: str = option(
        "dpo",
        "The loss of pairs of a chosen and a rejected completion; for kto, of completions that are good or bad.",
        choices=(*PAIR_LOSSES, "kto"),
    )
    beta: float = option(
        0.1, "Factor of what the loss compares; for orpo, weight of the odds ratio.", above=0, maximum=MAX_WEIGHT
    )
    label_smoothing: float = option(
        0.0, "Share of labels that are wrong (dpo, robust, exo, simpo, cpo).", minimum=0, maximum=0.5
    )
    margin: float = option(
        0.0, "Margin that the chosen completion has to reach (simpo).", minimum=0, maximum=MAX_WEIGHT
    )
    cross_entropy_coef: float = option(
        0.0, "Weight of the chosen completions' cross-entropy, added to the loss.", minimum=0, maximum=MAX_WEIGHT
    )
    desirable_weight: float = option(1.0, "Weight of good completions (kto).", minimum=0, maximum=MAX_WEIGHT)
    undesirable_weight: float = option(1.0, "Weight of bad completions (kto).", minimum=0, maximum=MAX_WEIGHT)

    @property
    def needs_reference(self) -> bool:
        return self.loss not in ("orpo", "simpo", "cpo")

    @property
    def takes_pairs(self) -> bool:
        return self.loss != "kto"

    @property
    def rows(self) -> str:
        """Name of the form that rows are rendered to."""
        return "pairs" if self.takes_pairs else "labelled"
