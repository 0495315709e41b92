"""Health of a run, judged by rules on its metrics; reported once when a rule trips, and once when it has recovered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlpipe.configs.schema.root_config import Config
from rlpipe.tracking.health_measures import RunHistory, is_evaluation
from rlpipe.tracking.health_rules import RULES, HealthRule

NOT_FINITE = "not_finite"
RECOVERY_STEPS = 5
"""Steps, or evaluations, in a row within the limits after which a rule that tripped counts as over."""


@dataclass(frozen=True, kw_only=True)
class HealthFinding:
    """A change of a rule's state."""

    rule: str
    subject: str = ""
    """Reward function or metric that the rule is about; empty: the whole run."""
    message: str
    stops: bool = False
    """Whether the run is to stop, since the value is beyond ``health.<rule>.stop``."""

    @property
    def key(self) -> tuple[str, str]:
        return self.rule, self.subject


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
        self._states: dict[tuple[str, str], _State] = defaultdict(_State)  # by rule and subject
        for row in rows:
            self.update(row)
        for state in self._states.values():
            state.stops = False  # the user goes on with the run, and is told again

    @property
    def tripped(self) -> list[tuple[str, str]]:
        """Rules, and their subjects, that are tripped now, without those that no longer apply to a solved task."""
        values = ((rule.name, rule.values(self._history)) for rule in self._rules)
        applying = [
            (name, subject) for name, subjects in values for subject, value in subjects.items() if value is not None
        ]
        return [key for key in applying if self._states[key].is_tripped]

    def update(self, metrics: Mapping[str, Any]) -> list[HealthFinding]:
        """Add the metrics of a step or an evaluation, and return what has changed with them."""
        self._history.add(metrics)
        evaluated = is_evaluation(metrics)
        return [x for rule in self._rules if rule.of_evaluations is evaluated for x in self._check(rule)]

    def _check(self, rule: HealthRule) -> Iterator[HealthFinding]:
        values = rule.values(self._history)
        earlier = [subject for name, subject in self._states if name == rule.name]
        for subject in dict.fromkeys([*values, *earlier]):
            yield from self._check_value(rule, subject, values.get(subject))

    def _check_value(self, rule: HealthRule, subject: str, value: float | None) -> Iterator[HealthFinding]:
        state, name = self._states[rule.name, subject], f"{rule.name} of {subject}" if subject else rule.name
        finding = partial(HealthFinding, rule=rule.name, subject=subject)
        limits, warn = self._config.health.get(rule.name), rule.limit(self._config)
        is_unknown = rule.name != NOT_FINITE and self._history.is_broken  # values are those of earlier steps
        if value is None:
            if _count_good_step(state):
                yield finding(message=f"{name} no longer applies")
        elif limits is not None and limits.stop is not None and rule.is_beyond(value, limits.stop) and not state.stops:
            state.is_tripped = state.stops = True
            reason = f"{rule.describe(value, subject)}; health.{rule.name}.stop is {limits.stop:g}"
            yield finding(message=reason, stops=True)
        elif rule.is_beyond(value, warn):
            state.num_ok = 0
            if not state.is_tripped:
                state.is_tripped = True
                yield finding(message=f"warning ({rule.name}): {rule.describe(value, subject)}")
        elif not is_unknown and _count_good_step(state):
            yield finding(message=f"{name} has recovered: {value:.3g} (warns from {warn:.3g})")


def _count_good_step(state: _State) -> bool:
    """Count a step at which a rule is well; return whether it was tripped, and is over with this step."""
    state.num_ok = state.num_ok + 1 if state.is_tripped else 0
    if state.num_ok < RECOVERY_STEPS:
        return False
    state.is_tripped, state.num_ok = False, 0
    return True
