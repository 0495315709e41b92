"""Tests that options for memory and for the adapter train as plain PyTorch does under every strategy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import make_family
from learner_cases import assert_close, make_adapter_config, make_learner, make_model_config, parameters_of, train_steps
from plain_training import load_plain, train_plain
from rank_cases import Ranks
from safetensors.torch import load_file

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig, ReferenceConfig
from rlpipe.configs.schema.learner_config import FsdpConfig, LearnerConfig, OptimizerConfig, Zero3Config
from rlpipe.configs.schema.model_config import AdapterConfig
from rlpipe.learner.objectives import FrozenCopy
from rlpipe.learner.publish import weight_specs, whole_weights
from rlpipe.models.tiny_model import make_tiny_policy

pytestmark = pytest.mark.covering(1)
NUM_STEPS, MAX_NORM, LEARNING_RATE = 3, 0.05, 1e-4
PADDED_BUDGET = 45
"""A token budget below the largest packed micro batch, so that some are split."""
NUM_RANKS = {"single": 1, "fsdp2": 2, "zero3": 2}
WRAPS: dict[str, dict[str, Any]] = {
    "blocks": {},
    "size": {"wrap": "size", "min_num_params": 64 * 128},
    "size between a layer and all": {"wrap": "size", "min_num_params": 60_000},
    "none": {"wrap": "none"},
    "classes": {"wrap": ["Qwen3MLP", "Qwen3Attention"]},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {"kind": "none"},
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "modules to save": {"target_modules": ["q_proj"], "modules_to_save": ["norm", "input_layernorm"]},
    "qlora": {"kind": "qlora"},
}
EXPERTS = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
MERGED: dict[str, dict[str, Any]] = {"qlora with dora": {"kind": "qlora", "use_dora": True}, "experts": EXPERTS}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy of which half a matrix exceeds bitsandbytes' minimum of 4,096 elements for 8-bit moments."""
    return make_tiny_policy(tmp_path_factory.mktemp("wide"), hidden_size=128, num_layers=2, intermediate_size=192)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen3-moe", tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy with linear attention, which sees across the sequences of a row."""
    return make_family("qwen3.5", tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[str, Ranks]]:
    pools = {num_ranks: Ranks(num_ranks) for num_ranks in set(NUM_RANKS.values())}
    yield {strategy: pools[num_ranks] for strategy, num_ranks in NUM_RANKS.items()}
    for ranks in pools.values():
        ranks.end()


