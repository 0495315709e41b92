"""Tests that the losses of preferences and their gradients equal those that TRL's own code computes.

TRL's losses run on a stand-in for its trainers and models, which hands them the log-probs of tokens as leaf tensors.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer

from rlpipe.algorithms.losses import LossOutput
from rlpipe.algorithms.preferences import LabelledInputs, PairInputs, kto_loss, labelled_means, pair_loss
from rlpipe.configs.compose import config_folder
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig

PAIRS, LENGTH, CASES = 50, 9, 4
DPO_NAMES = {"dpo": "sigmoid", "exo": "exo_pair", "sppo": "sppo_hard"}
"""TRL's names of losses, where they are others."""
SMOOTHING = {"robust": 0.2, "exo": 0.01}


class Tokens:
    """Log-probs of the tokens of completions ``[2 P, T]``, chosen ones first, of a policy and of a reference."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> Tensor:
            return -torch.randn(2 * PAIRS, LENGTH, generator=generator, dtype=torch.float64).abs()

        self.logprobs = draw().requires_grad_()
        self.ref_logprobs = draw()
        self.kl_logprobs, self.ref_kl_logprobs = draw(), draw()
        lengths = torch.randint(1, LENGTH + 1, (2 * PAIRS,), generator=generator)
        self.mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        self.is_good = torch.rand(2 * PAIRS, generator=generator) < 0.5

    def gradient(self, loss: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(loss, self.logprobs)
        return gradient

    def sums(self, logprobs: Tensor) -> Tensor:
        return (logprobs * self.mask).sum(1)

    def in_pairs(self, values: Tensor) -> Tensor:
        return torch.stack(values.chunk(2), dim=1)

    def pair_inputs(self, *, with_reference: bool) -> PairInputs:
        lengths = self.in_pairs(self.mask.sum(1))
        return PairInputs(
            logprobs=self.in_pairs(self.sums(self.logprobs)),
            ref_logprobs=self.in_pairs(self.sums(self.ref_logprobs)) if with_reference else None,
            lengths=lengths,
            num_pairs=PAIRS,
            num_chosen_tokens=int(lengths[:, 0].sum()),
        )

    def batch(self) -> dict[str, Tensor]:
        """Return what TRL's collators make of the completions, each after a prompt of one token."""
        mask = torch.cat([torch.zeros(2 * PAIRS, 1, dtype=torch.long), self.mask], dim=1)
        return {
            "input_ids": torch.zeros_like(mask),
            "attention_mask": torch.ones_like(mask),
            "completion_mask": mask,
            "label": self.is_good,
        }

    def model(self, logprobs: Tensor) -> Any:
        masked = logprobs * self.mask
        others = {"entropy": torch.zeros_like(masked), "mean_logits": torch.zeros_like(masked)}
        outputs = SimpleNamespace(log_probs=masked, is_top1=masked > 0, **others)
        return lambda **_: outputs


class Stand:
    """Stand-in for a trainer, with the attributes that TRL's losses read."""

    def __init__(self, tokens: Tokens, config: PreferenceConfig, **options: Any) -> None:
        self.beta, self.label_smoothing = config.beta, config.label_smoothing
        self.desirable_weight, self.undesirable_weight = config.desirable_weight, config.undesirable_weight
        self.model, self.ref_model = SimpleNamespace(training=True), tokens.model(tokens.ref_logprobs)
        self.args = SimpleNamespace(gradient_checkpointing_kwargs=None)
        same = lambda value: value  # noqa: E731
        self.accelerator = SimpleNamespace(device=torch.device("cpu"), gather=same, gather_for_metrics=same)
        self._metrics = {"train": defaultdict(list)}
        self._total_train_tokens, self._tp_size = 0, 1
        self.aux_loss_enabled = self.precompute_ref_logps = self.use_weighting = False
        self.ld_alpha, self.f_divergence_type = None, "reverse_kl"
        self.calculate_KL = True
        self.__dict__.update(options)

    def metric(self, name: str) -> float:
        (value,) = self._metrics["train"][name]
        return float(value)


@pytest.fixture(autouse=True)
def no_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what TRL's losses do to models, because the stand-ins are plain functions."""
    from contextlib import nullcontext

    for module in ("trl.trainer.dpo_trainer", "trl.trainer.kto_trainer"):
        monkeypatch.setattr(f"{module}.disable_gradient_checkpointing", lambda *_: nullcontext())
        monkeypatch.setattr(f"{module}.is_peft_model", lambda _: False)


def preset(name: str, **options: Any) -> PreferenceConfig:
    """Return the options of preferences that a shipped preset makes of the defaults."""
    file = config_folder() / "algorithm" / f"{name}.yaml"
    merged = OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), OmegaConf.load(file), {"preference": options})
    config = OmegaConf.to_object(merged)
    assert isinstance(config, AlgorithmConfig)
    return config.preference


