"""Settings of the model, its adapter, the rows, the engines and the rewards, and what they become."""

from __future__ import annotations

import re
from typing import Any

from rlpipe.configs.foreign.foreign_run import MAX_ENTRIES
from rlpipe.configs.foreign.foreign_values import ForeignValues, is_on
from rlpipe.configs.foreign.setting_rules import (
    NO_ADAPTER,
    OFF,
    Made,
    Options,
    Rule,
    SettingRow,
    UsedBy,
    about,
    adapted,
    engine_argument,
    named,
    only_if,
    sampled,
    switched,
    without_option,
)
from rlpipe.configs.foreign.system_defaults import NO_LIMIT, PEFT_DEFAULT
from rlpipe.configs.foreign.training_table import EPOCHS

LENGTH = (
    "set data.max_prompt_tokens and rollout.sampling.max_tokens; in supervised fine-tuning rows are as long as "
    "learner.max_tokens_per_microbatch allows"
)
TRUNCATED = "longer rows are truncated there; here rows above learner.max_tokens_per_microbatch are skipped"
MARGINS = "algorithm.reward_model.margin_column"
PRECISION = "set model.dtype to bfloat16, float16 or float32"
QUANTIZED = "write model=qlora for a base in NF4"
KERNELS = "kernels are chosen here by what the GPU supports"
TOKENIZER = "the tokenizer's own special tokens are used"
TEMPLATE = "model.chat_template names a Jinja file; the tokenizer's own template is the default"
TEMPLATE_TEXT = "it is a template's text; model.chat_template names a Jinja file"
FOUND = "found from the model's files"
LONGER_PROMPTS = "prompts longer than data.max_prompt_tokens, 1024, are skipped here: set it to the longest of yours"
HELD_OUT = "set data.held_out.size or data.held_out.split"
HELD_OUT_ENTRY = "held-out rows are those of one file or split: data.held_out.path or data.held_out.split"
PASSED_ON = "it is read where the script makes it"
WHOLE = (
    "a conversation is trained in full there, and here the assistant's turns are; data.loss_mask=all trains all of it. "
    "With prompt and completion, both train the completion"
)
LAST_TURN = "the last turn alone is trained there; data.messages_column trains each of the assistant's turns"
INSIDE = "the text is an entry of a dictionary in the column: a data.transform takes it out"
STEP_MODEL = (
    "steps are scored by a head here, and rows have lists of steps and labels: a data.transform makes them, and "
    "algorithm.process_reward_model.step_token is the text after each step"
)
REWARDS = (
    "set scoring.rewards.<name>.path to a function that takes lists: completions, and the columns of the rows by name"
)
REWARD_SERVER = (
    "set scoring.rewards.<name>.path to a function that asks the server, or rlpipe.scoring.judge:NumberJudge"
)
REWARD_MODEL = "see experiment=reward_model for a reward model of transformers"
TURNS = "see environment.tools and environment.path for episodes of several turns"
OVERLONG_REWARD = "rlpipe.scoring.toolbox:soft_overlong is such a reward"
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float32"), "float32"),
}
ATTENTION = ("sdpa", "eager", "flex_attention", "flash_attention_2")
TARGETS, PROMPTS = "model.adapter.target_modules", "data.max_prompt_tokens"


def part(of: str) -> Rule:
    return Rule(of, lambda values, value: UsedBy(of))


def typed(name: str) -> Rule:
    """Return the rule of a switch that selects a type."""

    def make(values: ForeignValues, value: Any) -> Made:
        if is_on(value):
            return {"model.dtype": "auto" if str(value).lower() == "auto" else DTYPES[name]}
        is_other_on = any(is_on(values.get(switch)) for switch in ("bf16", "bfloat16", "fp16", "float16"))
        return OFF if is_other_on else "it is off; model.dtype is auto here"

    return Rule("model.dtype", make)


@about("model.dtype")
def dtype(values: ForeignValues, value: Any) -> Made:
    plain = str(value).removeprefix("torch.")
    if plain == "auto":
        return "that of the files there; model.dtype=auto is the faster one of bfloat16 and float32 here"
    return named("model.dtype", DTYPES).make(values, plain)