@cache
def expect(path: Path, adapter: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    config = make_adapter_config(**(EXPERTS if adapter == "experts" else ADAPTERS[adapter]))
    return train_plain(path, config, num_steps=NUM_STEPS, learning_rate=LEARNING_RATE, max_norm=MAX_NORM)


def train(path: Path, strategy: str, adapter: str, options: dict[str, Any], model: dict[str, Any], out: Path) -> None:
    learner_config = LearnerConfig(
        strategy=strategy,
        num_ranks=NUM_RANKS[strategy],
        max_grad_norm=MAX_NORM,
        **{"optimizer": OptimizerConfig(lr=LEARNING_RATE)} | options,
    )
    adapter_config = make_adapter_config(**(EXPERTS if adapter == "experts" else ADAPTERS[adapter]))
    learner = make_learner(
        path,
        learner=learner_config,
        model=make_model_config(path, adapter=adapter_config, **model),
        algorithm=AlgorithmConfig(num_steps=10),
    )
    metrics = train_steps(learner, 0, NUM_STEPS)
    torch.save((metrics, parameters_of(learner)), out / f"rank{learner.policy.sharding.rank}.pt")


def run(
    groups: dict[str, Ranks], path: Path, out: Path, strategy: str, adapter: str, model: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[list[float], list[float], dict[str, torch.Tensor]]]:  # fmt: skip
    """Yield each rank's losses, gradient norms, and trained parameters."""
    groups[strategy].run(train, path, strategy, adapter, options, model or {}, out)
    for rank in range(NUM_RANKS[strategy]):
        metrics, parameters = torch.load(out / f"rank{rank}.pt", weights_only=False)
        yield [step["loss"] for step in metrics], [step["grad_norm"] for step in metrics], parameters


def check(
    groups: dict[str, Ranks], path: Path, out: Path, strategy: str, adapter: str, *model: Any, **options: Any
) -> None:
    expected_losses, expected_norms, expected = expect(path, adapter)
    for losses, norms, parameters in run(groups, path, out, strategy, adapter, *model, **options):
        assert losses == pytest.approx(expected_losses, abs=1e-5)
        assert norms == pytest.approx(expected_norms, abs=1e-5)
        assert_close(expected, parameters, 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_fsdp2_with_every_wrapping(
    tiny_wide_mlp: Path, groups: dict, tmp_path: Path, wrap: str, adapter: str, checkpointing: bool
) -> None:
    model = {"gradient_checkpointing": checkpointing}
    check(groups, tiny_wide_mlp, tmp_path, "fsdp2", adapter, model, fsdp=FsdpConfig(**WRAPS[wrap]))


@pytest.mark.parametrize("options", [{"offload": "policy"}, {"fsdp": FsdpConfig(reshard_after_forward=False)}])
@pytest.mark.parametrize("adapter", ["full", "lora", "qlora"])
def test_fsdp2_with_its_options(tiny_wide_mlp: Path, groups: dict, tmp_path: Path, adapter: str, options: dict) -> None:
    check(groups, tiny_wide_mlp, tmp_path, "fsdp2", adapter, **options)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "options", [{"offload_optimizer": True}, {"offload_optimizer": True, "offload_parameters": True}]
)
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_zero3_with_its_options(
    tiny_wide_mlp: Path, groups: dict, tmp_path: Path, adapter: str, options: dict, checkpointing: bool
) -> None:
    model = {"gradient_checkpointing": checkpointing}
    check(groups, tiny_wide_mlp, tmp_path, "zero3", adapter, model, zero3=Zero3Config(**options))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapter", [name for name in ADAPTERS if name not in ("full", "lora")])
@pytest.mark.parametrize("strategy", NUM_RANKS)
def test_every_adapter_under_every_strategy(
    tiny_wide_mlp: Path, groups: dict, tmp_path: Path, strategy: str, adapter: str, checkpointing: bool
) -> None:
    check(groups, tiny_wide_mlp, tmp_path, strategy, adapter, {"gradient_checkpointing": checkpointing})


@pytest.mark.parametrize("strategy", NUM_RANKS)
def test_adapters_of_experts_under_every_strategy(mixture: Path, groups: dict, tmp_path: Path, strategy: str) -> None:
    check(groups, mixture, tmp_path, strategy, "experts")


def publish(path: Path, strategy: str, adapter: AdapterConfig, out: Path) -> None:
    """Train one step, and write the trained parameters with the weights that engines receive."""
    config = LearnerConfig(strategy=strategy, num_ranks=NUM_RANKS[strategy], optimizer=OptimizerConfig(lr=1e-2))
    learner = make_learner(path, learner=config, model=make_model_config(path, adapter=adapter))
    train_steps(learner, 0, 1)
    specs = weight_specs(learner.policy)
    served = {name: tensor.clone() for name, tensor in whole_weights(learner.policy)}
    parameters = parameters_of(learner)
    if learner.policy.sharding.rank == 0:
        assert [(name, tuple(tensor.shape)) for name, tensor in served.items()] == [(o.name, o.shape) for o in specs]
        torch.save((parameters, served), out / "first.pt")


@pytest.mark.parametrize(
    ("strategy", "adapter"),
    [
        (strategy, adapter)
        for strategy in NUM_RANKS
        for adapter in [*ADAPTERS, *MERGED]
        if adapter != "full" and (strategy, adapter) != ("zero3", "qlora with dora")
    ],
)
def test_engines_are_given_what_peft_merges(
    tiny_wide_mlp: Path, mixture: Path, groups: dict, tmp_path: Path, strategy: str, adapter: str
) -> None:
    path = mixture if adapter == "experts" else tiny_wide_mlp
    config = make_adapter_config(**{**MERGED, **ADAPTERS}[adapter], merge=True)
    groups[strategy].run(publish, path, strategy, config, tmp_path)
    plain = load_plain(path, config)
    trained, served = torch.load(tmp_path / "first.pt", weights_only=False)
    for name, tensor in trained.items():
        plain.get_parameter(name).data.copy_(tensor)
    plain.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_close(load_file(tmp_path / "merged" / "model.safetensors"), served, 1e-6)


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("strategy", NUM_RANKS)
def test_rows_that_are_filled_up_keep_to_the_budget_on_all_ranks(
    hybrid: Path, groups: dict, tmp_path: Path, strategy: str, adapter: str
) -> None:
    """Check ranks that split their micro batches into different numbers of parts, but run equally many."""
    check(groups, hybrid, tmp_path, strategy, adapter, max_tokens_per_microbatch=PADDED_BUDGET)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("adapter", ["full", "lora"])
def test_both_forms_of_checkpointing(
    tiny_wide_mlp: Path, groups: dict, tmp_path: Path, adapter: str, reentrant: bool
) -> None:
    model = {"gradient_checkpointing": True, "reentrant_checkpointing": reentrant}
    check(groups, tiny_wide_mlp, tmp_path, "single", adapter, model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("strategy", NUM_RANKS)
def test_narrow_types_stay_within_their_rounding(
    tiny_wide_mlp: Path, groups: dict, tmp_path: Path, strategy: str, adapter: str, dtype: str
) -> None:
    expected_losses, expected_norms, _ = expect(tiny_wide_mlp, adapter)
    rounding = torch.finfo(getattr(torch, dtype)).eps / 2
    for losses, norms, parameters in run(groups, tiny_wide_mlp, tmp_path, strategy, adapter, {"dtype": dtype}):
        assert losses == pytest.approx(expected_losses, abs=rounding)
        assert norms == pytest.approx(expected_norms, rel=rounding)
        assert {parameter.dtype for parameter in parameters.values()} == {torch.float32}


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
@pytest.mark.parametrize("strategy", NUM_RANKS)
def test_moments_in_eight_bit_stay_near_those_in_float32(
    wide: Path, groups: dict, tmp_path: Path, strategy: str, optimizer: str
) -> None:
    """Check moments in 8 bit, which are rounded in blocks that differ between strategies."""
    expected_losses, expected_norms, expected = expect(wide, "full")
    config = OptimizerConfig(name=optimizer, lr=LEARNING_RATE)
    for losses, norms, parameters in run(groups, wide, tmp_path, strategy, "full", optimizer=config):
        assert losses == pytest.approx(expected_losses, abs=1e-4)
        assert norms == pytest.approx(expected_norms, rel=1e-3)
        assert_close(expected, parameters, LEARNING_RATE)
        assert any(not torch.equal(parameters[name], expected[name]) for name in expected)


def move_copy(path: Path, strategy: str, out: Path) -> None:
    learner = make_learner(
        path,
        learner=LearnerConfig(strategy=strategy, num_ranks=NUM_RANKS[strategy], optimizer=OptimizerConfig(lr=1e-3)),
        model=make_model_config(path, adapter="none", dtype="bfloat16"),
        algorithm=AlgorithmConfig(
            num_steps=10, loss=LossConfig(beta=0.1), reference=ReferenceConfig(sync_steps=1, mixup=0.01)
        ),
    )
    reference, sharding = learner.reference, learner.policy.sharding
    assert isinstance(reference, FrozenCopy)

    def copy() -> dict[str, torch.Tensor]:
        return {name: sharding.full(parameter).clone() for name, parameter in reference.moving().items()}

    before = copy()
    train_steps(learner, 0, 1)
    torch.save((before, parameters_of(learner), copy()), out / f"rank{sharding.rank}.pt")


@pytest.mark.parametrize("strategy", NUM_RANKS)
def test_a_copy_of_a_narrow_policy_moves_by_less_than_the_types_rounding(
    tiny_wide_mlp: Path, groups: dict[str, Ranks], tmp_path: Path, strategy: str
) -> None:
    groups[strategy].run(move_copy, tiny_wide_mlp, strategy, tmp_path)
    for rank in range(NUM_RANKS[strategy]):
        before, policy, moved = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert any(not torch.equal(moved[name], before[name]) for name in moved)
        assert_close(moved, {name: 0.99 * before[name] + 0.01 * policy[name] for name in moved}, 1e-6)
