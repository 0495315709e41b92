from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from engine_cases import (
    OpenVllm,
    adapted,
    corrupted,
    drain,
    largest_difference,
    load,
    model_config,
    publish_adapter,
    publish_full,
    request,
    retrained,
    rollout_config,
    sample,
    tokens,
    versions,
    without,
)

from rlpipe.configs.schema.rollout_config import SamplingConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import ConfigError, ModelError
from rlpipe.learner.merging import MergeRequest, merge
from rlpipe.models.tiny_model import make_tiny_policy, make_tokenizer
from rlpipe.rollout.engine import VLLM_GPU_SEQUENCES, Engine
from rlpipe.rollout.engine_thread import open_engine
from rlpipe.types import GroupRequest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.covering(1)]


@pytest.fixture(scope="module")
def path(tiny_policy: Path) -> Path:
    return tiny_policy


def open_hf(path: Path, kind: str = "lora") -> Engine:
    return open_engine("hf-0", model_config(path, kind), rollout_config("hf"), WeightsConfig(), max_prompt_tokens=256)


@pytest.fixture(scope="module")
def lora_engine(open_vllm: OpenVllm) -> Engine:
    return open_vllm(engine_args={"block_size": 32})


def test_vllm_has_no_larger_default_of_sequences_for_engines_inside_other_programs() -> None:
    from vllm import EngineArgs
    from vllm.config import SchedulerConfig
    from vllm.usage.usage_lib import UsageContext

    assert UsageContext.ENGINE_CONTEXT not in EngineArgs.get_batch_defaults(1)[1]
    assert SchedulerConfig.DEFAULT_MAX_NUM_SEQS == VLLM_GPU_SEQUENCES


def step_until_started(engine: Engine) -> None:
    assert engine.step() == []


def long_request(group_id: int, **options: Any) -> GroupRequest:
    return request(group_id, max_tokens=24, temperature=1.0, **options)


def test_the_base_model_is_version_0(lora_engine: Engine, path: Path) -> None:
    groups = sample(lora_engine, [request(i) for i in range(4)])
    assert versions(groups) == {0}
    base = adapted(path).unload()
    assert largest_difference(base, groups, 1.0) < 1e-4
    assert sum(group.num_loss_tokens for group in groups) == lora_engine.health().num_tokens
    assert all(group.generate_s > 0 for group in groups)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"r": 3, "target_modules": ["q_proj", "up_proj"]}])
def test_logprobs_of_an_adapter_equal_a_forward_pass(
    lora_engine: Engine, path: Path, temperature: float, config: dict[str, Any]
) -> None:
    policy = adapted(path, **config)
    published = publish_adapter(policy, 1)
    assert load(lora_engine, published) == published[0].digest
    groups = sample(lora_engine, [request(i, temperature=temperature) for i in range(6)])
    assert versions(groups) == {1}
    assert largest_difference(policy, groups, temperature) < 1e-4


def test_qloras_adapter_is_served_over_a_base_that_has_been_in_nf4(open_vllm: OpenVllm, path: Path) -> None:
    engine, policy = open_vllm("qlora"), adapted(path, nf4=True)
    published = publish_adapter(policy, 1)
    assert load(engine, published) == published[0].digest
    groups = sample(engine, [request(i) for i in range(6)])
    assert largest_difference(policy, groups, 1.0) < 1e-4
    assert largest_difference(adapted(path), groups, 1.0) > 1e-2, "NF4 makes a difference"


def test_running_sequences_keep_their_adapter_and_new_ones_take_the_new_one(lora_engine: Engine, path: Path) -> None:
    policies = {version: adapted(path, seed=version) for version in (2, 3)}
    load(lora_engine, publish_adapter(policies[2], 2))
    lora_engine.submit([long_request(0)])
    step_until_started(lora_engine)
    load(lora_engine, publish_adapter(policies[3], 3))
    lora_engine.submit([long_request(1), long_request(2, min_version=4)])
    groups = drain(lora_engine)
    assert [versions([group]) for group in groups] == [{2}, {3}]
    for group, version in zip(groups, (2, 3), strict=True):
        assert largest_difference(policies[version], [group], 1.0) < 1e-4
    load(lora_engine, publish_adapter(policies[2], 4))
    assert [versions([group]) for group in drain(lora_engine)] == [{4}]


