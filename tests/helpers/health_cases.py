"""The names of the metrics that health rules read, found by applying the rules to a history that records them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlpipe.configs.schema.root_config import Config
from rlpipe.tracking.health_measures import LONG, RunHistory
from rlpipe.tracking.health_rules import HealthRule

REWARD = "digits"
"""Name of the reward function of the runs in ``run_cases``."""
ABSENT: tuple[frozenset[str], ...] = (frozenset(), frozenset({"eval/accuracy"}), frozenset({"reward"}))
"""Metrics without which rules may read others."""


class RecordedValues(dict[str, Any]):
    """A history of ones for any metric but the absent ones, that records the names it is asked for."""

    def __init__(self, absent: frozenset[str]) -> None:
        super().__init__({f"rewards/{REWARD}/mean": None})  # by which rules find the run's reward functions
        self.names = set[str]()
        self._absent = absent

    def __getitem__(self, name: str) -> list[float]:
        self.names.add(name)
        return [] if name in self._absent else [1.0] * LONG


class RecordedEvaluation(dict[str, float]):
    """An evaluation with a one for any metric, that records the names it is asked for."""

    names: set[str]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __getitem__(self, name: str) -> float:
        self.names.add(name)
        return 1.0

    def get(self, name: str, default: Any = None) -> float:
        """Return no failures, with which a rule would end early, and a one for any other metric."""
        return 0.0 * self[name] if name.endswith("num_failed") else self[name]


def metrics_read_by(rule: HealthRule) -> set[str]:
    """Return the names of all metrics that a rule reads, in runs of different kinds."""
    return {
        name
        for kind in ("rl", "preference")
        for absent in ABSENT
        for name in _metrics_read(rule, _config_of(kind), absent)
    }


def _config_of(kind: str) -> Config:
    config = Config()
    config.algorithm.kind = kind
    config.rollout.num_gpus = config.learner.num_gpus = 1
    config.replay = replace(config.replay, max_staleness=4)
    return config


def _metrics_read(rule: HealthRule, config: Config, absent: frozenset[str]) -> set[str]:
    values, evaluation = RecordedValues(absent), RecordedEvaluation()
    evaluation.names = values.names
    history = RunHistory(config, first=values, latest=values, broken=values, num_steps=10_000, best_reward=1.0)
    history.evaluations = [(evaluation, 1.0)] * 3
    rule.values(history)
    if rule.of_evaluations:
        history.progress()  # recorded with each evaluation
    return values.names
