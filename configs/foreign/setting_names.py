"""Rules of settings by their names in one system, and options by the names of all systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from rlpipe.configs.foreign.correction_table import CORRECTION_SETTINGS
from rlpipe.configs.foreign.loss_table import CRITIC, LOSSES
from rlpipe.configs.foreign.model_table import DATA, ENGINES, LENGTH, MODEL, PRECISION, QUANTIZED
from rlpipe.configs.foreign.setting_rules import Rule, SettingRow
from rlpipe.configs.foreign.training_table import ACCUMULATION, ALWAYS_PACKED, STEPS, TRAINING, WARMUP
from rlpipe.configs.options import all_names

ROWS = (*TRAINING, *MODEL, *DATA, *ENGINES, *LOSSES, *CORRECTION_SETTINGS)
COLUMNS = {"axolotl": "hf", "trl": "hf", "verl": "verl", "openrlhf": "openrlhf"}
"""Columns of the tables by system."""
PREFIXES = {"axolotl": "trl.", "verl": "actor_rollout_ref."}
"""Beginnings of the names of some settings of a system, which the tables leave out."""
SECTIONS = ("actor", "algo", "ckpt", "data", "ds", "fsdp", "logger", "model", "rollout", "train", "vllm")
"""Sections in which newer versions of OpenRLHF have options that had no section before."""
ADAPTER = "write model=lora, model=qlora or model=full"
ALGORITHM = "write algorithm=grpo, dapo, dr_grpo, gspo, rloo or another of rlpipe config --groups algorithm"
HINTS = {
    **dict.fromkeys(("use_peft", "adapter"), ADAPTER),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), QUANTIZED),
    **dict.fromkeys(("bf16", "fp16", "tf32", "torch_dtype", "param_dtype"), PRECISION),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "rl"), ALGORITHM),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "num_episodes", "total_epochs"), STEPS),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), WARMUP),
    **dict.fromkeys(("per_device_train_batch_size", "gradient_accumulation_steps", "micro_batch_size"), ACCUMULATION),
    **dict.fromkeys(("max_length", "max_seq_length", "sequence_len"), LENGTH),
    **dict.fromkeys(("critic_warmup", "freezing_actor_steps", "save_value_network"), CRITIC),
    **dict.fromkeys(("packing", "sample_packing"), ALWAYS_PACKED),
    **dict.fromkeys(("batch_size", "train_batch_size", "generation_batch_size"), "algorithm.groups_per_step"),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), "data.roles_to_train"),
    **dict.fromkeys(("mask_prompt", "roles", "train_on_responses_only"), "data.roles_to_train"),
    **dict.fromkeys(("train_on_input", "train_on_prompt"), "data.train_on_inputs"),
    **dict.fromkeys(("eot_tokens", "instruction_template", "response_template"), "data.role_boundaries"),
    **dict.fromkeys(("custom_chat_template", "tokenizer_chat_template", "template"), "model.chat_template"),
    **dict.fromkeys(("default_system", "default_system_message"), "data.system_prompt"),
    **dict.fromkeys(("async_level", "max_async_level"), "replay.max_staleness"),
    **dict.fromkeys(("in_flight_weight_updates", "partial_rollout"), "weights.on_update"),
    **dict.fromkeys(("datasets", "dataset", "dataset_name", "train_files", "prompt_data"), "data.path"),
    "config": "data.name",
    "ppo_mini_batch_size": "set algorithm.num_minibatches to the number of updates in a pass over a step",
    "loss_type": "set algorithm.loss.name, or algorithm.preference.loss for preferences",
    "use_kl_loss": "the KL term is on if algorithm.loss.beta is above 0",
    "use_kl_in_reward": "the KL is in the reward if algorithm.reward_kl.coef is above 0",
    "kl_ctrl.type": "the coefficient is adaptive if algorithm.reward_kl.target is set",
    "reward_weights": "set scoring.rewards.<name>.weight",
    "critic_learning_rate": "algorithm.critic.lr",
    "critic.optim.lr": "algorithm.critic.lr",
    "total_steps": "algorithm.num_steps",
    "policy_loss_fn": "algorithm.loss.name",
    "kl_coef": "algorithm.loss.beta",
    "enable_thinking": "data.chat_template_kwargs",
    "train_on_eot": "data.train_on_eos",
    "field_messages": "data.messages_column",
    "resume_from_checkpoint": "resume",
}
"""Options, or sentences, for names of libraries without a table, and where the tables say something else or nothing."""


@cache
def table_of(system: str) -> tuple[Mapping[str, Rule | str], Mapping[str, str]]:
    """Return the rules of a system's settings by name, and the first names of those that have several."""
    rules: dict[str, Rule | str] = {}
    aliases: dict[str, str] = {}
    for row in ROWS:
        for names in getattr(row, COLUMNS[system]).split():
            first, *alternatives = names.split("=")
            assert first not in rules, first
            rules[first] = row.rule
            aliases |= dict.fromkeys(alternatives, first)
    return rules, aliases


def canonical(system: str, name: str) -> str:
    """Return the name that the tables have."""
    plain = name.replace("-", "_").removeprefix(PREFIXES.get(system, ""))
    rules, aliases = table_of(system)
    if system == "verl" and plain.startswith("optim."):
        return f"actor.{plain}"
    if system == "openrlhf" and "." in plain and plain not in rules and plain not in aliases:
        *sections, last = plain.split(".")
        if f"{sections[-1]}_{last}" in rules:
            return f"{sections[-1]}_{last}"
        return last if sections[0] in SECTIONS and last in rules else plain
    return aliases.get(plain, plain)


def rule_of(system: str, name: str) -> Rule | str | None:
    """Return the rule of a setting by its name in the tables; that of the longest beginning, if only that has one."""
    rules, _ = table_of(system)
    if name in rules:
        return rules[name]
    beginnings = [begin for begin in rules if begin.endswith("*") and f"{name}.".startswith(begin[:-1])]
    longest = max(beginnings, key=len, default="")
    rule = rules.get(longest)
    is_option = isinstance(rule, str) and " " not in rule
    return f"{rule}{name[len(longest) - 2 :]}" if is_option else rule


def foreign_name(name: str) -> str | None:
    """Return the option, or what to do instead, for the longest end of a dotted name that is known; None if none is."""
    segments = name.split(".")
    ends = [".".join(segments[index:]) for index in range(len(segments))]
    if segments[0] == "critic":
        ends = [end for end in ends if end.startswith("critic.") or end == "cliprange_value"]
    option = next((hint for end in ends if (hint := hints().get(end)) is not None), None)
    return CRITIC if option is None and segments[0] == "critic" else option


@cache
def hints() -> Mapping[str, str]:
    """Return an option, or a sentence, by the ends of names, without those that rlpipe's own options have."""
    option_ends = {name.rpartition(".")[2] for name in all_names()}
    by_end = dict(HINTS)
    for row in ROWS:
        hint = row.rule if isinstance(row.rule, str) else row.rule.option
        for end in _ends(row):
            if end not in option_ends and hint != "the option":
                by_end.setdefault(end, hint)
    return by_end


def _ends(row: SettingRow) -> Iterator[str]:
    """Yield the ends of a row's names that are specific enough: whole names, and ends of several words."""
    for column in (row.hf, row.verl, row.openrlhf):
        for name in column.replace("=", " ").replace(".*", "").replace("*", "").split():
            segments = name.split(".")
            ends = [".".join(segments[index:]) for index in range(len(segments))]
            yield from (end for end in ends if end == name or "." in end or "_" in end)