def test_cancelled_requests_end_and_others_continue_unchanged(lora_engine: Engine) -> None:
    undisturbed = sample(lora_engine, [long_request(0)])
    lora_engine.submit([long_request(0), long_request(1), long_request(2, min_version=99)])
    step_until_started(lora_engine)
    assert lora_engine.health().outstanding_groups == 3
    lora_engine.cancel({1, 2, 5})
    assert lora_engine.health().outstanding_groups == 1
    assert tokens(drain(lora_engine)) == tokens(undisturbed)
    lora_engine.submit([long_request(3)])
    step_until_started(lora_engine)
    lora_engine.cancel({3})
    assert not lora_engine.has_work
    assert tokens(sample(lora_engine, [long_request(0)])) == tokens(undisturbed)


def test_a_load_waits_for_a_free_slot(lora_engine: Engine, path: Path) -> None:
    for version in (5, 6, 7):
        load(lora_engine, publish_adapter(adapted(path, seed=version), version))
        lora_engine.submit([long_request(version)])
        step_until_started(lora_engine)
    published = publish_adapter(adapted(path, seed=8), 8)
    groups = []
    assert not lora_engine.prepare_load(published[0])
    while not lora_engine.prepare_load(published[0]):
        groups += lora_engine.step()
    assert load(lora_engine, published) == published[0].digest
    groups += drain(lora_engine)
    assert sorted(versions(groups)) == [5, 6, 7]


def test_the_prefix_cache_never_mixes_versions(lora_engine: Engine, path: Path) -> None:
    for version in (1, 2):
        policy = adapted(path, seed=version)
        load(lora_engine, publish_adapter(policy, version))
        groups = sample(lora_engine, [request(i, prompt_ids=[*range(30, 94)] * 3) for i in range(2)])
        assert largest_difference(policy, groups, 1.0) < 1e-4


def test_a_damaged_adapter_changes_the_digest(lora_engine: Engine, path: Path) -> None:
    published = publish_adapter(adapted(path), 8)
    digest = published[0].digest
    for part in ("1.self_attn.v_proj.lora_A", "0.mlp.gate_proj.lora_B", "1.mlp.down_proj.lora_B"):
        assert load(lora_engine, corrupted(published, part)) != digest
    wrong_scale = publish_adapter(adapted(path, lora_alpha=6), 8)
    assert load(lora_engine, (wrong_scale[0], published[1])) != digest
    assert load(lora_engine, published) == digest


def test_a_dropped_or_misnamed_adapter_is_named(lora_engine: Engine, path: Path) -> None:
    published = publish_adapter(adapted(path), 9)
    with pytest.raises(ModelError, match=r"no tensors for .* model\.layers\.1\.mlp\.down_proj"):
        load(lora_engine, without(published, "layers.1.mlp.down_proj"))
    with pytest.raises(ModelError, match="the adapter has no tensors"):
        load(lora_engine, without(published, "layers"))
    other = make_tiny_policy(
        path / "deeper", hidden_size=64, num_layers=3, num_heads=2, num_kv_heads=1, intermediate_size=96
    )
    with pytest.raises(ModelError, match=r"match no module of the model: model\.layers\.2"):
        load(lora_engine, publish_adapter(adapted(other), 9))
    assert versions(sample(lora_engine, [request(0)])) == {lora_engine.health().version}


def test_both_engines_serve_the_same(lora_engine: Engine, path: Path) -> None:
    published = publish_adapter(adapted(path), 10)
    hf = open_hf(path)
    assert load(hf, published) == load(lora_engine, published) == published[0].digest
    requests = [request(i, temperature=0.0) for i in range(6)]
    assert tokens(sample(hf, requests)) == tokens(sample(lora_engine, requests))


