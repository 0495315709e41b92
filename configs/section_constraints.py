"""Rules within one section of a config: EBFT, preferences, the learner, loss masks, chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from rlpipe.configs.data_sources import ROLE_OPTION, mixed_sources, read_role_boundaries
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, CorrectionConfig, RewardKlConfig
from rlpipe.configs.schema.data_config import SET_BY_OPTIONS, SET_FOR_EACH_ROW, DataConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, FsdpConfig, LearnerConfig, OptimizerConfig, Zero3Config
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import ServeConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, did_you_mean

KIND = "algorithm.kind=ebft_strided"


def check_strided(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if config.model.attention == "flash_attention_2":
        yield f"model.attention: flash_attention_2 does not support the masks that {KIND} needs; set sdpa"
    if algorithm.reference.sync_steps:
        yield f"algorithm.reference.sync_steps: the feature network of {KIND} stays the initial policy; set 0"
    if algorithm.loss.entropy_target is not None:
        yield f"algorithm.loss.entropy_target: has no effect on {KIND}; set entropy_coef"
    if algorithm.correction != CorrectionConfig():
        yield f"algorithm.correction: has no effect on {KIND}, whose learner samples itself; leave it out"
    if algorithm.reward_kl != RewardKlConfig():
        yield f"algorithm.reward_kl: has no effect on {KIND}; set algorithm.loss.beta"
    yield from _check_advantage(algorithm)
    yield from check_features(algorithm)
    yield from _check_block_size(config)


def check_structured(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield contradictions of EBFT as a reward (``ebft.reward``)."""
    if algorithm.combine != "sum_then_normalize":
        yield "algorithm.combine: EBFT's rewards are summed first; set sum_then_normalize"
    if algorithm.ebft.ce_coef and algorithm.num_minibatches > algorithm.groups_per_step:
        yield (
            f"algorithm.num_minibatches: {algorithm.num_minibatches}, but a step has only {algorithm.groups_per_step} "
            f"ground truths; set {algorithm.groups_per_step} or fewer, or algorithm.ebft.ce_coef=0"
        )
    features = algorithm.ebft.features
    if features.weights == "own" and not features.serve.replicas:
        yield "algorithm.ebft.features.serve.replicas: 0 replicas compute no features; set 1 or more"
    yield from check_replicas("algorithm.ebft.features.serve", features.serve)
    if features.weights == "learner":
        if features.serve != ServeConfig(replicas=1):
            yield "algorithm.ebft.features.serve: weights=learner has no replicas; leave it out, or set weights=own"
        if algorithm.reference.sync_steps:
            yield (
                "algorithm.reference.sync_steps: this would change the model that weights=learner reads features of; "
                "set 0, or algorithm.ebft.features.weights=own"
            )
    yield from check_features(algorithm)


def check_replicas(option: str, serve: ServeConfig) -> Iterator[str]:
    least = max(serve.replicas, 1)
    if serve.max_replicas is not None and serve.max_replicas < least:
        yield f"{option}.max_replicas: {serve.max_replicas} is below replicas; set {least} or more"


def check_features(algorithm: AlgorithmConfig) -> Iterator[str]:
    features = algorithm.ebft.features
    if not features.layers or not all(0 <= layer <= 1 for layer in features.layers):
        yield (
            f"algorithm.ebft.features.layers: {list(features.layers)} are not shares of the depth; set [0.25,0.5,0.75]"
        )
    if features.whiten_layers == "each" and features.whitening == "none":
        yield "algorithm.ebft.features.whiten_layers: each has no effect without whitening; set whitening, or joint"
    if not features.alignment_coef and not features.diversity_coef:
        yield "algorithm.ebft.features.alignment_coef: without diversity_coef, 0 leaves no reward; set it above 0"