@about("model.chat_template")
def chat_template(values: ForeignValues, value: Any) -> Made:
    is_file = isinstance(value, str) and value.endswith((".jinja", ".jinja2", ".j2"))
    return {"model.chat_template": value} if is_file else TEMPLATE


@about(TARGETS)
def target_modules(values: ForeignValues, value: Any) -> Made:
    """Translate names of modules, also with commas between them; a text of one that is a pattern stays one."""
    if value == PEFT_DEFAULT:
        return "PEFT chooses them by the model's architecture; all linear layers are adapted here"
    if value in ("all", "all-linear", ["all"], ["all-linear"]):
        return {TARGETS: "all-linear"}
    if isinstance(value, str) and re.fullmatch(r"[\w., -]+", value) is not None:
        value = value.split(",")
    if isinstance(value, list):
        value = [name for item in value for name in str(item).replace(",", " ").split()]
    return {TARGETS: value} if value else f"set {TARGETS}"


@about("model")
def quantized(values: ForeignValues, value: Any) -> Made:
    return UsedBy("model") if values.model == "qlora" else QUANTIZED if is_on(value) else OFF


@about("model.adapter.r")
def rank(values: ForeignValues, value: Any) -> Made:
    if values.model == "full":
        return UsedBy("model") if value == 0 else NO_ADAPTER
    return {"model.adapter.r": value}


@about("data.path")
def data(values: ForeignValues, value: Any) -> Made:
    is_long = len(value if isinstance(value, list) else str(value).split(",")) > MAX_ENTRIES
    return f"more than {MAX_ENTRIES}: set data.path to a folder or a pattern" if is_long else UsedBy("data")


@about("data.held_out.path")
def held_out_file(values: ForeignValues, value: Any) -> Made:
    path = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(path, str) and path.endswith((".json", ".jsonl", ".parquet")):
        return {"data.held_out.path": path}
    if path == values.get("datasets.0.path") and values.get("test_datasets.0.split") is not None:
        return UsedBy("data.held_out.split")
    return "set data.held_out.path, one file, or data.held_out.split"


@about("data.held_out.split")
def held_out_split_of_same(values: ForeignValues, value: Any) -> Made:
    """Translate a split of the rows that axolotl trains on."""
    path = values.get("test_datasets.0.path")
    if isinstance(held_out_file.make(values, path), dict):
        return UsedBy("data.held_out.path")
    is_same = path == values.get("datasets.0.path")
    return {"data.held_out.split": str(value)} if is_same else "set data.held_out.path, a file of these rows"


@about("data.held_out.size")
def held_out_size(values: ForeignValues, value: Any) -> Made:
    """Translate axolotl's held-out rows: a number if it is above 1, otherwise a share of all."""
    is_number = value == 0 or (type(value) is int and value > 1)
    return {"data.held_out.size": int(value)} if is_number else "a share of the rows; set data.held_out.size, a number"


@about("model.adapter.path")
def continued_adapter(values: ForeignValues, value: Any) -> Made:
    """Translate an adapter that is trained further, which is the reference of preferences as it begins."""
    options = {"model.adapter.path": value}
    is_reference = values.algorithm in ("dpo", "ipo", "kto")
    return options | ({"algorithm.preference.precompute_ref_log_probs": True} if is_reference else {})


@about("algorithm.reward_model.margin_column")
def margins(values: ForeignValues, value: Any) -> Made:
    """Translate whether OpenRLHF reads margins, which its rows have in a column of their own."""
    return "algorithm.reward_model.margin_column names the column" if is_on(value) else {MARGINS: None}


@about("data.held_out.split")
def held_out_split(values: ForeignValues, value: Any) -> Made:
    """Translate when it is evaluated, which TRL's commands do on another split."""
    when, split = (values.get(name) for name in ("eval_strategy", "dataset_test_split"))
    if str(value if split is None else when or "no").lower() in ("no", "false", "none"):
        return OFF
    if values.run.system != "trl":
        return EPOCHS
    settings = {setting.name: str(setting.value) for setting in values.run.settings}
    is_split = split is not None or "dataset_test_split" in settings.get("eval_dataset", "")
    if settings.keys() & {"train_dataset", "eval_dataset"} and not is_split:
        return HELD_OUT  # a script's trainer receives rows, and no split of the data set is read
    return {"data.held_out.split": "test" if split is None else split}


