"""The rows of a config as its run opens them: prompts for RL, sequences for algorithms that train on rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlpipe.algorithms.strided import document_budget
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.ebft_config import EbftConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import PromptSource, SequenceSource, open_prompts, open_sft_rows
from rlpipe.data.render.processor import ImageProcessor
from rlpipe.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def open_source(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptSource | SequenceSource:
    """Open the training rows to look at them, even if none is usable; raise ``DataError`` as ``open_prompts`` does."""
    if config.algorithm.kind == "rl":
        return open_run_prompts(config, config.model, tokenizer, tried=False)[0]
    return open_run_sequences(
        config.data,
        config.model,
        tokenizer,
        algorithm=config.algorithm,
        learner=config.learner,
        seed=config.seed,
        tried=False,
    )[0]


def open_run_prompts(
    config: Config, model: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, tried: bool = True
) -> tuple[PromptSource, list[Prompt]]:
    """Open the prompts of an RL run with ``open_prompts``; ``model`` may be a prepared form of the config's model."""
    return open_prompts(
        config.data,
        tokenizer,
        seed=config.seed,
        ebft=compared(config.algorithm),
        processor=processor_of(config.algorithm, model),
        tried=tried,
    )


def open_run_sequences(
    data: DataConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    algorithm: AlgorithmConfig,
    learner: LearnerConfig,
    seed: int,
    tried: bool = True,
) -> tuple[SequenceSource, list[Rollout]]:
    """Open the sequences of a run that trains on rows with ``open_sft_rows``."""
    return open_sft_rows(
        data,
        tokenizer,
        seed=seed,
        max_tokens=longest_row(algorithm, learner),
        processor=processor_of(algorithm, model),
        tried=tried,
    )


def processor_of(algorithm: AlgorithmConfig, model: ModelConfig) -> ImageProcessor | None:
    """Return the processor for rows with images, or None if the algorithm takes no images."""
    takes_images = algorithm.kind != "ebft_strided" and compared(algorithm) is None
    return ImageProcessor(model) if takes_images else None


def longest_row(algorithm: AlgorithmConfig, learner: LearnerConfig) -> int:
    """Return the number of tokens of the longest row that is trained on whole."""
    if algorithm.kind != "ebft_strided":
        return learner.max_tokens_per_microbatch
    return document_budget(learner.max_tokens_per_microbatch, algorithm.ebft.strided, algorithm.group_size)


def compared(algorithm: AlgorithmConfig) -> EbftConfig | None:
    """Return the EBFT options if rewards compare completions with a ground truth, else None."""
    return algorithm.ebft if algorithm.ebft.reward else None
