"""Rules within one section of a config: EBFT, preferences, the learner, loss masks, chat templates."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec

from rlpipe.configs.data_sources import ROLE_OPTION, all_sources, mixed_sources, read_role_boundaries
from rlpipe.configs.options import leaves, to_tree
from rlpipe.configs.schema.algorithm_config import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    RewardKlConfig,
)
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, FsdpConfig, LearnerConfig, OptimizerConfig, Zero3Config
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig
from rlpipe.configs.schema.rollout_config import ServeConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError

KIND = "algorithm.kind=ebft_strided"
PREFERENCE = "algorithm.preference"
PRECOMPUTE = f"{PREFERENCE}.precompute_ref_log_probs"
PREFERENCE_TAKERS = {
    "label_smoothing": ("dpo", "robust", "exo", "simpo", "cpo"),
    "margin": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Losses that an option has an effect on."""
OF_ROWS = ("preference", "reward_model", "process_reward_model")
"""Kinds of algorithms with rows of their own; each has a section of its name."""
OF_ROLLOUTS = (
    "algorithm.advantage",
    "algorithm.loss",
    "algorithm.correction",
    "algorithm.replay",
    "algorithm.reward_kl",
    "algorithm.critic",
    "algorithm.ebft",
    "algorithm.combine",
    "replay",
)
"""Options, and sections of them, that only rollouts, or blocks of raw text, have a use for."""


