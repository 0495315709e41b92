"""Names that users of other libraries type lead to what they mean here."""

from __future__ import annotations

import re

import pytest

from rlpipe.configs.compose import list_groups, load_config, unknown_option
from rlpipe.configs.foreign.setting_names import foreign_name, hints
from rlpipe.configs.options import all_names, options
from rlpipe.errors import ConfigError

BASE = ("model.path=org/policy", "data=reasoning_gym", "data.task=basic_arithmetic", "scoring.rewards.right.path=m:f")
NAMES = {
    "TRL": """learning_rate per_device_train_batch_size gradient_accumulation_steps num_generations num_train_epochs
        max_prompt_length max_completion_length beta output_dir use_vllm bf16 model_name_or_path dataset_name lora_r
        reward_funcs save_steps max_steps loss_type vllm_gpu_memory_utilization report_to packing""",
    "verl": """data.train_files data.val_files data.train_batch_size data.max_response_length
        actor_rollout_ref.model.path actor_rollout_ref.actor.optim.lr actor_rollout_ref.rollout.n
        actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.gpu_memory_utilization
        actor_rollout_ref.actor.ppo_mini_batch_size actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
        actor_rollout_ref.actor.kl_loss_coef algorithm.adv_estimator trainer.n_gpus_per_node trainer.nnodes
        trainer.total_epochs trainer.save_freq trainer.test_freq trainer.project_name custom_reward_function.path
        actor_rollout_ref.actor.fsdp_config.param_offload critic.optim.lr""",
    "axolotl": """base_model datasets adapter lora_r lora_alpha lora_target_linear sequence_len sample_packing
        micro_batch_size gradient_accumulation_steps num_epochs lr_scheduler learning_rate bf16 flash_attention
        load_in_4bit output_dir val_set_size warmup_ratio train_on_input rl""",
    "OpenRLHF": """pretrain prompt_data remote_rm_url n_samples_per_prompt train_batch_size rollout_batch_size
        micro_train_batch_size prompt_max_len generate_max_len actor_learning_rate init_kl_coef advantage_estimator
        zero_stage vllm_num_engines vllm_tensor_parallel_size num_episodes save_path adam_offload input_key eps_clip
        colocate_all_models actor_num_gpus_per_node""",
    "LLaMA-Factory, torchtune, Unsloth and older TRL": """mask_prompt roles assistant_only_loss completion_only_loss
        train_on_prompt train_on_eot eot_tokens chat_template_path custom_chat_template apply_chat_template prompt_key
        response_key field_messages dataset_text_field template train_on_responses_only""",
}


@pytest.mark.parametrize(("library", "name"), [(library, name) for library in NAMES for name in NAMES[library].split()])
def test_the_common_names_of_other_libraries_get_a_hint(library: str, name: str) -> None:
    hint = foreign_name(name) or {"beta": "algorithm.loss.beta", "custom_reward_function.path": "scoring.rewards"}[name]
    assert unknown_option(name).startswith(f"{name}: no such option; ")
    if name != "custom_reward_function.path":
        assert unknown_option(name).endswith(f"; {hint if ' ' in hint else f'did you mean {hint}?'}")


def test_a_nested_name_is_shown_whole() -> None:
    with pytest.raises(ConfigError, match=r"^actor_rollout_ref\.rollout\.n: .*; did you mean algorithm\.group_size\?$"):
        load_config([*BASE, "actor_rollout_ref.rollout.n=8"], need_files=False)
    with pytest.raises(ConfigError, match=r"^num_train_epochs: no such option; a run is counted in steps: set algo"):
        load_config([*BASE, "num_train_epochs=8"], need_files=False)


def test_what_is_hinted_at_exists() -> None:
    known = {*all_names(), "scoring.rewards", *(option.name for option in options())}
    groups = list_groups()
    for name, entry in hints().items():
        if " " not in entry:
            assert entry in known or entry.startswith("rollout.engine_args."), name
        for word in re.findall(r"[a-z][\w.<>]+\.[\w.<>]+", entry if " " in entry else ""):
            dotted = word.rstrip(".")
            assert dotted in known or dotted.startswith(("rollout.engine_args.", "rlpipe.")), (name, dotted)
        for group, choice in re.findall(r"(\w+)=(\w+)", entry):
            assert choice in groups[group], (name, group, choice)


def test_no_name_of_ours_is_anothers() -> None:
    assert not {name.rpartition(".")[2] for name in all_names()} & hints().keys() - {"adapter"}