def _check_advantage(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantage, size = algorithm.advantage, algorithm.group_size
    by_batch = advantage.name in ("reinforce_baseline", "reinforce_plus_plus", "gpg")
    if advantage.path is not None:
        yield (
            "algorithm.advantage.path: blocks of raw text are scored in the learner, micro batch by micro batch, "
            "without rollouts; set it to null"
        )
    elif advantage.name in ("optimal_token_baseline", "remax", "gae"):
        yield f"algorithm.advantage.name: {advantage.name} does not work on blocks of raw text; set rloo"
    elif by_batch or (advantage.name in ("grpo", "pass_at_k") and advantage.scale == "batch"):
        yield (
            f"algorithm.advantage: {advantage.name} normalizes over the step's batch, but blocks are sampled and "
            "trained in micro batches; set name=rloo"
        )
    elif size < 2 and advantage.name not in ("rloo", "group_norm", "reinforce"):
        yield (
            f"algorithm.group_size: {size}, but {advantage.name} compares the samples of a block; set 2 or more, or "
            "name=rloo"
        )


def _check_block_size(config: Config) -> Iterator[str]:
    """Yield a problem if the shortest document with a block does not fit into a micro batch with its blocks."""
    strided, size = config.algorithm.ebft.strided, config.algorithm.group_size
    shortest = strided.context_length + strided.generate_tokens
    needed = shortest + -(-shortest * size * strided.generate_tokens // min(strided.stride, shortest))
    if config.learner.max_tokens_per_microbatch < needed:
        yield (
            f"learner.max_tokens_per_microbatch: {config.learner.max_tokens_per_microbatch} are too few for a block "
            f"with its context and {size} samples; set it to {needed} or more"
        )


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
        yield (
            f"learner.fsdp.wrap: {wrap!r:.200} is not a name or list of names; set blocks, size, none or "
            "[Qwen3DecoderLayer]"
        )
    if wrap != "size" and learner.fsdp.min_num_params != FsdpConfig().min_num_params:
        yield "learner.fsdp.min_num_params: only counts with learner.fsdp.wrap=size; set that, or leave it out"


def check_offload(learner: LearnerConfig) -> Iterator[str]:
    strategy, chunked = learner.strategy, learner.chunked
    if learner.offload == "policy" and strategy != "fsdp2":
        alternative = "learner.zero3.offload_optimizer=true" if strategy == "zero3" else "learner.offload=chunked"
        yield f"learner.offload: policy needs FSDP2, but learner.strategy={strategy}; set fsdp2 there, or {alternative}"
    if learner.offload != "chunked":
        if chunked != ChunkedConfig():
            yield f"learner.chunked: has no effect with learner.offload={learner.offload}; set learner.offload=chunked"
        return
    if strategy == "zero3":
        yield "learner.offload: chunked needs learner.strategy=single or fsdp2; set one of them"
    if strategy == "fsdp2" and learner.fsdp != FsdpConfig():
        yield "learner.fsdp: has no effect with learner.offload=chunked, which splits the policy itself; leave it out"
    if learner.optimizer.name != "adamw":
        yield (
            f"learner.optimizer.name: {learner.optimizer.name} does not work with learner.offload=chunked; set adamw, "
            "and learner.chunked.state_dtype=bfloat16 if memory is short"
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
                "learner.chunked.num_checkpointed to choose a number"
            )
        if model.attention == "flex_attention" and learner.chunked.num_checkpointed != 0:
            yield (
                "model.attention: learner.offload=chunked can't recompute flex_attention; set sdpa, "
                "or learner.chunked.num_checkpointed=0"
            )
    if not model.gradient_checkpointing:
        if chosen is not None:
            yield f"{name}: nothing is checkpointed; set model.gradient_checkpointing=true, or null here"
        return
    flex = model.attention == "flex_attention"
    if learner.strategy == "fsdp2" and flex:
        yield (
            "model.gradient_checkpointing: flex_attention needs reentrant checkpointing, and "
            "learner.strategy=fsdp2 does not support it; set model.attention=sdpa, or learner.strategy=zero3"
        )
    elif chosen is True and learner.strategy == "fsdp2":
        yield f"{name}: learner.strategy=fsdp2 needs non-reentrant checkpointing; set false or null"
    elif chosen is False and (learner.strategy == "zero3" or flex):
        needing = "learner.strategy=zero3" if learner.strategy == "zero3" else "model.attention=flex_attention"
        yield f"{name}: {needing} needs reentrant checkpointing; set true or null"


def check_optimizer(optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.name != "adamw" and find_spec("bitsandbytes") is None:
        yield "learner.optimizer.name: bitsandbytes is not installed; pip install 'rlpipe[qlora]', or set adamw"
    betas = optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield f"learner.optimizer.betas: {list(betas)!r:.200} is not two numbers from 0 to below 1, such as [0.9,0.999]"


def check_schedule(learner: LearnerConfig, algorithm: AlgorithmConfig) -> Iterator[str]:
    warmup = learner.schedule.warmup_steps
    if warmup > algorithm.num_steps:
        yield f"learner.schedule.warmup_steps: {warmup}, but algorithm.num_steps={algorithm.num_steps}; set it lower"


def check_step_size(algorithm: AlgorithmConfig, learner: LearnerConfig) -> Iterator[str]:
    """Yield a problem if a step has too few sequences to give every rank one in every optimizer update."""
    per_group = algorithm.group_size if algorithm.kind == "rl" and not algorithm.samples_pairs else 1
    sequences = algorithm.groups_per_step * per_group
    needed = algorithm.num_minibatches * learner.num_ranks
    if sequences < needed:
        yield (
            f"algorithm.groups_per_step: a step of {sequences} sequences can't give one to each of "
            f"{algorithm.num_minibatches} minibatches on {learner.num_ranks} ranks; "
            f"set it to {-(-needed // per_group)} or more"
        )


ROLES = ("system", "user", "assistant", "tool")
"""Roles whose turns can be distinguished without ``data.role_boundaries``."""


def check_masks(config: Config) -> Iterator[str]:
    kind = config.algorithm.kind
    shared = [*_check_masks(config.data, kind, DataConfig(source=config.data.source))]
    yield from shared
    if config.data.source == "mix" and not shared:
        for source in mixed_sources(config.data):
            for problem in _check_masks(source.data, kind, config.data):
                yield problem.replace("data.", f"data.sources.{source.name}.")


MASK_OPTIONS: tuple[str, ...] = ("loss_mask", "train_on_inputs", "roles_to_train", "train_on_eos", "role_boundaries")


def _counts_all(data: DataConfig) -> bool:
    return data.loss_mask == "all" or data.train_on_inputs or data.text_column is not None


def _check_long_texts(data: DataConfig) -> Iterator[str]:
    if data.long_texts == "chunks" and data.text_column is None:
        yield "data.long_texts: only texts are cut into chunks; set data.text_column, or data.long_texts=window"
    elif data.long_texts == "chunks" and data.streaming:
        yield "data.long_texts: chunks are counted at the start, so they need data.streaming=false"


def _check_effect(data: DataConfig, kind: str, inherited: DataConfig) -> Iterator[str]:
    """Yield the options of the loss mask that would be ignored, but not inherited ones, which others may need."""
    if kind == "rl":
        names, reason = MASK_OPTIONS, "algorithm.kind=rl trains the completions, not the rows"
    elif kind in ("reward_model", "process_reward_model"):
        names, reason = MASK_OPTIONS[:-1], f"algorithm.kind={kind} trains values of completions, not of tokens"
    elif data.text_column is not None:
        names, reason = MASK_OPTIONS[2:], "all tokens of data.text_column are trained"
    elif _counts_all(data):
        names, reason = MASK_OPTIONS[2:], "data.loss_mask=all or data.train_on_inputs=true trains all tokens"
    else:
        return
    for name in names:
        if getattr(data, name) != getattr(inherited, name):
            yield f"data.{name} has no effect: {reason}; remove it"


def _check_masks(data: DataConfig, kind: str, inherited: DataConfig) -> Iterator[str]:
    try:
        markers = read_role_boundaries(data.role_boundaries or ())
    except ConfigError as error:
        yield str(error)
        return
    yield from _check_effect(data, kind, inherited)
    yield from _check_long_texts(data)
    if kind == "rl" or _counts_all(data):
        return
    if data.role_boundaries is not None and not markers:
        yield f"{ROLE_OPTION}: empty, so no token of a conversation is trained; add entries, or set null"
        return
    known_roles = [marker.role for marker in markers] or ROLES
    by = f" by {ROLE_OPTION}" if markers else ""
    for role in data.roles_to_train:
        if role not in known_roles:
            hint = did_you_mean(role, known_roles, f"there are {', '.join(dict.fromkeys(known_roles))}")
            yield f"data.roles_to_train: no turns of {role!r:.200} can be recognized{by}{hint}"
    if not data.roles_to_train and data.train_on_eos != "all" and data.chat:
        yield "data.roles_to_train: empty, so no token of a conversation is trained; name roles, as in [assistant]"


def check_template(data: DataConfig) -> Iterator[str]:
    shared = [*_check_template(data, "data")]
    yield from shared
    if not shared:
        for source in mixed_sources(data):
            yield from _check_template(source.data, f"data.sources.{source.name}")


def _check_template(data: DataConfig, section: str) -> Iterator[str]:
    for name in data.chat_template_kwargs:
        option = f"{section}.chat_template_kwargs.{name}"
        if name in SET_BY_OPTIONS:
            yield f"{option}: can't be set here; set {SET_BY_OPTIONS[name].replace('data', section)} instead"
        elif name in SET_FOR_EACH_ROW:
            yield f"{option}: rlpipe sets it for each row; leave it out"
