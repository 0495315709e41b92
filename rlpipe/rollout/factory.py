"""A factory of rollout engines; torch and vllm are only imported when an engine is opened."""

from __future__ import annotations

import logging

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import ConfigError
from rlpipe.rollout.engine import Engine, resolve_engine

logger = logging.getLogger(__name__)


def open_engine(
    name: str, model: ModelConfig, rollout: RolloutConfig, weights: WeightsConfig, *, max_prompt_tokens: int
) -> Engine:
    """Open the engine that the config selects, with the model loaded.

    Args:
        name: name of this engine, in its health and its errors.
        max_prompt_tokens: the longest prompt that will be submitted.

    Raises:
        ConfigError: an option is unknown to the engine, or not supported by it.
        ModelError: the model or adapter can't be loaded.
    """
    if model.dtype == "auto":  # vLLM would read auto as the type of the model's files
        from rlpipe.models.loading import own_device, with_dtype

        model = with_dtype(model, own_device())
    engine = resolve_engine(rollout.engine)
    if rollout.engine == "auto" and engine == "hf":
        logger.warning("vllm is not installed: engine %s samples with transformers, which is slower", name)
    if engine == "vllm":
        from rlpipe.rollout.vllm.vllm_engine import VllmEngine

        return VllmEngine(name, model, rollout, weights, max_prompt_tokens=max_prompt_tokens)
    if weights.transport == "nccl":
        raise ConfigError("weights.transport=nccl needs vLLM, which is not installed: set object_store")
    from rlpipe.rollout.hf_engine import HfEngine

    return HfEngine(name, model, rollout, max_prompt_tokens=max_prompt_tokens)
