"""Surrogates against references that are written again here, over padded rows as the papers' code has them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlpipe.algorithms.losses import LossInputs, estimate_kl, policy_loss
from rlpipe.algorithms.surrogates import SURROGATES
from rlpipe.configs.schema.algorithm_config import LOSSES, CorrectionConfig, CovarianceConfig, LossConfig

BATCH, LENGTH = 6, 9
NO_CORRECTION = CorrectionConfig(mode="none")


class Batch:
    """Rows ``[B, T]`` of float64, some of them short, that moved away from the old policy and the sampler."""

    def __init__(self, seed: int, spread: float = 0.4) -> None:
        generator = torch.Generator().manual_seed(seed)

        def noise() -> Tensor:
            return torch.randn(BATCH, LENGTH, generator=generator, dtype=torch.float64)

        self.logprobs = (-noise().abs() - 0.05).requires_grad_()
        self.old = (self.logprobs.detach() + spread * noise()).clamp(max=-0.01)
        self.sampling = (self.old + 0.5 * spread * noise()).clamp(max=-0.01)
        self.advantages = torch.randn(BATCH, 1, generator=generator, dtype=torch.float64).expand(BATCH, LENGTH)
        lengths = torch.randint(1, LENGTH + 1, (BATCH,), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).double()

    @property
    def ratio(self) -> Tensor:
        return torch.exp(self.logprobs - self.old)

    def mean(self, values: Tensor) -> Tensor:
        return (values * self.mask).sum() / self.mask.sum()

    def inputs(self) -> LossInputs:
        keep = self.mask.bool()
        return LossInputs(
            logprobs=self.logprobs[keep],
            old_logprobs=self.old[keep],
            sampling_logprobs=self.sampling[keep],
            advantages=self.advantages[keep],
            loss_mask=torch.ones(int(keep.sum()), dtype=torch.bool),
            sequence_ids=torch.arange(BATCH).repeat_interleave(keep.sum(1)),
            num_loss_tokens=int(keep.sum()),
            num_sequences=BATCH,
            max_completion_tokens=LENGTH,
        )


def assert_same(batch: Batch, config: LossConfig, want: Tensor, correction: CorrectionConfig = NO_CORRECTION) -> None:
    """Compare the loss and its gradient with respect to every log-prob."""
    got = policy_loss(batch.inputs(), config, correction).loss
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, batch.logprobs)[0] for loss in (got, want)]
    assert gradients[1].abs().max() > 1e-4, "nothing to compare"
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_every_name_of_the_schema_is_registered() -> None:
    assert tuple(SURROGATES) == LOSSES


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'clp'; use clip, cispo"):
        policy_loss(Batch(0).inputs(), LossConfig(name="clp"))


@pytest.mark.parametrize("seed", range(3))
def test_cispo_with_a_lower_bound(seed: int) -> None:
    batch = Batch(seed)
    weight = batch.ratio.clamp(0.8, 1.3).detach()
    want = batch.mean(-weight * batch.advantages * batch.logprobs)
    assert_same(batch, LossConfig(name="cispo", cispo_floor=0.8, clip_high=0.3), want)
    metrics = policy_loss(batch.inputs(), LossConfig(name="cispo", cispo_floor=0.8, clip_high=0.3)).metrics.values()
    assert metrics["clip_ratio/low_mean"] == pytest.approx(float(batch.mean((batch.ratio < 0.8).double())))


@pytest.mark.parametrize("seed", range(3))
def test_sapo(seed: int) -> None:
    batch = Batch(seed)
    temperature = torch.where(batch.advantages > 0, 1.0, 1.05)
    gate = 1 / (1 + torch.exp(-temperature * (batch.ratio - 1))) * 4 / temperature
    assert_same(batch, LossConfig(name="sapo"), batch.mean(-gate * batch.advantages))


def test_sapo_has_the_gradient_of_the_policy_where_nothing_moved() -> None:
    batch = Batch(0, spread=0.0)
    batch.old = batch.logprobs.detach()
    for name in ("sapo", "clip"):
        (gradient,) = torch.autograd.grad(
            policy_loss(batch.inputs(), LossConfig(name=name), NO_CORRECTION).loss, batch.logprobs
        )
        torch.testing.assert_close(gradient, -batch.advantages * batch.mask / batch.mask.sum())


@pytest.mark.parametrize("seed", range(3))
def test_vespo(seed: int) -> None:
    batch = Batch(seed, spread=0.2)
    weight = (batch.ratio.log() * batch.mask).sum(1, keepdim=True).exp().detach()
    is_positive = batch.advantages >= 0
    phi = torch.where(is_positive, weight**2 * torch.exp(3 * (1 - weight)), weight**3 * torch.exp(2 * (1 - weight)))
    want = batch.mean(-phi * batch.advantages * batch.logprobs)
    assert_same(batch, LossConfig(name="vespo"), want)
    metrics = policy_loss(batch.inputs(), LossConfig(name="vespo"), NO_CORRECTION).metrics.values()
    assert metrics["vespo/phi"] == pytest.approx(float(batch.mean(phi)))


def test_vespo_takes_the_correction_into_its_weight_once() -> None:
    batch = Batch(4, spread=0.1)
    total = ((batch.logprobs - batch.sampling) * batch.mask).sum(1, keepdim=True).exp().detach()
    is_positive = batch.advantages >= 0
    phi = torch.where(is_positive, total**2 * torch.exp(3 * (1 - total)), total**3 * torch.exp(2 * (1 - total)))
    want = batch.mean(-phi * batch.advantages * batch.logprobs)
    assert_same(batch, LossConfig(name="vespo"), want, CorrectionConfig(mode="token_truncate", cap=1e6))


@pytest.mark.parametrize("seed", range(3))
def test_dppo_by_total_variation(seed: int) -> None:
    batch = Batch(seed)
    moved = batch.logprobs.detach().exp() - batch.old.exp()
    kept = torch.where(batch.advantages > 0, moved <= 0.05, moved >= -0.04).double()
    assert 0 < batch.mean(kept) < 1, "nothing to compare"
    want = batch.mean(-batch.ratio.clamp(max=1.5).detach() * batch.advantages * batch.logprobs * kept)
    assert_same(batch, LossConfig(name="dppo_tv", clip_low=0.04, clip_high=0.05, dppo_cap=1.5), want)


@pytest.mark.parametrize("seed", range(3))
def test_dppo_by_divergence(seed: int) -> None:
    batch = Batch(seed, spread=0.8)
    new, old = batch.logprobs.detach().exp(), batch.old.exp()
    divergence = old * torch.log(old / new) + (1 - old) * torch.log((1 - old) / (1 - new))
    assert (divergence >= 0).all()
    outside = torch.where(batch.advantages > 0, (divergence > 0.02) & (new > old), (divergence > 0.01) & (new < old))
    assert 0 < batch.mean(outside.double()) < 1, "nothing to compare"
    want = batch.mean(-batch.ratio.clamp(max=20).detach() * batch.advantages * batch.logprobs * ~outside)
    config = LossConfig(name="dppo_kl", clip_low=0.01, clip_high=0.02)
    assert_same(batch, config, want)
    metrics = policy_loss(batch.inputs(), config).metrics.values()
    assert metrics["clip_ratio/region_mean"] == pytest.approx(float(batch.mean(outside.double())))


@pytest.mark.parametrize("mode", ["none", "token_truncate"])
@pytest.mark.parametrize("seed", range(3))
def test_geometric_mean(seed: int, mode: str) -> None:
    batch = Batch(seed)
    log_ratio, sign = batch.logprobs - batch.old, batch.advantages.sign()
    clipped = log_ratio.clamp(-0.2, 0.3)
    lower = torch.where(sign > 0, torch.minimum(log_ratio, clipped), torch.maximum(log_ratio, clipped))
    lengths = batch.mask.sum(1)
    ratio = torch.exp((lower * batch.mask).sum(1) / lengths)
    weights = torch.exp(batch.old - batch.sampling).clamp(0.5, 2.0)
    product = torch.exp((weights.log() * batch.mask).sum(1) / lengths) if mode == "token_truncate" else 1.0
    want = (-batch.advantages[:, 0] * ratio * product).mean()
    config = LossConfig(name="geo_mean", aggregate="sequence", clip_low=0.2, clip_high=0.3)
    assert_same(batch, config, want, CorrectionConfig(mode=mode))


def covariances(batch: Batch) -> Tensor:
    logprobs = batch.logprobs.detach()
    return (batch.advantages - batch.mean(batch.advantages)) * (logprobs - batch.mean(logprobs))


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_drops_a_share_of_the_tokens_of_high_covariance(seed: int) -> None:
    batch = Batch(seed)
    first, second = -batch.advantages * batch.ratio, -batch.advantages * batch.ratio.clamp(0.8, 1.2)
    found = batch.mask.bool() & (second <= first) & (covariances(batch) > 0.1) & (covariances(batch) < 5.0)
    places = found.nonzero()
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(places)))
    kept = torch.ones_like(batch.mask)
    for row, column in places[order[: int(0.1 * batch.mask.sum())]].tolist():
        kept[row, column] = 0
    assert len(places) > int(0.1 * batch.mask.sum()) > 0, "there must be a choice"
    want = batch.mean(torch.maximum(first, second) * kept)
    config = LossConfig(name="clip_cov", covariance=CovarianceConfig(share=0.1, low=0.1))
    assert_same(batch, config, want)
    metrics = policy_loss(batch.inputs(), config).metrics.values()
    assert metrics["covariance/chosen_ratio"] == pytest.approx(float(batch.mean(1 - kept)))


@pytest.mark.parametrize("share", [0.2, 1e-6])
@pytest.mark.parametrize("seed", range(3))
def test_kl_cov_penalises_the_tokens_of_highest_covariance(seed: int, share: float) -> None:
    batch = Batch(seed)
    count = max(int(share * batch.mask.sum()), 1)
    lowest = covariances(batch)[batch.mask.bool()].sort(descending=True).values[count - 1]
    chosen = (covariances(batch) >= lowest) & batch.mask.bool()
    penalty = 0.7 * (batch.logprobs - batch.old).abs() * chosen
    want = batch.mean(-batch.advantages * batch.ratio + penalty)
    assert_same(batch, LossConfig(name="kl_cov", covariance=CovarianceConfig(share=share, penalty=0.7)), want)


def test_dro_penalises_the_squared_distance_from_the_sampler() -> None:
    batch = Batch(1)
    distance = (batch.logprobs - batch.sampling) ** 2
    want = -batch.mean(batch.advantages * batch.logprobs - 0.5 * 0.2 * distance)
    assert_same(batch, LossConfig(name="dro", dro_beta=0.2), want)


def kept_by_m2(batch: Batch, threshold: float) -> Tensor:
    """Return the mask of the tokens that are left when the furthest is dropped until the mean square is small."""
    squares = ((batch.logprobs.detach() - batch.sampling) ** 2).masked_fill(batch.mask == 0, -1)
    kept = batch.mask.clone()
    while squares[kept > 0].mean() >= threshold and kept.sum() > 1:
        kept.view(-1)[(squares * kept).view(-1).argmax()] = 0
    return kept


@pytest.mark.parametrize("threshold", [1e-9, 0.01, 0.04, 9.0])
@pytest.mark.parametrize("seed", range(3))
def test_m2po_drops_the_furthest_tokens(seed: int, threshold: float) -> None:
    batch = Batch(seed)
    kept = kept_by_m2(batch, threshold)
    assert (kept.sum() == 1) == (threshold == 1e-9)
    assert (kept.sum() == batch.mask.sum()) == (threshold == 9.0)
    assert_same(
        batch, LossConfig(name="m2po", m2_threshold=threshold), batch.mean(-batch.ratio * batch.advantages * kept)
    )


def test_sequence_sum_is_the_mean_over_sequences_of_their_sums() -> None:
    batch = Batch(2)
    want = ((-batch.advantages * batch.logprobs) * batch.mask).sum(1).mean()
    assert_same(batch, LossConfig(name="reinforce", aggregate="sequence_sum"), want)


KLS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: torch.exp(x) - 1 - x,
    "abs": torch.abs,
}


@pytest.mark.parametrize("estimator", KLS)
def test_kl_estimators(estimator: str) -> None:
    batch = Batch(3)
    inputs = replace(batch.inputs(), ref_logprobs=batch.sampling[batch.mask.bool()])
    config = LossConfig(name="reinforce", beta=0.3, kl=estimator)
    output = policy_loss(inputs, config, NO_CORRECTION)
    kl = KLS[estimator](batch.sampling - batch.logprobs)
    want = batch.mean(-batch.advantages * batch.logprobs + 0.3 * kl)
    torch.testing.assert_close(output.loss, want)
    torch.testing.assert_close(*(torch.autograd.grad(loss, batch.logprobs)[0] for loss in (output.loss, want)))
    assert output.metrics.values()["kl"] == pytest.approx(float(batch.mean(kl).detach()))


def test_kl_estimators_agree_on_the_mean_of_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 12, generator=generator, dtype=torch.float64).log_softmax(-1)
    divergence = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        mean = (policy.exp() * estimate_kl(reference - policy, estimator)).sum()
        torch.testing.assert_close(mean, divergence)


@pytest.mark.parametrize("name", LOSSES)
def test_unmasked_values_and_empty_micro_batches_do_no_harm(name: str) -> None:
    batch = Batch(5)
    inputs = batch.inputs()
    poisoned = {
        field: torch.cat([getattr(inputs, field), torch.full((2,), math.nan, dtype=torch.float64)])
        for field in ("logprobs", "old_logprobs", "sampling_logprobs", "advantages")
    }
    dirty = replace(
        inputs,
        **poisoned,
        loss_mask=torch.cat([inputs.loss_mask, torch.zeros(2, dtype=torch.bool)]),
        sequence_ids=torch.cat([inputs.sequence_ids, inputs.sequence_ids[-1:].repeat(2)]),
    )
    config = LossConfig(name=name)
    outputs = [policy_loss(given, config) for given in (inputs, dirty)]
    assert outputs[0].loss.item() == pytest.approx(outputs[1].loss.item(), abs=1e-12)
    assert outputs[0].metrics.values() == pytest.approx(outputs[1].metrics.values(), abs=1e-12)
    gradients = [torch.autograd.grad(output.loss, batch.logprobs, retain_graph=True)[0] for output in outputs]
    torch.testing.assert_close(*gradients)
    for count in (0, 2):
        empty = LossInputs(
            logprobs=torch.zeros(count, requires_grad=True),
            old_logprobs=torch.zeros(count),
            sampling_logprobs=torch.zeros(count),
            advantages=torch.ones(count),
            loss_mask=torch.zeros(count, dtype=torch.bool),
            sequence_ids=torch.zeros(count, dtype=torch.int64),
            num_loss_tokens=5,
            num_sequences=1,
            max_completion_tokens=5,
        )
        output = policy_loss(empty, config)
        assert output.metrics.values() == {"loss": 0.0}
        output.loss.backward()
        assert not empty.logprobs.grad.any()


PER_SEQUENCE = [name for name in LOSSES if name not in ("clip_cov", "kl_cov", "m2po")]
"""Surrogates that look at one sequence at a time; the others compare the tokens of a micro batch."""


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 999), cut=st.integers(1, BATCH - 1))
@pytest.mark.parametrize("name", PER_SEQUENCE)
def test_losses_of_single_sequences_do_not_depend_on_the_cut_into_micro_batches(name: str, seed: int, cut: int) -> None:
    batch = Batch(seed, spread=0.2)
    whole = batch.inputs()
    parts = [whole.sequence_ids < cut, whole.sequence_ids >= cut]
    names = ("logprobs", "old_logprobs", "sampling_logprobs", "advantages", "loss_mask", "sequence_ids")
    cuts = [replace(whole, **{field: getattr(whole, field)[part] for field in names}) for part in parts]
    cuts[1].sequence_ids = cuts[1].sequence_ids - cut
    total = sum(policy_loss(part, LossConfig(name=name)).loss for part in cuts)
    torch.testing.assert_close(total, policy_loss(whole, LossConfig(name=name)).loss)


@settings(deadline=None, max_examples=25)
@given(distance=st.floats(-90, 90), advantage=st.floats(-3, 3))
@pytest.mark.parametrize("name", LOSSES)
def test_no_distance_from_the_old_policy_makes_a_loss_or_gradient_infinite(
    name: str, distance: float, advantage: float
) -> None:
    logprobs = torch.tensor([-0.5, -1.0], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=torch.tensor([-0.5 - distance, -1.0]),
        sampling_logprobs=torch.tensor([-0.5, -1.0 - distance]),
        advantages=torch.full((2,), advantage),
        loss_mask=torch.ones(2, dtype=torch.bool),
        sequence_ids=torch.zeros(2, dtype=torch.int64),
        num_loss_tokens=2,
        num_sequences=1,
        max_completion_tokens=2,
    )
    loss = policy_loss(inputs, LossConfig(name=name)).loss
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite()
    assert gradient.isfinite().all()
