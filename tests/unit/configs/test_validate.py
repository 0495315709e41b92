from __future__ import annotations

import inspect
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlpipe.configs.compose import require_rewards, validate
from rlpipe.configs.schema.data_config import HeldOutConfig
from rlpipe.configs.schema.model_config import WeightScaleRule
from rlpipe.configs.schema.rollout_config import RewardConfig, ServeConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, DataError, InputError, ModelError, RewardImportError

MENDED = {"model.normalize_weight_scales": {"conv": WeightScaleRule(name_pattern="conv")}}
CHUNKED = {"learner.offload": "chunked"}
ROWS = {"data.source": "jsonl", "data.path": "rows.jsonl", "data.task": None}
REWARDS = {"algorithm.kind": "reward_model", **ROWS}
STEPS = {"algorithm.kind": "process_reward_model", **ROWS}
NCCL = {"weights.transport": "nccl", "model.adapter.kind": "none"}
MERGED = {"weights.serve": "merged"}
FEATURES = {"algorithm.ebft.reward": True}
SERVE = "algorithm.ebft.features.serve"
LEARNERS = {**FEATURES, "algorithm.ebft.features.weights": "learner"}
KL = {"algorithm.reward_kl.coef": 0.1}
OTB = {"algorithm.advantage.name": "optimal_token_baseline"}
GAE = {"algorithm.advantage.name": "gae"}
REMAX = {"algorithm.advantage.name": "remax"}
BLOCKS = {"algorithm.kind": "ebft_strided", "data.source": "jsonl", "data.path": "rows.jsonl", "data.task": None}
CHECKPOINTING = {"model.gradient_checkpointing": True}


def config_with(changes: dict[str, Any]) -> Config:
    """Return a valid config with the given changes, which are named by dotted option."""
    config = Config()
    valid = {"model.path": "org/policy", "data.source": "reasoning_gym", "data.task": "basic_arithmetic"}
    for name, value in {**valid, **changes}.items():
        parent, _, option = name.rpartition(".")
        section = reduce(getattr, parent.split("."), config) if parent else config
        assert hasattr(section, option), f"there is no option {name}"
        setattr(section, option, value)
    return config