def check_strided(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if config.model.attention == "flash_attention_2":
        yield f"model.attention: flash_attention_2 does not support the masks that {KIND} needs; set sdpa"
    if algorithm.stop_loss is not None:
        yield "algorithm.stop_loss: only has an effect in SFT; set it to null"
    if algorithm.reference.sync_steps:
        yield f"algorithm.reference.sync_steps: the feature network of {KIND} stays the initial policy; set 0"
    if algorithm.loss.entropy_target is not None:
        yield f"algorithm.loss.entropy_target: has no effect on {KIND}; set entropy_coef"
    if algorithm.reward_kl != RewardKlConfig():
        yield f"algorithm.reward_kl: has no effect on {KIND}; set algorithm.loss.beta"
    yield from _check_advantage(algorithm)
    yield from check_features(algorithm)
    yield from _check_room(config)


def check_structured(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield contradictions of EBFT as a reward (``ebft.reward``)."""
    if algorithm.combine != "sum_then_normalize":
        yield "algorithm.combine: EBFT's rewards are summed first; set sum_then_normalize"
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


def check_reward_kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield contradictions of the KL in the reward, and of other advantages that the learner computes."""
    name, options, advantage = "algorithm.reward_kl", algorithm.reward_kl, algorithm.advantage
    if advantage.name != "gae" and (advantage.gamma, advantage.lam) != (1.0, 1.0):
        yield f"algorithm.advantage.gamma: gamma and lam have no effect on {advantage.name}; leave them out, or set gae"
    if not algorithm.has_critic and algorithm.critic != CriticConfig():
        yield "algorithm.critic: only algorithm.advantage.name=gae has a critic; set that, or leave it out"
    if algorithm.has_critic and (algorithm.ebft.reward or algorithm.combine == "normalize_then_sum"):
        part = "algorithm.ebft.reward" if algorithm.ebft.reward else "algorithm.combine"
        yield f"{part}: gae compares plain rewards with a critic's values; leave it out, or set rloo"
    if algorithm.credits_in_learner and algorithm.loss.mask_truncated:
        yield (
            "algorithm.loss.mask_truncated: the learner computes the advantages from the log-probs of all rollouts "
            "(reward_kl, optimal_token_baseline, gae), and has none of these; set false"
        )
    if not options.coef and options != RewardKlConfig():
        yield f"{name}: there is no KL in the reward with coef=0, which stays 0; set {name}.coef, or leave it out"
    elif options.target is None and options.horizon != RewardKlConfig().horizon:
        yield f"{name}.horizon: coef is constant without a target; set {name}.target, or leave it out"
    elif options.coef and algorithm.samples_pairs:
        yield f"{name}.coef: has no effect on the loss dpo, which has a reference of its own; set 0"
    elif options.coef and advantage.path is not None:
        yield f"{name}.coef: only built-in advantages take the KL; set 0, or algorithm.advantage.path=null"
    elif options.coef and advantage.credit == "turns":
        yield f"{name}.coef: rewards of single turns take no KL; set 0, or algorithm.advantage.credit=episode"


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
            f"algorithm.advantage: {advantage.name} normalizes over the step's batch, but blocks are drawn and trained "
            "in micro batches; set name=rloo"
        )
    elif size < 2 and advantage.name not in ("rloo", "group_norm", "reinforce"):
        yield (
            f"algorithm.group_size: {size}, but {advantage.name} compares the samples of a block; set 2 or more, or "
            "name=rloo"
        )


def _check_room(config: Config) -> Iterator[str]:
    """Yield a problem if the shortest document with a block does not fit into a micro batch with its blocks."""
    strided, size = config.algorithm.ebft.strided, config.algorithm.group_size
    shortest = strided.context_length + strided.generate_tokens
    needed = shortest + -(-shortest * size * strided.generate_tokens // strided.stride)
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
        other = "learner.zero3.offload_optimizer=true" if strategy == "zero3" else "learner.offload=chunked"
        yield f"learner.offload: policy needs FSDP2, but learner.strategy={strategy}; set fsdp2 there, or {other}"
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
    known = [marker.role for marker in markers] or ROLES
    by = f" by {ROLE_OPTION}" if markers else ""
    for role in data.roles_to_train:
        if role not in known:
            nearest = get_close_matches(role, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(dict.fromkeys(known))}"
            yield f"data.roles_to_train: no turns of {role!r:.200} can be recognized{by}; {hint}"
    if not data.roles_to_train and data.train_on_eos != "all" and data.chat:
        yield "data.roles_to_train: empty, so no token of a conversation is trained; name roles, as in [assistant]"


OPTIONS = {"tools": "data.tools", "chat_template": "model.chat_template"}
GIVEN = {
    *("conversation", "conversations", "messages", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("return_assistant_tokens_mask", "return_dict", "return_tensors", "padding", "truncation", "max_length"),
    "tokenizer_kwargs",
}


def check_template(data: DataConfig) -> Iterator[str]:
    shared = [*_check_template(data, "data")]
    yield from shared
    if not shared:
        for source in mixed_sources(data):
            yield from _check_template(source.data, f"data.sources.{source.name}")


def _check_template(data: DataConfig, at: str) -> Iterator[str]:
    for name in data.chat_template_kwargs:
        option = f"{at}.chat_template_kwargs.{name}"
        if name in OPTIONS:
            yield f"{option}: can't be set here; set {OPTIONS[name].replace('data', at)} instead"
        elif name in GIVEN:
            yield f"{option}: rlpipe sets it for each row; leave it out"


def check_unused(config: Config) -> Iterator[str]:
    """Yield the changed options that an algorithm on rows of preferences or labels ignores.

    Those of engines and rewards are not among them, because ``rlpipe eval`` reads them.
    """
    kind, usual = config.algorithm.kind, dict(leaves(to_tree(Config())))
    unused = (*OF_ROLLOUTS, *(f"algorithm.{other}" for other in OF_ROWS if other != kind))
    for name, value in leaves(to_tree(config)):
        is_unused = any(name == option or name.startswith(f"{option}.") for option in unused)
        has_own_check = kind == "preference" and name == "algorithm.loss.beta"
        if is_unused and not has_own_check and (name, value) not in usual.items():
            yield f"{name}: has no effect with algorithm.kind={kind}; remove it"


def check_preference(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    yield from check_unused(config)
    yield from _check_preference_loss(algorithm.preference)
    yield from _check_kto_update(algorithm)
    if algorithm.loss.beta:
        yield f"algorithm.loss.beta: has no effect on preferences; set {PREFERENCE}.beta"
    if algorithm.stop_loss is not None:
        yield "algorithm.stop_loss: only has an effect in SFT; set it to null"
    if algorithm.reference.sync_steps and not algorithm.preference.needs_reference:
        yield f"algorithm.reference.sync_steps: {algorithm.preference.loss} has no reference; set it to 0"
    yield from _check_precomputed(config)
    yield from _check_preference_rows(config)
    if algorithm.preference.loss == "kto":
        for name, value in (("loss_mask", "all"), ("train_on_inputs", True)):
            if any(getattr(source.data, name) == value for source in all_sources(config.data)):
                yield f"data.{name}: kto trains only completions, so prompts can't count; remove it"


def _check_precomputed(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if not algorithm.preference.precompute_ref_log_probs:
        return
    if not algorithm.preference.needs_reference:
        yield f"{PRECOMPUTE}: {algorithm.preference.loss} has no reference; remove it"
    if algorithm.reference.sync_steps:
        yield f"{PRECOMPUTE}: log-probs of a reference that moves can't be computed before; set reference.sync_steps=0"
    if any(source.data.streaming for source in all_sources(config.data)):
        yield f"{PRECOMPUTE}: the rows of a stream would be read twice; set data.streaming=false, or remove it"


def check_reward_model(config: Config) -> Iterator[str]:
    model, kind = config.model, config.algorithm.kind
    yield from check_unused(config)
    if config.learner.offload == "chunked":
        yield "learner.offload: chunked can't hold a reward model so far; set none, or policy with strategy=fsdp2"
    if model.images:
        yield f"model.images: {kind} takes no images so far; set false"
    if model.adapter.kind == "qlora":
        yield f"model.adapter.kind: qlora has no whole weights, which {kind} exports; set lora, or model=full"
    if model.adapter.path is not None:
        yield (
            "model.adapter.path: an adapter without a reward head can't be trained further; merge it (rlpipe merge), "
            "and give the merged model as model.path"
        )
    if config.algorithm.stop_loss is not None:
        yield "algorithm.stop_loss: only has an effect in SFT; set it to null"
    if config.algorithm.reference.sync_steps:
        yield f"algorithm.reference.sync_steps: {kind} has no reference; set it to 0"
    yield from _check_preference_rows(config)


def _check_preference_rows(config: Config) -> Iterator[str]:
    has_steps = config.algorithm.kind == "process_reward_model"
    for source in all_sources(config.data):
        at = f"data.sources.{source.name}" if source.name else "data"
        if source.data.text_column is not None:
            what = "labels are of steps after" if has_steps else "preferences are between completions of"
            yield f"{at}.text_column: {what} a prompt; set it to null"
        if source.data.source == "reasoning_gym" and source.data.transform is None:
            what = "labelled steps" if has_steps else "preferences"
            yield f"{at}.source: tasks of reasoning_gym have no {what}; set jsonl, parquet or datasets"


def check_sampled_pairs(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield contradictions of ``algorithm.loss.name=dpo``, which compares rollouts of a group."""
    yield from _check_preference_loss(algorithm.preference)
    if algorithm.preference.precompute_ref_log_probs:
        yield f"{PRECOMPUTE}: rollouts are not known before they are sampled; remove it"
    if not algorithm.preference.takes_pairs:
        yield f"{PREFERENCE}.loss: kto takes no pairs; set dpo, ipo or another loss of pairs"
    if algorithm.ebft.reward:
        yield "algorithm.loss.name: dpo has no part for EBFT's losses; set algorithm.ebft.reward=false, or another loss"
    if algorithm.loss.top_entropy_quantile < 1:
        yield "algorithm.loss.top_entropy_quantile: has no effect on the loss dpo; set it to 1"
    for name in ("beta", "entropy_coef"):
        if getattr(algorithm.loss, name):
            yield f"algorithm.loss.{name}: has no effect on the loss dpo; set it to 0"
    if algorithm.loss.entropy_target is not None:
        yield "algorithm.loss.entropy_target: has no effect on the loss dpo; leave it out"
    if algorithm.combine != AlgorithmConfig().combine:
        yield "algorithm.combine: the loss dpo compares sums of rewards; leave it out"
    if algorithm.correction != CorrectionConfig():
        yield "algorithm.correction: the loss dpo has no importance weights; leave it out"
    if algorithm.advantage != AdvantageConfig():
        yield "algorithm.advantage: the loss dpo compares rewards in pairs, without advantages; leave it out"


def _check_preference_loss(preference: PreferenceConfig) -> Iterator[str]:
    loss, default = preference.loss, PreferenceConfig()
    for name, losses in PREFERENCE_TAKERS.items():
        if loss not in losses and getattr(preference, name) != getattr(default, name):
            yield f"{PREFERENCE}.{name}: has no effect on {loss}, only on {', '.join(losses)}; remove it"
    if preference.label_smoothing == 0.5:
        yield f"{PREFERENCE}.label_smoothing: with half of all labels wrong there is nothing to learn; set it below 0.5"
    if loss == "exo" and not preference.label_smoothing:
        yield f"{PREFERENCE}.label_smoothing: exo needs more than 0; set 0.001"
    if loss == "orpo" and not preference.cross_entropy_coef:
        yield (
            f"{PREFERENCE}.cross_entropy_coef: orpo's odds ratio is added to a cross-entropy; set 1, or algorithm=orpo"
        )
    if loss == "kto" and preference.cross_entropy_coef:
        yield f"{PREFERENCE}.cross_entropy_coef: kto has no chosen completions; set it to 0"
    if loss == "kto" and not preference.desirable_weight and not preference.undesirable_weight:
        yield f"{PREFERENCE}.desirable_weight: with both weights 0 nothing is trained; set one above 0"


def _check_kto_update(algorithm: AlgorithmConfig) -> Iterator[str]:
    rows = algorithm.groups_per_step // algorithm.num_minibatches
    if algorithm.preference.loss == "kto" and rows < 2:
        yield (
            "algorithm.groups_per_step: kto estimates the KL from the completions of other rows, so an update needs "
            f"at least 2; set it to {2 * algorithm.num_minibatches} or more"
        )
