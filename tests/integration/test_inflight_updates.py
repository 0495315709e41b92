"""Tests of weight updates while vLLM samples: every token has the version that sampled it, and its log-prob."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import (
    OpenVllm,
    Published,
    adapted,
    corrupted,
    drain,
    forward_logprobs,
    largest_difference,
    load,
    mixed_logprobs,
    publish_adapter,
    publish_full,
    request,
    retrained,
    versions,
    without,
)
from run_cases import make_config
from torch import nn

from rlpipe.episodes.groups import open_player
from rlpipe.episodes.session import Deadline
from rlpipe.errors import EngineFailed, ModelError
from rlpipe.rollout.engine import Engine
from rlpipe.types import GroupRequest, Prompt, Rollout, RolloutGroup

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.covering(0)]

NUM_TOKENS = 40
LONG_PROMPT = [*range(30, 94)] * 3
TALK = f"{Path(__file__).parents[1] / 'helpers' / 'environment_cases.py'}:Talk"
"""Environment of three turns."""
ENDLESS = {"max_tokens": NUM_TOKENS, "extra": {"ignore_eos": True}}


@dataclass
class Trainer:
    """A publisher of versions to one engine; the same version always has the same weights."""

    engine: Engine
    path: Path
    kind: str
    policies: dict[int, nn.Module] = field(default_factory=dict)

    def make(self, version: int) -> Published:
        change, publish = (adapted, publish_adapter) if self.kind == "lora" else (retrained, publish_full)
        if version not in self.policies:
            self.policies[version] = change(self.path, seed=version)
        return publish(self.policies[version], version)

    def publish(self, version: int) -> None:
        published = self.make(version)
        assert load(self.engine, published) == published[0].digest
        health = self.engine.health()
        assert (health.version, health.digest) == (version, published[0].digest)

    def difference(self, groups: Iterable[RolloutGroup], shift: int = 0) -> float:
        """Return the largest difference between the log-probs of the engine and of the versions that it names.

        ``shift`` compares with the versions that the engine names that many tokens away.
        """
        return max(self._difference(rollout, shift) for group in groups for rollout in group)

    def _difference(self, rollout: Rollout, shift: int) -> float:
        logprobs = rollout.logprobs[rollout.loss_mask]
        versions = rollout.policy_versions[rollout.loss_mask]
        rollout.policy_versions[rollout.loss_mask] = np.roll(versions, shift)
        expected = mixed_logprobs(self.policies, rollout, 1.0)
        rollout.policy_versions[rollout.loss_mask] = versions
        return float(np.abs(logprobs - expected).max())


@pytest.fixture(scope="module", params=["lora", "none"])
def trainer(request: pytest.FixtureRequest, open_vllm: OpenVllm, tiny_policy: Path) -> Trainer:
    return Trainer(open_vllm(request.param, "inflight", sampling=ENDLESS), tiny_policy, request.param)


def long_request(group_id: int, **options: Any) -> GroupRequest:
    return request(group_id, max_tokens=NUM_TOKENS, **options)


def steps(engine: Engine, count: int) -> None:
    """Run engine steps, each of which samples one token of every sequence and ends none."""
    for _ in range(count):
        assert engine.step() == []


def sampled_versions(group: RolloutGroup) -> list[list[int]]:
    return [rollout.policy_versions[rollout.loss_mask].tolist() for rollout in group]


def test_running_sequences_continue_with_every_new_version(trainer: Trainer) -> None:
    trainer.publish(1)
    requests = [long_request(0), long_request(1, temperature=0.0), long_request(2, prompt_ids=LONG_PROMPT)]
    trainer.engine.submit(requests)
    steps(trainer.engine, 10)
    trainer.publish(2)
    steps(trainer.engine, 7)
    trainer.publish(3)
    groups = drain(trainer.engine)
    for group in groups:
        assert sampled_versions(group) == [[1] * 10 + [2] * 7 + [3] * 23] * 2
        assert group.oldest_version == 1
        assert {rollout.newest_version for rollout in group} == {3}
    assert trainer.difference(groups) < 1e-4
    assert trainer.difference(groups, shift=1) > 1e-2, "the first token of a version is told from the last one before"


def test_turns_of_an_episode_keep_the_version_of_every_token(
    trainer: Trainer, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    trainer.publish(1)
    turns: list[RolloutGroup] = []

    async def sample(request: GroupRequest, _: Deadline) -> Rollout:
        trainer.engine.submit([request])
        steps(trainer.engine, 5)
        trainer.publish(len(turns) + 2)
        turns.extend(drain(trainer.engine))
        return turns[-1].rollouts[0]

    async def play() -> RolloutGroup:
        limits = [f"rollout.sampling.max_tokens={NUM_TOKENS}", "data.max_prompt_tokens=200"]
        config = make_config(tiny_policy, prompts_file, tmp_path, f"environment.path={TALK}", *limits)
        player, _ = open_player(config, sample)
        await player.start()
        task = {"prompt": "x", "completion": "y"}
        prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(0, np.int32), prompt="x", task=task)
        return await player.play(replace(long_request(0, group_size=1), prompt=prompt))

    group = asyncio.run(play())
    assert group.failure is None
    in_turn = [[version] * 5 + [version + 1] * (NUM_TOKENS - 5) for version in (1, 2, 3)]
    assert [sampled_versions(turn) for turn in turns] == [[versions] for versions in in_turn]
    assert sampled_versions(group) == [[version for versions in in_turn for version in versions]]
    for name in ("token_ids", "logprobs"):
        expected = np.concatenate([getattr(turn.rollouts[0], name)[turn.rollouts[0].loss_mask] for turn in turns])
        assert np.array_equal(getattr(group.rollouts[0], name)[group.rollouts[0].loss_mask], expected), name
    assert trainer.difference(turns) < 1e-4
    assert trainer.difference(turns, shift=1) > 1e-2


def test_a_new_request_reads_nothing_that_an_older_version_computed(trainer: Trainer) -> None:
    trainer.publish(1)
    trainer.engine.submit([long_request(0, prompt_ids=LONG_PROMPT)])
    steps(trainer.engine, 5)
    trainer.publish(2)
    trainer.engine.submit([long_request(1, prompt_ids=LONG_PROMPT), long_request(2, prompt_ids=LONG_PROMPT)])
    old, *new = drain(trainer.engine)
    assert sampled_versions(old) == [[1] * 5 + [2] * 35] * 2
    assert trainer.difference([old]) < 1e-4
    assert versions(new) == {2}
    assert largest_difference(trainer.policies[2], new, 1.0) < 1e-4


def test_requests_wait_for_their_version(trainer: Trainer) -> None:
    trainer.publish(4)
    trainer.engine.submit([long_request(0), long_request(1, min_version=5)])
    steps(trainer.engine, 3)
    trainer.publish(5)
    first, second = drain(trainer.engine)
    assert sampled_versions(first) == [[4] * 3 + [5] * 37] * 2
    assert versions([second]) == {5}


def test_an_older_version_is_loaded_while_sequences_run_that_it_may_sample(trainer: Trainer) -> None:
    trainer.publish(8)
    trainer.engine.submit([long_request(0, min_version=6)])
    steps(trainer.engine, 4)
    trainer.publish(6)
    steps(trainer.engine, 4)
    trainer.publish(7)
    groups = drain(trainer.engine)
    assert sampled_versions(groups[0]) == [[8] * 4 + [6] * 4 + [7] * 32] * 2
    assert groups[0].oldest_version == 6
    assert trainer.difference(groups) < 1e-4


def test_an_older_version_waits_for_sequences_that_it_must_not_sample(trainer: Trainer) -> None:
    trainer.publish(8)
    trainer.engine.submit([long_request(0, min_version=8), long_request(1, min_version=6)])
    steps(trainer.engine, 4)
    published = trainer.make(7)
    assert not trainer.engine.prepare_load(published[0])
    trainer.engine.submit([long_request(2, min_version=7), long_request(3, min_version=8)])
    groups = []
    while not trainer.engine.prepare_load(published[0]):
        groups += trainer.engine.step()
    assert trainer.engine.load(*published) == published[0].digest
    groups = sorted(groups + drain(trainer.engine), key=lambda group: group.group_id)
    assert [versions([group]) for group in groups] == [{8}, {8}, {7}]
    trainer.publish(8)
    groups += drain(trainer.engine)
    assert [group.group_id for group in groups] == [0, 1, 2, 3]
    assert versions(groups[3:]) == {8}
    assert trainer.difference(groups) < 1e-4


def test_damage_shows_in_the_digest_while_sequences_run(trainer: Trainer) -> None:
    trainer.publish(1)
    trainer.engine.submit([long_request(0)])
    steps(trainer.engine, 3)
    published = trainer.make(2)
    assert load(trainer.engine, corrupted(published, "1.mlp.down_proj")) != published[0].digest
    trainer.publish(2)
    groups = drain(trainer.engine)
    assert sampled_versions(groups[0]) == [[1] * 3 + [2] * 37] * 2
    assert trainer.difference(groups) < 1e-4


@pytest.fixture(scope="module")
def lora_trainer(open_vllm: OpenVllm, tiny_policy: Path) -> Trainer:
    return Trainer(open_vllm("lora", "inflight", sampling=ENDLESS), tiny_policy, "lora")


def test_sequences_that_began_without_an_adapter_finish_without_one(lora_trainer: Trainer) -> None:
    engine = lora_trainer.engine
    assert engine.health().version == 0
    engine.submit([long_request(0)])
    steps(engine, 3)
    published = lora_trainer.make(1)
    groups = []
    while not engine.prepare_load(published[0]):
        groups += engine.step()
    assert engine.load(*published) == published[0].digest
    engine.submit([long_request(1)])
    groups += drain(engine)
    assert [versions([group]) for group in groups] == [{0}, {1}]
    assert largest_difference(adapted(lora_trainer.path).unload(), groups[:1], 1.0) < 1e-4
    assert largest_difference(lora_trainer.policies[1], groups[1:], 1.0) < 1e-4


def test_requests_without_the_adapter_hold_no_version_up_and_are_sampled_by_none(lora_trainer: Trainer) -> None:
    engine = lora_trainer.engine
    engine.submit([long_request(0, use_adapter=False), long_request(1)])
    steps(engine, 3)
    for version in (2, 3):
        assert engine.prepare_load(lora_trainer.make(version)[0])
        lora_trainer.publish(version)
        steps(engine, 3)
    engine.submit([long_request(2, use_adapter=False)])
    base, policy, another = drain(engine)
    assert largest_difference(adapted(lora_trainer.path).unload(), [base, another], 1.0) < 1e-4
    assert len(versions([policy])) == 3


def test_an_adapter_that_does_not_fit_leaves_the_one_that_is_served(lora_trainer: Trainer) -> None:
    lora_trainer.publish(1)
    lora_trainer.engine.submit([long_request(0)])
    steps(lora_trainer.engine, 3)
    with pytest.raises(ModelError, match=r"no tensors for .* model\.layers\.1\.mlp\.down_proj"):
        load(lora_trainer.engine, without(lora_trainer.make(2), "layers.1.mlp.down_proj"))
    lora_trainer.engine.submit([long_request(1)])
    groups = drain(lora_trainer.engine)
    assert versions(groups) == {1}
    assert lora_trainer.difference(groups) < 1e-4


def test_full_weights_that_do_not_fit_end_the_engine_that_samples_with_them(
    open_vllm: OpenVllm, tiny_policy: Path
) -> None:
    trainer = Trainer(open_vllm("none", "inflight", sampling=ENDLESS), tiny_policy, "none")
    incomplete = without(trainer.make(1), "model.norm")
    with pytest.raises(ModelError, match=r"were not published: model\.norm\.weight"):
        load(trainer.engine, incomplete)
    trainer.publish(1)
    trainer.engine.submit([long_request(0)])
    steps(trainer.engine, 3)
    with pytest.raises(EngineFailed, match=r"parts of two versions: .*model\.norm\.weight"):
        load(trainer.engine, incomplete)


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_siblings_that_have_not_begun_begin_with_the_new_version(
    open_vllm: OpenVllm, tiny_policy: Path, kind: str
) -> None:
    engine = open_vllm(kind, "inflight", sampling=ENDLESS, engine_args={"max_num_seqs": 2})
    trainer = Trainer(engine, tiny_policy, kind)
    trainer.publish(1)
    engine.submit([long_request(0, prompt_ids=LONG_PROMPT, group_size=4)])
    steps(engine, 6)
    trainer.publish(2)
    (group,) = drain(engine)
    assert sampled_versions(group) == [[1] * 6 + [2] * 34] * 2 + [[2] * NUM_TOKENS] * 2
    assert trainer.difference([group]) < 1e-4


@pytest.mark.parametrize("kind", ["lora", "none"])
def test_a_sequence_that_gave_up_its_memory_is_computed_by_the_new_version_alone(
    open_vllm: OpenVllm, tiny_policy: Path, kind: str
) -> None:
    few_blocks = {"block_size": 32, "num_gpu_blocks_override": 12}
    trainer = Trainer(open_vllm(kind, "inflight", sampling=ENDLESS, engine_args=few_blocks), tiny_policy, kind)
    trainer.publish(1)
    trainer.engine.submit([long_request(0, group_size=10)])
    steps(trainer.engine, 35)
    trainer.publish(2)
    (group,) = drain(trainer.engine)
    preempted = [rollout for rollout in group if np.count_nonzero(rollout.policy_versions == 1) < 35]
    assert 0 < len(preempted) < len(group)
    for rollout in preempted:
        new = rollout.policy_versions[rollout.loss_mask] == 2
        expected = forward_logprobs(trainer.policies[2], rollout, 1.0)[new]
        assert np.abs(rollout.logprobs[rollout.loss_mask][new] - expected).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "none"])
def test_tokens_that_are_sampled_but_not_delivered_keep_their_version(
    open_vllm: OpenVllm, tiny_policy: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import VllmConfig

    # As on GPUs, which compute a batch while the previous one is delivered; the CPU platform has no such mode.
    monkeypatch.setattr(VllmConfig, "max_concurrent_batches", 2)
    trainer = Trainer(open_vllm(kind, "inflight", sampling=ENDLESS), tiny_policy, kind)
    trainer.publish(1)
    engine = trainer.engine
    engine.submit([long_request(0)])
    steps(engine, 5)
    engine.submit([long_request(1)])
    steps(engine, 8)
    sampled = [batch.total_num_scheduled_tokens for _, batch, _ in engine._core.batch_queue]  # type: ignore[attr-defined]
    assert sampled == [2], "one token of either sibling is sampled and not delivered"
    trainer.publish(2)
    groups = drain(engine)
    for group in groups:
        assert versions([group]) == {1, 2}
    assert trainer.difference(groups) < 1e-4
    assert trainer.difference(groups, shift=1) > 1e-2
    assert trainer.difference(groups, shift=-1) > 1e-2
