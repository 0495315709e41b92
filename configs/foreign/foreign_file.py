"""Settings of a run, read from files of TRL, axolotl, verl and OpenRLHF: YAML, shell scripts, Python scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from rlpipe.configs.foreign.foreign_run import SYSTEMS, ForeignRun, flatten
from rlpipe.configs.foreign.foreign_values import ALGORITHMS
from rlpipe.configs.foreign.launch_command import read_shell
from rlpipe.configs.foreign.loss_table import PREFERENCE_LOSSES, TRL_LOSSES
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
    "rl": ("num_generations", "reward_funcs", "scale_rewards", "importance_sampling_level"),
    "kto": ("desirable_weight", "undesirable_weight"),
    "cpo": ("cpo_alpha", "simpo_gamma"),
    "reward_model": ("center_rewards_coefficient",),
    "process_reward_model": ("step_separator", "train_on_last_step_only"),
    "sft": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"),
}
"""Names in a YAML file of TRL, which names no method, by the method that has them, and those above it have not."""
OPENRLHF_MARKS = {
    "rl": ("prompt_data", "prompt_dataset"),
    "kto": ("desirable_loss_weight", "undesirable_loss_weight"),
    "reward_model": ("margin_loss", "compute_fp32_loss"),
    "process_reward_model": ("placeholder_token", "reward_tokens"),
    "sft": ("multiturn", "pretrain_mode"),
}
"""Names in a YAML file of OpenRLHF, without their sections, by the method that has them."""
PAIR_SETTINGS = ("beta", "precompute_ref_log_probs", "label_smoothing", "chosen_key", "rejected_key", "nll_loss_coef")
"""Names that DPO has, and other methods, too."""
LOSS_TYPES = {
    "rl": TRL_LOSSES,
    "sft": ("nll", "chunked_nll", "dft"),
    "kto": ("kto", "apo_zero_unpaired"),
    "dpo": PREFERENCE_LOSSES,
}
"""Values of TRL's ``loss_type`` by the method that has them."""
GUESSES = {
    "dpo": "taken for DPO: KTO, ORPO and reward models have such options, too; --method names another",
    "rl": "taken for GRPO: RLOO has such options, too; --method names another",
    "sft": "taken for SFT: no option tells the method; --method names another",
}
"""Notes on methods that a file does not tell with certainty."""
GRPO_SETTINGS = ("scale_rewards", "importance_sampling_level", "loss_type")
MERGE = "tag:yaml.org,2002:merge"
"""Tag of the key ``<<``, which takes the entries of other mappings."""
TWICE = "it is given again below; the last one counts"


def read_foreign(path: Path, system: str | None = None, method: str | None = None) -> ForeignRun:
    """Read a file; raise ``ConfigError`` if it is of no known system, or if nothing is found in it.

    A method of ``ForeignRun`` replaces the one that the file has, or that its options tell.
    """
    text = read_text(path)
    if path.suffix == ".py":
        run = read_python(text, path)
    elif path.suffix in (".yaml", ".yml"):
        run = _read_tree(text, path, system, method)
    else:
        run = read_shell(text, path)
    if not run.settings:
        raise ConfigError(f"{path}: no settings of {' or '.join(SYSTEMS.values())} were found in it; name another file")
    return run if method is None else replace(run, method=method)


class LastKeyWinsLoader(get_yaml_loader()):  # type: ignore[misc]
    """A loader that takes the last value of a key, as the other systems do, and remembers the earlier ones."""

    def __init__(self, text: str, earlier: list[tuple[str, str]]) -> None:
        super().__init__(text)
        self._earlier = earlier

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        entries = [(key, value) for key, value in node.value if key.tag != MERGE]
        keys = [self.construct_object(key, deep=True) for key, _ in entries]
        for index, (key, (_, value)) in enumerate(zip(keys, entries, strict=True)):
            if key in keys[index + 1 :]:
                self._earlier.append((f"{key}: {self.construct_object(value, deep=True)}", TWICE))
        return yaml.SafeLoader.construct_mapping(self, node, deep=deep)


def _read_tree(text: str, path: Path, system: str | None, method: str | None) -> ForeignRun:
    earlier: list[tuple[str, str]] = []
    tree = load_yaml(path, text, partial(LastKeyWinsLoader, earlier=earlier))
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path}: it contains no settings of {' or '.join(SYSTEMS.values())}; name another file")
    settings = list(flatten(tree))
    values = {setting.name: setting.value for setting in settings}
    system = system or next((name for name, marks in MARKS.items() if values.keys() & set(marks)), None)
    if system is None:
        raise ConfigError(f"{path}: it is not clear which system it is for; add --from {'|'.join(SYSTEMS)}")
    if method is None:
        method, is_certain = _method_of(system, values)
        earlier += [] if is_certain else [(f"algorithm: {ALGORITHMS[method]}", GUESSES[method])]
    return ForeignRun(system=system, method=method, settings=settings, notes=earlier)


def _method_of(system: str, values: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the method of a YAML file, which only axolotl's names, and whether that is certain."""
    if system == "axolotl":
        if model := next((name for name in ("process_reward_model", "reward_model") if values.get(name)), None):
            return model, True
        method = str(values.get("rl") or "sft")
        if method == "ebft" and values.get("ebft.mode") == "strided":
            return "ebft_strided", True
        return "rl" if method in ("grpo", "gdpo") else method, True
    if system == "verl":
        is_rl = any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in values)
        return "rl" if is_rl else "sft", True
    names = {name.rpartition(".")[2] if system == "openrlhf" else name for name in values}
    table = OPENRLHF_MARKS if system == "openrlhf" else TRL_MARKS
    recognized = next((method for method, marks in table.items() if names & set(marks)), None)
    if recognized is None and system == "trl":
        types = values.get("loss_type")
        first = str(types[0] if isinstance(types, list) and types else types)
        recognized = next((method for method, losses in LOSS_TYPES.items() if first in losses), None)
    if recognized is None:
        return "dpo" if names & set(PAIR_SETTINGS) else "sft", False
    is_shared = recognized == "dpo" or (system == "trl" and recognized == "rl" and not names & set(GRPO_SETTINGS))
    return recognized, not is_shared
