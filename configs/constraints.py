"""Checks for options that contradict each other; each problem is a one-line message with the fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from rlpipe.configs.data_sources import EXAMPLE, mixed_sources
from rlpipe.configs.objective_constraints import (
    check_correction,
    check_engine_dtype,
    check_function,
    check_group_size,
    check_loss,
    check_preference,
    check_reward_kl,
    check_reward_model,
    check_unused,
)
from rlpipe.configs.options import changed
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, ReplayPolicyConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.health_config import HEALTH_RULES, HealthLimits
from rlpipe.configs.schema.model_config import ModelConfig, needs_merging
from rlpipe.configs.schema.rollout_config import (
    ENGINE_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    RewardConfig,
    RolloutConfig,
    ScoringConfig,
)
from rlpipe.configs.schema.root_config import Config, TrackingConfig, longest_conversation
from rlpipe.configs.section_constraints import (
    check_checkpointing,
    check_learner,
    check_masks,
    check_optimizer,
    check_replicas,
    check_schedule,
    check_step_size,
    check_strided,
    check_structured,
    check_template,
)
from rlpipe.configs.serving import check_quantization, check_serve, check_transport, check_updates

SPLITTING_ARGUMENTS = {"enable_chunked_prefill", "long_prefill_token_threshold"}
"""vLLM's options that compute a long prompt in several steps."""


def contradictions(config: Config) -> Iterator[str]:
    yield from check_model(config.model, on_gpu=config.learner.num_gpus > 0)
    yield from check_processor(config.model)
    yield from check_source(config.data)
    yield from check_template(config.data)
    yield from check_masks(config)
    yield from check_held_out(config.data)
    yield from check_learner(config.learner)
    yield from check_checkpointing(config.model, config.learner)
    yield from check_adapter(config)
    yield from check_quantization(config)
    yield from check_optimizer(config.learner.optimizer)
    yield from check_schedule(config.learner, config.algorithm)
    yield from check_step_size(config.algorithm, config.learner)
    if config.algorithm.kind != "sft" and config.algorithm.stop_loss is not None:
        yield "algorithm.stop_loss: only has an effect in SFT; set it to null"
    if config.algorithm.kind == "rl":
        yield from check_group_size(config.algorithm)
        yield from check_loss(config.algorithm)
        yield from check_reward_kl(config.algorithm)
        yield from check_engine_dtype(config)
        yield from check_correction(config.algorithm)
        yield from check_replay(config)
        yield from check_reference(config.algorithm, config.model)
        yield from check_rollout(config.rollout)
        yield from check_sampling(config.rollout)
        yield from check_lengths(config)
        yield from check_transport(config)
        yield from check_serve(config)
        yield from check_environment(config)
        if config.algorithm.ebft.reward:
            yield from check_structured(config.algorithm)
    elif config.algorithm.kind == "preference":
        yield from check_preference(config)
        yield from check_moving_reference(config.algorithm, config.model)
    elif config.algorithm.kind in ("reward_model", "process_reward_model"):
        yield from check_reward_model(config)
    elif config.algorithm.kind == "ebft_strided":
        yield from check_loss(config.algorithm)
        yield from check_strided(config)
    yield from check_unused(config)
    yield from check_updates(config.weights, config.replay)
    yield from check_rewards(config.scoring, others=config.algorithm.ebft.reward or config.environment.takes_rows)
    yield from check_tracking(config.tracking)
    yield from check_health(config.health)


def check_model(model: ModelConfig, *, on_gpu: bool) -> Iterator[str]:
    adapter = model.adapter
    if adapter.kind == "none" and adapter.path is not None:
        yield "model.adapter.path: there is no adapter with model.adapter.kind=none; set kind=lora or path=null"
    modules = adapter.target_modules
    names = modules if isinstance(modules, list | tuple) else [modules]
    if not names or not all(isinstance(name, str) and name for name in names):
        yield (
            f"model.adapter.target_modules: {modules!r:.200} is not a name or list of names; set all-linear or "
            "[q_proj,v_proj]"
        )
    if model.dtype == "float16" and not on_gpu:
        yield "model.dtype: float16 needs a GPU; set model.dtype=auto, float32 or bfloat16, or learner=single_gpu"
    if model.attention == "flash_attention_2" and not on_gpu:
        yield "model.attention: flash_attention_2 needs a GPU; set model.attention=sdpa, or learner=single_gpu"
    if model.attention == "flash_attention_2" and model.dtype == "float32":
        yield (
            "model.attention: flash_attention_2 does not support float32; set model.dtype=bfloat16, or "
            "model.attention=sdpa"
        )
    if model.prepare is not None and ":" not in model.prepare:
        yield f"model.prepare: {model.prepare!r:.200} is not of the form module:function"


