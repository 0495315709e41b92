import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_cases import make_family
from learner_cases import (
    TEMPERATURE,
    assert_close,
    make_batches,
    make_learner,
    make_model_config,
    make_rollouts,
    micro_batch_of,
    parameters_of,
)

from rlpipe.configs.schema.algorithm_config import LOSSES as LOSS_NAMES
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, EbftConfig, LossConfig, ReferenceConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig, ScheduleConfig
from rlpipe.data.packing import pack_step
from rlpipe.errors import ConfigError, LearnerFailed, RunError
from rlpipe.learner.objectives import FrozenCopy
from rlpipe.learner.row_plan import Row
from rlpipe.learner.strategies.optimizer import clipping_scale, learning_rate_factor
from rlpipe.learner.strategies.sharding import SingleRank
from rlpipe.replay.assemble import number_tokens
from rlpipe.types import TrainBatch

LOSSES = [LossConfig(), LossConfig(level="sequence", aggregate="sequence", beta=0.1), LossConfig(aggregate="constant")]


@pytest.mark.parametrize("loss", LOSSES)
def test_any_number_of_micro_batches_gives_the_same_gradient(tiny: Path, loss: LossConfig) -> None:
    """Check the first moment, because AdamW's update would hide a wrong scale."""
    algorithm = AlgorithmConfig(loss=loss)
    gradients, counts = [], []
    for max_tokens in (4096, 100, 45):
        learner = make_learner(tiny, adapter="none", algorithm=algorithm, learner=LearnerConfig(max_grad_norm=None))
        batch = make_batches(max_tokens=max_tokens)[0]
        learner.train_step(batch)
        counts.append(len(batch.mini_batches[0].micro_batches))
        parameters = learner.policy.trainable_parameters()
        gradients.append({name: learner.updates.optimizer.state[p]["exp_avg"] / 0.1 for name, p in parameters.items()})
    assert counts[0] == 1 < counts[1] < counts[2]
    assert sum(float(gradient.square().sum()) for gradient in gradients[0].values()) > 0.01
    for other in gradients[1:]:
        assert_close(gradients[0], other, 1e-5)


def test_any_number_of_micro_batches_gives_the_same_parameters(tiny: Path) -> None:
    results, losses = [], []
    for max_tokens in (4096, 100, 45):
        # AdamW turns rounding errors of gradients near 0 into parts of the learning rate.
        learner = make_learner(tiny, learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-3)))
        for step in range(3):
            losses.append(learner.train_step(make_batches(step=step, max_tokens=max_tokens)[0])["loss"])
        results.append(parameters_of(learner))
    for other in results[1:]:
        assert_close(results[0], other, 1e-5)
    np.testing.assert_allclose(losses, losses[:3] * 3, atol=1e-6)


def test_old_logprobs_are_those_of_the_start_of_the_step(tiny: Path) -> None:
    algorithm = AlgorithmConfig(num_minibatches=2, num_epochs_per_step=2)
    learner = make_learner(tiny, algorithm=algorithm, learner=LearnerConfig(optimizer=OptimizerConfig(lr=0.5)))
    batch = make_batches(algorithm=algorithm)[0]
    assert len(batch.mini_batches) == 4
    metrics = learner.train_step(batch)
    assert metrics["clip_ratio/region_mean"] > 0
    single = make_learner(tiny)
    assert single.train_step(make_batches()[0])["clip_ratio/region_mean"] == 0


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_every_loss_trains_with_several_updates_of_a_step(tiny: Path, name: str) -> None:
    loss = LossConfig(name=name, top_entropy_quantile=0.5, beta=0.1, kl="k2")
    algorithm = AlgorithmConfig(num_minibatches=2, num_epochs_per_step=2, loss=loss)
    learner = make_learner(tiny, algorithm=algorithm, learner=LearnerConfig(optimizer=OptimizerConfig(lr=0.01)))
    before = parameters_of(learner)
    metrics = learner.train_step(make_batches(algorithm=algorithm, max_tokens=100)[0])
    assert all(math.isfinite(value) for value in metrics.values())
    assert 0.4 < metrics["entropy/trained_ratio"] < 0.6
    assert any(not torch.equal(before[key], value) for key, value in parameters_of(learner).items())


def test_the_entropy_bonus_follows_each_update(tiny: Path) -> None:
    loss = LossConfig(entropy_target=10.0, entropy_step=0.1)
    algorithm = AlgorithmConfig(num_minibatches=2, num_epochs_per_step=2, loss=loss)
    learner = make_learner(tiny, algorithm=algorithm)
    (batch,) = make_batches(algorithm=algorithm)
    assert learner.train_step(batch)["entropy/coef"] == 0
    assert learner.entropy_bonus.weight == pytest.approx(0.4)


