"""The cache of an engine per sequence: keys and values of each layer, or the state of linear attention.

Sources: grouped-query attention, arXiv:2305.13245; multi-head latent attention, arXiv:2405.04434; gated delta
networks, arXiv:2412.06464.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

BLOCK_TOKENS = 16
"""Tokens per block, the unit in which vLLM allocates the cache."""
STATE_BYTES = 4
"""Bytes per element of a linear layer's state, which is kept in float32."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionLayers:
    """Attention layers of one kind."""

    count: int
    token_bytes: int
    """Bytes per token in one layer."""
    query_width: int
    """Number of query heads times their size."""
    window: int | None = None
    """Number of last tokens that the layers keep; None: all."""

    def kept(self, num_tokens: float) -> float:
        return num_tokens if self.window is None else min(num_tokens, self.window)


@dataclass(kw_only=True, slots=True, frozen=True)
class KvCache:
    """The cache on one device; with tensor parallelism each device has its part of the heads."""

    layers: Sequence[AttentionLayers]
    state_bytes: int = 0
    """Bytes of linear attention's state per sequence, independent of its length."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token that all layers keep."""
        return sum(layers.count * layers.token_bytes for layers in self.layers)

    def read_bytes(self, num_tokens: float) -> float:
        """Return the bytes that the next token of a sequence of ``num_tokens`` reads."""
        return self.state_bytes + sum(
            layers.count * layers.token_bytes * layers.kept(num_tokens) for layers in self.layers
        )

    def held_bytes(self, num_tokens: float) -> int:
        """Return the bytes that a sequence of ``num_tokens`` holds, in whole blocks."""
        return int(self.read_bytes(-(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS))

    def attention_flops(self, num_tokens: float) -> float:
        """Return the FLOPs of a token's products with the keys and values of ``num_tokens`` earlier tokens."""
        return sum(4 * layers.count * layers.query_width * layers.kept(num_tokens) for layers in self.layers)


def read_kv_cache(described: PreTrainedConfig, *, element_bytes: float, num_devices: int = 1) -> KvCache:
    """Read the cache's layout from a model's config; unknown layers count as full attention, which keeps most."""
    text: Any = described.get_text_config()
    kinds = Counter(_layer_kinds(text))
    linear = kinds.pop("linear_attention", 0) if hasattr(text, "linear_num_value_heads") else 0
    found = [
        AttentionLayers(
            count=count,
            token_bytes=_token_bytes(text, element_bytes, num_devices),
            query_width=-(-text.num_attention_heads * _head_size(text) // num_devices),
            window=_window(text, kind),
        )
        for kind, count in kinds.items()
    ]
    state_bytes = linear * _state_bytes(text, element_bytes) // num_devices if linear else 0
    return KvCache(layers=found, state_bytes=state_bytes)


def _layer_kinds(text: Any) -> list[str]:
    kinds = getattr(text, "layer_types", None)
    if kinds is not None:
        return list(kinds)
    # Models without a list of kinds have one: Mistral's has a window, if any.
    windowed = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * text.num_hidden_layers


def _window(text: Any, kind: str) -> int | None:
    if kind == "sliding_attention":
        return getattr(text, "sliding_window", None)
    if kind == "chunked_attention":
        return getattr(text, "attention_chunk_size", None)
    return None


def _token_bytes(text: Any, element_bytes: float, num_devices: int) -> int:
    latent = getattr(text, "kv_lora_rank", None)
    if latent is not None:  # all heads read it, so each device has the whole
        return int((latent + text.qk_rope_head_dim) * element_bytes)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * max(1, heads // num_devices) * _head_size(text) * element_bytes)


def _head_size(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _state_bytes(text: Any, element_bytes: float) -> int:
    """Return the bytes per layer and sequence, over all devices: the state, and the convolution's last inputs."""
    keys = text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    convolved = (2 * keys + values) * (text.linear_conv_kernel_dim - 1)
    return int(values * text.linear_key_head_dim * STATE_BYTES + convolved * element_bytes)