@about("data.loss_mask")
def answers_only(values: ForeignValues, value: Any) -> Made:
    return {"data.loss_mask": "roles"} if is_on(value) else WHOLE


@about("data.text_column")
def text_column(values: ForeignValues, value: Any) -> Made:
    if values.run.method != "sft":
        return "rows have prompts"
    if value in ("messages", "conversations"):  # which TRL finds by itself
        return {"data.messages_column": value}
    return "set data.text_column if the rows are raw text" if value == "text" else {"data.text_column": value}


def column(option: str, keys: str) -> Rule:
    """Return the rule of a column, which may hold a dictionary whose entry is another setting."""
    return only_if(lambda values: values.samples or not values.get(f"data.{keys}_dict_keys"), option, INSIDE)


@about("data.prompt_column")
def input_column(values: ForeignValues, value: Any) -> Made:
    """Translate the column of prompts, which holds whole conversations if there is no column of answers."""
    if values.run.method == "sft" and values.get("output_key") is None:
        return {"data.messages_column": value} if is_on(values.get("multiturn")) else LAST_TURN
    return {"data.prompt_column": value}


@about("data.label_column")
def label_column(values: ForeignValues, value: Any) -> Made:
    if values.run.method == "kto":
        return {"data.label_column": value}
    return "all columns go to the rewards by their names" if values.samples else STEP_MODEL


@about(PROMPTS)
def prompt_length(values: ForeignValues, value: Any) -> Made:
    return LONGER_PROMPTS if value == NO_LIMIT else {PROMPTS: value}


@about(PROMPTS)
def total_length(values: ForeignValues, value: Any) -> Made:
    """Translate the length of a row; with completions, what they leave of it is for the prompt."""
    longest = values.number("generate_max_len")
    if not values.samples:
        return LENGTH
    is_longer = type(value) is int and longest is not None and value > longest
    return {"rollout.max_model_len": value} | ({PROMPTS: value - longest} if is_longer else {})


@about(PROMPTS)
def row_length(values: ForeignValues, value: Any) -> Made:
    return TRUNCATED if values.run.system == "trl" and not values.samples and value is not None else LENGTH


@about("rollout.engine")
def engine(values: ForeignValues, value: Any) -> Made:
    is_vllm = value == "vllm" or is_on(value)
    return {"rollout.engine": "vllm"} if is_vllm else "the engine is vLLM here; rollout.engine=hf is transformers"


@about("rollout.sampling.top_k")
def top_k(values: ForeignValues, value: Any) -> Made:
    return {"rollout.sampling.top_k": max(value, 0)} if type(value) is int else "it is not set"


@about("rollout.tensor_parallel_size")
def tensor_parallel(values: ForeignValues, value: Any) -> Made:
    return {"rollout.tensor_parallel_size": value, "rollout.num_gpus": value}


@about("scoring.rewards")
def reward_functions(values: ForeignValues, value: Any) -> Made:
    """Translate names of importable functions, whose arguments are the same as in TRL."""
    names = [str(name) for name in value] if isinstance(value, list) else [str(value)]
    weights = values.get("reward_weights")
    weights = weights if isinstance(weights, list) and len(weights) == len(names) else [1.0] * len(names)
    is_importable = all(re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) for name in names)
    if not 0 < len(names) <= MAX_ENTRIES or not is_importable:
        return "set scoring.rewards.<name>.path to each function; rlpipe.scoring.toolbox has some"
    options: Options = {}
    for name, weight in zip(names, weights, strict=True):
        module, _, function = name.rpartition(".")
        is_duplicate = f"scoring.rewards.{function}.path" in options
        reward_name = name.replace(".", "_") if is_duplicate else function  # functions of two modules may have one name
        options[f"scoring.rewards.{reward_name}.path"] = f"{module}:{function}"
        options[f"scoring.rewards.{reward_name}.weight"] = weight
    return options


@about("scoring.rewards")
def reward_weights(values: ForeignValues, value: Any) -> Made:
    names = values.get("reward_funcs")
    is_used = isinstance(names, list) and isinstance(value, list) and len(names) == len(value)
    options = reward_functions.make(values, names) if is_used else ""
    return options if isinstance(options, dict) else "set scoring.rewards.<name>.weight"


