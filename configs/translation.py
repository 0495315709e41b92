"""Translation of another system's run into a config: each setting becomes an option, or a comment with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import yaml

from rlpipe.configs.compose import MultipleErrors, load_config
from rlpipe.configs.foreign.data_set_entries import (
    describe_entry,
    entry_of,
    equal_weights,
    translate_data,
    unread_files,
    unread_splits,
)
from rlpipe.configs.foreign.foreign_run import Computed, ForeignRun, Setting
from rlpipe.configs.foreign.foreign_values import ALGORITHMS, GROUPS, UPDATES, ForeignValues
from rlpipe.configs.foreign.setting_names import canonical, rule_of
from rlpipe.configs.foreign.setting_rules import NO_ADAPTER, NO_EFFECT, OFF, Made, Rule, UsedBy
from rlpipe.configs.options import options
from rlpipe.configs.schema.option import MISSING
from rlpipe.errors import ConfigError, InputError

GIVEN_AGAIN = "it is given again, and the last one counts"
UNKNOWN = "no equivalent is known"
BATCH = "the settings of the batch"
EMPTY = "it has no value"
COMPUTED = "the file computes it: set {} yourself"
FROM_ENVIRONMENT = "a variable that the file does not set: set {} yourself"
NO_REWARDS = ("scoring.rewards", "the run needs rewards: see scoring.rewards.<name>.path, and docs/rewards.md")
ONE_PROCESS = "counted for one process, because the file does not say how many there are: {} it by their number"
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
REFERENCE = re.compile(r"\$\{oc\.env:\w+\}")
MAX_COMMENT = 120
PROMPT, COMPLETION = ("data.max_prompt_tokens", 1024), ("rollout.sampling.max_tokens", 256)
MICRO_BATCH, ROOM = "learner.max_tokens_per_microbatch", 8192
"""Options of lengths, with their defaults."""
PLACEHOLDER = "unset"
"""Stands for a required option that the file does not give, and for variables, while the rest is validated."""


@dataclass
class Translation:
    """Choices of groups, options with the settings that they come from, and the settings without an equivalent."""

    choices: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)
    """Settings by the option, or by the group, that follows from them."""
    notes: list[tuple[str, str]] = field(default_factory=list)

    def take(self, made: Mapping[str, Any], setting: Setting) -> None:
        """Take the options of a setting; one that has another value already keeps it."""
        for option, value in made.items():
            if option in self.options and self.options[option] != value:
                if not setting.default_of:
                    self.notes.append(
                        (str(setting), f"{option} is set by {', '.join(self.origins.get(option) or [BATCH])}")
                    )
                continue
            self.options[option] = value
            self.origins.setdefault(option, []).append(str(setting))

    def drop(self, option: str, reason: str) -> None:
        """Turn an option into a comment."""
        origins = ", ".join(self.origins.pop(option, []))
        self.notes.append((f"{option}: {self.options.pop(option)}" + (f" ({origins})" if origins else ""), reason))


def translate(run: ForeignRun) -> Translation:
    """Return the config of a run, without options that it can't have; raise ``ConfigError`` if there can be none."""
    values = ForeignValues(run, partial(canonical, run.system))
    if values.algorithm is None:
        algorithms = ", ".join(dict.fromkeys(ALGORITHMS.values()))
        raise ConfigError(f"there is no algorithm {run.method} here; there are {algorithms}")
    data = translate_data(values)
    choices = {"algorithm": values.algorithm, "data": data.pop("data"), "model": values.model, "learner": "single_gpu"}
    translation = Translation(choices | ({"rollout": "vllm_gpu"} if values.samples else {}))
    for name, value in data.items():
        translated = _with_variables(values, value)
        translation.options[name] = MISSING if translated is None else translated
    translation.options |= values.batch
    _note_processes(translation, values)
    for setting in [*run.settings, *values.defaults]:
        _apply_setting(translation, values, setting)
    translation.options.setdefault("model.path", MISSING)
    _fit_micro_batch(translation)
    if values.samples and values.algorithm != "ebft" and not any(".rewards." in name for name in translation.options):
        translation.notes.append(NO_REWARDS)
    _drop_refused_options(translation)
    translation.notes += [*equal_weights(values), *unread_files(values), *unread_splits(values), *run.notes]
    return translation


