"""Checks for options of the learner that contradict each other or those of other sections."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import (
    ChunkedConfig,
    FsdpConfig,
    LearnerConfig,
    OptimizerConfig,
    Zero3Config,
)
from rlpipe.configs.schema.model_config import ModelConfig


def check_learner(learner: LearnerConfig) -> Iterator[str]:
    strategy, wrap = learner.strategy, learner.fsdp.wrap
    if strategy == "single" and learner.num_ranks > 1:
        yield f"learner.num_ranks: {learner.num_ranks}, but learner.strategy=single; set fsdp2 or zero3 there, or 1"
    if learner.num_ranks > 1 and 0 < learner.num_gpus < 1:
        yield f"learner.num_gpus: with {learner.num_gpus} of a GPU two ranks would share one, which NCCL refuses; set 1"
    if strategy != "fsdp2" and learner.fsdp != FsdpConfig():
        yield f"learner.fsdp: has no effect with learner.strategy={strategy}; set learner.strategy=fsdp2"
    if strategy != "zero3" and learner.zero3 != Zero3Config():
        yield f"learner.zero3: has no effect with learner.strategy={strategy}; set learner.strategy=zero3"
    if strategy == "zero3" and find_spec("deepspeed") is None:
        yield "learner.strategy: deepspeed is not installed; pip install 'rlpipe[zero3]', or set fsdp2"
    yield from check_offload(learner)
    names = wrap if isinstance(wrap, list | tuple) else [wrap]
    if not names or not all(isinstance(name, str) and name for name in names):
        yield f"learner.fsdp.wrap: {wrap!r} is no name or list of them; set blocks, size, none or [Qwen3DecoderLayer]"
    if wrap != "size" and learner.fsdp.min_num_params != FsdpConfig().min_num_params:
        yield "learner.fsdp.min_num_params: only counts with learner.fsdp.wrap=size; set that, or leave it out"


def check_offload(learner: LearnerConfig) -> Iterator[str]:
    strategy, chunked = learner.strategy, learner.chunked
    if learner.offload == "policy" and strategy != "fsdp2":
        other = "learner.zero3.offload_optimizer=true" if strategy == "zero3" else "learner.offload=chunked"
        yield f"learner.offload: policy is FSDP2's, but learner.strategy={strategy}; set fsdp2 there, or {other}"
    if learner.offload != "chunked":
        if chunked != ChunkedConfig():
            yield f"learner.chunked: has no effect with learner.offload={learner.offload}; set learner.offload=chunked"
        return
    if strategy == "zero3":
        yield "learner.offload: chunked goes with learner.strategy=single or fsdp2; set one of them"
    if strategy == "fsdp2" and learner.fsdp != FsdpConfig():
        yield "learner.fsdp: has no effect with learner.offload=chunked, which cuts the policy itself; leave it out"
    if learner.optimizer.name != "adamw":
        yield (
            f"learner.optimizer.name: {learner.optimizer.name} has no moments that chunks can hold; set adamw, and "
            "learner.chunked.state_dtype=bfloat16 where memory is short"
        )
    if chunked.sharing != "auto" and learner.num_ranks == 1:
        yield f"learner.chunked.sharing: {chunked.sharing}, but learner.num_ranks=1; set auto, or more ranks"


def check_checkpointing(model: ModelConfig, learner: LearnerConfig) -> Iterator[str]:
    """Yield contradictions of gradient checkpointing.

    The reentrant form runs a block's backward pass inside another one, where FSDP2 has no hooks. The other form
    compares the recomputed tensors with the saved ones; ZeRO-3 has freed these, and flex_attention compiles anew.
    """
    name, chosen = "model.reentrant_checkpointing", model.reentrant_checkpointing
    if learner.offload == "chunked":
        if model.gradient_checkpointing:
            yield (
                "model.gradient_checkpointing: learner.offload=chunked decides for each layer itself; set false, and "
                "learner.chunked.num_checkpointed where you know better"
            )
        if model.attention == "flex_attention" and learner.chunked.num_checkpointed != 0:
            yield (
                "model.attention: flex_attention can't be computed again as learner.offload=chunked does it; set sdpa, "
                "or learner.chunked.num_checkpointed=0"
            )
    if not model.gradient_checkpointing:
        if chosen is not None:
            yield f"{name}: nothing is checkpointed; set model.gradient_checkpointing=true, or null here"
        return
    flex = model.attention == "flex_attention"
    if learner.strategy == "fsdp2" and flex:
        yield (
            "model.gradient_checkpointing: flex_attention needs its reentrant form, and learner.strategy=fsdp2 the "
            "other; set model.attention=sdpa, or learner.strategy=zero3"
        )
    elif chosen is True and learner.strategy == "fsdp2":
        yield f"{name}: learner.strategy=fsdp2 needs the form that is not reentrant; set false or null"
    elif chosen is False and (learner.strategy == "zero3" or flex):
        needing = "learner.strategy=zero3" if learner.strategy == "zero3" else "model.attention=flex_attention"
        yield f"{name}: {needing} needs the reentrant form; set true or null"


def check_optimizer(optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.name != "adamw" and find_spec("bitsandbytes") is None:
        yield "learner.optimizer.name: bitsandbytes is not installed; pip install 'rlpipe[qlora]', or set adamw"
    betas = optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"learner.optimizer.betas: {list(betas)} is not two numbers from 0 to below 1, such as [0.9,0.999]"


def check_schedule(learner: LearnerConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    warmup = learner.schedule.warmup_steps
    if warmup > algorithm.num_steps:
        yield f"learner.schedule.warmup_steps: {warmup}, but algorithm.num_steps={algorithm.num_steps}; set it lower"


def check_step_size(algorithm: AlgorithmConfig, learner: LearnerConfig) -> Iterator[str]:
    """Yield a problem if a step has too few sequences to give every rank one in every optimizer update."""
    per_group = algorithm.group_size if algorithm.kind == "rl" else 1
    sequences = algorithm.groups_per_step * per_group
    needed = algorithm.num_minibatches * learner.num_ranks
    if sequences < needed:
        yield (
            f"algorithm.groups_per_step: a step of {sequences} sequences can't give one to each of "
            f"{algorithm.num_minibatches} minibatches on {learner.num_ranks} ranks; "
            f"set it to {-(-needed // per_group)} or more"
        )
