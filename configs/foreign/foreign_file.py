"""Reads the settings of a run from files of TRL, axolotl, verl and OpenRLHF: YAML, shell scripts, Python scripts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from rlpipe.configs.foreign.foreign_run import SYSTEMS, ForeignRun, flatten
from rlpipe.configs.foreign.launch_command import read_shell
from rlpipe.configs.foreign.trl_script import read_python
from rlpipe.configs.yaml_file import load_yaml, read_text
from rlpipe.errors import ConfigError

MARKS = {
    "axolotl": ("base_model",),
    "verl": (
        "actor_rollout_ref.model.path",
        "algorithm.adv_estimator",
        "actor_rollout_ref.rollout.n",
        "trainer.total_epochs",
    ),
    "openrlhf": ("pretrain", "prompt_data", "actor.model_name_or_path", "data.prompt_dataset"),
    "trl": ("model_name_or_path", "dataset_name", "per_device_train_batch_size"),
}
"""Names in a YAML file by which a system is recognized."""
TRL_MARKS = {
    "rloo": ("normalize_advantages", "reward_clip_range"),
    "rl": ("num_generations", "reward_funcs"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "reward_model": ("center_rewards_coefficient",),
    "process_reward_model": ("step_separator", "train_on_last_step_only"),
}
"""Names in a YAML file of TRL, which names no method, by the method that has them, and those above it have not."""
GUESSED = "taken for DPO: ORPO and KTO have it, too; if it is one of theirs, choose another algorithm"
TWICE = "it is given again below; the last one counts"


def read_foreign(path: Path, system: str | None = None) -> ForeignRun:
    """Read a file; raise ``ConfigError`` if it is of no known system, or if nothing is found in it."""
    text = read_text(path)
    if path.suffix == ".py":
        run = read_python(text, path)
    elif path.suffix in (".yaml", ".yml"):
        run = _read_tree(text, path, system)
    else:
        run = read_shell(text, path)
    if not run.settings:
        raise ConfigError(f"{path}: no settings of {' or '.join(SYSTEMS.values())} were found in it; name another file")
    return run


class LastKeyWinsLoader(get_yaml_loader()):  # type: ignore[misc]
    """A loader that takes the last value of a key, as the other systems do, and remembers the earlier ones."""

    def __init__(self, text: str, earlier: list[tuple[str, str]]) -> None:
        super().__init__(text)
        self._earlier = earlier

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for index, (key, (_, value)) in enumerate(zip(keys, node.value, strict=True)):
            if key in keys[index + 1 :]:
                self._earlier.append((f"{key}: {self.construct_object(value, deep=True)}", TWICE))
        return yaml.SafeLoader.construct_mapping(self, node, deep=deep)


def _read_tree(text: str, path: Path, system: str | None) -> ForeignRun:
    earlier: list[tuple[str, str]] = []
    tree = load_yaml(path, text, partial(LastKeyWinsLoader, earlier=earlier))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: it contains no settings of {' or '.join(SYSTEMS.values())}; name another file")
    settings = list(flatten(tree))
    values = {setting.name: setting.value for setting in settings}
    system = system or next((name for name, marks in MARKS.items() if values.keys() & set(marks)), None)
    if system is None:
        raise ConfigError(f"{path}: it is not clear which system it is for; add --from {'|'.join(SYSTEMS)}")
    method = _method_of(system, values)
    if system == "trl" and method == "dpo":
        earlier.append((f"beta: {values['beta']}", GUESSED))
    return ForeignRun(system=system, method=method, settings=settings, notes=earlier)


def _method_of(system: str, values: Mapping[str, Any]) -> str:
    """Return the method of a YAML file, which only axolotl's names."""
    if system == "axolotl":
        if model := next((name for name in ("process_reward_model", "reward_model") if values.get(name)), None):
            return model
        method = str(values.get("rl") or "sft")
        if method == "ebft" and values.get("ebft.mode") == "strided":
            return "ebft_strided"
        return "rl" if method in ("grpo", "gdpo") else method
    if system == "verl":
        return "rl" if any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in values) else "sft"
    if system == "openrlhf":
        return "rl" if values.keys() & {"prompt_data", "data.prompt_dataset"} else "sft"
    known = next((method for method, marks in TRL_MARKS.items() if values.keys() & set(marks)), None)
    return known or ("dpo" if "beta" in values else "sft")
