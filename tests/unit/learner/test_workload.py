"""Tests that an update's workload is known before the run, and that learner and plan decide by it alike."""

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import make_family
from learner_cases import make_rollouts
from transformers import AutoConfig

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.packing import pack_fullest, pack_step
from rlpipe.errors import ConfigError, ModelError
from rlpipe.hardware.calibration import measured_device
from rlpipe.learner.policy import load_policy
from rlpipe.learner.strategies import chunked
from rlpipe.learner.workload import Workload, full_rollouts, pack_full, read_workload
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.plan.learner_plan import plan_learner, with_options

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _rates() -> None:
    """Measure this machine roughly, in a tenth of the time, unless another test has measured it."""
    measured_device(CPU, scale=0.1)


def config_of(*overrides: str) -> Config:
    """Return a config of 4 groups of 4 rollouts, of 32 tokens each."""
    options = ["algorithm.groups_per_step=4", "algorithm.group_size=4", "data.max_prompt_tokens=16"]
    options += ["rollout.sampling.max_tokens=16", "learner.max_tokens_per_microbatch=64", *overrides]
    return load_config(["experiment=gsm8k", "model.dtype=bfloat16", *options], need_files=False)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_ranks": 3},
        {"num_minibatches": 2},
        {"num_ranks": 2, "num_minibatches": 3, "num_epochs": 2},
        {"num_ranks": 64},
    ],
)
@pytest.mark.parametrize("max_tokens", [64, 200, 4096])
def test_the_fullest_mini_batch_is_that_of_the_packed_step(options: dict[str, Any], max_tokens: int) -> None:
    rollouts = make_rollouts(seed=3)
    first = pack_step(rollouts, step=0, max_tokens=max_tokens, **({"num_ranks": 1} | options))[0]
    fullest = max(first.mini_batches, key=lambda mini_batch: len(mini_batch.micro_batches))
    count, micro_batch = pack_fullest(rollouts, max_tokens=max_tokens, **({"num_ranks": 1} | options))
    assert count == len(fullest.micro_batches)
    assert micro_batch.token_ids.tolist() == fullest.micro_batches[0].token_ids.tolist()
    assert micro_batch.sequence_starts.tolist() == fullest.micro_batches[0].sequence_starts.tolist()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 8),
        (["learner.max_tokens_per_microbatch=32"], 16),
        (["learner.strategy=fsdp2", "learner.num_ranks=2"], 4),
        (["algorithm.num_minibatches=4"], 2),
        (["algorithm.num_minibatches=4", "algorithm.num_epochs_per_step=2"], 2),
    ],
)
def test_micro_batches_hold_whole_sequences_of_full_length(overrides: list[str], expected: int) -> None:
    assert read_workload(config_of(*overrides)).num_micro_batches == expected


def test_episodes_are_as_long_as_conversations_may_be() -> None:
    config = config_of("environment.path=m:E", "environment.max_turns=2", "rollout.max_model_len=56")
    rollouts = [*full_rollouts(config)]
    assert {len(rollout.token_ids) for rollout in rollouts} == {56}
    assert {int(rollout.loss_mask.sum()) for rollout in rollouts} == {2 * 16}
    assert all(rollout.loss_mask[-1] and not rollout.loss_mask[:16].any() for rollout in rollouts)
    assert read_workload(config).num_micro_batches == 16, "two have more than 64 tokens, less the prompt they share"
    long = config_of("environment.path=m:E", "environment.max_turns=2", "rollout.max_model_len=32")
    assert [int(rollout.loss_mask.sum()) for rollout in full_rollouts(long)] == [16] * 16


def test_what_the_loss_needs_is_part_of_the_workload() -> None:
    options = ("rollout.sampling.temperature=0.7", "algorithm.loss.entropy_coef=0.1", "algorithm.loss.beta=0.1")
    expected = {"num_micro_batches": 8, "temperature": 0.7, "with_entropy": True, "trains_entropy": True}
    assert read_workload(config_of(*options)) == Workload(**expected)
    whole = config_of(*options, "model.adapter.kind=none")
    assert read_workload(whole) == Workload(**expected, copied_for=whole.algorithm)


def test_sequences_that_no_micro_batch_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"set learner\.max_tokens_per_microbatch, now 31, to at least 32"):
        pack_full(with_options(config_of(), {"learner.max_tokens_per_microbatch": 31}))


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("room_gib", "overrides"),
    [
        (0.0023, ("model.adapter.kind=lora",)),
        (0.0025, ("model.adapter.kind=none", "algorithm.loss.beta=0.1", "algorithm.loss.entropy_coef=0.01")),
        (0.0025, ("model.adapter.kind=none", "algorithm.loss.beta=0.1", "algorithm.reference.sync_steps=5")),
    ],
    ids=["lora", "full with a reference", "full with a copy that moves"],
)
def test_a_learner_decides_as_its_plan_says(tmp_path: Path, room_gib: float, overrides: tuple[str, ...]) -> None:
    path = make_tiny_policy(tmp_path / "tiny", hidden_size=64, num_layers=4, intermediate_size=96)
    decision = decide_twice(path, room_gib, *overrides)
    assert "per update of 8 full micro batches" in decision
    assert "all" not in decision.split()[0], "nothing was left to decide"


def decide_twice(path: Path, room_gib: float, *overrides: str) -> str:
    """Return the plan's decision, which is also the learner's."""
    own = ("learner.offload=chunked", "learner.chunked.chunk_mib=0.06", "model.gradient_checkpointing=false")
    room = (f"learner.chunked.device_memory_gib={room_gib}", "learner.chunked.host_memory_gib=1")
    config = config_of(f"model.path={path}", "learner.num_gpus=0", "rollout.num_gpus=0", *own, *room, *overrides)
    plan = plan_learner(config, AutoConfig.from_pretrained(path), measured_device(CPU))
    policy = load_policy(config.model, config.learner, CPU, workload=read_workload(config))
    assert plan.decision is not None
    assert policy.notes[0] == f"learner.offload=chunked: {plan.decision}"
    return plan.decision


@pytest.mark.slow
def test_layers_of_a_vision_tower_are_planned_too(tmp_path: Path) -> None:
    path = make_family("qwen3-vl", tmp_path / "model")
    own = ("model.images=true", "model.adapter.kind=none")
    assert "of 5 layers" in decide_twice(path, 0.01, *own), "two of the language model, two and a merger of the tower"
    least = decide_twice(path, 0.0018, *own)
    assert "of 5 layers 5 keep" not in least
    with pytest.raises(ModelError, match="no offload plan fits"):
        decide_twice(path, 0.001, *own)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("adapter", "is_said"), [("none", True), ("lora", False)])
def test_a_trained_tower_that_cannot_be_planned_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: str, is_said: bool
) -> None:
    monkeypatch.setattr(chunked, "_with_images", lambda *_: [])
    path = make_family("qwen3-vl", tmp_path / "model")
    own = ("learner.offload=chunked", "model.gradient_checkpointing=false", "learner.num_gpus=0", "rollout.num_gpus=0")
    config = config_of(f"model.path={path}", "model.images=true", f"model.adapter.kind={adapter}", *own)
    plan = plan_learner(config, AutoConfig.from_pretrained(path), measured_device(CPU))
    policy = load_policy(config.model, config.learner, CPU, workload=read_workload(config))
    assert (chunked.UNPLANNED_TOWER in plan.notes) == is_said
    assert any(chunked.UNPLANNED_TOWER in note for note in policy.notes) == is_said
