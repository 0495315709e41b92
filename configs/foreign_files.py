"""Reads the settings of a run from files of TRL, axolotl, verl and OpenRLHF: YAML, shell scripts, Python scripts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from rlpipe.configs.foreign_shell import read_commands
from rlpipe.configs.yaml_file import read_text, read_yaml
from rlpipe.errors import ConfigError

SYSTEMS = ("axolotl", "openrlhf", "trl", "verl")
MODULES = {
    "verl.trainer.main_ppo": ("verl", "rl"),
    "verl.trainer.sft_trainer": ("verl", "sft"),
    "verl.trainer.fsdp_sft_trainer": ("verl", "sft"),
    "recipe.dapo.main_dapo": ("verl", "rl"),
    "openrlhf.cli.train_ppo": ("openrlhf", "rl"),
    "openrlhf.cli.train_ppo_ray": ("openrlhf", "rl"),
    "openrlhf.cli.train_sft": ("openrlhf", "sft"),
    "openrlhf.cli.train_dpo": ("openrlhf", "dpo"),
    "openrlhf.cli.train_kto": ("openrlhf", "kto"),
    "openrlhf.cli.train_rm": ("openrlhf", "reward_model"),
    "openrlhf.cli.train_prm": ("openrlhf", "process_reward_model"),
}
"""Programs of the commands, with their systems and what they do."""
TRL_METHODS = {
    "async_grpo": "rl",
    "grpo": "rl",
    "gspo": "rl",
    "rloo": "rloo",
    "sft": "sft",
    "dpo": "dpo",
    "dpo_online": "online_dpo",
    "online_dpo": "online_dpo",
    "kto": "kto",
    "bco": "bco",
    "orpo": "orpo",
    "cpo": "cpo",
    "reward": "reward_model",
    "prm": "process_reward_model",
}
"""Methods by the names of TRL's commands, scripts, configs and trainers, in small letters."""
PROGRAM = re.compile(r"(?:.*/)?(\w+)\.py")
MARKS = {
    "axolotl": ("base_model",),
    "verl": ("actor_rollout_ref.model.path", "algorithm.adv_estimator", "actor_rollout_ref.rollout.n"),
    "openrlhf": ("pretrain", "prompt_data"),
    "trl": ("model_name_or_path",),
}
"""Names in a YAML file by which a system is recognized."""


@dataclass(frozen=True)
class Setting:
    """An option as a foreign file has it; ``name`` is dotted, and ``value`` None if it is empty."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


@dataclass(kw_only=True, frozen=True)
class Computed:
    """A value in a Python script that no constant gives."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(kw_only=True, frozen=True)
class ForeignRun:
    """The settings of a run of another system; ``method`` is ``rl``, or the name of one of rlpipe's algorithms."""

    system: str
    method: str
    settings: Sequence[Setting]


def read_foreign(path: Path, system: str | None = None) -> ForeignRun:
    """Read a file; raise ``ConfigError`` if it is of no known system, or if nothing is found in it."""
    if path.suffix == ".py":
        run = _read_python(read_text(path), path)
    elif path.suffix in (".yaml", ".yml"):
        run = _read_tree(read_yaml(path), path, system)
    else:
        run = _read_shell(read_text(path), path)
    if not run.settings:
        raise ConfigError(f"{path}: no settings of {' or '.join(SYSTEMS)} were found in it; name another file")
    return run


def _read_tree(tree: Mapping[str, Any], path: Path, system: str | None) -> ForeignRun:
    settings = list(flatten(tree))
    names = {setting.name for setting in settings}
    system = system or next((name for name, marks in MARKS.items() if not names.isdisjoint(marks)), None)
    if system is None:
        raise ConfigError(f"{path}: it is not clear which system it is for; add --from {'|'.join(SYSTEMS)}")
    return ForeignRun(
        system=system, method=_method_of(system, {own.name: own.value for own in settings}), settings=settings
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[Setting]:
    """Yield the leaves of a tree under dotted names; lists are leaves."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield Setting(name, value)


def _method_of(system: str, values: Mapping[str, Any]) -> str:
    """Return the method of a YAML file, which only axolotl's names."""
    if system == "axolotl":
        method = str(values.get("rl") or "sft")
        if values.get("process_reward_model"):
            return "process_reward_model"
        return "reward_model" if values.get("reward_model") else "rl" if method in ("grpo", "gdpo") else method
    if system == "verl":
        return "rl" if any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in values) else "sft"
    if system == "openrlhf":
        return "rl" if "prompt_data" in values else "sft"
    return "rl" if values.keys() & {"num_generations", "reward_funcs"} else "dpo" if "beta" in values else "sft"