def check_processor(model: ModelConfig) -> Iterator[str]:
    for name in ("revision", "trust_remote_code"):
        if name in model.processor_kwargs:
            yield f"model.processor_kwargs.{name}: can't be set here; set model.{name} instead"


def check_source(data: DataConfig, at: str = "data") -> Iterator[str]:
    """Yield contradictions of a data source; ``at`` is the name of the section that its options are in."""
    source = f"{at}.source={data.source}"
    if data.source == "mix" and at != "data":
        yield f"{source}: a mix can't contain another; list its sources in data.sources"
    elif data.source == "mix":
        yield from check_mix(data)
    elif data.sources:
        yield f"data.sources: {source} does not read other sources; set data.source=mix, or data.sources={{}}"
    if data.source in ("reasoning_gym", "mix"):
        if data.path is not None:
            yield f"{at}.path: {source} reads no path; set {at}.path=null, or another {at}.source"
        if data.task is None and data.source != "mix":
            yield f"{at}.task: {source} needs the name of a task, such as {at}.task=basic_arithmetic"
    else:
        if data.path is None:
            needs = "a folder or hub id" if data.source == "datasets" else "a file"
            yield f"{at}.path: {source} needs {needs}, as in {at}.path=..."
        if data.task is not None or data.task_args:
            yield f"{at}.task: {source} has no tasks; set {at}.source=reasoning_gym, or remove task and task_args"
    if data.source not in ("datasets", "mix") and data.name is not None:
        yield f"{at}.name: {source} has no configurations; set {at}.name=null, or {at}.source=datasets"
    if data.streaming and data.source == "reasoning_gym":
        yield f"{at}.streaming: {source} generates its rows; set {at}.streaming=false"
    if data.transform is not None and ":" not in data.transform:
        yield f"{at}.transform: {data.transform!r:.200} is not of the form module:function"
    if data.transform is None and data.transform_args and data.source != "mix":
        yield f"{at}.transform_args: there is no transform to receive them; set {at}.transform=module:function"


def check_mix(data: DataConfig) -> Iterator[str]:
    if not data.sources:
        yield f"data.sources: data.source=mix needs at least one source, {EXAMPLE}"
    if data.name is not None or data.task is not None:
        yield "data.name, data.task: each source of a mix has its own; set data.sources.<name>.name or task"
    for source in mixed_sources(data):
        yield from check_source(source.data, at=f"data.sources.{source.name}")


def check_held_out(data: DataConfig) -> Iterator[str]:
    held_out = data.held_out
    if held_out.every_steps > 0 and held_out.size == 0 and held_out.path is None and held_out.split is None:
        yield (
            f"data.held_out.every_steps: {held_out.every_steps}, but there are no held-out rows; "
            "set data.held_out.size, data.held_out.path or data.held_out.split"
        )
    if held_out.size > 0 and held_out.path is not None:
        yield "data.held_out.size: held-out rows come from data.held_out.path already; set one of the two"
    if held_out.split is not None and (held_out.size > 0 or held_out.path is not None):
        yield "data.held_out.split: held-out rows come from data.held_out.size or path already; set one of the three"
    if held_out.split is not None and data.source != "datasets":
        yield f"data.held_out.split: data.source={data.source} has no splits; set data.held_out.size or path instead"
    if held_out.split is not None and held_out.split == data.split:
        yield f"data.held_out.split: {held_out.split} is trained on (data.split); name another split"
    streams = [f"data.sources.{source.name}" for source in mixed_sources(data) if source.data.streaming]
    if data.streaming and data.source != "mix":
        streams = ["data"]
    if held_out.size > 0 and streams:
        yield (
            f"data.held_out.size: with {streams[0]}.streaming=true, the rows are not known at the start; "
            "set data.held_out.path or split instead"
        )
    rows = data.task_args.get("size")
    if isinstance(rows, int) and 0 < rows <= held_out.size:
        yield f"data.held_out.size: {held_out.size} of data.task_args.size={rows} leaves no training row; set it lower"


