"""The prompts, or the sequences to train, that a run's config names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import numpy as np

from rlpipe.algorithms.strided import document_budget
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, EbftConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.preference_config import ProcessRewardConfig, RewardModelConfig, RowOptions
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.cached_rows import PreparedRow, Rendering, prompt_settings, sequence_settings
from rlpipe.data.held_out import KeepOut, Renderers, Split
from rlpipe.data.packing import pack_labelled, pack_step
from rlpipe.data.pairs import PreferenceRenderer, RewardRenderer, StepRenderer
from rlpipe.data.render.processor import ImageProcessor
from rlpipe.data.row import Row, RowLocation, SkipKind, UnusableRow
from rlpipe.data.row_renderer import GroundTruthRenderer, PromptRenderer, SequenceRenderer, num_chunks
from rlpipe.data.sources.row_source import Cursor, RowSource
from rlpipe.errors import ConfigError
from rlpipe.types import Prompt, Rollout, TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PromptSource = RowSource[Prompt]
SequenceSource = RowSource[Rollout]


def open_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    ebft: EbftConfig | None = None,
    processor: ImageProcessor | None = None,
    as_rows: bool = False,
    require_usable_rows: bool = True,
    max_truth_tokens: int | None = None,
) -> tuple[PromptSource, list[Prompt]]:
    """Open the source of training prompts, and the held-out prompts; with ``ebft``, only rows with a ground truth.

    With ``as_rows`` rows are left as they are, for an environment that makes the first messages from them.
    ``max_truth_tokens`` is the limit on a prompt with its ground truth, if it is trained on.

    The held-out rows are those of ``data.held_out.path`` or ``data.held_out.split``, or ``data.held_out.size`` rows
    that ``seed`` splits off. A training row whose rendered prompt equals a held-out one is skipped. Raises
    ``DataError`` if the data can't be read, lacks a column, or, if ``require_usable_rows``, yields no prompt.
    """

    def renderers_of(data: DataConfig) -> Renderers[Prompt]:
        renderer: PromptRenderer | RawRowRenderer
        renderer = RawRowRenderer() if as_rows else PromptRenderer(tokenizer, data, processor)
        truth = None if ebft is None else GroundTruthRenderer(tokenizer, data, ebft)

        def render(row: Row, at: RowLocation) -> Prompt:
            if isinstance(row, PreparedRow):
                return row.prompt(at)
            prompt = renderer.render(row, at)
            return prompt if truth is None else truth.prepare(prompt)

        def render_trained(row: Row, at: RowLocation, keep_out: KeepOut | None) -> Prompt:
            prompt = render(row, at)
            if max_truth_tokens is not None and (length := len(prompt.with_truth()[0])) > max_truth_tokens:
                limit = f"learner.max_tokens_per_microbatch={max_truth_tokens}"
                reason = f"{length} tokens with its ground truth, more than {limit}"
                raise UnusableRow(reason, SkipKind.TOO_LONG)
            if keep_out is not None:
                keep_out(prompt)
            return prompt

        return Renderers(check=renderer.check, prompt=render, trained=render_trained)

    rendering = Rendering(tokenizer=tokenizer, processor=processor, settings=prompt_settings(ebft, as_rows=as_rows))
    split = Split(data, rendering, renderers_of, seed, require_usable_rows=require_usable_rows)
    return split.source(), split.held_out


class RawRowRenderer:
    """A renderer that keeps rows as they are, in ``task``."""

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Accept any columns."""

    def render(self, row: Row, at: RowLocation) -> Prompt:
        return Prompt(prompt_id=at.row, epoch=at.epoch, token_ids=np.zeros(0, np.int32), prompt=[], task={**row})