def problem_of(**changes: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        validate(config_with(changes))
    assert "\n" not in str(caught.value)
    return caught.value


def serving(*, replicas: int = 1, max_replicas: int | None = None, **options: Any) -> dict[str, Any]:
    serve = ServeConfig(replicas=replicas, max_replicas=max_replicas)
    return {"scoring.rewards": {"right": RewardConfig(path="mine:right", serve=serve, **options)}}


def reward(path: str = "mine:right", weight: float = 1.0, **options: Any) -> dict[str, RewardConfig]:
    return {"right": RewardConfig(path=path, weight=weight, **options)}


def test_defaults_with_a_model_and_data_are_valid() -> None:
    validate(config_with({}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("algorithm.num_steps", 0, "algorithm.num_steps: 0 is out of range; it must be at least 1"),
        ("algorithm.loss.clip_delta", 1.0, "algorithm.loss.clip_delta: 1.0 is out of range; it must be above 1"),
        (
            "rollout.sampling.top_p",
            1.5,
            "rollout.sampling.top_p: 1.5 is out of range; it must be above 0 and at most 1",
        ),
        ("rollout.sampling.temperature", 0.0, "rollout.sampling.temperature: 0.0 is out of range; it must be at least"),
        ("learner.optimizer.lr", float("nan"), "learner.optimizer.lr: nan is not a finite number"),
        ("learner.optimizer.lr", float("inf"), "learner.optimizer.lr: inf is not a finite number"),
        ("rollout.engine", "vlm", "rollout.engine: 'vlm' is not one of auto, vllm, hf; did you mean vllm?"),
        (
            "scoring.rewards",
            {"a": RewardConfig(path="m:f", timeout_s=0)},
            "scoring.rewards.a.timeout_s: 0 is out of range",
        ),
        (
            "scoring.rewards",
            {"a": RewardConfig(path="m:f", isolation="sandbx")},
            "scoring.rewards.a.isolation: 'sandbx' is not one of process, sandbox; did you mean sandbox?",
        ),
        ("scoring.memory_gb", 0.0, "scoring.memory_gb: 0.0 is out of range; it must be above 0"),
    ],
)
def test_values_out_of_range_are_named_with_the_range(name: str, value: Any, message: str) -> None:
    assert str(problem_of(**{name: value})).startswith(message)


@pytest.mark.parametrize(
    ("changes", "option", "fix"),
    [
        (
            {"replay.reuse_groups": 4, "algorithm.correction.mode": "none"},
            "replay.reuse_groups",
            "set algorithm.correction.mode, such as token_truncate",
        ),
        ({"replay.reuse_groups": 1, "algorithm.advantage.name": "gae"}, "replay.reuse_groups", "set it to 0"),
        ({"replay.refill_attempts": 1, "algorithm.advantage.name": "gae"}, "replay.refill_attempts", "set it to 0"),
        (
            {"algorithm.loss.name": "dpo", "algorithm.combine": "normalize_then_sum"},
            "algorithm.combine",
            "leave it out",
        ),
        (
            {"algorithm.loss.name": "dpo", "algorithm.correction.mode": "token_mask"},
            "algorithm.correction",
            "leave it out",
        ),
        (
            {"replay.refill_attempts": 1, "algorithm.advantage.name": "reinforce"},
            "replay.refill_attempts",
            "set it to 0, or another advantage",
        ),
        ({"cluster.dead_after_s": 5.0}, "cluster.dead_after_s", "5 is less than cluster.suspect_after_s=30"),
        ({"algorithm.group_size": 1}, "algorithm.group_size", "set 2 or more"),
        ({"algorithm.group_size": 1, "algorithm.advantage.name": "rloo"}, "algorithm.group_size", "set 2 or more"),
        (
            {
                "algorithm.group_size": 1,
                "algorithm.advantage.name": "reinforce",
                "algorithm.combine": "normalize_then_sum",
            },
            "algorithm.group_size",
            "set 2 or more",
        ),
        (
            {"algorithm.advantage.name": "rloo", "algorithm.advantage.scale": "none"},
            "algorithm.advantage.scale",
            "only on grpo",
        ),
        ({"learner.num_ranks": 2}, "learner.num_ranks", "set fsdp2 or zero3"),
        ({"learner.num_ranks": 2, "learner.strategy": "fsdp2", "learner.num_gpus": 0.5}, "learner.num_gpus", "set 1"),
        ({"learner.fsdp.reshard_after_forward": False}, "learner.fsdp", "learner.strategy=fsdp2"),
        ({"weights.transport": "nccl"}, "weights.transport", "model.adapter.merge=true, or model=full"),
        (
            {"rollout.engine_args": {"data_parallel_size": 2}},
            "rollout.engine_args.data_parallel_size",
            "set rollout.num_engines",
        ),
        (
            NCCL | {"rollout.num_gpus": 1, "learner.num_gpus": 1, "weights.timeout_s": 301},
            "weights.timeout_s",
            "set 300 or less",
        ),
        (NCCL | {"rollout.engine": "hf"}, "weights.transport", "set rollout.engine=vllm, or object_store"),
        (NCCL | {"learner.num_gpus": 0.5, "rollout.num_gpus": 0.5}, "weights.transport", "or num_gpus=1"),
        (NCCL | {"learner.num_gpus": 1.0}, "weights.transport", "num_gpus of both"),
        (MERGED | {"model.adapter.kind": "none"}, "weights.serve", "set auto"),
        (MERGED | {"model.adapter.merge": True}, "weights.serve", "merge=null"),
        (MERGED | {"model.adapter.kind": "qlora"}, "weights.serve", "model.adapter.kind=lora"),
        (MERGED | MENDED, "weights.serve", "leave the rules out"),
        (MERGED | {"weights.transport": "nccl", "model.adapter.use_dora": True}, "weights.serve", "object_store"),
        (MERGED | {"scoring.rewards": reward(kwargs={"engine": "base"})}, "weights.serve", "set adapter"),
        ({"weights.serve": "adapter", "model.adapter.use_dora": True}, "weights.serve", "set auto"),
        (
            MERGED | {"rollout.engine_args": {"quantization": "bitsandbytes"}},
            "rollout.engine_args.quantization",
            "leave it out",
        ),
        ({"learner.zero3.offload_optimizer": True}, "learner.zero3", "learner.strategy=zero3"),
        ({"learner.offload": "policy"}, "learner.offload", "set fsdp2 there, or learner.offload=chunked"),
        ({"learner.chunked.num_slots": 3}, "learner.chunked", "set learner.offload=chunked"),
        (CHUNKED | {"learner.strategy": "zero3"}, "learner.offload", "learner.strategy=single or fsdp2"),
        (
            CHUNKED | {"learner.strategy": "fsdp2", "learner.fsdp.reshard_after_forward": False},
            "learner.fsdp",
            "leave it out",
        ),
        (CHUNKED | {"learner.optimizer.name": "adamw_8bit"}, "learner.optimizer.name", "set adamw"),
        (CHUNKED | {"learner.chunked.sharing": "sharded"}, "learner.chunked.sharing", "set auto, or more ranks"),
        (CHUNKED | {"model.gradient_checkpointing": True}, "model.gradient_checkpointing", "set false"),
        (CHUNKED | {"model.attention": "flex_attention"}, "model.attention", "learner.chunked.num_checkpointed=0"),
        ({"learner.strategy": "fsdp2", "learner.fsdp.wrap": ()}, "learner.fsdp.wrap", "set blocks, size, none or [Qw"),
        ({"learner.strategy": "fsdp2", "learner.fsdp.wrap": 3}, "learner.fsdp.wrap", "set blocks, size, none or [Qw"),
        (
            {"learner.strategy": "fsdp2", "learner.fsdp.min_num_params": 10},
            "learner.fsdp.min_num_params",
            "only counts with learner.fsdp.wrap=size",
        ),
        ({"model.reentrant_checkpointing": True}, "model.reentrant_checkpointing", "gradient_checkpointing=true"),
        (
            CHECKPOINTING | {"learner.strategy": "fsdp2", "model.reentrant_checkpointing": True},
            "model.reentrant_checkpointing",
            "set false or null",
        ),
        (
            CHECKPOINTING | {"learner.strategy": "zero3", "model.reentrant_checkpointing": False},
            "model.reentrant_checkpointing",
            "set true or null",
        ),
        (
            CHECKPOINTING | {"model.attention": "flex_attention", "model.reentrant_checkpointing": False},
            "model.reentrant_checkpointing",
            "model.attention=flex_attention needs reentrant checkpointing",
        ),
        (
            CHECKPOINTING | {"model.attention": "flex_attention", "learner.strategy": "fsdp2"},
            "model.gradient_checkpointing",
            "set model.attention=sdpa, or learner.strategy=zero3",
        ),
        (
            {"model.adapter.kind": "qlora", "learner.strategy": "zero3", "learner.zero3.offload_parameters": True},
            "learner.zero3.offload_parameters",
            "set false, or model.adapter.kind=lora",
        ),
        ({"model.adapter.kind": "none", "model.adapter.use_dora": True}, "model.adapter.use_dora", "set kind=lora"),
        (
            {"model.adapter.kind": "qlora", "model.adapter.use_dora": True, "learner.strategy": "zero3"},
            "model.adapter.use_dora",
            "or learner.strategy=fsdp2",
        ),
        ({"model.adapter.kind": "none", "model.adapter.merge": True}, "model.adapter.merge", "set kind=lora"),
        ({"model.adapter.use_dora": True, "model.adapter.merge": False}, "model.adapter.merge", "set null"),
        (MENDED | {"model.adapter.merge": False}, "model.adapter.merge", "set null"),
        (
            {
                "algorithm.kind": "sft",
                "model.adapter.kind": "qlora",
                "model.normalize_weight_scales": {"conv": WeightScaleRule(name_pattern="conv", dry_run=True)},
            },
            "model.normalize_weight_scales",
            "set model.adapter.kind=lora",
        ),
        (
            {"model.adapter.kind": "qlora", "algorithm.reference.sync_steps": 5, "algorithm.loss.beta": 0.1},
            "algorithm.reference.sync_steps",
            "set 0, or model=full",
        ),
        ({"learner.optimizer.betas": (0.9, 1.0)}, "learner.optimizer.betas", "[0.9,0.999]"),
        ({"learner.optimizer.betas": (0.9,)}, "learner.optimizer.betas", "two numbers"),
        ({"learner.schedule.warmup_steps": 101}, "learner.schedule.warmup_steps", "set it lower"),
        ({"learner.max_tokens_per_microbatch": 1279}, "learner.max_tokens_per_microbatch", "set 1280 or more"),
        ({"rollout.max_model_len": 1279}, "rollout.max_model_len", "set 1280 or more"),
        (
            {"environment.path": "m:E", "rollout.max_model_len": 99_999},
            "learner.max_tokens_per_microbatch",
            "set 99999 or more, or rollout.max_model_len=",
        ),
        ({"environment.tools": ["m:f"], "rollout.sampling.stop": ["x"]}, "environment.tools", "set it to []"),
        ({"environment.path": "m:E", "data.chat": False}, "environment.path", "set data.chat=true"),
        ({"environment.path": "m:E", "environment.agent": "m:f"}, "environment.agent", "remove environment.path"),
        ({"environment.agent": "m:f", "environment.isolation": "sandbox"}, "environment.isolation", "set process"),
        (
            {"environment.agent": "m:f", "environment.port": 8000, "environment.num_processes": 2},
            "environment.port",
            "set environment.num_processes=1",
        ),
        ({"environment.path": "m:E", "algorithm.ebft.reward": True}, "environment.path", "ebft.reward=false"),
        ({"algorithm.advantage.credit": "turns"}, "algorithm.advantage.credit", "set environment.path"),
        (
            {"algorithm.advantage.credit": "turns", "environment.path": "m:E"},
            "algorithm.advantage.credit",
            "set algorithm.advantage.name=rloo",
        ),
        (
            {"algorithm.groups_per_step": 1, "algorithm.num_minibatches": 9},
            "algorithm.groups_per_step",
            "set it to 2 or more",
        ),
        ({"algorithm.loss.name": "cispo", "algorithm.loss.level": "sequence"}, "algorithm.loss.level", "name=clip"),
        (
            {"algorithm.kind": "ebft_strided", "algorithm.advantage.path": "mine.py:advantages"},
            "algorithm.advantage.path",
            "set it to null",
        ),
        ({"algorithm.kind": "ebft_strided", "algorithm.advantage.name": "gpg"}, "algorithm.advantage", "set name=rloo"),
        (
            {
                "algorithm.advantage.credit": "turns",
                "algorithm.advantage.name": "rloo",
                "algorithm.advantage.path": "mine.py:advantages",
                "environment.path": "m:E",
            },
            "algorithm.advantage.credit",
            "set algorithm.advantage.name=rloo, without a path",
        ),
        (
            {"algorithm.advantage.name": "reinforce_plus_plus", "replay.refill_attempts": 1},
            "replay.refill_attempts",
            "set it to 0",
        ),
        ({"algorithm.loss.path": "mine"}, "algorithm.loss.path", "write file.py:function"),
        ({"algorithm.advantage.path": "mine"}, "algorithm.advantage.path", "write file.py:function"),
        ({"algorithm.loss.kwargs": {"factor": 1}}, "algorithm.loss.kwargs", "set algorithm.loss.path"),
        ({"algorithm.advantage.digest": "0"}, "algorithm.advantage.digest", "set algorithm.advantage.path"),
        (
            {"algorithm.loss.name": "vespo", "algorithm.correction.mode": "sequence_mask"},
            "algorithm.correction.mode",
            "set token_truncate, token_mask or none",
        ),
        (
            {"algorithm.loss.name": "clip_cov", "algorithm.loss.covariance.low": 9.0},
            "algorithm.loss.covariance.low",
            "set it lower",
        ),
        ({"algorithm.loss.clip_low": 1.0}, "algorithm.loss.clip_low", "set it below 1"),
        ({"algorithm.loss.dro_beta": 1.0}, "algorithm.loss.dro_beta", "has no effect on clip, only on dro"),
        ({"algorithm.loss.sapo.temperature_positive": 2.0}, "algorithm.loss.sapo", "has no effect on clip"),
        (
            {"algorithm.loss.name": "sapo", "algorithm.loss.covariance.share": 0.1},
            "algorithm.loss.covariance",
            "has no effect on sapo, only on clip_cov, kl_cov",
        ),
        ({"algorithm.advantage.name": "rloo", "algorithm.advantage.eps": 0.1}, "algorithm.advantage.eps", "rloo"),
        ({"replay.rerolls_per_step": 2}, "replay.rerolls_per_step", "set replay.reroll_after"),
        ({"replay.reroll_below": 0.5}, "replay.reroll_below", "nothing is sampled again"),
        ({"algorithm.loss.clip_delta": 1.1}, "algorithm.loss.clip_delta", "set 1.2 or more"),
        (
            {"algorithm.loss.name": "cispo", "algorithm.loss.clip_delta": 2.0},
            "algorithm.loss.clip_delta",
            "set it to null",
        ),
        (
            {"algorithm.correction.bias_corrected_kl": True, "algorithm.correction.mode": "token_mask"},
            "algorithm.correction.bias_corrected_kl",
            "beta above 0",
        ),
        (
            {
                "algorithm.correction.bias_corrected_kl": True,
                "algorithm.correction.mode": "none",
                "algorithm.loss.beta": 0.1,
            },
            "algorithm.correction.bias_corrected_kl",
            "set another mode",
        ),
        ({"algorithm.reference.sync_steps": 5}, "algorithm.reference.sync_steps", "beta above 0"),
        (
            {"algorithm.reference.sync_steps": 5, "algorithm.loss.beta": 0.1},
            "algorithm.reference.sync_steps",
            "model=full",
        ),
        ({"model.adapter.kind": "none", "model.adapter.path": "a/b"}, "model.adapter.path", "kind=lora"),
        ({"model.adapter.target_modules": [1]}, "model.adapter.target_modules", "[q_proj,v_proj]"),
        ({"model.dtype": "float16"}, "model.dtype", "bfloat16"),
        ({"model.attention": "flash_attention_2"}, "model.attention", "sdpa"),
        (
            {"model.attention": "flash_attention_2", "model.dtype": "float32", "learner.num_gpus": 1.0},
            "model.attention",
            "model.dtype=bfloat16",
        ),
        ({"model.prepare": "make_model"}, "model.prepare", "module:function"),
        ({"data.source": "jsonl", "data.task": None}, "data.path", "data.path=..."),
        ({"data.source": "datasets", "data.task": None}, "data.path", "hub id"),
        ({"data.task": None}, "data.task", "data.task=basic_arithmetic"),
        ({"data.path": "rows.jsonl"}, "data.path", "data.path=null"),
        ({"data.source": "parquet", "data.path": "rows.parquet"}, "data.task", "data.source=reasoning_gym"),
        ({"data.name": "main"}, "data.name", "data.source=datasets"),
        ({"data.transform": "mine"}, "data.transform", "module:function"),
        ({"data.transform_args": {"a": 1}}, "data.transform_args", "data.transform=module:function"),
        ({"data.held_out.every_steps": 5}, "data.held_out.every_steps", "data.held_out.size"),
        ({"data.held_out.size": 5, "data.held_out.path": "rows.jsonl"}, "data.held_out.size", "one of the two"),
        ({"data.held_out.size": 5, "data.held_out.split": "test"}, "data.held_out.split", "one of the three"),
        ({"data.held_out.split": "test"}, "data.held_out.split", "has no splits"),
        ({"data.held_out.size": 50, "data.task_args": {"size": 50}}, "data.held_out.size", "set it lower"),
        (
            {"rollout.engine": "hf", "rollout.sampling.guided_regex": "a+"},
            "rollout.sampling.guided_regex",
            "engine=vllm",
        ),
        (
            {"rollout.sampling.guided_json": {"type": "object"}, "rollout.sampling.guided_regex": "a+"},
            "rollout.sampling.guided_json",
            "guided_regex=null",
        ),
        ({"rollout.engine": "hf", "rollout.tensor_parallel_size": 2}, "rollout.tensor_parallel_size", "engine=vllm"),
        ({"rollout.tensor_parallel_size": 2}, "rollout.num_gpus", "set both to the same"),
        ({"rollout.num_gpus": 2.0}, "rollout.num_gpus", "set both to the same"),
        ({"rollout.engine_args": {"dtype": "auto"}}, "rollout.engine_args.dtype", "set model.dtype"),
        (
            {"rollout.engine_args": {"mm_processor_kwargs": {}}},
            "rollout.engine_args.mm_processor_kwargs",
            "processor_kwargs",
        ),
        ({"rollout.engine_args": {"worker_extension_cls": "x"}}, "rollout.engine_args.worker_extension_cls", "itself"),
        ({"rollout.sampling.extra": {"logprobs": 3}}, "rollout.sampling.extra.logprobs", "rlpipe sets it itself"),
        (
            {"rollout.engine_args": {"quantization": "bitsandbytes"}, "model.adapter.merge": True},
            "rollout.engine_args.quantization",
            "leave it out",
        ),
        ({"rollout.sampling.extra": {"top_p": 1}}, "rollout.sampling.extra.top_p", "set rollout.sampling.top_p"),
        ({"weights.on_update": "inflight"}, "weights.on_update", "replay.max_staleness=1"),
        ({"weights.every_steps": 3, "replay.max_staleness": 1}, "weights.every_steps", "replay.max_staleness=2"),
        ({"scoring.rewards": reward("right")}, "scoring.rewards.right.path", "file.py:function"),
        ({"scoring.rewards": reward(weight=0.0)}, "scoring.rewards", "set a weight"),
        (
            {"scoring.rewards": {"right": RewardConfig(path="m:f", isolation="sandbox", num_gpus=1.0)}},
            "scoring.rewards.right.num_gpus",
            "isolation=process",
        ),
        (serving(isolation="sandbox"), "scoring.rewards.right.isolation", "serve.replicas=0"),
        (serving(num_processes=2), "scoring.rewards.right.num_processes", "serve.replicas=0"),
        (serving(max_replicas=1, replicas=2), "scoring.rewards.right.serve.max_replicas", "set 2 or more"),
        ({**FEATURES, SERVE: ServeConfig(replicas=2, max_replicas=1)}, f"{SERVE}.max_replicas", "set 2 or more"),
        ({"algorithm.ebft.reward": True, "algorithm.combine": "normalize_then_sum"}, "algorithm.combine", "are summed"),
        (
            FEATURES | {"algorithm.ebft.ce_coef": 0.1, "algorithm.groups_per_step": 4, "algorithm.num_minibatches": 8},
            "algorithm.num_minibatches",
            "only 4 ground truths; set 4 or fewer",
        ),
        (FEATURES | {"rollout.max_model_len": 10_000}, "learner.max_tokens_per_microbatch", "the longest conversation"),
        ({**FEATURES, SERVE: ServeConfig()}, f"{SERVE}.replicas", "set 1 or more"),
        ({**LEARNERS, SERVE: ServeConfig(replicas=2)}, SERVE, "weights=own"),
        (
            {**FEATURES, "algorithm.ebft.features.layers": (0.5, 2.0)},
            "algorithm.ebft.features.layers",
            "[0.25,0.5,0.75]",
        ),
        (
            {**FEATURES, "algorithm.ebft.features.whiten_layers": "each", "algorithm.ebft.features.whitening": "none"},
            "algorithm.ebft.features.whiten_layers",
            "set whitening, or joint",
        ),
        (
            {**LEARNERS, "model.adapter.kind": "none", "algorithm.loss.beta": 0.1, "algorithm.reference.sync_steps": 5},
            "algorithm.reference.sync_steps",
            "weights=own",
        ),
        (
            {"model.processor_kwargs": {"min_pixels": 100, "revision": "main"}},
            "model.processor_kwargs.revision",
            "set model.revision instead",
        ),
        (
            {"model.processor_kwargs": {"trust_remote_code": True}},
            "model.processor_kwargs.trust_remote_code",
            "set model.trust_remote_code instead",
        ),
        (
            {"data.chat_template_kwargs": {"enable_thinking": False, "tools": []}},
            "data.chat_template_kwargs.tools",
            "set data.tools instead",
        ),
        (
            {"data.chat_template_kwargs": {"chat_template": "x"}},
            "data.chat_template_kwargs.chat_template",
            "set model.chat_template instead",
        ),
        (KL | {"algorithm.loss.mask_truncated": True}, "algorithm.loss.mask_truncated", "set false"),
        (OTB | {"algorithm.loss.mask_truncated": True}, "algorithm.loss.mask_truncated", "set false"),
        ({"algorithm.reward_kl.target": 0.1}, "algorithm.reward_kl", "set algorithm.reward_kl.coef"),
        (
            KL | {"algorithm.reward_kl.target": 0.1, "algorithm.reward_kl.horizon": 1},
            "algorithm.reward_kl.horizon",
            "set 10000 or so",
        ),
        (KL | {"algorithm.advantage.name": "max_rl"}, "algorithm.reward_kl.coef", "algorithm.loss.beta"),
        (
            {"algorithm.advantage.name": "max_rl", "algorithm.combine": "normalize_then_sum"},
            "algorithm.combine",
            "leave it out",
        ),
        (
            {"replay.refill_attempts": 1, "algorithm.advantage.path": "mine.py:f", "algorithm.group_size": 1},
            "replay.refill_attempts",
            "algorithm.group_size to 2 or more",
        ),
        (KL | {"algorithm.reward_kl.horizon": 99}, "algorithm.reward_kl.horizon", "set algorithm.reward_kl.target"),
        (GAE | BLOCKS, "algorithm.advantage.name", "set rloo"),
        (GAE | FEATURES, "algorithm.ebft.reward", "set rloo"),
        (GAE | {"algorithm.loss.mask_truncated": True}, "algorithm.loss.mask_truncated", "set false"),
        ({"algorithm.advantage.lam": 0.9}, "algorithm.advantage.gamma", "set gae"),
        ({"algorithm.critic.lr": 0.1}, "algorithm.critic", "leave it out"),
        (REMAX | BLOCKS, "algorithm.advantage.name", "set rloo"),
        (REMAX | FEATURES, "algorithm.ebft.reward", "set rloo"),
        (REMAX | {"algorithm.combine": "normalize_then_sum"}, "algorithm.combine", "set rloo"),
        (REMAX | {"environment.path": "mine.py:Game", "data.chat": True}, "algorithm.advantage.name", "set rloo"),
        (KL | {"algorithm.loss.name": "dpo"}, "algorithm.reward_kl.coef", "set 0"),
        (KL | BLOCKS, "algorithm.reward_kl", "set algorithm.loss.beta"),
        (OTB | BLOCKS, "algorithm.advantage.name", "set rloo"),
        (
            KL
            | {
                "algorithm.advantage.credit": "turns",
                "algorithm.advantage.name": "rloo",
                "environment.path": "mine.py:Game",
                "data.chat": True,
            },
            "algorithm.reward_kl.coef",
            "algorithm.advantage.credit=episode",
        ),
        (
            {"rollout.dtype": "bfloat16", "model.dtype": "float32", "algorithm.correction.mode": "none"},
            "rollout.dtype",
            "set algorithm.correction.mode, such as token_truncate",
        ),
        ({"rollout.dtype": "float16"}, "rollout.dtype", "needs a GPU"),
        (
            {"rollout.engine_args": {"long_prefill_token_threshold": 64}},
            "rollout.engine_args.long_prefill_token_threshold",
            "on a CPU; delete it",
        ),
        ({"algorithm.preference.path": "mine.py:f"}, "algorithm.preference.path", "set algorithm=online_dpo"),
        ({"algorithm.correction.path": "mine.py"}, "algorithm.correction.path", "names no function"),
        ({"algorithm.correction.kwargs": {"a": 1}}, "algorithm.correction.kwargs", "set algorithm.correction.path"),
        (
            {"algorithm.correction.path": "mine.py:f", "algorithm.correction.cap": 3.0},
            "algorithm.correction.cap",
            "remove it, or set path=null",
        ),
        ({"algorithm.replay.path": "mine.py:f"}, "algorithm.replay", "set replay.reuse_groups above 0"),
        ({"algorithm.replay.name": "most_spread"}, "algorithm.replay", "set replay.reuse_groups above 0"),
        (
            {"algorithm.replay.path": "mine.py:f", "algorithm.replay.name": "most_spread", "replay.reuse_groups": 4},
            "algorithm.replay.name",
            "has no effect on the function of path",
        ),
        (REWARDS | CHUNKED, "learner.offload", "chunked can't hold a reward model so far; set none, or policy with"),
        (REWARDS | {"model.images": True}, "model.images", "reward_model takes no images so far; set false"),
        (STEPS | {"model.adapter.kind": "qlora"}, "model.adapter.kind", "set lora, or model=full"),
        (REWARDS | {"model.adapter.path": "adapter"}, "model.adapter.path", "merge it (rlpipe merge)"),
        (REWARDS | {"algorithm.stop_loss": 0.1}, "algorithm.stop_loss", "set it to null"),
        (REWARDS | {"algorithm.reference.sync_steps": 5}, "algorithm.reference.sync_steps", "set it to 0"),
        (REWARDS | {"data.text_column": "text"}, "data.text_column", "preferences are between completions"),
        (
            STEPS | {"data.text_column": "text"},
            "data.text_column",
            "labels are of steps after a prompt; set it to null",
        ),
        ({"algorithm.kind": "reward_model"}, "data.source", "have no preferences; set jsonl, parquet or datasets"),
        ({"algorithm.kind": "process_reward_model"}, "data.source", "have no labelled steps"),
        *(
            ({"data.chat_template_kwargs": {name: True}}, f"data.chat_template_kwargs.{name}", "leave it out")
            for name in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
            if name not in ("self", "tools", "documents", "chat_template", "kwargs")
        ),
    ],
)
def test_contradictions_name_the_option_and_the_fix(changes: dict[str, Any], option: str, fix: str) -> None:
    problem = problem_of(**changes)
    assert isinstance(problem, ConfigError)
    assert any(message.startswith(f"{option}: ") for message in getattr(problem, "messages", [str(problem)]))
    assert fix in str(problem)


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.group_size": 1, "algorithm.advantage.name": "reinforce"},
        {"algorithm.group_size": 1, "algorithm.advantage.name": "reinforce_plus_plus"},
        {"algorithm.group_size": 1, "algorithm.advantage.path": "mine.py:advantages"},
        {"algorithm.advantage.name": "pass_at_k", "algorithm.advantage.scale": "none"},
        {"algorithm.loss.name": "vespo", "algorithm.correction.mode": "token_mask"},
        {"algorithm.loss.name": "clip_cov", "algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 1.0},
        {
            "algorithm.loss.path": "mine:loss",
            "algorithm.loss.kwargs": {"factor": 1},
            "algorithm.loss.level": "sequence",
        },
        {"algorithm.kind": "sft", "algorithm.group_size": 1, "rollout.sampling.max_tokens": 9000},
        {"learner.num_ranks": 2, "learner.strategy": "fsdp2", "learner.num_gpus": 1.0},
        {"model.dtype": "float16", "learner.num_gpus": 1.0},
        {"rollout.tensor_parallel_size": 2, "rollout.num_gpus": 2.0},
        {"rollout.num_gpus": 0.5},
        {"replay.reuse_groups": 4, "algorithm.correction.mode": "token_mask"},
        KL | {"algorithm.advantage.path": "mine.py:f"},
        {"weights.on_update": "inflight", "replay.max_staleness": 1},
        {"weights.every_steps": 3, "replay.max_staleness": 2},
        {"weights.on_update": "inflight", "replay.max_staleness": 1, "rollout.engine": "hf"},
        {"algorithm.reference.sync_steps": 5, "algorithm.loss.beta": 0.1, "model.adapter.kind": "none"},
        {"algorithm.loss.name": "cispo", "algorithm.loss.clip_high": 4.0, "algorithm.loss.clip_low": 1.0},
        {"model.adapter.target_modules": ("q_proj", "v_proj")},
        {"model.adapter.use_dora": True, "model.adapter.modules_to_save": ("norm",)},
        {"algorithm.kind": "sft", "model.adapter.use_dora": True, "model.adapter.merge": False},
        {"weights.transport": "nccl", "model.adapter.merge": True},
        MERGED | {"model.adapter.use_dora": True, "model.adapter.merge": False, "replay.max_staleness": 2},
        MERGED | {"model.adapter.r": 1000, "model.adapter.modules_to_save": ("norm",)},
        {"weights.serve": "adapter", "scoring.rewards": reward(kwargs={"engine": "base"})},
        {"algorithm.kind": "sft", "weights.serve": "merged", "model.adapter.kind": "qlora"},
        {**FEATURES, "scoring.rewards": reward(weight=0.0)},
        {"environment.path": "mine:Game", "scoring.rewards": reward(weight=0.0)},
        LEARNERS,
        MENDED,
        {"learner.strategy": "fsdp2", "learner.fsdp.wrap": ("Qwen3MLP",)},
        {"learner.strategy": "fsdp2", "learner.fsdp.wrap": "size", "learner.fsdp.min_num_params": 10},
        CHECKPOINTING | {"model.reentrant_checkpointing": True},
        NCCL,
        CHECKPOINTING | {"learner.strategy": "zero3", "model.attention": "flex_attention"},
        {"model.adapter.kind": "qlora", "learner.strategy": "zero3", "learner.zero3.offload_optimizer": True},
        {"model.normalize_weight_scales": {"conv": WeightScaleRule(name_pattern="conv", dry_run=True)}},
    ],
)
def test_sound_combinations_pass(changes: dict[str, Any]) -> None:
    validate(config_with(changes))