def check_adapter(config: Config) -> Iterator[str]:
    adapter, learner = config.model.adapter, config.learner
    if adapter.kind == "qlora" and find_spec("bitsandbytes") is None:
        yield "model.adapter.kind: bitsandbytes is not installed; pip install 'rlpipe[qlora]', or set lora"
    if adapter.kind == "qlora" and learner.strategy == "zero3" and learner.zero3.offload_parameters:
        yield (
            "learner.zero3.offload_parameters: an NF4 weight has its scales outside of the parameter, and ZeRO-3 "
            "does not move them; set false, or model.adapter.kind=lora"
        )
    if adapter.kind == "qlora" and adapter.use_dora and learner.strategy == "zero3":
        yield (
            "model.adapter.use_dora: PEFT copies NF4 layers in DoRA's forward pass, and ZeRO-3 does not know the "
            "copies; set false, model.adapter.kind=lora, or learner.strategy=fsdp2"
        )
    for name in ("use_dora", "modules_to_save", "target_parameters", "merge"):
        if getattr(adapter, name) and adapter.kind == "none":
            yield f"model.adapter.{name}: model.adapter.kind=none has no adapter; set kind=lora, or leave it out"
    merges = config.weights.serve == "merged"
    if adapter.merge is False and config.algorithm.kind == "rl" and needs_merging(config.model) and not merges:
        yield (
            "model.adapter.merge: engines can only serve A and B of linear layers over an unchanged base, and this "
            "adapter has more; set null, or weights.serve=merged"
        )
    if config.model.normalize_weight_scales and adapter.kind == "qlora":
        yield (
            "model.normalize_weight_scales: the weights are already in NF4 when they would be checked; leave it "
            "out, or set model.adapter.kind=lora"
        )


def check_replay(config: Config) -> Iterator[str]:
    replay, advantage = config.replay, config.algorithm.advantage.name
    yield from check_function(config.algorithm.replay, "algorithm.replay")
    policy = config.algorithm.replay
    if policy.path is not None and policy.name != ReplayPolicyConfig().name:
        yield f"algorithm.replay.name: {policy.name} has no effect on the function of path; remove it, or set path=null"
    if policy != ReplayPolicyConfig() and not replay.reuse_groups:
        yield "algorithm.replay: no groups are kept to choose from; set replay.reuse_groups above 0, or leave it out"
    for name in changed(replay, ("reroll_below", "rerolls_per_step")):
        if replay.reroll_after is None:
            yield f"replay.{name}: nothing is sampled again; set replay.reroll_after, or leave it out"
    for name in ("refill_attempts", "reuse_groups"):
        if advantage in ("reinforce", "reinforce_plus_plus", "gae") and getattr(replay, name):
            yield (
                f"replay.{name}: with algorithm.advantage.name={advantage}, a group whose rewards are all the "
                "same trains like any other; set it to 0, or another advantage"
            )
        elif config.algorithm.completions_per_prompt == 1 and getattr(replay, name):
            yield (
                f"replay.{name}: the reward of a group's only rollout never differs from another; set it to 0, or "
                "algorithm.group_size to 2 or more"
            )
    if replay.reuse_groups and config.algorithm.correction.mode == "none":
        yield (
            "replay.reuse_groups: older policies sampled the groups that are reused; set algorithm.correction.mode, "
            "such as token_truncate, or 0 here"
        )
    cluster = config.cluster
    if cluster.dead_after_s < cluster.suspect_after_s:
        yield (
            f"cluster.dead_after_s: {cluster.dead_after_s:g} is less than cluster.suspect_after_s="
            f"{cluster.suspect_after_s:g}; set it to at least that"
        )