def test_samples_depend_on_their_seed(lora_engine: Engine) -> None:
    requests = [request(i) for i in range(4)]
    first = sample(lora_engine, requests)
    assert tokens(first) == tokens(sample(lora_engine, requests[:2])) + tokens(sample(lora_engine, requests[2:]))
    assert len({tuple(ids) for ids in tokens(first[:1])}) == 2


def test_requests_without_the_adapter_run_alongside_those_with_it(lora_engine: Engine, path: Path) -> None:
    policy = adapted(path)
    load(lora_engine, publish_adapter(policy, 11))
    asked: dict[str, Any] = {"temperature": 0.0, "group_size": 1, "sampling": SamplingConfig(), "has_priority": True}
    requests = [request(i, use_adapter=False, **asked) for i in range(3)]
    groups = sample(lora_engine, [request(3), *requests, request(4, **asked)])
    base = adapted(path).unload()
    assert largest_difference(base, groups[:3], 1.0) < 1e-4
    assert largest_difference(policy, groups[3:], 1.0) < 1e-4
    assert tokens(groups[:3]) == tokens(sample(open_hf(path), requests))
    assert largest_difference(base, groups[3:], 1.0) > 1e-2


def test_a_request_may_have_its_own_sampling(lora_engine: Engine) -> None:
    options = SamplingConfig(guided_regex="[ab]{4}", top_k=5)
    (guided,) = sample(lora_engine, [request(0, sampling=options, group_size=3)])
    texts = make_tokenizer().batch_decode([r.completion_ids.tolist() for r in guided], skip_special_tokens=True)
    assert all(re.fullmatch("[ab]{4}", text) for text in texts)
    (refused,) = sample(lora_engine, [request(0, sampling=SamplingConfig(extra={"top_kk": 5}))])
    assert refused.failure is not None
    assert "did you mean top_k" in refused.failure


def test_the_message_on_prompts_that_do_not_fit_names_the_option(lora_engine: Engine, full_engine: Engine) -> None:
    (failed,) = sample(lora_engine, [request(0, prompt_ids=[30] * 300)])
    assert failed.failure == "the prompt is too long: its 300 tokens leave no space in 280 (rollout.max_model_len)"
    (adapterless,) = sample(full_engine, [request(0, use_adapter=False)])
    assert adapterless.failure == "the engine serves full weights, so it can't leave out an adapter"


def test_a_request_that_vllm_refuses_fails_alone(lora_engine: Engine) -> None:
    groups = sample(lora_engine, [request(0, prompt_ids=[4, 10_000]), request(1)])
    assert groups[0].failure is not None
    assert "10000 is out of vocabulary" in groups[0].failure
    assert groups[1].failure is None


def test_full_weights_are_loaded_in_place_after_running_sequences(full_engine: Engine, path: Path) -> None:
    first, second = (retrained(path, seed=seed) for seed in (1, 2))
    published = publish_full(first, 1)
    assert load(full_engine, published) == published[0].digest
    full_engine.submit([long_request(0)])
    step_until_started(full_engine)
    published = publish_full(second, 2)
    full_engine.submit([long_request(1)])
    groups = []
    while not full_engine.prepare_load(published[0]):
        groups += full_engine.step()
    assert full_engine.load(*published) == published[0].digest
    groups = sorted(groups + drain(full_engine), key=lambda group: group.group_id)
    assert [versions([group]) for group in groups] == [{1}, {2}]
    assert largest_difference(first, groups[:1], 1.0) < 1e-4
    assert largest_difference(second, groups[1:], 1.0) < 1e-4


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_a_version_may_be_older_than_the_one_before(
    lora_engine: Engine, full_engine: Engine, path: Path, kind: str
) -> None:
    engine = lora_engine if kind == "lora" else full_engine
    make, publish = (adapted, publish_adapter) if kind == "lora" else (retrained, publish_full)
    policies = {version: make(path, seed=version) for version in (12, 11)}
    load(engine, publish(policies[12], 12))
    engine.submit([long_request(0, min_version=12), long_request(1)])
    step_until_started(engine)
    groups = []
    published = publish(policies[11], 11)
    while not engine.prepare_load(published[0]):
        groups += engine.step()
    assert engine.load(*published) == published[0].digest
    engine.submit([long_request(2, min_version=11), long_request(3, min_version=12)])
    groups = sorted(groups + drain(engine), key=lambda group: group.group_id)
    assert [versions([group]) for group in groups] == [{12}, {12}, {11}]
    for group, version in zip(groups, (12, 12, 11), strict=True):
        assert largest_difference(policies[version], [group], 1.0) < 1e-4
    load(engine, publish(policies[12], 12))
    assert versions(drain(engine)) == {12}


