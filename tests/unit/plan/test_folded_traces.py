"""Tests that the trace of a few layers stands for that of all: folded and unfolded traces are equal."""

import pytest
import torch
from offload_cases import make_moe
from torch import Tensor, nn
from transformers import Gemma3nTextConfig, Gemma3TextConfig, Gemma4TextConfig, PreTrainedConfig, Qwen3Config

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device_profiles import DEVICES
from rlpipe.learner.strategies.chunked import full_rows
from rlpipe.offload.planner.fake_trace import traceable_experts
from rlpipe.offload.planner.profiler import trace_on
from rlpipe.offload.planner.trace import Stage, Trace, choose_blocks, unfold
from rlpipe.plan.learner_estimate import trace_policy
from rlpipe.plan.learner_memory import MetaPolicy, meta_policy

SMALL = {
    "vocab_size": 997,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
}
DEVICE = DEVICES["h100-80g"]


def config_of(*overrides: str) -> Config:
    options = ["model.path=x", "learner.logprob_chunk_tokens=16", "rollout.sampling.temperature=1", *overrides]
    return load_config(["experiment=gsm8k", "model.dtype=bfloat16", *options], need_files=False)


def trace_whole(policy: MetaPolicy, config: Config, dtype: torch.dtype | None) -> Trace:
    module = policy.module
    row = full_rows(module, 100)[-1]

    def loss_of(trace: Trace) -> Tensor:
        module.announce = trace.read
        return module.logprobs(row, 1.0, config.learner.logprob_chunk_tokens, with_entropy=True)[0].sum()

    with traceable_experts(module):
        return trace_on(DEVICE, module, policy.units, loss_of, compute_dtype=dtype)


QWEN = Qwen3Config(num_hidden_layers=5, **SMALL)
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
GEMMA = Gemma3TextConfig(num_hidden_layers=6, layer_types=KINDS, sliding_window=32, **SMALL)
DEEP = {"layer_types": KINDS, "sliding_window": 32, "num_hidden_layers": 6, "num_kv_shared_layers": 3} | SMALL
PER_LAYER = {"vocab_size_per_layer_input": 997, "hidden_size_per_layer_input": 16}
GEMMA_4 = Gemma4TextConfig(**DEEP, **PER_LAYER, global_head_dim=32)
GEMMA_3N = Gemma3nTextConfig(**DEEP, **PER_LAYER, laurel_rank=8, activation_sparsity_pattern=[0.95] * 3 + [0.0] * 3)


def both_traces(described: PreTrainedConfig, adapter: str, dtype: torch.dtype | None) -> tuple[Trace, Trace]:
    config = config_of(f"model.adapter.kind={adapter}")
    policy = meta_policy(described, config.model)
    row = full_rows(policy.module, 100)[-1]
    folded = trace_policy(policy, row, config, DEVICE, compute_dtype=dtype)
    return folded, trace_whole(policy, config, dtype)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("adapter", "dtype"), [("none", None), ("none", torch.bfloat16), ("lora", None)])
def test_a_folded_trace_is_the_unfolded_one(adapter: str, dtype: torch.dtype | None) -> None:
    folded, whole = both_traces(QWEN, adapter, dtype)
    assert [stage.unit for stage in folded.stages] == [stage.unit for stage in whole.stages]
    assert [stage.reads for stage in folded.stages] == [stage.reads for stage in whole.stages]
    assert folded.profiles() == whole.profiles()
    assert folded.shared_bytes == whole.shared_bytes


@pytest.mark.parametrize(("described", "adapter"), [(GEMMA_4, "lora"), (GEMMA_3N, "none"), (GEMMA_3N, "lora")])
def test_layers_that_read_what_others_made_are_all_traced(described: PreTrainedConfig, adapter: str) -> None:
    folded, whole = both_traces(described, adapter, torch.bfloat16)
    assert folded.profiles() == whole.profiles()
    assert folded.shared_bytes == whole.shared_bytes


@pytest.mark.slow
def test_layers_of_two_kinds_are_each_folded() -> None:
    folded, whole = both_traces(GEMMA, "lora", torch.bfloat16)
    assert [stage.unit for stage in folded.stages] == [stage.unit for stage in whole.stages]
    for own, other in zip(folded.profiles(), whole.profiles(), strict=True):
        # Tensors that layers of both kinds share live until the last layer of a kind, which may differ.
        assert (own.forward_s, own.backward_s) == (other.forward_s, other.backward_s)
        assert (own.saved_bytes, own.input_bytes) == (other.saved_bytes, other.input_bytes)
        assert own.backward_peak == pytest.approx(other.backward_peak, rel=0.06)


@pytest.mark.slow
def test_the_model_is_whole_again_after_a_trace() -> None:
    config = config_of()
    policy = meta_policy(GEMMA, config.model)
    before = [name for name, _ in policy.module.named_parameters()]
    trace_policy(policy, full_rows(policy.module, 50)[-1], config, DEVICE, compute_dtype=None)
    assert [name for name, _ in policy.module.named_parameters()] == before
    assert policy.module.causal_model.config.layer_types == KINDS


def test_blocks_of_a_kind_are_stood_for_by_one() -> None:
    assert choose_blocks(["a", "a", "b", "a", "b", "b"]) == {0: 0, 1: 1, 2: 2, 3: 1, 4: 2, 5: 5}
    assert choose_blocks(["a"]) == {0: 0}
    assert choose_blocks(["a", "b"]) == {0: 0, 1: 1}


def test_what_is_alive_grows_with_every_block_that_is_put_in() -> None:
    stages = [
        Stage(0, after=10),
        Stage(1, reads={1}, before=10, after=30, forward_peak=35, backward_peak=40),
        Stage(2, reads={2}, before=30, after=55, forward_peak=60),
        Stage(4, before=55, after=80),
        Stage(5, before=80, after=81, forward_peak=90),
    ]
    found = unfold(stages, {1: 1, 2: 2, 3: 2, 4: 4})
    assert [(stage.unit, stage.before, stage.after) for stage in found] == [
        (0, 0, 10),
        (1, 10, 30),
        (2, 30, 55),
        (3, 55, 80),
        (4, 80, 105),
        (5, 105, 106),
    ]
    assert found[3].reads == {3}
    assert (found[3].forward_peak, found[5].forward_peak) == (85, 115)


def test_blocks_that_are_not_traced_once_each_are_refused() -> None:
    with pytest.raises(ValueError, match="not traced exactly once"):
        unfold([Stage(0), Stage(0)], {0: 0})


def test_experts_are_traced_and_then_run_as_before() -> None:
    model = make_moe()
    model.set_experts_implementation("eager")
    with traceable_experts(model):
        assert model.config._experts_implementation == "grouped_mm"
    assert model.config._experts_implementation == "eager"
    with traceable_experts(nn.Linear(1, 1)):
        pass