def check_reference(algorithm: AlgorithmConfig, model: ModelConfig) -> Iterator[str]:
    if algorithm.reference.sync_steps == 0:
        return
    if algorithm.samples_pairs:
        if not algorithm.preference.needs_reference:
            yield f"algorithm.reference.sync_steps: {algorithm.preference.loss} has no reference; set it to 0"
    elif algorithm.loss.beta == 0 and algorithm.reward_kl.coef == 0:
        yield "algorithm.reference.sync_steps: nothing uses the reference; set algorithm.loss.beta above 0, or 0 here"
    yield from check_moving_reference(algorithm, model)


def check_moving_reference(algorithm: AlgorithmConfig, model: ModelConfig) -> Iterator[str]:
    if algorithm.reference.sync_steps and model.adapter.kind != "none":
        yield (
            "algorithm.reference.sync_steps: a LoRA policy's reference is the base model, which does not move; "
            "set 0, or model=full"
        )


def check_rollout(rollout: RolloutConfig) -> Iterator[str]:
    size, gpus = rollout.tensor_parallel_size, rollout.num_gpus
    if rollout.engine == "hf" and size > 1:
        yield f"rollout.tensor_parallel_size: {size}, but only vllm splits a model; set rollout.engine=vllm, or 1"
    if (size > 1 or gpus > 1) and gpus != size:
        yield (
            f"rollout.num_gpus: {gpus:g} GPUs for an engine with rollout.tensor_parallel_size={size}; "
            "set both to the same"
        )
    for key, value in rollout.engine_args.items():
        if key in ENGINE_ARGUMENTS:
            yield f"rollout.engine_args.{key}: {_suggest_option(ENGINE_ARGUMENTS[key])}"
        if key in SPLITTING_ARGUMENTS and value and not gpus:
            yield f"rollout.engine_args.{key}: vllm can't split prompts of seeded requests on a CPU; delete it"


def check_sampling(rollout: RolloutConfig) -> Iterator[str]:
    sampling = rollout.sampling
    guides = {"guided_regex": sampling.guided_regex, "guided_json": sampling.guided_json}
    used = [name for name, guide in guides.items() if guide is not None]
    if used and rollout.engine == "hf":
        yield f"rollout.sampling.{used[0]}: only vllm guides completions; set rollout.engine=vllm, or {used[0]}=null"
    if len(used) > 1:
        yield "rollout.sampling.guided_json: a completion follows one guide; set guided_regex=null or guided_json=null"
    for key in sampling.extra:
        if key in SAMPLING_ARGUMENTS:
            yield f"rollout.sampling.extra.{key}: {_suggest_option(SAMPLING_ARGUMENTS[key])}"


def _suggest_option(option: str) -> str:
    return f"has an option of its own; set {option}" if option else "rlpipe sets it itself; delete it"


def check_lengths(config: Config) -> Iterator[str]:
    prompt, completion = config.data.max_prompt_tokens, config.rollout.sampling.max_tokens
    lengths = f"data.max_prompt_tokens={prompt} and rollout.sampling.max_tokens={completion}"
    limit = config.rollout.max_model_len
    if limit is not None and limit < prompt + completion:
        yield f"rollout.max_model_len: {limit} is less than {lengths} together; set {prompt + completion} or more"
    # Rows of EBFT may have further turns, which go on up to the limit of the engine.
    has_turns = config.environment.is_used or (config.algorithm.ebft.reward and limit is not None)
    conversation, limit = longest_conversation(config), config.learner.max_tokens_per_microbatch
    if has_turns and limit < conversation:
        longest = "episode" if config.environment.is_used else "conversation"
        yield (
            f"learner.max_tokens_per_microbatch: {limit} can't hold the longest {longest}, of {conversation} tokens; "
            f"set {conversation} or more, or rollout.max_model_len={limit}"
        )
    elif config.algorithm.samples_pairs and limit < 2 * (prompt + completion):
        yield (
            f"learner.max_tokens_per_microbatch: {limit} can't hold the longest pair, two rollouts of {lengths}; set "
            f"{2 * (prompt + completion)} or more"
        )
    elif limit < prompt + completion:
        yield (
            f"learner.max_tokens_per_microbatch: {limit} can't hold the longest rollout, {lengths}; set "
            f"{prompt + completion} or more"
        )


