"""Contradictions among the options of preference learning and of training reward models."""

from __future__ import annotations

from collections.abc import Iterator

from rlpipe.configs.data_sources import all_sources
from rlpipe.configs.schema.algorithm_config import AdvantageConfig, AlgorithmConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig
from rlpipe.configs.schema.root_config import Config

AT = "algorithm.preference"
TAKERS = {
    "label_smoothing": ("dpo", "robust", "exo", "simpo", "cpo"),
    "margin": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Losses that an option has an effect on."""


def check_preference(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    yield from _check_loss(algorithm.preference)
    yield from _check_update(algorithm)
    if algorithm.loss.beta:
        yield f"algorithm.loss.beta: has no effect on preferences; set {AT}.beta"
    if algorithm.stop_loss is not None:
        yield "algorithm.stop_loss: only has an effect in SFT; set it to null"
    if algorithm.reference.sync_steps and not algorithm.preference.needs_reference:
        yield f"algorithm.reference.sync_steps: {algorithm.preference.loss} has no reference; set it to 0"
    yield from _check_rows(config)
    if algorithm.preference.loss == "kto":
        for name, value in (("loss_mask", "all"), ("train_on_inputs", True)):
            if any(getattr(source.data, name) == value for source in all_sources(config.data)):
                yield f"data.{name}: kto trains only completions, so prompts can't count; remove it"


def check_reward_model(config: Config) -> Iterator[str]:
    model, learner, kind = config.model, config.learner, config.algorithm.kind
    if learner.strategy != "single" or learner.num_ranks > 1:
        yield f"learner.strategy: {kind} trains on one rank without sharding so far; set single, and num_ranks=1"
    if learner.offload != "none":
        yield f"learner.offload: {learner.offload} can't hold a reward model so far; set none"
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
    yield from _check_rows(config)


def _check_rows(config: Config) -> Iterator[str]:
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
    yield from _check_loss(algorithm.preference)
    if not algorithm.preference.takes_pairs:
        yield f"{AT}.loss: kto takes no pairs; set dpo, ipo or another loss of pairs"
    if algorithm.ebft.reward:
        yield "algorithm.loss.name: dpo has no part for EBFT's losses; set algorithm.ebft.reward=false, or another loss"
    if algorithm.loss.top_entropy_quantile < 1:
        yield "algorithm.loss.top_entropy_quantile: has no effect on the loss dpo; set it to 1"
    for name in ("beta", "entropy_coef"):
        if getattr(algorithm.loss, name):
            yield f"algorithm.loss.{name}: has no effect on the loss dpo; set it to 0"
    if algorithm.advantage != AdvantageConfig():
        yield "algorithm.advantage: the loss dpo compares rewards in pairs, without advantages; leave it out"


def _check_loss(preference: PreferenceConfig) -> Iterator[str]:
    loss, default = preference.loss, PreferenceConfig()
    for name, losses in TAKERS.items():
        if loss not in losses and getattr(preference, name) != getattr(default, name):
            yield f"{AT}.{name}: has no effect on {loss}, only on {', '.join(losses)}; remove it"
    if preference.label_smoothing == 0.5:
        yield f"{AT}.label_smoothing: with half of all labels wrong there is nothing to learn; set it below 0.5"
    if loss == "exo" and not preference.label_smoothing:
        yield f"{AT}.label_smoothing: exo needs more than 0; set 0.001"
    if loss == "orpo" and not preference.cross_entropy_coef:
        yield f"{AT}.cross_entropy_coef: orpo's odds ratio is added to a cross-entropy; set 1, or algorithm=orpo"
    if loss == "kto" and preference.cross_entropy_coef:
        yield f"{AT}.cross_entropy_coef: kto has no chosen completions; set it to 0"
    if loss == "kto" and not preference.desirable_weight and not preference.undesirable_weight:
        yield f"{AT}.desirable_weight: with both weights 0 nothing is trained; set one above 0"


def _check_update(algorithm: AlgorithmConfig) -> Iterator[str]:
    rows = algorithm.groups_per_step // algorithm.num_minibatches
    if algorithm.preference.loss == "kto" and rows < 2:
        yield (
            "algorithm.groups_per_step: kto estimates the KL from the completions of other rows, so an update needs "
            f"at least 2; set it to {2 * algorithm.num_minibatches} or more"
        )
