"""Values of another system's run: its settings, and the model and batch that follow from several of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlpipe.configs.foreign.foreign_run import Computed, ForeignRun, Setting
from rlpipe.configs.foreign.system_defaults import default_values

ALGORITHMS = {"rl": "grpo"} | {
    name: name
    for name in (
        *("ebft", "ebft_strided", "rloo", "sft", "dpo", "ipo", "kto", "orpo", "simpo", "cpo", "online_dpo"),
        *("reward_model", "process_reward_model"),
    )
}
"""Choices of rlpipe's group ``algorithm`` by method."""
ONLINE = ("rl", "rloo", "online_dpo", "ebft")
GROUPS, SIZE, UPDATES = "algorithm.groups_per_step", "algorithm.group_size", "algorithm.num_minibatches"


NULL_IS_A_VALUE = {
    "trl": ("vllm_importance_sampling_clip_max", "max_length"),
    "verl": ("actor.clip_ratio_low", "actor.clip_ratio_high"),
}
"""Settings for which null is a value, and not the lack of one."""
ACCELERATE_CONFIGS = {"single_gpu": 1} | dict.fromkeys(("multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"), 8)
"""Processes of the configs of accelerate that TRL has by name."""
SWITCHED_ON = ("true", "1", "yes", "on", "auto", "full", "enable", "offload", "offload_disk", "unsloth")


def is_on(value: Any) -> bool:
    """Return whether a switch is on, as YAML, shells and Python write it."""
    return str(value).lower() in SWITCHED_ON