def open_sft_rows(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int,
    processor: ImageProcessor | None = None,
    preference: RowOptions | None = None,
    pads_pairs: Callable[[], bool] = lambda: False,
    require_usable_rows: bool = True,
) -> tuple[SequenceSource, list[Rollout]]:
    """Open the source of sequences of at most ``max_tokens`` tokens, and the held-out sequences.

    They are those of supervised fine-tuning, or with ``preference`` pairs or labelled completions, or rows for a reward
    model; ``pads_pairs`` is that of ``PreferenceRenderer``.

    With the same ``data`` and ``seed`` the held-out rows are those of ``open_prompts``. A conversation's prompt is all
    before its first assistant turn, a text's prompt all of it. A row without a renderable prompt can't be held out, and
    is trained on if its sequence can be rendered. Raises ``DataError`` as ``open_prompts`` does.
    """

    def renderers_of(data: DataConfig) -> Renderers[Rollout]:
        renderer = sequence_renderer(
            tokenizer, data, max_tokens=max_tokens, processor=processor, preference=preference, pads_pairs=pads_pairs
        )

        def render(row: Row, at: RowLocation) -> Prompt:
            return row.sequence_prompt(at) if isinstance(row, PreparedRow) else renderer.prompt(row, at)

        def render_trained(row: Row, at: RowLocation, keep_out: KeepOut | None) -> Rollout:
            if keep_out is not None:
                try:
                    prompt = render(row, at)
                except UnusableRow:
                    pass  # a row without a prompt equals no held-out one, and may still make a sequence
                else:
                    keep_out(prompt)
            rendered = row.sequence() if isinstance(row, PreparedRow) else renderer.whole(row, at)
            return renderer.fit(rendered, at)

        def count_chunks(row: Row) -> int:
            assert isinstance(renderer, SequenceRenderer), "only texts are cut into chunks"
            encoded = row.sequence().encoded if isinstance(row, PreparedRow) else renderer.encoded_text(row)
            return num_chunks(encoded, max_tokens)

        chunks = count_chunks if data.long_texts == "chunks" else None
        return Renderers(check=renderer.check, prompt=render, trained=render_trained, count_chunks=chunks)

    rendering = Rendering(tokenizer=tokenizer, processor=processor, settings=sequence_settings(data, preference))
    split = Split(data, rendering, renderers_of, seed, require_usable_rows=require_usable_rows)
    return split.source(), split.render_held_out()


AnyRenderer = SequenceRenderer | PreferenceRenderer | StepRenderer


def sequence_renderer(
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    max_tokens: int,
    processor: ImageProcessor | None,
    preference: RowOptions | None,
    pads_pairs: Callable[[], bool] = lambda: False,
) -> AnyRenderer:
    """Return the renderer of rows that are trained: for fine-tuning, for preferences, or for a reward model."""
    if preference is None:
        return SequenceRenderer(tokenizer, data, max_tokens=max_tokens, processor=processor)
    if isinstance(preference, RewardModelConfig):
        return RewardRenderer(tokenizer, data, preference, max_tokens=max_tokens, pads_pairs=pads_pairs)
    if isinstance(preference, ProcessRewardConfig):
        return StepRenderer(tokenizer, data, preference, max_tokens=max_tokens)
    return PreferenceRenderer(
        tokenizer,
        data,
        takes_pairs=preference.takes_pairs,
        max_tokens=max_tokens,
        processor=processor,
        pads_pairs=pads_pairs,
    )