def _read_shell(text: str, path: Path) -> ForeignRun:
    for words in read_commands(text):
        for index, word in enumerate(words):
            if (found := _program(word, words[index + 1 : index + 2])) is not None:
                system, method, num_words = found
                return ForeignRun(system=system, method=method, settings=list(_arguments(words[index + num_words :])))
    raise ConfigError(f"{path}: no command of {' or '.join(SYSTEMS)} was found in it; name another file")


def _program(word: str, after: Sequence[str]) -> tuple[str, str, int] | None:
    """Return the system, the method and the number of words of a program's name; None if it is none."""
    if word in MODULES:
        return *MODULES[word], 1
    if word == "trl" and after and after[0] in TRL_METHODS:
        return "trl", TRL_METHODS[after[0]], 2
    found = PROGRAM.fullmatch(word)
    if found is not None and found[1] in TRL_METHODS:
        return "trl", TRL_METHODS[found[1]], 1
    if found is not None and found[1].startswith("main_"):
        return "verl", "rl", 1
    if found is not None and (module := f"openrlhf.cli.{found[1]}") in MODULES:
        return *MODULES[module], 1
    return None


def _arguments(words: Sequence[str]) -> Iterator[Setting]:
    """Yield ``key=value``, ``--key value``, ``--key=value`` and ``--key``; other words are settings without a value."""
    rest = [word for word in words if word not in ("$@", "$*")]
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.lstrip("-+").partition("=")
        if word.startswith("--") and not has_value:
            values = []
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            given: Any = (
                True if not values else read_value(values[0]) if len(values) == 1 else [*map(read_value, values)]
            )
            yield Setting(name, given)
        else:
            yield Setting(name, read_value(value) if has_value else None)


def read_value(text: str) -> Any:
    """Return a word's value as YAML reads it, or the word itself."""
    try:
        return yaml.load(text, Loader=get_yaml_loader())
    except (yaml.YAMLError, ValueError):
        return text


def _read_python(text: str, path: Path) -> ForeignRun:
    """Read the arguments of configs, trainers and data sets in a script, or the command in its docstring."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a Python file: {error}") from None
    constants = _constants(module)
    methods, settings = [], []
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and (name := _called(node)):
            kind = re.sub(r"(?:Config|Trainer)$", "", name).lower()
            if name.endswith(("Config", "Trainer")) and kind in TRL_METHODS:
                methods.append(TRL_METHODS[kind])
            settings += _settings_of(name, node, constants)
    told = ast.get_docstring(module) or ""
    if not any(setting.name == "learning_rate" or "model" in setting.name for setting in settings):
        return _read_shell("\n".join(line for line in told.splitlines()), path)
    if not methods:
        raise ConfigError(f"{path}: no trainer of TRL was found in it; name another file")
    return ForeignRun(system="trl", method=methods[-1], settings=settings)


def _constants(module: ast.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _value(node.value, found)
            if not isinstance(value, Computed):
                found[node.targets[0].id] = value
    return found


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


READ_CALLS = {"load_dataset": "dataset", "from_pretrained": "pretrained", "get_peft_model": ""}
"""Functions whose arguments are settings, with what their first argument is called."""


def _settings_of(name: str, call: ast.Call, constants: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield the arguments of a call that makes a config, a trainer, a data set or a model."""
    if not name.endswith(("Config", "Trainer")) and name not in READ_CALLS:
        return
    if name == "from_pretrained" and "Tokenizer" in ast.unparse(call.func):
        return
    if call.args and READ_CALLS.get(name):
        yield Setting(READ_CALLS[name], _value(call.args[0], constants))
    if name == "load_dataset" and len(call.args) > 1:
        yield Setting("dataset_config", _value(call.args[1], constants))
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield Setting(keyword.arg, _value(keyword.value, constants))


def _value(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return Computed(text=ast.unparse(node)[:200])