def _note_processes(translation: Translation, values: ForeignValues) -> None:
    """Note for how many processes rows are counted, in the systems that count those of a process."""
    if values.run.system not in ("trl", "axolotl") or GROUPS not in values.batch:
        return
    if values.num_processes is not None:
        translation.origins[GROUPS] = [f"{values.num_processes} processes"]
        return
    of_all = values.samples and values.number("generation_batch_size")
    option, change = (UPDATES, "divide") if of_all else (GROUPS, "multiply")
    if option in values.batch:
        translation.notes.append((f"{option}: {values.batch[option]}", ONE_PROCESS.format(change)))


def _fit_micro_batch(translation: Translation) -> None:
    """Raise the size of micro batches to that of the longest rollout, which they must hold."""
    lengths = [translation.options.get(option, default) for option, default in (PROMPT, COMPLETION)]
    longest = sum(length for length in lengths if type(length) is int)
    size = translation.options.get(MICRO_BATCH, ROOM)
    if "rollout" in translation.choices and type(size) is int and longest > size:
        if MICRO_BATCH in translation.options:
            translation.drop(MICRO_BATCH, "fewer tokens than a prompt and a completion have together")
        translation.options[MICRO_BATCH] = longest
        translation.origins[MICRO_BATCH] = [f"{PROMPT[0]} + {COMPLETION[0]}"]


def _apply_setting(translation: Translation, values: ForeignValues, setting: Setting) -> None:
    """Take over the options that a setting makes, or note why it makes none, unless it is a default without effect."""
    outcome = translate_setting(values, setting)
    if not (setting.default_of or values.counts(setting) or isinstance(setting.value, Computed)):
        translation.notes.append((str(setting), GIVEN_AGAIN))
    elif isinstance(outcome, UsedBy):
        translation.origins.setdefault(outcome.of, []).append(str(setting))
    elif isinstance(outcome, str):
        if not (setting.default_of and outcome in (OFF, NO_EFFECT, NO_ADAPTER)):
            translation.notes.append((str(setting), outcome))
    else:
        translated = {}
        for option, value in outcome.items():
            translated_value = _with_variables(values, value)
            if translated_value is None and value is not None:
                translation.notes.append((str(setting), COMPUTED.format(option)))
            elif REFERENCE.search(str(translated_value)) and option not in _texts():
                translation.notes.append((str(setting), FROM_ENVIRONMENT.format(option)))
            else:
                translated[option] = translated_value
        translation.take(translated, setting)


@cache
def _texts() -> frozenset[str]:
    """Return the options that are texts, whose values may come from the environment."""
    return frozenset(option.name for option in options() if option.type.startswith("a string"))


def translate_setting(values: ForeignValues, setting: Setting) -> Made:
    """Return the options that a setting makes, or the reason why it makes none."""
    name, value = values.key(setting.name), setting.value
    entry, rule = entry_of(name), rule_of(values.run.system, name)
    if entry is None and rule is None:
        return UNKNOWN if value is not None else f"{EMPTY}, and {UNKNOWN}"
    if setting.is_empty and not values.is_null(name):
        return EMPTY
    if entry is not None:
        return COMPUTED.format("the option") if isinstance(value, Computed) else describe_entry(*entry, values, value)
    if isinstance(rule, str) and " " in rule:
        return rule
    if isinstance(value, Computed):
        return COMPUTED.format(rule.option if isinstance(rule, Rule) else rule)
    return rule.make(values, value) if isinstance(rule, Rule) else {str(rule): value}