def test_missing_files_are_reported_with_their_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"data.source": "jsonl", "data.task": None}
    cases: list[tuple[dict[str, Any], type[InputError], str]] = [
        ({**rows, "data.path": "rows.jsonl"}, DataError, "data.path: there is no file {}/rows.jsonl"),
        ({"data.held_out.path": "held.jsonl"}, DataError, "data.held_out.path: there is no file {}/held.jsonl"),
        ({"model.path": "./policy"}, ModelError, "model.path: there is no folder {}/policy"),
        ({"model.path": "runs/1/policy"}, ModelError, "model.path: there is no folder {}/runs/1/policy"),
        ({"model.tokenizer": "/no/tokenizer"}, ModelError, "model.tokenizer: there is no folder /no/tokenizer"),
        ({"model.chat_template": "chat.jinja"}, ModelError, "model.chat_template: there is no file {}/chat.jinja"),
        ({"model.adapter.path": "./adapter"}, ModelError, "model.adapter.path: there is no PEFT adapter in {}/adapter"),
        (
            {"scoring.rewards": reward("r.py:f")},
            RewardImportError,
            "scoring.rewards.right.path: there is no file {}/r.py",
        ),
        ({"resume": "always"}, ConfigError, "resume: there is no checkpoint {}/always; give auto, never or"),
    ]
    for changes, kind, message in cases:
        problem = problem_of(**changes)
        assert type(problem) is kind
        assert str(problem).startswith(message.format(tmp_path))


