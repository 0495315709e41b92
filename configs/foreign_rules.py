"""Rules by which settings of other systems become options of rlpipe, or say why they do not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.configs.foreign_defaults import OF_PEFT
from rlpipe.configs.foreign_names import QUANTIZED, STEPS, WARMUP
from rlpipe.configs.foreign_run import MAX_ENTRIES
from rlpipe.configs.foreign_values import ForeignValues, is_on

Options = dict[str, Any]


@dataclass(frozen=True)
class PartOf:
    """Result of a rule for a setting that is one of those from which a group's choice, or an option, follows."""

    of: str


Made = Options | PartOf | str
"""Options of rlpipe by their dotted names, what a setting is part of, or the reason why it makes neither."""
Rule = Callable[[ForeignValues, Any], Made]
Table = Mapping[str, Rule | str]
"""Rules by name; a text is an option that has the same value, or the reason why there is none."""

NOT_SAMPLED = "nothing is sampled"
NO_ADAPTER = "there is no adapter"
OFF = "it is off, as it is here"
PACKED = (
    "a row of a batch is a packed sequence there; set algorithm.groups_per_step, a number of rows before packing, and "
    "learner.max_tokens_per_microbatch, the tokens of a packed sequence"
)
NO_BATCH = "set algorithm.groups_per_step"
OVERLONG_REWARD = "rlpipe.scoring.toolbox:soft_overlong is such a reward"
SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"} | {
    name: name for name in ("linear", "cosine", "constant")
}
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
}
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float32"), "float32"),
}
ATTENTION = ("sdpa", "eager", "flex_attention", "flash_attention_2")
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {name: name for name in ("abs", "k1", "k2", "k3")}


def copied(option: str) -> Rule:
    return lambda values, value: {option: value}


def named(option: str, names: Mapping[str, str]) -> Rule:
    """Return a rule that translates names."""

    def rule(values: ForeignValues, value: Any) -> Made:
        known = names.get(str(value).lower())
        return f"{option} is one of {', '.join(dict.fromkeys(names.values()))}" if known is None else {option: known}

    return rule


def part(of: str) -> Rule:
    return lambda values, value: PartOf(of)


def text(option: str) -> Rule:
    """Return a rule that copies a name, which YAML may have read as a number."""
    return lambda values, value: {option: str(value)}


def switched(option: str, setting: Any = True) -> Rule:
    """Return a rule that sets an option if a switch is on."""
    return lambda values, value: {option: setting} if is_on(value) else OFF


def of_engines(rule: Rule | str) -> Rule:
    """Return a rule for runs that sample; the others have no engines."""
    sampled = copied(rule) if isinstance(rule, str) else rule
    return lambda values, value: sampled(values, value) if values.samples else NOT_SAMPLED


def for_method(*methods: str, rule: Rule | str, others: str) -> Rule:
    """Return a rule for some methods, with the reason for the others."""
    own = copied(rule) if isinstance(rule, str) else rule
    return lambda values, value: own(values, value) if values.run.method in methods else others


def counted(option: str, *, is_never: bool = False) -> Rule:
    """Return a rule for a number of updates of the policy, or a share of the run; steps here may have several updates.

    With ``is_never``, 0 and less mean never, which is 0 here.
    """

    def rule(values: ForeignValues, value: Any) -> Made:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"set {option}, a number of steps"
        if value <= 0:
            return {option: 0} if is_never else f"it is not set there; set {option}"
        if value < 1:
            return f"it is a share of the run; set {option}, a number of steps"
        return {option: math.ceil(value / values.updates_per_step)}

    return rule


def positive(option: str) -> Rule:
    """Return a rule that copies whole numbers above 0."""
    return lambda values, value: {option: value} if type(value) is int and value > 0 else f"set {option}"


def epochs(values: ForeignValues, value: Any) -> Made:
    return STEPS if values.num_steps is None else "the number of steps is set, and counts instead, as it does there"


def warmup_ratio(values: ForeignValues, value: Any) -> Made:
    if values.num_steps is None or isinstance(value, bool) or not isinstance(value, int | float):
        return WARMUP
    return {"learner.schedule.warmup_steps": math.ceil(value * values.num_steps)}


def warmup_steps(values: ForeignValues, value: Any) -> Made:
    """Translate a number of updates; below 1 it is a share of the run, and 0 or less leaves it to the ratio."""
    is_share = isinstance(value, float) and 0 < value < 1
    return warmup_ratio(values, value) if is_share else counted("learner.schedule.warmup_steps")(values, value)


def schedule(values: ForeignValues, value: Any) -> Made:
    """Translate the shape of the learning rate; the lowest rate may be another setting."""
    lowest = values.get("lr_scheduler_kwargs.min_lr_rate", "min_lr_ratio", "actor.optim.min_lr_ratio")
    if value == "cosine_with_min_lr" and lowest is None:
        if values.run.system != "openrlhf":
            return "set learner.schedule.name=cosine, and learner.schedule.min_ratio"
        lowest = 0.1
    made = named("learner.schedule.name", SCHEDULES)(values, value)
    return (
        {**made, "learner.schedule.min_ratio": lowest}
        if value == "cosine_with_min_lr" and isinstance(made, dict)
        else made
    )


def betas(values: ForeignValues, value: Any) -> Made:
    pair = value if isinstance(value, list | tuple) else (values.get("adam_beta1"), values.get("adam_beta2"))
    if len(pair) != 2:
        return "set learner.optimizer.betas, two numbers"
    return {
        "learner.optimizer.betas": [
            default if given is None else given for given, default in zip(pair, (0.9, 0.999), strict=True)
        ]
    }