def test_damaged_full_weights_are_seen(full_engine: Engine, path: Path) -> None:
    published = publish_full(retrained(path), 3)
    for part in ("1.self_attn.k_proj", "embed_tokens", "0.input_layernorm"):
        assert load(full_engine, corrupted(published, part)) != published[0].digest
    with pytest.raises(ModelError, match=r"were not published: model\.layers\.0\.self_attn\.k_proj\.weight"):
        load(full_engine, without(published, "layers.0.self_attn.k_proj"))
    assert load(full_engine, published) == published[0].digest


def test_both_engines_serve_the_same_full_weights(full_engine: Engine, path: Path) -> None:
    published = publish_full(retrained(path), 4)
    hf = open_hf(path, "none")
    assert load(hf, published) == load(full_engine, published) == published[0].digest
    requests = [request(i, temperature=0.0) for i in range(6)]
    assert tokens(sample(hf, requests)) == tokens(sample(full_engine, requests))


@pytest.mark.parametrize(
    ("sampling", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}"}, r"[0-9]{3}"),
        ({"guided_json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}, None),
    ],
)
def test_completions_follow_the_grammar(open_vllm: OpenVllm, sampling: dict[str, Any], pattern: str | None) -> None:
    (group,) = sample(open_vllm(sampling=sampling), [request(0, max_tokens=80)])
    tokenizer = make_tokenizer()
    for rollout in group:
        text = tokenizer.decode(rollout.completion_ids.tolist(), skip_special_tokens=True)
        assert re.fullmatch(pattern, text) if pattern else rollout.finish_reason == "length" or "a" in json.loads(text)
        assert rollout.logprobs.max() <= 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine_args": {"max_num_seq": 2}}, "did you mean max_num_seqs"),
        ({"engine_args": {"max_model_len": 2}}, r"set rollout\.max_model_len instead"),
        ({"sampling": {"extra": {"bad_word": ["x"]}}}, "did you mean bad_words"),
        ({"sampling": {"extra": {"logprobs": 3}}}, "rlpipe sets it itself"),
        ({"sampling": {"guided_regex": "a", "guided_json": {}}}, "both guided_regex and guided_json"),
        ({"engine_args": {"block_size": -1}}, "vllm can't be started"),
    ],
)
def test_options_that_vllm_does_not_know_are_config_errors(
    open_vllm: OpenVllm, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_vllm(**options)


def test_stop_strings_end_a_completion_with_their_token(open_vllm: OpenVllm) -> None:
    tokenizer = make_tokenizer()
    engine = open_vllm(sampling={"stop": list("abcdefgh")})
    groups = sample(engine, [request(i, group_size=8) for i in range(3)])
    texts = [
        tokenizer.decode(rollout.completion_ids.tolist(), skip_special_tokens=True)
        for group in groups
        for rollout in group
        if rollout.finish_reason == "stop"
    ]
    assert any(text[-1:] in list("abcdefgh") for text in texts)
    assert not any(set(text[:-1]) & set("abcdefgh") for text in texts)


@pytest.mark.slow
def test_a_merged_model_is_served_as_it_is(path: Path, tmp_path: Path) -> None:
    policy = adapted(path)
    policy.save_pretrained(str(tmp_path / "adapter"))
    merged = tmp_path / "merged"
    list(merge(MergeRequest(adapter=str(tmp_path / "adapter"), base=str(path), output=merged)))
    config = model_config(merged, "none")
    engine = open_engine("merged-0", config, rollout_config("vllm"), WeightsConfig(), max_prompt_tokens=256)
    assert largest_difference(policy, sample(engine, [request(i) for i in range(3)]), 1.0) < 1e-4