def test_a_folder_alongside_the_path_makes_it_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    validate(config_with({"model.path": "outputs/policy"}))
    (tmp_path / "outputs").mkdir()
    assert "there is no folder" in str(problem_of(**{"model.path": "outputs/policy"}))
    validate(config_with({"model.path": "outputs/policy", "model.prepare": "mine:make"}))
    (tmp_path / "outputs" / "policy").mkdir()
    validate(config_with({"model.path": "outputs/policy"}))


def test_existing_files_pass(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "reward.py", "adapter_config.json"):
        (tmp_path / name).touch()
    changes = {"data.source": "jsonl", "data.task": None, "data.path": f"{tmp_path}/rows.jsonl"}
    rewards = reward(f"{tmp_path}/reward.py:right")
    validate(
        config_with(
            {**changes, "model.adapter.path": str(tmp_path), "scoring.rewards": rewards, "resume": str(tmp_path)}
        )
    )
    for option in ("output", "data.cache"):
        message = f"{option}: {tmp_path}/rows.jsonl is a file; name a folder"
        assert str(problem_of(**{option: f"{tmp_path}/rows.jsonl"})) == message


def test_reinforcement_learning_needs_a_reward() -> None:
    with pytest.raises(ConfigError, match=r"scoring\.rewards: reinforcement learning needs a reward"):
        require_rewards(config_with({}))
    require_rewards(config_with({}), rewards=[len])
    require_rewards(config_with({"scoring.rewards": reward()}))
    require_rewards(config_with({"algorithm.kind": "sft"}))


