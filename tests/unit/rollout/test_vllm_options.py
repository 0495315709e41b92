"""Tests of vLLM's arguments and of what GPU kernels hold, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlpipe.configs.schema.rollout_config import SamplingConfig
from rlpipe.errors import ConfigError

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("extra", "is_too_long"),
    [
        ({"logit_bias": dict.fromkeys(range(1025), -1.0)}, True),
        ({"logit_bias": dict.fromkeys(range(1024), -1.0)}, False),
        ({"allowed_token_ids": [*range(1025)]}, True),
    ],
)
def test_lists_that_vllm_refuses_on_gpus_only_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], is_too_long: bool
) -> None:
    from rlpipe.rollout.vllm import vllm_options

    sampling = SamplingConfig(extra=extra)
    assert vllm_options.sampling_args(sampling)["logprobs"] == 0
    monkeypatch.setattr(vllm_options, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    if not is_too_long:
        vllm_options.sampling_args(sampling)
        return
    with pytest.raises(ConfigError, match=rf"rollout\.sampling\.extra\.{next(iter(extra))} has more than \d+ entries"):
        vllm_options.sampling_args(sampling)


def test_stop_ids_are_limited_where_vllm_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlpipe.rollout.vllm import vllm_options

    monkeypatch.setattr(vllm_options, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    stop_token_ids = [*range(128)]
    vllm_options.sampling_args(SamplingConfig(stop_token_ids=stop_token_ids))
    with pytest.raises(ConfigError, match=r"rollout\.sampling\.stop_token_ids has more than 127 ids"):
        vllm_options.sampling_args(SamplingConfig(stop_token_ids=stop_token_ids, extra={"min_tokens": 1}))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    vllm_options.sampling_args(SamplingConfig(stop_token_ids=stop_token_ids, extra={"min_tokens": 1}))


def test_kernels_that_copy_attention_sinks_get_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlpipe.rollout.vllm import vllm_transfer

    class Kernels:
        def __init__(self, sinks: nn.Parameter | None) -> None:
            self.source = self.sinks = sinks

        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            assert self.source is not None, "kernels without sinks have nothing to copy"
            self.sinks = self.source.detach().to(torch.float32)  # type: ignore[assignment]

    class Attention(nn.Module):
        def __init__(self, num_heads: int) -> None:
            super().__init__()
            self.sinks = nn.Parameter(torch.zeros(num_heads, dtype=torch.bfloat16)) if num_heads else None
            self.impl = Kernels(self.sinks)

    monkeypatch.setattr(vllm_transfer, "is_deferred_attention_layer", lambda layer: isinstance(layer, Attention))
    model = nn.ModuleList([Attention(2), Attention(0), nn.Linear(2, 2)])
    assert isinstance(model[0], Attention)
    assert model[0].sinks is not None
    model[0].sinks.data.fill_(7)
    vllm_transfer.refresh_sinks(model, torch.bfloat16)
    assert model[0].impl.sinks is not None
    assert model[0].impl.sinks.tolist() == [7.0, 7.0]
    assert model[0].impl.sinks.dtype == torch.float32
