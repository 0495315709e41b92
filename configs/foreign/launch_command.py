"""The training command of a shell script, and its arguments as settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from omegaconf._utils import get_yaml_loader

from rlpipe.configs.foreign.foreign_run import SYSTEMS, ForeignRun, Setting, flatten, hide_secret, read_value
from rlpipe.configs.foreign.shell_script import Script, ShellCommand
from rlpipe.configs.yaml_file import load_yaml, read_text
from rlpipe.errors import ConfigError

TRL_METHODS = {
    **dict.fromkeys(("grpo", "gspo"), "rl"),
    **dict.fromkeys(("async_grpo", "asyncgrpo"), "async_grpo"),
    **dict.fromkeys(("online_dpo", "onlinedpo", "dpo_online"), "online_dpo"),
    **dict.fromkeys(("reward_modeling", "reward"), "reward_model"),
    **dict.fromkeys(("nash_md", "nashmd"), "nash_md"),
    "prm": "process_reward_model",
    **{name: name for name in ("rloo", "sft", "dpo", "kto", "bco", "orpo", "cpo", "gkd", "ppo", "xpo")},
}
"""Methods by the names of TRL's commands, scripts and trainers, in small letters."""
OPENRLHF_METHODS = {
    **dict.fromkeys(("ppo", "ppo_ray"), "rl"),
    **dict.fromkeys(("kd", "opd"), "distillation"),
    "rm": "reward_model",
    "prm": "process_reward_model",
    "es_ray": "evolution_strategies",
    **{name: name for name in ("sft", "dpo", "kto")},
}
OPENRLHF = re.compile(r"(?:openrlhf\.cli\.|(?:.*/)?)train_(\w+?)(?:\.py)?")
VERL_RL = re.compile(r"(?:verl|recipe)\.[\w.]*\bmain_(?!eval|gen)\w+|(?:.*/)?main_(?!eval|gen)\w+\.py|verl[\w.]*_main")
VERL_SFT = re.compile(r"(?:verl|recipe)\.[\w.]*sft_trainer\w*|(?:.*/)?\w*sft_trainer\w*\.py")
TRL_MODULE = re.compile(r"trl\.(?:scripts|experimental)\.(?:\w+\.)?(\w+)")
TRL_SCRIPT = re.compile(r"(?:.*/)?(\w+)\.py")
NUM_PROCESSES = re.compile(r"--(?:num[_-]processes|nproc[_-]per[_-]node|num[_-]gpus)")
CONFIG_FILE = re.compile(r"--config[_-]file")
"""Argument of ``accelerate launch`` for a YAML file with the number of processes, the type and the strategy."""
NUM_NODES = re.compile(r"--(?:nnodes|num[_-]nodes)")
PLAIN_LAUNCH = ("python", "python3", "-m", "-u", "uv", "run", "--frozen", "--no-sync", "exec", "time", "nohup", "sudo")
SILENT = ("set", "echo", "printf", "exit", "return", "true", ":", "shift", "cd", "tee", "read", "trap", "sleep")
"""Commands that are not worth a comment."""
LAUNCHER = "set learner.num_ranks and learner=fsdp2_gpu or learner=zero3_gpu for several GPUs"
OTHER_COMMAND = "a command of the script that does not train"
OTHER_RUN = "another run: import it from a file of its own"
NOT_TAKEN = "in a branch of the script that is not taken"
EXPORTED = "a variable of the environment: set it where you start the run"
UNUSED = "a variable of the script that the command does not use"
MAX_DEPTH = 3


@dataclass(kw_only=True, frozen=True)
class Found:
    """A command that trains: what it is, and its words before and after the program."""

    system: str
    method: str
    launcher: Sequence[str]
    arguments: Sequence[str]


def read_shell(text: str, path: Path) -> ForeignRun:
    """Read the first command that trains; the other lines become notes."""
    try:
        script = Script(text)
        programs = [(command, find_program(command.words)) for command in script.commands]
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    runs = [(command, program) for command, program in programs if program is not None]
    if not runs:
        raise ConfigError(f"{path}: no command of {' or '.join(SYSTEMS.values())} was found in it; name another file")
    chosen = next((run for run in runs if run[0].runs), runs[0])
    notes = [(show(run[0].words), OTHER_RUN) for run in runs if run is not chosen]
    notes += [
        (show(command.words), OTHER_COMMAND if command.runs else NOT_TAKEN)
        for command, program in programs
        if program is None and command.words[0] not in SILENT
    ]
    notes += [*script.notes, *((hide_secret(exported), EXPORTED) for exported in script.exported)]
    exported = {assignment.partition("=")[0] for assignment in script.exported}
    unused = sorted(script.variables.unused & script.variables.values.keys() - exported)
    values = [*script.variables.replaced, *((name, " ".join(script.variables.values[name])) for name in unused)]
    notes += [(hide_secret(f"{name}={value}"), UNUSED) for name, value in values]
    return as_run(chosen[1], notes, path.parent)


def show(words: Sequence[str]) -> str:
    hidden = [hide_secret(word) if "=" in word and not word.startswith("-") else word for word in words]
    return " ".join(word if re.fullmatch(r"[\w./:=,@%+$-]+", word) else shlex.quote(word) for word in hidden)