def check_environment(config: Config) -> Iterator[str]:
    environment, advantage = config.environment, config.algorithm.advantage
    if config.algorithm.samples_pairs and environment.is_used:
        yield "algorithm.loss.name: dpo compares single answers, not episodes; set another loss, or no environment"
    if advantage.credit == "turns" and not environment.takes_rows:
        yield (
            "algorithm.advantage.credit: only the turns of an environment or agent have rewards; set environment.path, "
            "or credit=episode"
        )
    elif advantage.credit == "turns" and (advantage.name != "rloo" or advantage.path is not None):
        yield (
            "algorithm.advantage.credit: turns compares each turn with those of the other episodes, as rloo does; set "
            "algorithm.advantage.name=rloo, without a path"
        )
    if not environment.is_used:
        return
    if config.algorithm.samples_greedy:
        yield "algorithm.advantage.name: remax has no greedy episodes to compare with; set rloo"
    names = [name for name in ("path", "agent", "tools") if getattr(environment, name)]
    name = f"environment.{names[0]}"
    if environment.port is not None and environment.num_processes > 1:
        yield "environment.port: each process that plays episodes needs its own port; set environment.num_processes=1"
    if environment.agent is not None and names != ["agent"]:
        extra = next(name for name in names if name != "agent")
        yield f"environment.agent: a program brings its own tools and answers; remove environment.{extra}, or agent"
    if environment.agent is not None and environment.isolation == "sandbox":
        yield "environment.isolation: an agent in a sandbox could not reach the policy; set process"
    if config.algorithm.ebft.reward:
        yield f"{name}: EBFT compares single completions with a ground truth; set algorithm.ebft.reward=false"
    if config.rollout.sampling.stop:
        yield f"{name}: rollout.sampling.stop would end turns without their end token; set it to []"
    if not config.data.chat:
        yield f"{name}: episodes are conversations; set data.chat=true"


def check_rewards(scoring: ScoringConfig, *, others: bool) -> Iterator[str]:
    """Yield contradictions of the rewards; with ``others``, the run has rewards besides these."""
    for name, reward in scoring.rewards.items():
        if ":" not in reward.path:
            yield (
                f"scoring.rewards.{name}.path: {reward.path!r:.200} names no function; write "
                "package.module:function or file.py:function"
            )
        if reward.isolation == "sandbox" and reward.num_gpus > 0:
            yield (
                f"scoring.rewards.{name}.num_gpus: a sandboxed call can't use the GPU of its process; set 0, or "
                "isolation=process"
            )
        yield from check_serving(name, reward)
    if scoring.rewards and not others and all(reward.weight == 0 for reward in scoring.rewards.values()):
        yield "scoring.rewards: every weight is 0, so nothing is rewarded; set a weight"


def check_serving(name: str, reward: RewardConfig) -> Iterator[str]:
    yield from check_replicas(f"scoring.rewards.{name}.serve", reward.serve)
    if not reward.is_served:
        return
    if reward.isolation == "sandbox":
        yield f"scoring.rewards.{name}.isolation: replicas have no sandbox; set process, or serve.replicas=0"
    for option in ("num_processes", "memory_gb"):
        if getattr(reward, option) is not None:
            yield f"scoring.rewards.{name}.{option}: it is scored by serve.replicas; set null, or serve.replicas=0"


def check_tracking(tracking: TrackingConfig) -> Iterator[str]:
    for name in ("wandb", "mlflow", "trackio"):
        if getattr(tracking, name) and find_spec(name) is None:
            yield f"tracking.{name}: it is not installed; pip install 'rlpipe[{name}]', or set tracking.{name}=false"


def check_health(health: Mapping[str, HealthLimits]) -> Iterator[str]:
    for name in health:
        if name not in HEALTH_RULES:
            yield f"health.{name}: no such rule; the rules are {', '.join(HEALTH_RULES)}"
