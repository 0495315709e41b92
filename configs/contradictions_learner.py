"""Options of the learner that contradict each other or those of other parts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from rlpipe.configs.schema_algorithm import AlgorithmConfig
from rlpipe.configs.schema_learner import FsdpConfig, LearnerConfig, OptimizerConfig, Zero3Config
from rlpipe.configs.schema_model import ModelConfig


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
    names = wrap if isinstance(wrap, list | tuple) else [wrap]
    if not names or not all(isinstance(name, str) and name for name in names):
        yield f"learner.fsdp.wrap: {wrap!r} is no name or list of them; set blocks, size, none or [Qwen3DecoderLayer]"
    if wrap != "size" and learner.fsdp.min_num_params != FsdpConfig().min_num_params:
        yield "learner.fsdp.min_num_params: only counts with learner.fsdp.wrap=size; set that, or leave it out"


def check_checkpointing(model: ModelConfig, learner: LearnerConfig) -> Iterator[str]:
    """Reentrant checkpointing runs a block's backward pass inside another, where FSDP2 has no hooks; the other form
    compares what was saved, which ZeRO-3 has freed, and flex_attention compiles anew."""
    name, chosen = "model.reentrant_checkpointing", model.reentrant_checkpointing
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
    """Every rank needs a sequence in every optimizer update."""
    per_group = algorithm.group_size if algorithm.kind == "rl" else 1
    sequences = algorithm.groups_per_step * per_group
    needed = algorithm.num_minibatches * learner.num_ranks
    if sequences < needed:
        yield (
            f"algorithm.groups_per_step: a step of {sequences} sequences can't give one to each of "
            f"{algorithm.num_minibatches} minibatches on {learner.num_ranks} ranks; "
            f"set it to {-(-needed // per_group)} or more"
        )
