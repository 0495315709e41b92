"""Looks up settings of another system's run, and what follows from several of them: the batch, the data, the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from rlpipe.configs.foreign_files import Computed, ForeignRun

ALGORITHMS = {
    "rl": "grpo",
    "gdpo": "grpo",
    "rloo": "rloo",
    "sft": "sft",
    "dpo": "dpo",
    "ipo": "ipo",
    "kto": "kto",
    "orpo": "orpo",
    "simpo": "simpo",
    "cpo": "cpo",
    "online_dpo": "online_dpo",
    "reward_model": "reward_model",
    "process_reward_model": "process_reward_model",
}
"""Choices of rlpipe's group ``algorithm`` by method."""
ONLINE = ("rl", "rloo", "online_dpo")
RANKS = ("lora_r", "lora_rank", "r")
BATCH_NAMES = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "micro_batch_size"),
    *("num_generations", "train_batch_size", "ppo_mini_batch_size", "rollout_batch_size"),
    *("n_samples_per_prompt", "rollout.n"),
)
TRL_ROWS, TRL_GROUP = 8, 8
"""TRL's defaults of ``per_device_train_batch_size`` and ``num_generations``."""


def is_on(value: Any) -> bool:
    """Return whether a switch is on, as YAML, shells and Python write it."""
    return str(value).lower() in ("true", "1", "yes", "on", "auto", "full")


@dataclass
class ForeignValues:
    """The settings of a run of another system, by name."""

    run: ForeignRun

    @cached_property
    def _by_end(self) -> dict[str, Any]:
        """Values by every end of their dotted names; the first setting of several with one end counts."""
        found: dict[str, Any] = {}
        for setting in self.run.settings:
            parts = setting.name.replace("-", "_").split(".")
            for index in range(len(parts)):
                found.setdefault(".".join(parts[index:]), setting.value)
        return found

    def get(self, *names: str) -> Any:
        """Return the value of the first of the names that has one; names may be the ends of dotted ones."""
        values = (self._by_end.get(name) for name in names)
        return next((value for value in values if value is not None and not isinstance(value, Computed)), None)

    def number(self, *names: str, default: int | None = None) -> int | None:
        """Return a whole number above 0, or the default."""
        value = self.get(*names)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else default

    @property
    def samples(self) -> bool:
        """Whether the policy samples what it is trained on."""
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
        adapter = str(self.get("adapter") or "")
        has_rank = any(self.number(name) for name in RANKS)
        if not (has_rank or adapter in ("lora", "qlora") or is_on(self.get("use_peft"))):
            return "full"
        is_quantized = is_on(self.get("load_in_4bit")) or is_on(self.get("load_in_8bit"))
        return "qlora" if is_quantized or adapter == "qlora" else "lora"

    @property
    def num_steps(self) -> int | None:
        return self.number("max_steps", "total_training_steps")

    @property
    def batch_origin(self) -> str:
        """The settings that the batch follows from."""
        given = [f"{name}: {self.get(name)}" for name in BATCH_NAMES if self.get(name) is not None]
        return ", ".join(given) or f"defaults of {self.run.system}"

    @cached_property
    def batch(self) -> dict[str, int]:
        """Options of the number of prompts, completions and updates of a step, for one process of TRL or axolotl."""
        make = {"verl": self._verl_batch, "openrlhf": self._openrlhf_batch}.get(self.run.system, self._row_batch)
        return {name: number for name, number in make().items() if number}

    def _verl_batch(self) -> dict[str, int | None]:
        prompts, update = self.number("train_batch_size"), self.number("ppo_mini_batch_size")
        return {
            "algorithm.groups_per_step": prompts,
            "algorithm.group_size": self.number("rollout.n") if self.samples else None,
            "algorithm.num_minibatches": _share(prompts, update),
        }

    def _openrlhf_batch(self) -> dict[str, int | None]:
        if not self.samples:
            return {"algorithm.groups_per_step": self.number("train_batch_size")}
        prompts, group = self.number("rollout_batch_size"), self.number("n_samples_per_prompt", default=1)
        return {
            "algorithm.groups_per_step": prompts,
            "algorithm.group_size": group,
            "algorithm.num_minibatches": _share((prompts or 0) * (group or 1), self.number("train_batch_size")),
        }

    def _row_batch(self) -> dict[str, int | None]:
        """Return the batch of systems that count rows of a process, and their accumulation."""
        rows = self.number("per_device_train_batch_size", "micro_batch_size", default=TRL_ROWS)
        accumulated = self.number("gradient_accumulation_steps", default=1)
        assert rows is not None
        assert accumulated is not None
        if not self.samples:
            return {"algorithm.groups_per_step": rows * accumulated}
        group = self.number("num_generations", default=TRL_GROUP)
        updates = self.number("steps_per_generation", default=accumulated)
        assert group is not None
        assert updates is not None
        return {
            "algorithm.groups_per_step": max(rows * updates // group, 1),
            "algorithm.group_size": group,
            "algorithm.num_minibatches": max(updates // accumulated, 1),
        }

    @cached_property
    def data(self) -> dict[str, Any]:
        """Options of the data, with the choice of the group under ``data``."""
        sources = [source for source in map(_source, self._entries()) if source]
        if len(sources) > 1:
            named = {f"set_{index}": source for index, source in enumerate(sources, start=1)}
            return {"data": "mix", "data.sources": named}
        if not sources:
            return {"data": "jsonl", "data.path": "???"}
        return {"data": sources[0].pop("source"), **{f"data.{name}": value for name, value in sources[0].items()}}

    def _entries(self) -> list[Any]:
        """Return the data sets as the system names them: paths, or mappings with a path."""
        found = self.get("datasets", "train_files", "prompt_data", "dataset_name", "dataset")
        if isinstance(found, str) and self.run.system == "openrlhf":
            return found.split(",")
        entries = found if isinstance(found, list) else [] if found is None else [found]
        name, split = self.get("dataset_config", "dataset_config_name"), self.get("dataset_train_split", "split")
        extra = {key: value for key, value in (("name", name), ("split", split)) if isinstance(value, str)}
        return [{"path": entry, **extra} if isinstance(entry, str) else entry for entry in entries]


COLUMNS = {"field_messages": "messages_column", "field": "text_column", "split": "split", "name": "name"}
"""Options of ``data`` by the names of a data set's entries."""


def _source(entry: Any) -> dict[str, Any]:
    """Return the options of a data set, with its ``source``."""
    given: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {"path": entry}
    path = given.get("path")
    if not isinstance(path, str):
        return {}
    kinds = {".json": "jsonl", ".jsonl": "jsonl", ".parquet": "parquet"}
    source = kinds.get(PurePath(path).suffix, "datasets")
    options = {ours: given[theirs] for theirs, ours in COLUMNS.items() if isinstance(given.get(theirs), str)}
    if "messages_column" not in options and str(given.get("type", "")).startswith(
        ("sharegpt", "chat_template.argilla")
    ):
        options["messages_column"] = "conversations"
    if source != "datasets":
        options = {name: value for name, value in options.items() if name not in ("split", "name")}
    return {"source": source, "path": path, **options}


def _share(whole: int | None, part: int | None) -> int | None:
    """Return how many times a part fits into the whole; None if it does not divide it."""
    return whole // part if whole and part and whole % part == 0 else None