def test_differences_of_log_probs_are_those_of_every_token_before_the_step(tiny: Path) -> None:
    algorithm = AlgorithmConfig(num_minibatches=2, num_epochs_per_step=2)
    learner = make_learner(tiny, algorithm=algorithm, learner=LearnerConfig(optimizer=OptimizerConfig(lr=0.01)))
    expected: dict[int, list[float]] = {}
    with torch.no_grad():
        for rollout in make_rollouts():
            row = learner.policy.plan(micro_batch_of([rollout]))
            logprobs, _ = learner.policy.module.logprobs(row, TEMPERATURE, 64)
            differences = logprobs.numpy() - rollout.logprobs[rollout.loss_mask]
            expected.setdefault(rollout.group_id, []).extend(differences.tolist())
    (batch,) = make_batches(algorithm=algorithm, max_tokens=100)
    for _ in range(2):
        learner.train_step(batch)
        found = learner.token_differences(batch)
        assert found.keys() == expected.keys()
        same = [np.allclose(found[group_id], expected[group_id], rtol=1e-3, atol=1e-5) for group_id in expected]
        assert all(same) if learner.num_steps_done == 1 else not any(same)


def test_tokens_that_the_learner_leaves_out_have_no_difference(tiny: Path) -> None:
    rollouts = make_rollouts()
    rollouts[4].advantages = np.zeros_like(rollouts[4].advantages)
    places = number_tokens(rollouts)
    (batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=100, skip_zero_advantage=True)
    learner = make_learner(tiny)
    learner.train_step(replace(batch, group_ranges=places))
    found = learner.token_differences(replace(batch, group_ranges=places))[1]
    left_out = np.repeat([False, True, False], [rollout.num_loss_tokens for rollout in rollouts[3:6]])
    assert np.array_equal(np.isnan(found), left_out)
    assert not learner.token_differences(batch), "nothing says whose tokens they are"