def as_run(found: Found, notes: Sequence[tuple[str, str]], folder: Path) -> ForeignRun:
    """Return the run of a command in a file in this ``folder``."""
    if any(word not in PLAIN_LAUNCH for word in found.launcher):
        notes = [(show(found.launcher), LAUNCHER), *notes]
    settings = [*read_arguments(found.arguments, is_hydra=found.system == "verl")]
    settings += _launch_settings(found.launcher, folder)
    counts = [_count(found.launcher, pattern) for pattern in (NUM_PROCESSES, NUM_NODES)]
    return ForeignRun(
        system=found.system,
        method=found.method,
        settings=settings,
        notes=notes,
        num_processes=counts[0] * (counts[1] or 1) or None,
        is_shell=True,
    )


def _count(launcher: Sequence[str], pattern: re.Pattern[str]) -> int:
    """Return the number that a launcher has after, or as, an argument; 0 if it has none."""
    return next((int(value) for value in _values_of(launcher, pattern) if value.isdigit()), 0)


def _values_of(launcher: Sequence[str], pattern: re.Pattern[str]) -> list[str]:
    words = " ".join(launcher).replace("=", " ").split()
    return [value for name, value in pairwise(words) if pattern.fullmatch(name)]


def _launch_settings(launcher: Sequence[str], folder: Path) -> Iterator[Setting]:
    """Yield the settings of the file that a launcher names, if it exists in the ``folder``."""
    for name in _values_of(launcher, CONFIG_FILE)[:1]:
        if (path := folder / name).is_file():
            tree = load_yaml(path, read_text(path), get_yaml_loader())
            yield from flatten(tree) if isinstance(tree, Mapping) else ()


def find_program(words: Sequence[str], depth: int = 0) -> Found | None:
    """Return the program of a command that trains; None if it trains nothing."""
    for index, word in enumerate(words):
        if index and words[index - 1] == "-c" and " " in word and depth < MAX_DEPTH:
            before = list(words[:index])
            for command in _commands_of(word):
                if (program := find_program(command.words, depth + 1)) is not None:
                    return replace(program, launcher=[*before, *program.launcher])
                before += [*command.words, "&&"]
        if word == "axolotl" and index + 1 < len(words) and words[index + 1] in ("train", "preprocess"):
            file = next((after for after in words[index + 2 :] if after.endswith((".yml", ".yaml"))), "its YAML file")
            raise ConfigError(f"it runs axolotl with {file}; import that file")
        method = _method(word, words[index + 1 : index + 2], words[index + 1 :])
        if method is not None:
            return Found(
                system=method[0], method=method[1], launcher=words[:index], arguments=words[index + method[2] :]
            )
    return None


def _commands_of(word: str) -> Sequence[ShellCommand]:
    """Return the commands in the text of ``bash -c``; none if its quotes do not match."""
    try:
        return Script(word).commands
    except ConfigError:
        return []


def _method(word: str, after: Sequence[str], rest: Sequence[str]) -> tuple[str, str, int] | None:
    """Return the system, the method and the number of words of a program's name; None if the word names none."""
    has_arguments = any(argument.startswith("--") for argument in rest)
    if word == "trl" and after and after[0] in TRL_METHODS:
        return "trl", TRL_METHODS[after[0]], 2
    if VERL_SFT.fullmatch(word):
        return "verl", "sft", 1
    if VERL_RL.fullmatch(word) and any("=" in argument for argument in rest):
        return "verl", "rl", 1
    match = OPENRLHF.fullmatch(word)
    if match is not None and match[1] in OPENRLHF_METHODS and has_arguments:
        return "openrlhf", OPENRLHF_METHODS[match[1]], 1
    script = TRL_MODULE.fullmatch(word) or TRL_SCRIPT.fullmatch(word)
    method = trl_method(script[1]) if script is not None and has_arguments else None
    return None if method is None else ("trl", method, 1)


def trl_method(name: str) -> str | None:
    """Return the method of a script or a trainer of TRL, such as ``grpo_vlm`` or ``GRPOTrainer``; None if unknown."""
    plain = name.lower()
    return next((TRL_METHODS[key] for key in TRL_METHODS if plain == key or plain.startswith(f"{key}_")), None)


def read_arguments(words: Sequence[str], *, is_hydra: bool = False) -> Iterator[Setting]:
    """Yield ``key=value``, ``--key value``, ``--key=value`` and ``--key``; other words are settings without a value.

    Hydra's commands mix ``--key value`` with ``key=value``, so a key has one value there.
    """
    index = 0
    while index < len(words):
        word = words[index]
        name, has_value, value = word.lstrip("-+").partition("=")
        index += 1
        if word.startswith("--") and not has_value:
            start = index
            while index < len(words) and not words[index].startswith("--") and not (is_hydra and index > start):
                index += 1
            values = [read_value(text) for text in words[start:index]]
            yield from _settings(name, True if not values else values[0] if len(values) == 1 else values)
        elif has_value and name:
            yield from _settings(name, read_value(value))
        else:
            yield Setting(name=word, value=None)


def _settings(name: str, value: object) -> Iterator[Setting]:
    if isinstance(value, Mapping) and value:
        yield from flatten(value, f"{name}.")
    else:
        yield Setting(name=name, value=value)
