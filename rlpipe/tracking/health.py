"""Watches a run's metrics by rules, and reports once when a rule trips and once when it has recovered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.configs.schema.root_config import Config
from rlpipe.tracking.health_measures import RunHistory, is_evaluation
from rlpipe.tracking.health_rules import RULES, HealthRule

RECOVERY_STEPS = 5
"""Steps, or evaluations, in a row within the limits after which a rule that tripped counts as over."""


@dataclass(frozen=True, kw_only=True)
class HealthFinding:
    """A change of a rule's state."""

    rule: str
    message: str
    stops: bool = False
    """Whether the run is to stop, since the value is beyond ``health.<rule>.stop``."""


@dataclass
class _State:
    is_tripped: bool = False
    stops: bool = False
    num_ok: int = 0


class HealthWatch:
    """The state of all rules of one run; ``rows`` are the metrics of steps that are done already."""

    def __init__(self, config: Config, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        limits = config.health
        self._rules = [rule for rule in RULES if rule.name not in limits or limits[rule.name].enabled]
        self._history, self._config = RunHistory(config), config
        self._states = {rule.name: _State() for rule in self._rules}
        for row in rows:
            self.update(row)
        for state in self._states.values():
            state.stops = False  # the user goes on with the run, and is told again

    @property
    def tripped(self) -> list[str]:
        """Names of the rules that are tripped now, without those that no longer apply, as the task is solved."""
        applying = [rule.name for rule in self._rules if rule.measure(self._history) is not None]
        return [name for name in applying if self._states[name].is_tripped]

    def update(self, metrics: Mapping[str, Any]) -> list[HealthFinding]:
        """Add the metrics of a step or an evaluation, and return what has changed with them."""
        self._history.add(metrics)
        evaluated = is_evaluation(metrics)
        return [x for rule in self._rules if rule.of_evaluations is evaluated for x in self._check(rule)]

    def _check(self, rule: HealthRule) -> Iterator[HealthFinding]:
        value, state = rule.measure(self._history), self._states[rule.name]
        if value is None:
            yield from self._count_recovery(rule, f"{rule.name} no longer applies")
            return
        limits, warn = self._config.health.get(rule.name), rule.limit(self._config)
        if limits is not None and limits.stop is not None and rule.is_beyond(value, limits.stop) and not state.stops:
            state.is_tripped = state.stops = True
            reason = f"{rule.describe(value)}; health.{rule.name}.stop is {limits.stop:g}"
            yield HealthFinding(rule=rule.name, message=reason, stops=True)
        elif rule.is_beyond(value, warn):
            state.num_ok = 0
            if not state.is_tripped:
                state.is_tripped = True
                yield HealthFinding(rule=rule.name, message=f"warning ({rule.name}): {rule.describe(value)}")
        else:
            yield from self._count_recovery(rule, f"{rule.name} has recovered: {value:.3g} (warns from {warn:.3g})")

    def _count_recovery(self, rule: HealthRule, message: str) -> Iterator[HealthFinding]:
        """Count a step at which a rule is well; yield that it is over, if it was tripped, after some of them."""
        state = self._states[rule.name]
        state.num_ok = state.num_ok + 1 if state.is_tripped else 0
        if state.num_ok == RECOVERY_STEPS:
            state.is_tripped, state.num_ok = False, 0
            yield HealthFinding(rule=rule.name, message=message)