@dataclass
class ForeignValues:
    """The settings of a run of another system, by their names in the tables, with the defaults of those it lacks."""

    run: ForeignRun
    key: Callable[[str], str] = str
    """Returns the name of a setting in the tables."""

    @cached_property
    def _by_name(self) -> dict[str, Any]:
        """Values by name; the last setting of a name that is not empty counts, as in the other systems."""
        settings = [setting for setting in self.run.settings if self.counts(setting) and not setting.is_empty]
        return {self.key(setting.name): setting.value for setting in [*self.defaults, *settings]}

    @cached_property
    def _last(self) -> dict[str, Setting]:
        """The last setting of each name, or the last with a constant value if there is one."""
        constant = [setting for setting in self.run.settings if not isinstance(setting.value, Computed)]
        return {self.key(setting.name): setting for setting in [*self.run.settings, *constant]}

    def counts(self, setting: Setting) -> bool:
        """Return whether a setting is not given again with another value."""
        return self._last[self.key(setting.name)] is setting

    @cached_property
    def defaults(self) -> list[Setting]:
        """Defaults of the system that differ from those of rlpipe, for settings that the file has not, or empty."""
        names = {self.key(setting.name) for setting in self.run.settings if not setting.is_empty}
        values = default_values(self.run.system, self.run.method, names)
        settings = [Setting(name=name, value=value, default_of=self.run.system) for name, value in values.items()]
        return [setting for setting in settings if not (self.key(setting.name) in names or self.is_null(setting.name))]

    def get(self, *names: str) -> Any:
        """Return the value of the first of the names that has one which is known."""
        values = (self._by_name.get(name) for name in names)
        return next((value for value in values if value is not None and not isinstance(value, Computed)), None)

    def is_null(self, name: str) -> bool:
        """Return whether the file sets null, for a setting of which null is a value."""
        setting = self._last.get(name)
        is_value = name in NULL_IS_A_VALUE.get(self.run.system, ())
        return is_value and setting is not None and setting.value is None

    def number(self, *names: str) -> int | None:
        """Return a whole number above 0; None if there is none."""
        value = self.get(*names)
        return value if type(value) is int and value > 0 else None

    @property
    def samples(self) -> bool:
        """Whether the policy samples what it is trained on, with engines."""
        return self.run.method in ONLINE

    @property
    def algorithm(self) -> str | None:
        """The choice of the group ``algorithm``; None if there is none for the method."""
        if self.run.method == "cpo" and self.get("loss_type") == "simpo":
            return "simpo"
        return ALGORITHMS.get(self.run.method)

    @property
    def model(self) -> str:
        """The choice of the group ``model``."""
        kind = str(self.get("adapter") or "")
        by_rank = self.run.system in ("verl", "openrlhf") and self.number(
            "lora_rank", "model.lora_rank", "model.lora.rank"
        )
        adapter_call = self.get("LoraConfig", "get_peft_model")
        if not (by_rank or kind in ("lora", "qlora") or is_on(self.get("use_peft")) or adapter_call):
            return "full"
        return "qlora" if kind == "qlora" or is_on(self.get("load_in_4bit")) else "lora"

    @property
    def is_packed(self) -> bool:
        """Whether a row of a batch is a sequence of several rows of the data."""
        return (
            self.run.method == "sft"
            and self.run.system in ("trl", "axolotl")
            and is_on(self.get("packing", "sample_packing"))
        )

    @cached_property
    def num_processes(self) -> int | None:
        """Processes that the launcher starts, which TRL's commands may be told in a setting; None if not known."""
        if self.run.num_processes is not None or self.run.system != "trl":
            return self.run.num_processes
        return self.number("num_processes") or ACCELERATE_CONFIGS.get(str(self.get("accelerate_config")))

    @cached_property
    def updates_per_step(self) -> int:
        """Updates of the policy in a step of rlpipe, for systems that count updates."""
        if self.run.system in ("verl", "openrlhf"):
            return 1
        passes = self.number("num_iterations") if self.samples else None
        return self.batch.get(UPDATES, 1) * (passes or 1)

    @property
    def num_steps(self) -> int | None:
        number = self.number("max_steps", "trainer.total_training_steps", "actor.optim.total_training_steps")
        return None if number is None else -(-number // self.updates_per_step)

    @cached_property
    def batch(self) -> dict[str, int]:
        """Options of the number of prompts, completions and updates of a step."""
        if self.run.system in ("trl", "axolotl"):
            sizes = self._row_batch()
        elif not self.samples:
            sizes = {GROUPS: self.number("data.train_batch_size", "train_batch_size")}
        elif self.run.system == "verl":
            prompts = self.number("data.train_batch_size")
            updates = _share(prompts, self.number("actor.ppo_mini_batch_size"))
            sizes = {GROUPS: prompts, SIZE: self.number("rollout.n"), UPDATES: updates}
        else:
            prompts, group = self.number("rollout_batch_size"), self.number("n_samples_per_prompt")
            completions = prompts * group if prompts and group else None
            sizes = {GROUPS: prompts, SIZE: group, UPDATES: _share(completions, self.number("train_batch_size"))}
        return {name: number for name, number in sizes.items() if number}

    def _row_batch(self) -> dict[str, int | None]:
        """Return the batch of systems that count rows of a process, and their accumulation."""
        rows = self.number("micro_batch_size" if self.run.system == "axolotl" else "per_device_train_batch_size")
        accumulated = self.number("gradient_accumulation_steps")
        if rows is None or accumulated is None or self.is_packed:
            return {}
        together = rows * (self.num_processes or 1)
        if not self.samples:
            return {GROUPS: together * accumulated}
        if self.run.method == "online_dpo":
            return {GROUPS: together * accumulated, SIZE: 2}
        group, generated = self.number("num_generations"), self.number("generation_batch_size")
        if group is None:
            return {}
        # Batches of completions per generation; with fewer than an update takes, several generations make one step.
        sampled = generated // together if generated else self.number("steps_per_generation") or accumulated
        sampled = max(sampled, accumulated)
        return {GROUPS: max(together * sampled // group, 1), SIZE: group, UPDATES: _share(sampled, accumulated) or 1}


def _share(total: int | None, size: int | None) -> int | None:
    """Return how many times a size fits into a total; None if it does not divide it."""
    return total // size if total and size and total % size == 0 else None