def test_an_own_loss_trains_as_the_built_in_one_that_it_equals(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(inputs):\n    return -inputs.advantages * inputs.logprobs\n")
    results = []
    for loss in (LossConfig(name="reinforce"), LossConfig(path=f"{tmp_path}/mine.py:loss")):
        learner = make_learner(tiny, algorithm=AlgorithmConfig(loss=loss))
        learner.train_step(make_batches(max_tokens=100)[0])
        results.append(parameters_of(learner))
    assert_close(*results, 0)


def test_the_failure_of_an_own_loss_ends_the_step_with_its_name(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def loss(inputs):\n    return inputs.logprobs.sum()\n")
    learner = make_learner(tiny, algorithm=AlgorithmConfig(loss=LossConfig(path=f"{tmp_path}/mine.py:loss")))
    with pytest.raises(
        RunError, match=r"mine\.py:loss returned per_token of shape \[\], not a tensor of shape \[\d+\], one value"
    ):
        learner.train_step(make_batches()[0])


def test_the_reference_of_a_lora_policy_is_the_model_below_it(tiny: Path) -> None:
    learner = make_learner(tiny, algorithm=AlgorithmConfig(loss=LossConfig(beta=0.1)))
    first = learner.train_step(make_batches()[0])
    second = learner.train_step(make_batches()[0])
    assert first["kl"] == pytest.approx(0, abs=1e-9)
    assert second["kl"] > 1e-6


def test_a_frozen_copy_moves_by_the_mixup(tiny: Path) -> None:
    algorithm = AlgorithmConfig(loss=LossConfig(beta=0.1), reference=ReferenceConfig(sync_steps=2, mixup=0.25))
    learner = make_learner(tiny, adapter="none", algorithm=algorithm)
    assert learner.reference is not None
    start = parameters_of(learner)
    learner.train_step(make_batches()[0])
    assert_close({name: tensor.clone() for name, tensor in learner.reference.moving().items()}, start, 0)
    learner.train_step(make_batches(step=1)[0])
    now = parameters_of(learner)
    expected = {name: 0.75 * start[name] + 0.25 * now[name] for name in start}
    assert_close(learner.reference.moving(), expected, 1e-6)


def test_a_fixed_copy_has_the_models_dtype_and_one_that_moves_that_of_the_weights(tiny: Path) -> None:
    model = make_model_config(tiny, adapter="none", dtype="bfloat16")
    for sync_steps, dtype in ((0, torch.bfloat16), (2, torch.float32)):
        algorithm = AlgorithmConfig(loss=LossConfig(beta=0.1), reference=ReferenceConfig(sync_steps=sync_steps))
        learner = make_learner(tiny, model=model, algorithm=algorithm)
        assert isinstance(learner.reference, FrozenCopy)
        assert {parameter.dtype for parameter in learner.reference.module.parameters()} == {dtype}
        assert abs(learner.train_step(make_batches()[0])["kl"]) < 1e-4, "the policy is still the reference"


def test_the_reference_of_a_lora_policy_cannot_be_asked_to_move(tiny: Path) -> None:
    algorithm = AlgorithmConfig(loss=LossConfig(beta=0.1), reference=ReferenceConfig(sync_steps=2))
    with pytest.raises(ConfigError, match="sync_steps"):
        make_learner(tiny, algorithm=algorithm)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_torchs(max_norm: float) -> None:
    ours, theirs = (torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    data = torch.randn(4, 5)
    for model in (ours, theirs):
        model(data).square().sum().backward()
    updates = SingleRank().make_updates(dict(ours.named_parameters()), OptimizerConfig(lr=0.0))
    norm = math.sqrt(updates.squared_norm())
    scaled = [parameter.grad * clipping_scale(norm, max_norm) for parameter in ours.parameters()]
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    assert norm == pytest.approx(float(expected), rel=1e-6)
    for mine, parameter in zip(scaled, theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad)


def test_steps_that_are_not_finite_change_nothing_and_then_stop_the_run(tiny: Path) -> None:
    learner = make_learner(tiny, learner=LearnerConfig(max_bad_steps=2, optimizer=OptimizerConfig(lr=1e-2)))
    learner.train_step(make_batches()[0])
    before = parameters_of(learner)
    bad = make_batches(step=1)[0]
    bad.mini_batches[0].micro_batches[0].advantages[:] = np.nan
    metrics = learner.train_step(bad)
    assert metrics["bad_steps"] == 1
    assert not math.isfinite(metrics["grad_norm"])
    assert_close(before, parameters_of(learner), 0)
    learner.train_step(make_batches(step=2)[0])
    learner.train_step(bad)
    with pytest.raises(LearnerFailed, match=r"step 1: .* 2 steps in a row .*, last in groups 0, 1, 2, 3; inspect"):
        learner.train_step(bad)


def test_skipped_updates_have_no_part_in_the_metrics_of_a_step(tiny: Path) -> None:
    learner = make_learner(tiny, algorithm=AlgorithmConfig(num_minibatches=2))
    batch = pack_step(make_rollouts(), step=0, num_ranks=1, max_tokens=200, num_minibatches=2)[0]
    for micro_batch in batch.mini_batches[1].micro_batches:
        micro_batch.advantages[:] = np.nan
    metrics = learner.train_step(batch)
    assert metrics["bad_steps"] == 1
    batch.mini_batches.pop()
    alone = make_learner(tiny, algorithm=AlgorithmConfig(num_minibatches=1)).train_step(batch)
    for name in ("loss", "grad_norm", "entropy", "tokens/run"):
        assert metrics[name] == pytest.approx(alone[name], rel=1e-4)


def test_the_groups_of_a_bad_micro_batch_are_named(tiny: Path) -> None:
    learner = make_learner(tiny, learner=LearnerConfig(max_bad_steps=1))
    bad = make_batches(max_tokens=60)[0]
    micro_batch = bad.mini_batches[0].micro_batches[1]
    micro_batch.advantages[:] = np.nan
    named = sorted(set(micro_batch.group_ids.tolist()))
    assert 0 < len(named) < 4
    with pytest.raises(LearnerFailed, match=f"last in groups {', '.join(map(str, named))}; inspect"):
        learner.train_step(bad)


def test_all_groups_are_named_where_only_the_gradient_is_bad(tiny: Path) -> None:
    learner = make_learner(tiny, learner=LearnerConfig(max_bad_steps=1))
    parameter = next(iter(learner.policy.trainable_parameters().values()))
    parameter.register_hook(lambda gradient: gradient * math.inf)
    batch = pack_step(make_rollouts(num_groups=10), step=4, num_ranks=1, max_tokens=60)[0]
    with pytest.raises(LearnerFailed, match=r"step 4: .* last in groups 0, 1, 2, 3, 4, 5, 6, 7 \.\.\.; inspect"):
        learner.train_step(batch)


def test_a_step_without_loss_tokens_leaves_the_parameters_alone(tiny: Path) -> None:
    learner = make_learner(tiny)
    learner.train_step(make_batches()[0])
    before = parameters_of(learner)
    batch = make_batches(step=1)[0]
    for micro_batch in batch.mini_batches[0].micro_batches:
        micro_batch.loss_mask[:] = False
    batch.mini_batches[0].num_loss_tokens = 0
    assert learner.train_step(batch)["grad_norm"] == 0
    assert_close(before, parameters_of(learner), 0)


def test_sft_learns_its_rows(tiny: Path) -> None:
    learner = make_learner(tiny, adapter="none", algorithm=AlgorithmConfig(kind="sft"))
    losses = [learner.train_step(make_batches()[0])["loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(math.log(107), rel=0.1)
    assert losses[-1] < losses[0] / 2


def test_comparing_trains_nothing(tiny: Path) -> None:
    learner = make_learner(tiny)
    before = parameters_of(learner)
    batch = make_batches()[0]
    scores, _ = learner.policy.logprobs(batch.mini_batches[0].micro_batches[0], temperature=0.9)
    micro_batch = batch.mini_batches[0].micro_batches[0]
    micro_batch.logprobs = scores.detach().numpy().copy()
    last = np.flatnonzero(micro_batch.loss_mask)[-1]
    micro_batch.logprobs[last] += 0.25
    assert learner.compare(batch)["sampling/logp_difference/max"] == pytest.approx(0.25, abs=1e-5)
    assert_close(before, parameters_of(learner), 0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.9, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 0.97286, 0.55, 0.1]),
    ],
)
def test_schedules(name: str, expected: list[float]) -> None:
    config = ScheduleConfig(name=name, warmup_steps=2, min_ratio=0.1)
    factors = [learning_rate_factor(config, step, 11) for step in (0, 2, 3, 6.5, 11)]
    assert factors == pytest.approx(expected, abs=1e-4)


def test_metrics_of_a_step(tiny: Path) -> None:
    metrics = make_learner(tiny).train_step(make_batches()[0])
    expected = {
        "loss",
        "grad_norm",
        "learning_rate",
        "entropy",
        "bad_steps",
        "time/train",
        "sampling/logp_difference/max",
    }
    assert expected <= metrics.keys()
    assert all(isinstance(value, float) and math.isfinite(value) for value in metrics.values())


def test_sequences_that_are_filled_up_keep_to_the_token_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = 45
    path = make_family("qwen3.5", tmp_path)
    learner = make_learner(path, learner=LearnerConfig(max_tokens_per_microbatch=budget))
    rows: list[Row] = []
    plan = learner.policy.plan
    monkeypatch.setattr(learner.policy, "plan", lambda micro_batch: rows.append(plan(micro_batch)) or rows[-1])
    (batch,) = make_batches(max_tokens=budget)
    learner.train_step(batch)
    sizes = [block.numel() for row in rows if row.attention is not None for block in row.attention.blocks]
    assert len(sizes) == len(rows) > len(batch.mini_batches[0].micro_batches)
    assert max(sizes) <= budget


def with_truths(batch: TrainBatch, seed: int = 7) -> TrainBatch:
    """Add the rollouts of another step as ground truths."""
    batch.mini_batches[0].truth = make_batches(step=seed)[0].mini_batches[0]
    return batch


def test_the_likelihood_of_ground_truths_is_trained_as_weighed(tiny: Path) -> None:
    def gradients(
        *, ebft: EbftConfig, truths: bool, kind: str = "rl"
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        algorithm = AlgorithmConfig(kind=kind, ebft=ebft)
        learner = make_learner(tiny, adapter="none", algorithm=algorithm)
        batch = with_truths(make_batches()[0]) if truths else make_batches(step=7 if kind == "sft" else 0)[0]
        kept: dict[str, torch.Tensor] = {}
        apply = learner.updates.apply

        def keep(scale: float) -> None:
            kept.update({n: p.grad.clone() for n, p in learner.policy.trainable_parameters().items()})
            apply(scale)

        learner.updates.apply = keep  # type: ignore[method-assign]
        return kept, learner.train_step(batch)

    plain, plain_metrics = gradients(ebft=EbftConfig(), truths=False)
    alone, alone_metrics = gradients(ebft=EbftConfig(), truths=False, kind="sft")
    both, metrics = gradients(ebft=EbftConfig(reward=True, rl_coef=0.5, ce_coef=0.3), truths=True)
    for name in plain:
        torch.testing.assert_close(both[name], 0.5 * plain[name] + 0.3 * alone[name], atol=1e-6, rtol=1e-4)
    assert metrics["ebft/rl_loss"] == pytest.approx(plain_metrics["loss"], abs=1e-6)
    assert metrics["ebft/ce_loss"] == pytest.approx(alone_metrics["loss"], abs=1e-6)
    assert metrics["loss"] == pytest.approx(0.5 * plain_metrics["loss"] + 0.3 * alone_metrics["loss"], abs=1e-6)
    assert metrics["entropy"] == pytest.approx(plain_metrics["entropy"], abs=1e-6), "of the rollouts alone"


def test_ground_truths_are_trained_where_no_rollout_teaches(tiny: Path) -> None:
    algorithm = AlgorithmConfig(ebft=EbftConfig(reward=True, ce_coef=0.3), num_minibatches=1)
    learner = make_learner(tiny, algorithm=algorithm)
    batch = with_truths(make_batches()[0])
    batch.mini_batches[0].micro_batches = []
    assert learner.train_step(batch)["grad_norm"] > 0