def open_source(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSource | SequenceSource:
    """Open the training rows to look at them, even if none is usable; raise ``DataError`` as ``open_prompts`` does."""
    if config.algorithm.kind == "rl":
        return open_run_prompts(config, config.model, tokenizer, require_usable_rows=False)[0]
    return open_run_sequences(
        config.data,
        config.model,
        tokenizer,
        algorithm=config.algorithm,
        learner=config.learner,
        seed=config.seed,
        require_usable_rows=False,
    )[0]


def open_run_prompts(
    config: Config, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, require_usable_rows: bool = True
) -> tuple[PromptSource, list[Prompt]]:
    """Open the prompts of an RL run with ``open_prompts``; ``model`` may be a prepared form of the config's model."""
    trains_truth = config.algorithm.ebft.reward and config.algorithm.ebft.ce_coef
    return open_prompts(
        config.data,
        tokenizer,
        seed=config.seed,
        ebft=ebft_with_reward(config.algorithm),
        processor=processor_of(config.algorithm, model),
        as_rows=config.environment.takes_rows,
        require_usable_rows=require_usable_rows,
        max_truth_tokens=config.learner.max_tokens_per_microbatch if trains_truth else None,
    )


def open_run_sequences(
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    algorithm: AlgorithmConfig,
    learner: LearnerConfig,
    seed: int,
    pads_pairs: Callable[[], bool] = lambda: False,
    require_usable_rows: bool = True,
) -> tuple[SequenceSource, list[Rollout]]:
    """Open the sequences of a run that trains on rows with ``open_sft_rows``."""
    return open_sft_rows(
        data,
        tokenizer,
        seed=seed,
        max_tokens=longest_row(algorithm, learner),
        processor=processor_of(algorithm, model),
        preference=preference_of(algorithm),
        pads_pairs=pads_pairs,
        require_usable_rows=require_usable_rows,
    )


def preference_of(algorithm: AlgorithmConfig) -> RowOptions | None:
    """Return the options of preferences or a reward model if the run learns from them, else None."""
    options: dict[str, RowOptions] = {
        "preference": algorithm.preference,
        "reward_model": algorithm.reward_model,
        "process_reward_model": algorithm.process_reward_model,
    }
    return options.get(algorithm.kind)


def first_epoch(
    source: SequenceSource, data: DataConfig, algorithm: AlgorithmConfig, *, first_step: int = 0, start: Cursor
) -> range:
    """Return the steps of a run on pairs after which every row has been in one; all steps if that is not known.

    ``start`` is the cursor of ``first_step``. A step takes at least ``groups_per_step`` positions of an epoch.
    """
    last = algorithm.num_steps
    if algorithm.preference.takes_pairs and source.num_rows is not None and not data.streaming:
        num_positions = source.num_rows * (2 if start.position else 1) - start.position
        last = min(last, first_step - (-num_positions // algorithm.groups_per_step))
    return range(first_step, last)


def packing_of(algorithm: AlgorithmConfig) -> Callable[..., list[TrainBatch]]:
    """Return the function that packs a step's sequences: for KTO ``pack_labelled``, which takes pairs apart."""
    preference = preference_of(algorithm)
    return pack_labelled if preference is not None and preference.rows == "labelled" else pack_step


def processor_of(algorithm: AlgorithmConfig, model: ModelConfig) -> ImageProcessor | None:
    """Return the processor for rows with images, or None if the algorithm takes no images.

    Raises ``ModelError`` if ``model.processor_kwargs`` are not options of the model's processor, and ``ConfigError`` if
    nothing would read them.
    """
    is_reward_model = algorithm.kind in ("reward_model", "process_reward_model")
    if is_reward_model or algorithm.kind == "ebft_strided" or ebft_with_reward(algorithm) is not None:
        if model.processor_kwargs:
            kind = "a reward model" if is_reward_model else "EBFT"
            raise ConfigError(f"model.processor_kwargs has no effect: {kind} takes no images; remove it")
        return None
    processor = ImageProcessor(model)
    if model.processor_kwargs:
        _ = processor.hf_processor  # which checks their names, whether or not rows have images
    return processor


def longest_row(algorithm: AlgorithmConfig, learner: LearnerConfig) -> int:
    """Return the number of tokens of the longest row that is trained on whole."""
    if algorithm.kind != "ebft_strided":
        return learner.max_tokens_per_microbatch
    return document_budget(learner.max_tokens_per_microbatch, algorithm.ebft.strided, algorithm.group_size)


def ebft_with_reward(algorithm: AlgorithmConfig) -> EbftConfig | None:
    """Return the EBFT options if rewards compare completions with a ground truth, else None."""
    return algorithm.ebft if algorithm.ebft.reward else None