MIX = {"data.source": "mix", "data.task": None}
SUMS = {"source": "reasoning_gym", "task": "basic_arithmetic"}


def test_a_mix_of_sources_is_valid() -> None:
    validate(config_with({**MIX, "data.sources": {"a": SUMS, "b": {**SUMS, "weight": 0.5, "shuffle": False}}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.sources": {}}, "data.sources: data.source=mix needs at least one source, such as data.sources.math="),
        ({"data.path": "rows.jsonl"}, "data.path: data.source=mix reads no path; set data.path=null"),
        ({"data.task": "chain_sum"}, "data.name, data.task: each source of a mix has its own"),
        ({"data.source": "reasoning_gym", "data.task": "chain_sum"}, "data.sources: .* set data.source=mix"),
        ({"data.sources": {"a": 3}}, "data.sources.a: 3 is not a dictionary of options; write such as"),
        ({"data.sources": {"a": {"task": "chain_sum"}}}, "data.sources.a.source is missing"),
        ({"data.sources": {"a": {**SUMS, "weight": 0}}}, "data.sources.a.weight: 0 is not a number above 0, from"),
        ({"data.sources": {"a": {**SUMS, "weight": -1.5}}}, "data.sources.a.weight: -1.5 is not a number"),
        ({"data.sources": {"a": {**SUMS, "weight": True}}}, "data.sources.a.weight: True is not a number"),
        ({"data.sources": {"a": {**SUMS, "weight": float("nan")}}}, "a.weight: nan is not a finite number"),
        ({"data.sources": {"a": {**SUMS, "weight": float("inf")}}}, "a.weight: inf is not a finite number"),
        ({"data.sources": {"a": {**SUMS, "weight": 10**400}}}, "a.weight: a number of 1329 bits is out of range"),
        ({"data.sources": {"a": {**SUMS, "weight": 1e-320}}}, "a.weight: 1e-320 is not a number above 0, from 1e-100"),
        ({"data.sources": {"a": {**SUMS, "weight": None}}}, "data.sources.a.weight: None is not a number above 0"),
        ({"data.sources": {"a": {**SUMS, "weight": "2"}}}, "data.sources.a.weight: '2' is not a number above 0"),
        ({"data.sources": {"": SUMS}}, "data.sources: '' is not a non-empty string"),
        ({"data.sources": {"a/b": SUMS}}, "data.sources: 'a/b' is not a name of .*; write such as data.sources.math="),
        ({"data.sources": {"a": SUMS, 1: SUMS}}, "data.sources: 1 is not a non-empty string"),
        ({"data.sources": {"a": {**SUMS, "wieght": 2}}}, "data.sources.a: no such key 'wieght'; did you mean weight?"),
        ({"data.sources": {"a": {**SUMS, "qqq": 2}}}, "data.sources.a: no such key 'qqq'; a source has a weight, and"),
        ({"data.sources": {"a": {**SUMS, "held_out": {"size": 2}}}}, "set data.held_out"),
        ({"data.sources": {"a": {**SUMS, "shuffle": "often"}}}, "data.sources.a.shuffle: 'often' is not true or false"),
        ({"data.sources": {"a": {**SUMS, "loss_mask": "rolls"}}}, "data.sources.a.loss_mask: 'rolls' is not one of"),
        ({"data.sources": {"a": {"source": "mix"}}}, "data.sources.a.source=mix: a mix can't contain another"),
        ({"data.sources": {"a": {"source": "jsnl"}}}, "data.sources.a.source: 'jsnl' is not .* did you mean jsonl"),
        ({"data.sources": {"a": {"source": "jsonl"}}}, "data.sources.a.path: .* as in data.sources.a.path="),
        ({"data.sources": {"a": {"source": "reasoning_gym"}}}, "data.sources.a.task: .* needs the name of a task"),
        ({"data.sources": {"a": {**SUMS, "transform": "mine"}}}, "data.sources.a.transform: 'mine' is not of the form"),
        (
            {"data.sources": {"a": {**SUMS, "chat_template_kwargs": {"tools": []}}}},
            r"^data\.sources\.a\.chat_template_kwargs\.tools: .*; set data\.sources\.a\.tools instead",
        ),
        (
            {"data.chat_template_kwargs": {"messages": []}},
            r"^data\.chat_template_kwargs\.messages: rlpipe sets it for each row",
        ),
        ({"data.held_out": HeldOutConfig(split="test")}, "data.held_out.split: data.source=mix has no splits"),
    ],
)
def test_what_is_wrong_with_a_mix_is_named(changes: dict[str, Any], message: str) -> None:
    problem = problem_of(**{**MIX, "data.sources": {"a": SUMS}, **changes})
    assert re.search(message, str(problem)), str(problem)


def test_streams_hold_out_no_rows_of_their_own() -> None:
    rows = {"data.source": "jsonl", "data.task": None, "data.path": "rows.jsonl", "data.streaming": True}
    problem = problem_of(**rows, **{"data.held_out": HeldOutConfig(size=2)})
    assert str(problem).startswith(
        "data.held_out.size: with data.streaming=true, the rows are not known at the start; set"
    )
    sources = {"a": SUMS, "b": {"source": "jsonl", "path": "rows.jsonl", "streaming": True}}
    problem = problem_of(**MIX, **{"data.sources": sources, "data.held_out": HeldOutConfig(size=2)})
    assert str(problem).startswith("data.held_out.size: with data.sources.b.streaming=true, the rows are not known")
    problem = problem_of(**{"data.streaming": True})
    assert str(problem).startswith("data.streaming: data.source=reasoning_gym generates its rows")


def test_missing_files_of_a_mix_are_named() -> None:
    problem = problem_of(**MIX, **{"data.sources": {"a": {"source": "jsonl", "path": "none.jsonl"}}})
    assert "data.sources.a.path: there is no file" in str(problem)