@about("scoring.rewards")
def remote_reward(values: ForeignValues, value: Any) -> Made:
    if str(value).startswith("http"):
        return REWARD_SERVER
    return "set scoring.rewards.<name>.path to a function that takes completions and the columns of the rows by name"


MODEL = (
    SettingRow(
        "model.path",
        "model_name_or_path base_model model model_name pretrained",
        "model.path model.partial_pretrain",
        "pretrain=actor.model_name_or_path=model.model_name_or_path",
    ),
    SettingRow("model.revision", "model_revision revision revision_of_model"),
    SettingRow("model.tokenizer", "tokenizer_config", "model.tokenizer_path"),
    SettingRow(switched("model.trust_remote_code"), "trust_remote_code", "model.trust_remote_code"),
    SettingRow(FOUND, "model_type tokenizer_type processor_type is_llama_derived_model num_labels"),
    SettingRow(TOKENIZER, "eos_token pad_token special_tokens.*"),
    SettingRow("the reference is the model that training starts from", openrlhf="ref_pretrain=ref.model_name_or_path"),
    SettingRow(
        dtype, "torch_dtype dtype model_init_kwargs.dtype model_init_kwargs.torch_dtype", openrlhf="param_dtype"
    ),
    SettingRow(typed("bf16"), "bf16 bfloat16", openrlhf="bf16"),
    SettingRow(typed("fp16"), "fp16 float16"),
    SettingRow("torch's own default is kept", "tf32"),
    SettingRow(
        PRECISION,
        verl=(
            "rollout.dtype actor.fsdp_config.dtype actor.fsdp_config.model_dtype model.fsdp_config.model_dtype "
            "engine.model_dtype"
        ),
    ),
    SettingRow(
        named("model.attention", {name: name for name in ATTENTION}),
        "attn_implementation model_init_kwargs.attn_implementation",
        openrlhf="attn_implementation",
    ),
    SettingRow(switched("model.attention", "flash_attention_2"), "flash_attention flash_attn", openrlhf="flash_attn"),
    SettingRow(switched("model.attention", "sdpa"), "sdp_attention"),
    SettingRow(switched("model.attention", "eager"), "eager_attention"),
    SettingRow(switched("model.attention", "flex_attention"), "flex_attention"),
    SettingRow(KERNELS, "plugins.* lora_mlp_kernel.*"),
    SettingRow(
        switched("model.gradient_checkpointing"),
        "gradient_checkpointing use_gradient_checkpointing",
        "model.enable_gradient_checkpointing",
        "gradient_checkpointing=actor.gradient_checkpointing_enable=model.gradient_checkpointing_enable",
    ),
    SettingRow("model.reentrant_checkpointing", "gradient_checkpointing_kwargs.use_reentrant"),
    SettingRow(switched("model.reentrant_checkpointing"), openrlhf="gradient_checkpointing_use_reentrant"),
    SettingRow(chat_template, "chat_template_path chat_template_jinja"),
    SettingRow(TEMPLATE, "chat_template"),
    SettingRow(TEMPLATE_TEXT, verl="model.custom_chat_template", openrlhf="tokenizer_chat_template"),
    # adapter
    SettingRow(part("model"), "use_peft adapter LoraConfig get_peft_model BitsAndBytesConfig task_type lora_task_type"),
    SettingRow(quantized, "load_in_4bit", openrlhf="load_in_4bit"),
    SettingRow(without_option("there is no base in 8 bit here; write model=qlora for one in NF4"), "load_in_8bit"),
    SettingRow(
        Rule("model", lambda values, value: UsedBy("model") if value == "nf4" else "a 4-bit base is in NF4"),
        "bnb_4bit_quant_type",
    ),
    SettingRow(rank, "lora_r r", "model.lora_rank model.lora.rank", "lora_rank"),
    SettingRow(adapted("model.adapter.alpha"), "lora_alpha", "model.lora_alpha model.lora.alpha", "lora_alpha"),
    SettingRow(adapted("model.adapter.dropout"), "lora_dropout", "model.lora.dropout", "lora_dropout"),
    SettingRow(adapted(target_modules), "lora_target_modules target_modules", "model.target_modules", "target_modules"),
    SettingRow(adapted(switched(TARGETS, "all-linear")), "lora_target_linear"),
    SettingRow(adapted("model.adapter.target_parameters"), "lora_target_parameters target_parameters"),
    SettingRow(adapted("model.adapter.modules_to_save"), "lora_modules_to_save modules_to_save"),
    SettingRow(adapted(switched("model.adapter.use_dora")), "use_dora peft_use_dora"),
    SettingRow(adapted(switched("model.adapter.use_rslora")), "use_rslora peft_use_rslora"),
    SettingRow(adapted(continued_adapter), "lora_model_dir", "model.lora_adapter_path"),
    SettingRow(Rule("model", lambda values, value: OFF if value == "none" else "biases are not adapted"), "bias"),
    SettingRow("model.adapter selects what is trained", "unfrozen_parameters.*"),
)
DATA = (
    SettingRow(
        data,
        "dataset dataset_name dataset_config dataset_config_name name data_files data_files.train "
        "dataset_train_split split",
        "data.train_files",
        "prompt_data=data.prompt_dataset dataset dataset_probs prompt_data_probs prompt_split train_split "
        "dataset_split",
    ),
    SettingRow(held_out_file, "test_datasets test_datasets.0.path", "data.val_files", "eval_dataset"),
    SettingRow(held_out_split_of_same, "test_datasets.0.split"),
    SettingRow("the file's name says its format", "test_datasets.0.ds_type"),
    SettingRow(HELD_OUT_ENTRY, "test_datasets.*"),
    SettingRow(held_out_size, "val_set_size"),
    SettingRow(held_out_split, "eval_strategy evaluation_strategy dataset_test_split"),
    SettingRow(switched("data.streaming"), "streaming dataset_streaming"),
    SettingRow("data.shuffle", "shuffle_dataset", "data.shuffle"),
    SettingRow("rlpipe data prepare renders the rows once, with --workers", "dataset_num_proc dataset_processes"),
    SettingRow("data.cache is where rlpipe data prepare keeps rows", "dataset_prepared_path"),
    SettingRow(
        "a number of rows of the data set: a data.split such as train[:1000] selects them", openrlhf="max_samples"
    ),
    SettingRow(
        "columns that rendering does not read go to the rewards", "remove_unused_columns no_remove_unused_columns"
    ),
    SettingRow("data.train_on_inputs", "train_on_inputs"),
    SettingRow(answers_only, "assistant_only_loss completion_only_loss"),
    SettingRow("end markers are found in the chat template; data.role_boundaries sets them", "eot_tokens train_on_eot"),
    SettingRow(Rule("data.chat", lambda values, value: {"data.chat": is_on(value)}), openrlhf="apply_chat_template"),
    SettingRow("data.chat_template_kwargs", "chat_template_kwargs.*", "data.apply_chat_template_kwargs.*"),
    SettingRow("a data.transform may add the text around a prompt", openrlhf="input_template"),
    SettingRow(without_option("each of the assistant's turns is trained"), openrlhf="multiturn"),
    # columns
    SettingRow(text_column, "dataset_text_field"),
    SettingRow(column("data.prompt_column", "prompt"), verl="data.prompt_key"),
    SettingRow(column("data.completion_column", "response"), verl="data.response_key"),
    SettingRow(INSIDE, verl="data.prompt_dict_keys data.response_dict_keys"),
    SettingRow("data.messages_column", verl="data.messages_key data.multiturn.messages_key"),
    SettingRow("data.tools_column", verl="data.tools_key data.multiturn.tools_key"),
    SettingRow("data.images_column", verl="data.image_key"),
    SettingRow("data.prompt_column", openrlhf="prompt_key"),
    SettingRow(input_column, openrlhf="input_key"),
    SettingRow("data.completion_column", openrlhf="output_key"),
    SettingRow(label_column, openrlhf="label_key"),
    SettingRow("data.chosen_column", openrlhf="chosen_key"),
    SettingRow("data.rejected_column", openrlhf="rejected_key"),
    SettingRow(margins, openrlhf="margin_loss"),
    SettingRow(STEP_MODEL, openrlhf="placeholder_token reward_tokens specialize_reward_tokens"),
    # lengths
    SettingRow(
        sampled(prompt_length), "max_prompt_length", "data.max_prompt_length rollout.prompt_length", "prompt_max_len"
    ),
    SettingRow(total_length, openrlhf="max_len"),
    SettingRow(row_length, "max_length max_seq_length sequence_len", "data.max_length"),
    SettingRow(
        "prompts that are too long are skipped and counted", verl="data.truncation data.filter_overlong_prompts*"
    ),
)
ENGINES = (
    SettingRow(engine, "use_vllm", "rollout.name"),
    SettingRow(sampled("rollout.num_engines"), openrlhf="vllm_num_engines"),
    SettingRow(
        sampled(tensor_parallel),
        "vllm_tensor_parallel_size vllm.tensor_parallel_size",
        "rollout.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
    ),
    SettingRow(
        engine_argument("gpu_memory_utilization"),
        "vllm_gpu_memory_utilization vllm.gpu_memory_utilization",
        "rollout.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
    ),
    SettingRow(
        sampled("rollout.max_model_len"),
        "vllm_max_model_length vllm_max_model_len vllm.max_model_len",
        "rollout.max_model_len",
    ),
    SettingRow(engine_argument("enforce_eager"), verl="rollout.enforce_eager", openrlhf="enforce_eager"),
    SettingRow(
        engine_argument("enable_prefix_caching"), verl="rollout.enable_prefix_caching", openrlhf="enable_prefix_caching"
    ),
    *(
        SettingRow(engine_argument(name), verl=f"rollout.{name}")
        for name in ("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill")
    ),
    SettingRow("rollout.engine_args", verl="rollout.engine_kwargs.vllm.*"),
    SettingRow("an engine that does not exist here: rollout.engine is vllm or hf", verl="rollout.engine_kwargs.*"),
    SettingRow("engines are started by the run: see rollout.engine_args", "vllm.*"),
    SettingRow("see rollout.engine_args", openrlhf="vllm.*"),
    SettingRow("see weights.transport", openrlhf="vllm_sync_backend vllm_sync_with_ray"),
    SettingRow("the engine's log-probs are always kept", verl="rollout.calculate_log_probs"),
    # sampling
    SettingRow(sampled("rollout.sampling.temperature"), "temperature", "rollout.temperature", "temperature"),
    SettingRow(sampled("rollout.sampling.top_p"), "top_p", "rollout.top_p", "top_p"),
    SettingRow(sampled(top_k), "top_k", "rollout.top_k"),
    SettingRow(sampled("rollout.sampling.min_p"), "min_p"),
    SettingRow(sampled("rollout.sampling.repetition_penalty"), "repetition_penalty"),
    SettingRow(
        sampled("rollout.sampling.max_tokens"),
        "max_completion_length max_new_tokens",
        "data.max_response_length rollout.response_length",
        "generate_max_len=rollout.max_new_tokens",
    ),
    SettingRow("rollout.sampling.guided_regex", "vllm_structured_outputs_regex vllm_guided_decoding_regex"),
    SettingRow(
        "see rollout.sampling, and rollout.sampling.extra for other arguments of the engine", "generation_kwargs.*"
    ),
    # rewards and episodes
    SettingRow(reward_functions, "reward_funcs"),
    SettingRow(reward_weights, "reward_weights"),
    SettingRow(remote_reward, openrlhf="remote_rm_url=reward.remote_url"),
    SettingRow(
        REWARD_MODEL,
        "reward_model_name_or_path reward_model_path",
        openrlhf="reward_pretrain=reward.model_name_or_path",
    ),
    SettingRow(REWARDS, verl="reward_model.* reward.* custom_reward_function.*"),
    SettingRow("see scoring.rewards", openrlhf="reward.*"),
    SettingRow(
        OVERLONG_REWARD,
        verl="reward_model.overlong_buffer.* reward_model.reward_kwargs.*",
        openrlhf="overlong_buffer_len=reward.overlong_buffer_len "
        "overlong_penalty_factor=reward.overlong_penalty_factor",
    ),
    SettingRow(
        TURNS,
        "tools environment_factory rollout_func max_tool_calling_iterations",
        "rollout.multi_turn.* rollout.agent.*",
    ),
    SettingRow("see environment.agent and environment.path", openrlhf="agent_func_path"),
    # what a script passes on
    SettingRow(HELD_OUT, "eval_dataset"),
    SettingRow(PASSED_ON, "args train_dataset peft_config quantization_config.* processing_class tokenizer"),
)
