"""Rows of the tables: which settings of other systems become which option of rlpipe, and by which rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlpipe.configs.foreign.foreign_values import ForeignValues, is_on

Options = dict[str, Any]


@dataclass(frozen=True)
class UsedBy:
    """Result of a rule for a setting that is one of those from which a group's choice, or an option, follows."""

    of: str


Made = Options | UsedBy | str
"""Options of rlpipe by their dotted names, what a setting is part of, or the reason why it makes neither."""
Maker = Callable[[ForeignValues, Any], Made]
Condition = Callable[[ForeignValues], bool]


@dataclass(frozen=True)
class Rule:
    """The translation of a setting into options, and the option to set where that is not possible."""

    option: str
    make: Maker


class SettingRow(NamedTuple):
    """Settings that mean the same in several systems, by their names there.

    Names have spaces between them, and ``=`` between two names of one setting, of which ``get`` takes the first. They
    lack the part that all settings of a system have: ``trl.`` in axolotl's, ``actor_rollout_ref.`` in verl's, and
    ``actor.`` of ``actor.optim.``. A name that ends with ``*`` stands for all that begin like it, and ``.*`` for a
    section.
    """

    rule: Rule | str
    """Rule that makes the options; a text is an option that has the same value, or the reason why there is none."""
    hf: str = ""
    """Names in TRL and axolotl, whose trainers are those of transformers."""
    verl: str = ""
    openrlhf: str = ""


NOT_SAMPLED = "nothing is sampled"
NO_ADAPTER = "there is no adapter"
NO_EFFECT = "it has no effect with this loss"
OFF = "it is off, as it is here"


def about(option: str) -> Callable[[Maker], Rule]:
    """Return a decorator that makes a rule of a function."""
    return lambda make: Rule(option, make)


def copied(option: str) -> Rule:
    return Rule(option, lambda values, value: {option: value})


def text(option: str) -> Rule:
    """Return a rule that copies a name, which YAML may have read as a number."""
    return Rule(option, lambda values, value: {option: str(value)})


def positive(option: str) -> Rule:
    """Return a rule that copies whole numbers above 0."""
    return Rule(option, lambda values, value: {option: value} if type(value) is int and value > 0 else f"set {option}")


def switched(option: str, setting: Any = True) -> Rule:
    """Return a rule that sets an option if a switch is on."""
    return Rule(option, lambda values, value: {option: setting} if is_on(value) else OFF)


def without_option(reason: str) -> Rule:
    """Return a rule that has a reason why there is no option if a switch is on."""
    return Rule("the option", lambda values, value: reason if is_on(value) else OFF)


def named(option: str, names: Mapping[str, str | Options], others: str = "") -> Rule:
    """Return a rule that translates names, some of which stand for several options."""
    translations = {name: target if isinstance(target, dict) else {option: target} for name, target in names.items()}
    choices = ", ".join(dict.fromkeys(str(made[option]) for made in translations.values() if option in made))
    others = others or f"{option} is one of {choices}"
    return Rule(option, lambda values, value: dict(translations.get(str(value).lower(), {})) or others)


def counted(option: str, *, is_never: bool = False) -> Rule:
    """Return a rule for a number of updates of the policy; steps here may have several updates.

    With ``is_never``, 0 and less mean never, which is 0 here.
    """

    def make(values: ForeignValues, value: Any) -> Made:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"set {option}, a number of steps"
        if value <= 0:
            return {option: 0} if is_never else f"it is not set there; set {option}"
        if value < 1:
            return f"it is a share of the run; set {option}, a number of steps"
        return {option: math.ceil(value / values.updates_per_step)}

    return Rule(option, make)


def enabling(option: str, number: str, default: float) -> Rule:
    """Return the rule of a switch for an option whose number is another setting, or that setting's default."""

    def make(values: ForeignValues, value: Any) -> Made:
        if not is_on(value):
            return OFF
        return {option: default} if values.get(number) is None else UsedBy(option)

    return Rule(option, make)


def with_setting(rule: Rule, *names: str, option: str = "") -> Rule:
    """Return a rule that translates the value of another setting, which has one of these names."""

    def make(values: ForeignValues, value: Any) -> Made:
        options = rule.make(values, values.get(*names))
        return UsedBy(option if option in options else rule.option) if isinstance(options, dict) else options

    return Rule(option or rule.option, make)


def only_if(holds: Condition, rule: Rule | str, others: str) -> Rule:
    """Return a rule for some runs, with the reason for the others."""
    chosen = copied(rule) if isinstance(rule, str) else rule
    return Rule(chosen.option, lambda values, value: chosen.make(values, value) if holds(values) else others)


def sampled(rule: Rule | str) -> Rule:
    """Return a rule for runs that sample; the others have no engines."""
    return only_if(lambda values: values.samples, rule, NOT_SAMPLED)


def adapted(rule: Rule | str) -> Rule:
    """Return a rule for runs that train an adapter."""
    return only_if(lambda values: values.model != "full", rule, NO_ADAPTER)


def for_method(*methods: str, rule: Rule | str) -> Rule:
    return only_if(lambda values: values.run.method in methods, rule, OFF)


def without(name: str, losses: Sequence[Any], rule: Rule | str, others: str = NO_EFFECT) -> Rule:
    """Return a rule for runs in which a setting, such as the loss, has none of these values."""
    return only_if(lambda values: values.get(name) not in losses, rule, others)


def engine_argument(name: str) -> Rule:
    return sampled(f"rollout.engine_args.{name}")
