"""A vLLM model loader for QLoRA: weights that the learner holds in NF4 are quantised to NF4 and dequantised again.

vLLM's own NF4 uses less memory, but needs a GPU and other kernels; set
``rollout.engine_args.quantization=bitsandbytes`` to use it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from torch import Tensor, nn
from vllm.config import LoadConfig, ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from rlpipe.errors import ModelError
from rlpipe.models.loading import outline_model
from rlpipe.models.nf4 import nf4_parameters, nf4_round_trip

LOAD_FORMAT = "rlpipe_nf4"


@register_model_loader(LOAD_FORMAT)
class Nf4Loader(DefaultModelLoader):
    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        left = nf4_parameters(outline_model(model_config.hf_config, trust_remote_code=model_config.trust_remote_code))
        for name, weight in super().get_all_weights(model_config, model):
            quantized = name in left
            left.discard(name)
            yield name, nf4_round_trip(weight.to(model_config.dtype)) if quantized else weight
        if left:
            raise ModelError(
                f"{type(model).__name__} has files that name weights in another way than transformers, such as "
                f"{min(left)}: set rollout.engine=hf, or model.adapter.kind=lora"
            )