def typed(name: str) -> Rule:
    """Return the rule of a switch that selects a type."""

    def rule(values: ForeignValues, value: Any) -> Made:
        if str(value).lower() == "auto":
            return {"model.dtype": "auto"}
        return {"model.dtype": DTYPES[name]} if is_on(value) else "it is off; model.dtype is auto here"

    return rule


def dtype(values: ForeignValues, value: Any) -> Made:
    plain = str(value).removeprefix("torch.")
    if plain == "auto":
        return "that of the files there; model.dtype=auto is the faster one of bfloat16 and float32 here"
    return named("model.dtype", DTYPES)(values, plain)


def attention(values: ForeignValues, value: Any) -> Made:
    return {"model.attention": value} if value in ATTENTION else f"model.attention is one of {', '.join(ATTENTION)}"


def tracker(values: ForeignValues, value: Any) -> Made:
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    if "wandb" in names or "all" in names:
        return {"tracking.wandb": True}
    return "metrics go to files, TensorBoard and Ray's dashboard"


def target_modules(values: ForeignValues, value: Any) -> Made:
    """Translate names of modules, also with commas between them; a text of one that is a pattern stays one."""
    if values.model == "full":
        return NO_ADAPTER
    if value == OF_PEFT:
        return "PEFT chooses them by the model's architecture; all linear layers are adapted here"
    if value in ("all", "all-linear", ["all"], ["all-linear"]):
        return {"model.adapter.target_modules": "all-linear"}
    if isinstance(value, str) and re.fullmatch(r"[\w., -]+", value) is not None:
        value = value.split(",")
    if isinstance(value, list):
        value = [name for item in value for name in str(item).replace(",", " ").split()]
    return {"model.adapter.target_modules": value} if value else "set model.adapter.target_modules"


def quantized(values: ForeignValues, value: Any) -> Made:
    return PartOf("model") if values.model == "qlora" else QUANTIZED if is_on(value) else OFF


def in_8_bit(values: ForeignValues, value: Any) -> Made:
    return "there is no base in 8 bit here; write model=qlora for one in NF4" if is_on(value) else OFF


def rank(values: ForeignValues, value: Any) -> Made:
    if values.model == "full":
        return PartOf("model") if value == 0 else NO_ADAPTER
    return {"model.adapter.r": value}


def with_adapter(option: str) -> Rule:
    """Return a rule that copies a setting of the adapter if there is one."""
    return lambda values, value: {option: value} if values.model != "full" else NO_ADAPTER


def adapter_switch(option: str) -> Rule:
    return lambda values, value: switched(option)(values, value) if values.model != "full" else NO_ADAPTER


def batch(values: ForeignValues, value: Any) -> Made:
    """Say that a setting is part of the step's size, which follows from several."""
    if "algorithm.groups_per_step" in values.batch:
        return PartOf("algorithm.groups_per_step")
    return PACKED if values.is_packed else NO_BATCH


def minibatches(values: ForeignValues, value: Any) -> Made:
    """Say that a setting is part of the number of updates in a step."""
    if "algorithm.num_minibatches" in values.batch:
        return PartOf("algorithm.num_minibatches")
    return "set algorithm.num_minibatches to the number of updates in a pass over a step"


def group_size(values: ForeignValues, value: Any) -> Made:
    return PartOf("algorithm.group_size") if "algorithm.group_size" in values.batch else NOT_SAMPLED


def top_k(values: ForeignValues, value: Any) -> Made:
    return {"rollout.sampling.top_k": max(value, 0)} if type(value) is int else "it is not set"


def engine_argument(name: str) -> Rule:
    return of_engines(f"rollout.engine_args.{name}")


def tensor_parallel(values: ForeignValues, value: Any) -> Made:
    return {"rollout.tensor_parallel_size": value, "rollout.num_gpus": value}


def data(values: ForeignValues, value: Any) -> Made:
    is_long = len(value if isinstance(value, list) else str(value).split(",")) > MAX_ENTRIES
    return f"more than {MAX_ENTRIES}: set data.path to a folder or a pattern" if is_long else PartOf("data")


def held_out_file(values: ForeignValues, value: Any) -> Made:
    path = value[0] if isinstance(value, list) and len(value) == 1 else value
    is_file = isinstance(path, str) and path.endswith((".json", ".jsonl", ".parquet"))
    return {"data.held_out.path": path} if is_file else "set data.held_out.path, one file, or data.held_out.split"


def kl_estimator(values: ForeignValues, value: Any) -> Made:
    return named("algorithm.loss.kl", KL_ESTIMATORS)(values, value)


def engine(values: ForeignValues, value: Any) -> Made:
    is_vllm = value == "vllm" or is_on(value)
    return {"rollout.engine": "vllm"} if is_vllm else "the engine is vLLM here; rollout.engine=hf is transformers"


def reward_functions(values: ForeignValues, value: Any) -> Made:
    """Translate names of importable functions, whose arguments are the same as in TRL."""
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    weights = values.get("reward_weights")
    weights = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    if not 0 < len(names) <= MAX_ENTRIES or not all(
        re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) for name in names
    ):
        return "set scoring.rewards.<name>.path to each function; rlpipe.scoring.toolbox has some"
    made: Options = {}
    for name, weight in zip(names, weights, strict=True):
        module, _, function = name.rpartition(".")
        made[f"scoring.rewards.{function}.path"] = f"{module}:{function}"
        made[f"scoring.rewards.{function}.weight"] = weight
    return made


def reward_weights(values: ForeignValues, value: Any) -> Made:
    names = values.get("reward_funcs")
    is_used = isinstance(names, list) and isinstance(value, list) and len(names) == len(value)
    made = reward_functions(values, names) if is_used else ""
    return made if isinstance(made, dict) else "set scoring.rewards.<name>.weight"