def assert_equal(tokens: Tokens, own: LossOutput, theirs: Tensor) -> None:
    torch.testing.assert_close(own.loss, theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tokens.gradient(own.loss), tokens.gradient(theirs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "hinge", "robust", "exo", "nca_pair", "sppo", "apo_zero", "apo_down"])
def test_losses_with_a_reference_equal_those_of_the_dpo_trainer(loss: str) -> None:
    for seed in range(CASES):
        tokens = Tokens(seed)
        config = preset("dpo", loss=loss, label_smoothing=SMOOTHING.get(loss, 0.0), beta=0.05 + seed / 4)
        stand = Stand(tokens, config, loss_types=[DPO_NAMES.get(loss, loss)], loss_weights=[1.0])
        model = tokens.model(tokens.logprobs)
        model_like = _Callable(model)
        theirs = DPOTrainer._compute_loss(stand, model_like, tokens.batch(), return_outputs=False)
        own = pair_loss(tokens.pair_inputs(with_reference=True), config)
        assert_equal(tokens, own, theirs)
        if loss == "ipo":  # whose implicit rewards are means here
            continue
        values = own.metrics.values()
        for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen"):
            assert values[name] == pytest.approx(stand.metric(name), abs=1e-5), name


class _Callable:
    """A function with the attributes of a model."""

    training = True
    kl_logprobs: Tensor

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, **inputs: Any) -> Any:
        return self._function(**inputs)


@pytest.mark.parametrize(("name", "loss"), [("simpo", "simpo"), ("cpo", "sigmoid")])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_without_a_reference_equal_those_of_the_cpo_trainer(name: str, loss: str, smoothing: float) -> None:
    for seed in range(CASES):
        tokens = Tokens(seed)
        config = preset(name, label_smoothing=smoothing, beta=0.1 + seed)
        stand = Stand(tokens, config, loss_type=loss, simpo_gamma=config.margin, alpha=0.0)
        sums = tokens.sums(tokens.logprobs)
        compared = sums / tokens.mask.sum(1) if name == "simpo" else sums
        losses, *_ = CPOTrainer.cpo_loss(stand, *compared.chunk(2))
        theirs = losses.mean() + config.cross_entropy_coef * cross_entropy(tokens)
        assert_equal(tokens, pair_loss(tokens.pair_inputs(with_reference=False), config), theirs)


def _kl_logprobs(model: _Callable, batch: object) -> Tensor:
    return model.kl_logprobs


def test_orpo_equals_the_orpo_trainer_with_the_cross_entropy_of_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "float", lambda values: values)  # TRL's would round to float32
    for seed in range(CASES):
        tokens = Tokens(seed)
        config = preset("orpo", beta=0.1 + seed)
        means = tokens.sums(tokens.logprobs) / tokens.mask.sum(1)
        losses, *_ = ORPOTrainer.odds_ratio_loss(Stand(tokens, config), *means.chunk(2))
        own = pair_loss(tokens.pair_inputs(with_reference=False), config)
        assert_equal(tokens, own, cross_entropy(tokens) - losses.mean())


def cross_entropy(tokens: Tokens) -> Tensor:
    """Return the mean over the chosen completions' tokens."""
    chosen = (tokens.logprobs * tokens.mask)[:PAIRS]
    return -chosen.sum() / tokens.mask[:PAIRS].sum()


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1.5), (0.5, 2.0)])
def test_kto_equals_the_kto_trainer(weights: tuple[float, float]) -> None:
    for seed in range(CASES):
        tokens = Tokens(seed)
        config = preset("kto", desirable_weight=weights[0], undesirable_weight=weights[1], beta=0.05 + seed / 4)
        policy, reference = _Callable(tokens.model(tokens.logprobs)), _Callable(tokens.model(tokens.ref_logprobs))
        policy.kl_logprobs, reference.kl_logprobs = tokens.sums(tokens.kl_logprobs), tokens.sums(tokens.ref_kl_logprobs)
        stand = Stand(tokens, config, loss_type="kto", ref_model=reference, _compute_kl_logps=_kl_logprobs)
        theirs = KTOTrainer._compute_loss(stand, policy, tokens.batch(), return_outputs=False)
        kl = (policy.kl_logprobs - reference.kl_logprobs).mean().clamp(min=0)
        inputs = LabelledInputs(
            logprobs=tokens.sums(tokens.logprobs),
            ref_logprobs=tokens.sums(tokens.ref_logprobs),
            is_good=tokens.is_good,
            kl=kl,
            num_sequences=2 * PAIRS,
        )
        own = kto_loss(inputs, config)
        assert_equal(tokens, own, theirs)
        values = labelled_means(own.metrics.values())
        for name in ("kl", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected"):
            if name in stand._metrics["train"]:
                assert values[name] == pytest.approx(stand.metric(name), abs=1e-5), name
