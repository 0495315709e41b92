"""Versions that vLLM merges into its own fused weights, and weights that it packs for the CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    OpenVllm,
    adapted,
    corrupted,
    drain,
    largest_difference,
    load,
    mixed_logprobs,
    model_config,
    publish_full,
    publish_merged,
    request,
    retrained,
    sample,
    versions,
)
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, set_seed

from rlpipe.errors import ModelError
from rlpipe.models.tiny_model import make_tokenizer
from rlpipe.rollout.engine import Engine

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.covering(1)]
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "some modules": {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 2}},
    "dora": {"use_dora": True},
    "modules to save": {"modules_to_save": ["norm", "lm_head"], "target_modules": ["v_proj"]},
    "rank 600": {"r": 600, "lora_alpha": 20},
}


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy with attention biases and an output layer of its own."""
    set_seed(0)
    folder, tokenizer = tmp_path_factory.mktemp("untied"), make_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, dtype="float32",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, max_shard_size=100_000)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(open_vllm: OpenVllm, untied: Path) -> Engine:
    return open_vllm(model=model_config(untied), serve="merged")


def layers_of(engine: Any) -> dict[str, Any]:
    """Return the modules of vLLM's model, by name."""
    worker = engine._core.model_executor.driver_worker.worker
    return dict(worker.model_runner.model.named_modules())


@pytest.mark.parametrize("variant", ADAPTERS)
def test_merged_versions_are_served_with_the_published_digest(engine: Engine, untied: Path, variant: str) -> None:
    policy = adapted(untied, **ADAPTERS[variant])
    published = publish_merged(policy, 3, untied)
    assert load(engine, published) == published[0].digest
    groups = sample(engine, [request(i) for i in range(6)])
    assert versions(groups) == {3}
    assert largest_difference(policy, groups, 1.0) < 1e-4
    base = AutoModelForCausalLM.from_pretrained(untied)
    assert largest_difference(base, groups, 1.0) > 1e-3


def test_tied_embeddings_stay_tied(open_vllm: OpenVllm, tiny_policy: Path) -> None:
    engine, policy = open_vllm(serve="merged"), adapted(tiny_policy)
    published = publish_merged(policy, 1, tiny_policy)
    assert load(engine, published) == published[0].digest
    assert largest_difference(policy, sample(engine, [request(i) for i in range(6)]), 1.0) < 1e-4
    with pytest.raises(ModelError, match=r"the model ties to model\.embed_tokens\.weight"):
        publish_merged(adapted(tiny_policy, modules_to_save=["lm_head"]), 2, tiny_policy)


def test_a_flipped_bit_in_the_engines_weights_is_found(engine: Engine, untied: Path) -> None:
    published = publish_merged(adapted(untied), 5, untied)
    assert load(engine, corrupted(published, "1.self_attn.v_proj.lora_A")) != published[0].digest
    assert load(engine, published) == published[0].digest
    for name, part in (("model.embed_tokens", "weight"), ("model.layers.1.self_attn.qkv_proj", "bias")):
        weight = getattr(layers_of(engine)[name], part)
        kept = weight.data.clone()
        weight.data.view(torch.int32).view(-1)[5] ^= 1
        adapter = publish_merged(adapted(untied, target_modules=["o_proj"]), 6, untied)
        assert load(engine, adapter) != adapter[0].digest, name
        weight.data.copy_(kept)


def test_running_sequences_finish_before_a_merged_version_is_loaded(engine: Engine, untied: Path) -> None:
    policies = {version: adapted(untied, seed=version) for version in (7, 8)}
    load(engine, publish_merged(policies[7], 7, untied))
    engine.submit([request(0), request(1, min_version=8)])
    engine.step()
    published = publish_merged(policies[8], 8, untied)
    groups = []
    while not engine.prepare_load(published[0]):
        groups += engine.step()
    assert [group.group_id for group in groups] == [0]
    assert engine.load(*published) == published[0].digest
    groups += drain(engine)
    for group, version in zip(groups, (7, 8), strict=True):
        assert versions([group]) == {version}
        assert largest_difference(policies[version], [group], 1.0) < 1e-4


def test_running_sequences_continue_with_a_merged_version(open_vllm: OpenVllm, untied: Path) -> None:
    engine = open_vllm(model=model_config(untied), on_update="inflight", serve="merged")
    policies = {version: adapted(untied, seed=version) for version in (1, 2)}
    load(engine, publish_merged(policies[1], 1, untied))
    engine.submit([request(0), request(1)])
    for _ in range(4):
        engine.step()
    load(engine, publish_merged(policies[2], 2, untied))
    groups = drain(engine)
    assert versions(groups) == {1, 2}
    for group in groups:
        for rollout in group:
            expected = mixed_logprobs(policies, rollout, 1.0)
            assert abs(expected - rollout.logprobs[rollout.loss_mask]).max() < 1e-4


def test_a_merged_engine_starts_from_an_adapter(open_vllm: OpenVllm, untied: Path, tmp_path: Path) -> None:
    policy = adapted(untied, use_dora=True)
    policy.save_pretrained(tmp_path)
    engine = open_vllm(model=model_config(untied, path=str(tmp_path)), serve="merged")
    assert engine.health().digest == publish_merged(policy, 0, untied)[0].digest
    assert largest_difference(policy, sample(engine, [request(i) for i in range(3)]), 1.0) < 1e-4


def handlers() -> Iterator[Any]:
    from vllm._custom_ops import CPUDNNLGEMMHandler

    gc.collect()
    return (one for one in gc.get_objects() if isinstance(one, CPUDNNLGEMMHandler))


def test_packed_layers_serve_every_new_version(full_engine: Engine, tiny_policy: Path) -> None:
    layer = layers_of(full_engine)["model.layers.1.self_attn.qkv_proj"]
    assert layer.cpu_linear is not nn.functional.linear, "it is packed from the start"
    num_packed = len(list(handlers()))
    inputs = torch.randn(5, layer.weight.shape[1])
    for version in (1, 2, 3):
        policy = retrained(tiny_policy, seed=version)
        published = publish_full(policy, version)
        assert load(full_engine, published) == published[0].digest
        attention = policy.get_submodule("model.layers.1.self_attn")
        expected = torch.cat([getattr(attention, f"{part}_proj")(inputs) for part in "qkv"], dim=1)
        assert torch.allclose(layer.cpu_linear(inputs, layer.weight, None), expected, atol=1e-5)
        assert largest_difference(policy, sample(full_engine, [request(i) for i in range(3)]), 1.0) < 1e-4
    assert len(list(handlers())) == num_packed, "packing again frees what was packed"