def _with_variables(values: ForeignValues, value: Any) -> Any:
    """Return a value with references to the environment where a shell's variables are left; None if others are."""
    if isinstance(value, dict):
        entries = {name: _with_variables(values, child) for name, child in value.items()}
        return None if None in entries.values() else entries
    if isinstance(value, list):
        listed = [_with_variables(values, child) for child in value]
        return None if None in listed else listed
    if not isinstance(value, str):
        return value
    if values.run.is_shell:
        value = VARIABLE.sub(lambda name: f"${{oc.env:{name[1] or name[2]}}}", value)
    return None if "${" in REFERENCE.sub("", value) else value


def _drop_refused_options(translation: Translation) -> None:
    """Turn the options that a config can't have, alone or together, into comments with the reasons."""
    while True:
        try:
            load_config(options=[as_tree(translation, PLACEHOLDER)], overrides=_chosen(translation), need_files=False)
        except InputError as error:
            messages = error.messages if isinstance(error, MultipleErrors) else [str(error)]
            named = {
                option: text
                for text in messages
                for name in _options_in(text)
                for option in translation.options
                if option == name or (option.startswith(f"{name}.") and text.startswith(f"{name}: "))
            }
            if not named:
                raise
            for option, text in named.items():
                translation.drop(option, text)
        else:
            return


def _options_in(message: str) -> Iterator[str]:
    """Yield the first option that a message names, with the sections around it."""
    match = re.match(r"[\w.]+", message)
    segments = match[0].split(".") if match else []
    for length in range(len(segments), 1, -1):
        yield ".".join(segments[:length])


def _chosen(translation: Translation) -> list[str]:
    return [f"{group}={choice}" for group, choice in translation.choices.items()]


def as_tree(translation: Translation, missing: str = MISSING) -> dict[str, Any]:
    """Return the options as a tree, with ``missing`` for those that the file does not give, and for variables."""
    tree: dict[str, Any] = {}
    for option, value in translation.options.items():
        *sections, last = option.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value if missing == MISSING else _without_variables(value, missing)
    return tree


def _without_variables(value: Any, missing: str) -> Any:
    if isinstance(value, dict):
        return {name: _without_variables(child, missing) for name, child in value.items()}
    if isinstance(value, list):
        return [_without_variables(child, missing) for child in value]
    return REFERENCE.sub(missing, value.replace(MISSING, missing)) if isinstance(value, str) else value


def write(translation: Translation, source: str) -> str:
    """Return the config as YAML, with the settings that each option comes from, and those without one at the end."""
    lines = [
        f"# Made from {_one_line(source)} by rlpipe import; what has no equivalent here is at the end.",
        "defaults:",
    ]
    for group, choice in translation.choices.items():
        lines += _commented(f"  - {group}: {choice}", translation.origins.get(group, []))
    lines += ["", *_lines(as_tree(translation), translation)]
    if translation.notes:
        lines += ["", "# Without an equivalent:"]
    for setting, reason in dict.fromkeys(translation.notes):
        lines += [f"# {_one_line(setting)}", f"#     {_one_line(reason)}"]
    return "\n".join(lines) + "\n"


def _lines(tree: Mapping[str, Any], translation: Translation, prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        option = f"{prefix}{name}"
        if option in translation.options or not isinstance(value, dict):
            shown = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
            line = f"{indent}{name}: {shown.removesuffix('...' + chr(10)).strip()}"
            yield from _commented(line, translation.origins.get(option, []))
        else:
            yield f"{indent}{name}:"
            yield from _lines(value, translation, f"{option}.")


def _commented(line: str, origins: list[str]) -> Iterator[str]:
    """Yield a line with the settings that it comes from: after it, or above it if there are too many."""
    settings = [_one_line(origin) for origin in dict.fromkeys(origins)]
    together = ", ".join(settings)
    if len(together) > MAX_COMMENT:
        indent = line[: len(line) - len(line.lstrip())]
        yield from (f"{indent}# {setting}" for setting in settings)
        yield line
    else:
        yield f"{line}  # {together}" if together else line


def _one_line(text: str) -> str:
    return " ".join(text.split())
