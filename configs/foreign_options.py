"""Translates a run of another system into a config, in which each setting is an option or a comment with the reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlpipe.configs.compose import ManyProblems, load_config
from rlpipe.configs.foreign_files import Computed, ForeignRun, Setting
from rlpipe.configs.foreign_names import foreign_name
from rlpipe.configs.foreign_rules import OFF_TOPIC, RULES, WIRED, Chooses, Made
from rlpipe.configs.foreign_values import ALGORITHMS, ForeignValues
from rlpipe.configs.options import all_names
from rlpipe.errors import ConfigError, InputError

UNKNOWN = "no equivalent is known"
EMPTY = "it has no value"
COMPUTED = "the file computes it: set {} yourself"
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
MISSING = "???"
MAX_COMMENT = 120
PLACEHOLDER = "unset"
"""Stands for a required option that the file does not give, while the rest is validated."""


@dataclass
class Translation:
    """Choices of groups, options with the settings that they come from, and the settings without an equivalent."""

    choices: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    chosen_by: dict[str, list[str]] = field(default_factory=dict)
    """Settings by the group in which they are part of what is chosen."""

    def take(self, made: Mapping[str, Any], origin: str) -> None:
        for option, value in made.items():
            self.options[option] = value
            self.origins.setdefault(option, origin)

    def drop(self, option: str, reason: str) -> None:
        """Turn an option into a comment."""
        value = self.options.pop(option)
        self.notes.append((f"{option}: {value} ({self.origins.pop(option)})", reason))


def translate(run: ForeignRun) -> Translation:
    """Return the config of a run, without options that it can't have; raise ``ConfigError`` if there can be none."""
    values = ForeignValues(run)
    if values.algorithm is None:
        raise ConfigError(f"there is no algorithm {run.method} here; there are {', '.join(ALGORITHMS)}")
    data = dict(values.data)
    choices = {"algorithm": values.algorithm, "data": data.pop("data"), "model": values.model, "learner": "single_gpu"}
    translation = Translation(choices | ({"rollout": "vllm_gpu"} if values.samples else {}))
    translation.take({name: _with_variables(value) for name, value in data.items()}, "the data set")
    translation.take(values.batch, values.batch_origin)
    for setting in run.settings:
        made = _translate(values, setting)
        if isinstance(made, str):
            translation.notes.append((str(setting), made))
        elif isinstance(made, Chooses):
            translation.chosen_by.setdefault(made.group, []).append(str(setting))
        else:
            translation.take({name: _with_variables(value) for name, value in made.items()}, str(setting))
    translation.options.setdefault("model.path", MISSING)
    _leave_out_what_is_refused(translation)
    return translation


def _translate(values: ForeignValues, setting: Setting) -> Made:
    """Return the options that a setting makes, or the reason why it makes none."""
    name = setting.name.replace("-", "_")
    parts = name.split(".")
    off_topic = next((OFF_TOPIC[part] for part in parts if part in OFF_TOPIC), None)
    if off_topic is not None or setting.value in (None, ""):
        return off_topic or EMPTY
    ends = [".".join(parts[index:]) for index in range(len(parts))]
    rule = next((RULES[end] for end in ends if end in RULES), None)
    known = foreign_name(name)
    if isinstance(setting.value, Computed) and name not in WIRED:
        return COMPUTED.format(known) if known in all_names() else known or COMPUTED.format("it")
    if rule is not None:
        return rule(values, setting.value)
    if known is None:
        return UNKNOWN
    return {known: setting.value} if known in all_names() else known


def _with_variables(value: Any) -> Any:
    """Return a value with references to the environment where a shell's variables are left."""
    if isinstance(value, dict):
        return {name: _with_variables(each) for name, each in value.items()}
    return VARIABLE.sub(r"${oc.env:\1}", value) if isinstance(value, str) else value


def _leave_out_what_is_refused(translation: Translation) -> None:
    """Turn the options that a config can't have, alone or together, into comments with the reasons."""
    while True:
        try:
            load_config(options=[as_tree(translation, PLACEHOLDER)], overrides=_chosen(translation), need_files=False)
        except InputError as error:
            messages = error.messages if isinstance(error, ManyProblems) else [str(error)]
            named = {option: text for text in messages for option in _options_in(text) if option in translation.options}
            if not named:
                raise
            for option, text in named.items():
                translation.drop(option, text)
        else:
            return


def _options_in(message: str) -> Iterator[str]:
    """Yield the first option that a message names, with the sections around it."""
    found = re.match(r"[\w.]+", message)
    parts = found[0].split(".") if found else []
    for length in range(len(parts), 1, -1):
        yield ".".join(parts[:length])


def _chosen(translation: Translation) -> list[str]:
    return [f"{group}={choice}" for group, choice in translation.choices.items()]


def as_tree(translation: Translation, missing: str = MISSING) -> dict[str, Any]:
    """Return the options as a tree, with ``missing`` for those that the file does not give."""
    tree: dict[str, Any] = {}
    for option, value in translation.options.items():
        *sections, last = option.split(".")
        inside = tree
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = missing if value == MISSING else value
    return tree


def write(translation: Translation, source: str) -> str:
    """Return the config as YAML, with the settings that each option comes from, and those without one at the end."""
    lines = [f"# Made from {source} by rlpipe import; what has no equivalent here is at the end.", "defaults:"]
    for group, choice in translation.choices.items():
        lines.append(f"  - {group}: {choice}" + _comment(", ".join(translation.chosen_by.get(group, []))))
    lines += ["", *_lines(as_tree(translation), translation.origins)]
    if translation.notes:
        lines += ["", "# Without an equivalent:"]
    for setting, reason in translation.notes:
        lines += [f"# {' '.join(setting.split())}", f"#     {reason}"]
    return "\n".join(lines) + "\n"


def _lines(tree: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> Iterator[str]:
    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        option = f"{prefix}{name}"
        if option in origins or not isinstance(value, dict):
            shown = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
            yield f"{indent}{name}: {shown.removesuffix('...' + chr(10)).strip()}" + _comment(origins.get(option, ""))
        else:
            yield f"{indent}{name}:"
            yield from _lines(value, origins, f"{option}.")


def _comment(text: str) -> str:
    """Return the text as the end of a line, shortened."""
    return f"  # {' '.join(text.split())[:MAX_COMMENT]}" if text else ""
