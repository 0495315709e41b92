"""Tests that the losses and their gradients equal those that TRL's own code computes from the same tensors.

TRL's ``_compute_loss`` runs on a stand-in for its trainer that hands it log-probs and entropies as leaf tensors. It
sees right-padded rows ``[B, T]``; rlpipe sees the same rows packed ``[N]``, each after a prompt of its own.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

from rlpipe.algorithms.losses import EntropyBonus, LossInputs, LossOutput, policy_loss
from rlpipe.configs.compose import config_folder
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, CorrectionConfig, LossConfig

CONFIGS = config_folder() / "algorithm"
BATCH, LENGTH, PROMPT = 16, 13, 3
MAX_COMPLETION_TOKENS = 16
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
ENTROPY_COEF = 0.01
TRL_DEFAULTS = (
    *("sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)
"""Options that stay at TRL's defaults, which are rlpipe's as well."""
ADAPTIVE_ENTROPY = ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")


def loss_config(algorithm: str) -> LossConfig:
    """Return the loss config that the shipped config group makes of the defaults."""
    merged = OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), OmegaConf.load(CONFIGS / f"{algorithm}.yaml"))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, AlgorithmConfig)
    return config.loss


@dataclass(kw_only=True)
class Rows:
    """Right-padded rows ``[B, T]`` from an off-policy step: some hardly moved, some moved far."""

    logprobs: Tensor
    entropy: Tensor
    old_logprobs: Tensor
    ref_logprobs: Tensor
    mask: Tensor  # [B, T] of 0 and 1
    advantages: Tensor  # [B]
    sampling_logprobs: Tensor | None = None  # None means the old policy's


def make_rows(dtype: torch.dtype, seed: int, *, with_gaps: bool) -> Rows:
    """Return rows; ``with_gaps`` masks single tokens (like tool results) and one whole row (like truncated ones)."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: Tensor | float) -> Tensor:
        return torch.randn(BATCH, LENGTH, generator=generator, dtype=torch.float64) * scale

    logprobs = -noise(1.0).abs()
    scale = torch.tensor([0.0, 1e-4, 3e-4, 1e-3, 0.03, 0.1, 0.4, 0.8] * 2, dtype=torch.float64)[:, None]
    drift = torch.randn(BATCH, 1, generator=generator, dtype=torch.float64).abs() * scale
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(BATCH // 2)
    lengths = torch.randint(1, LENGTH + 1, (BATCH,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    if with_gaps:
        mask[:, 1:] *= (torch.rand(BATCH, LENGTH - 1, generator=generator) > 0.3).long()
        mask[seed % BATCH] = 0
    return Rows(
        logprobs=logprobs.to(dtype, copy=True).requires_grad_(),
        entropy=noise(1.0).abs().to(dtype).requires_grad_(),
        old_logprobs=(logprobs - drift + noise(scale)).to(dtype),
        ref_logprobs=(logprobs + noise(0.5)).to(dtype),
        mask=mask,
        advantages=(signs * torch.randn(BATCH, generator=generator).abs()).to(dtype),
    )


class OneProcess:
    """An accelerator with a single process."""

    num_processes = 1

    def gather(self, values: Tensor) -> Tensor:
        return values

    def pad_across_processes(self, values: Tensor, dim: int, pad_index: float) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        assert reduction == "sum"
        return values


@dataclass(kw_only=True)
class StandInTrainer:
    """A stand-in with the trainer attributes that TRL's losses read, and given tensors as the model's outputs."""

    rows: Rows
    loss_type: str = "grpo"
    importance_sampling_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    entropy_coef: float = 0.0
    max_completion_length: int = MAX_COMPLETION_TOKENS
    aux_loss_enabled: bool = False
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    use_vllm: bool = False
    vllm_importance_sampling_correction: bool = True
    vllm_importance_sampling_mode: str = "token_truncate"
    vllm_importance_sampling_clip_min: float | None = None
    vllm_importance_sampling_clip_max: float | None = None
    use_adaptive_entropy: bool = False
    entropy_target: float = 0.2
    entropy_coef_delta: float = 0.005
    entropy_coef_min: float = 0.0
    entropy_coef_max: float = 1.0
    current_gradient_accumulation_steps: int = 1
    accelerator: OneProcess = field(default_factory=OneProcess)
    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(training=True))
    _metrics: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {"train": defaultdict(list), "eval": defaultdict(list)}
    )

    def __post_init__(self) -> None:
        self._entropy_bonus_enabled = self.entropy_coef > 0 or self.use_adaptive_entropy
        self._last_world_entropy = math.inf
        self._entropy_window_stats = None
        self.accelerator.sync_gradients = True  # type: ignore[attr-defined]
        self.args = SimpleNamespace(
            delta=self.delta,
            use_bias_correction_kl=False,
            steps_per_generation=1,
            **{name: getattr(self, name) for name in ADAPTIVE_ENTROPY},
            # As tensors, because TRL's torch.where makes float32 of numbers.
            **{
                name: torch.tensor(GRPOConfig.__dataclass_fields__[name].default, dtype=self.rows.logprobs.dtype)
                for name in TRL_DEFAULTS
            },
        )

    get_off_policy_mask = staticmethod(GRPOTrainer.get_off_policy_mask)
    get_gamma_weights = staticmethod(GRPOTrainer.get_gamma_weights)
    get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        return self.rows.logprobs, self.rows.entropy, None

    def metrics(self) -> dict[str, float]:
        return {name: values[0] for name, values in self._metrics["train"].items()}


def padded_inputs(rows: Rows) -> dict[str, Tensor]:
    """Return what TRL's loss reads from a batch; of the token ids it uses only the number."""
    return {
        "prompt_ids": torch.zeros(BATCH, PROMPT, dtype=torch.long),
        "prompt_mask": torch.ones(BATCH, PROMPT, dtype=torch.long),
        "completion_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long),
        "completion_mask": rows.mask,
        "advantages": rows.advantages,
        "old_per_token_logps": rows.old_logprobs,
        "old_logps": (rows.old_logprobs * rows.mask).sum(1),
        "ref_per_token_logps": rows.ref_logprobs,
        "num_items_in_batch": rows.mask.sum(),
    }


def packed_inputs(rows: Rows) -> LossInputs:
    """Return each row up to its last loss token, after a prompt whose values must never be read."""
    lengths = [int(row.nonzero().max()) + 1 if row.any() else LENGTH for row in rows.mask]

    def pack(values: Tensor, prompt: float) -> Tensor:
        behind = [torch.cat([row.new_full((PROMPT,), prompt), row[:n]]) for row, n in zip(values, lengths, strict=True)]
        return torch.cat(behind)

    return LossInputs(
        logprobs=pack(rows.logprobs, 7.0),
        entropy=pack(rows.entropy, 7.0),
        old_logprobs=pack(rows.old_logprobs, -7.0),
        sampling_logprobs=pack(rows.old_logprobs if rows.sampling_logprobs is None else rows.sampling_logprobs, -7.0),
        ref_logprobs=pack(rows.ref_logprobs, 7.0),
        advantages=pack(rows.advantages[:, None].expand(BATCH, LENGTH), 7.0),
        loss_mask=pack(rows.mask, 0).bool(),
        sequence_ids=torch.arange(BATCH).repeat_interleave(torch.tensor(lengths) + PROMPT),
        num_loss_tokens=int(rows.mask.sum()),
        num_sequences=BATCH,
        max_completion_tokens=MAX_COMPLETION_TOKENS,
    )


def assert_equal(rows: Rows, ours: LossOutput, theirs: Tensor) -> None:
    """Compare the losses, and their gradients with respect to every log-prob and every entropy."""
    tolerance = TOLERANCE[rows.logprobs.dtype]
    torch.testing.assert_close(ours.loss, theirs, rtol=tolerance, atol=tolerance)
    leaves = (rows.logprobs, rows.entropy)
    got = torch.autograd.grad(ours.loss, leaves, allow_unused=True, materialize_grads=True)
    want = torch.autograd.grad(theirs, leaves, allow_unused=True, materialize_grads=True)
    assert want[0].abs().max() > 1e-3, "nothing to compare"
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def compare_with_grpo_trainer(rows: Rows, config: LossConfig, loss_type: str) -> None:
    trainer = StandInTrainer(
        rows=rows,
        loss_type=loss_type,
        importance_sampling_level=config.level,
        epsilon_low=config.clip_low,
        epsilon_high=config.clip_high + 1 if config.name == "cispo" else config.clip_high,
        delta=config.clip_delta,
        beta=config.beta,
        entropy_coef=config.entropy_coef,
    )
    ours = policy_loss(packed_inputs(rows), config)
    assert_equal(rows, ours, GRPOTrainer._compute_loss(trainer, None, padded_inputs(rows)))
    if config.level == "token":
        shared = trainer.metrics().keys() & ours.metrics.values().keys()
        assert shared >= {"entropy"} | ({"kl"} if config.beta else set())
        assert config.name != "clip" or "clip_ratio/region_mean" in shared
        for name in shared:
            assert ours.metrics.values()[name] == pytest.approx(trainer.metrics()[name], abs=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("algorithm", "loss_type"),
    [*[(name, name) for name in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo")], ("gspo", "grpo")],
)
def test_shipped_algorithms_equal_trl(algorithm: str, loss_type: str, seed: int, dtype: torch.dtype) -> None:
    compare_with_grpo_trainer(make_rows(dtype, seed, with_gaps=True), loss_config(algorithm), loss_type)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_rloo_equals_trl(seed: int, dtype: torch.dtype) -> None:
    rows = make_rows(dtype, seed, with_gaps=False)
    theirs = RLOOTrainer._compute_loss(StandInTrainer(rows=rows), None, padded_inputs(rows))
    assert_equal(rows, policy_loss(packed_inputs(rows), loss_config("rloo")), theirs)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(("clip_low", "clip_high"), [(0.4, 0.4), (0.1, 0.2)])
def test_gmpo_equals_trl(clip_low: float, clip_high: float, beta: float, dtype: torch.dtype) -> None:
    config = replace(loss_config("gmpo"), clip_low=clip_low, clip_high=clip_high, beta=beta)
    for seed in range(3):
        rows = make_rows(dtype, seed, with_gaps=True)
        noise = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        rows = replace(rows, old_logprobs=rows.logprobs.detach() + noise / 2)
        rows.advantages[rows.mask.sum(1) == 0] = 0  # for a row without loss tokens, TRL adds a constant, -a
        trainer = StandInTrainer(rows=rows, epsilon_low=clip_low, epsilon_high=clip_high, beta=beta)
        theirs = GMPOTrainer._compute_loss(trainer, None, padded_inputs(rows))
        ours = policy_loss(packed_inputs(rows), config)
        assert_equal(rows, ours, theirs)
        assert trainer.metrics()["clip_ratio/low_mean"] > 0
        assert trainer.metrics()["clip_ratio/high_mean"] > 0
        clipped = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
        for name in (*clipped, "entropy", *(["kl"] if beta else [])):
            assert ours.metrics.values()[name] == pytest.approx(trainer.metrics()[name], abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("clip_delta", [None, 1.3])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("loss_type", "name", "aggregate"),
    [
        ("grpo", "clip", "sequence"),
        ("bnpo", "clip", "token"),
        ("dapo", "clip", "token"),
        ("dr_grpo", "clip", "constant"),
        ("cispo", "cispo", "token"),
    ],
)
def test_every_combination_of_options_equals_trl(
    loss_type: str, name: str, aggregate: str, level: str, clip_delta: float | None, beta: float
) -> None:
    config = LossConfig(
        name=name, aggregate=aggregate, level=level, clip_low=0.1, clip_high=0.15, clip_delta=clip_delta, beta=beta
    )
    for dtype in TOLERANCE:
        rows = make_rows(dtype, 5, with_gaps=True)
        compare_with_grpo_trainer(rows, config, loss_type)
        unbounded = policy_loss(packed_inputs(rows), replace(config, clip_delta=None)).loss
        bound_matters = policy_loss(packed_inputs(rows), config).loss.item() != unbounded.item()
        assert bound_matters == (clip_delta is not None and name == "clip")


def test_entropy_bonus_equals_trl_where_tokens_weigh_the_same() -> None:
    config = LossConfig(aggregate="token", entropy_coef=ENTROPY_COEF)
    compare_with_grpo_trainer(make_rows(torch.float64, 6, with_gaps=True), config, "dapo")


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_adaptive_entropy_equals_trl(loss_type: str, share: float) -> None:
    """Compare updates whose entropies are on both sides of the target, and the coefficient after each."""
    adaptive = {"entropy_target": 1.0, "entropy_coef_min": 0.05, "entropy_coef_max": 0.12}
    config = replace(
        loss_config(loss_type), entropy_coef=0.1, top_entropy_quantile=share, entropy_step=0.015, **adaptive
    )
    bonus = EntropyBonus(config)
    trainer = StandInTrainer(
        rows=make_rows(torch.float64, 6, with_gaps=True),
        loss_type=loss_type,
        epsilon_low=config.clip_low,
        epsilon_high=config.clip_high,
        entropy_coef=0.1,
        use_adaptive_entropy=True,
        entropy_coef_delta=0.015,
        top_entropy_quantile=share,
        **adaptive,
    )
    coefficients = []
    for seed, scale in enumerate((0.2, 0.2, 0.2, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.2)):
        rows = make_rows(torch.float64, seed, with_gaps=True)
        trainer.rows = rows = replace(rows, entropy=(rows.entropy.detach() * scale).requires_grad_())
        ours = policy_loss(replace(packed_inputs(rows), entropy_weight=bonus.weight), config)
        assert_equal(rows, ours, GRPOTrainer._compute_loss(trainer, None, padded_inputs(rows)))
        bonus.follow(ours.metrics.values()["entropy" if share == 1 else "entropy/trained_mean"])
        coefficients.append(bonus.coef)
        assert (bonus.coef, bonus.is_on) == (trainer.entropy_coef, trainer._last_world_entropy <= 1.0)
    assert {0.12, 0.05} < set(coefficients), "both limits and other values"


def test_on_policy_without_old_logprobs_equals_trl() -> None:
    rows = make_rows(torch.float64, 7, with_gaps=True)
    inputs = {name: value for name, value in padded_inputs(rows).items() if name != "old_per_token_logps"}
    theirs = GRPOTrainer._compute_loss(StandInTrainer(rows=rows), None, inputs)
    ours = policy_loss(
        replace(packed_inputs(rows), old_logprobs=None), loss_config("grpo"), CorrectionConfig(mode="none")
    )
    assert_equal(rows, ours, theirs)


def importance_ratio(trainer: StandInTrainer, rows: Rows, sampling_logprobs: Tensor) -> Tensor:
    """Return TRL's token weights ``[B, T]`` or ``[B, 1]``, computed by the code block of its batch preparation."""
    method = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions)))
    condition = "self.use_vllm and self.vllm_importance_sampling_correction"
    (block,) = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.If) and ast.unparse(node.test) == condition and "logps_diff = " in ast.unparse(node)
    ]
    names: dict[str, Any] = {"self": trainer, "torch": torch, "math": math, "tool_mask": None}
    names |= {"completion_mask": rows.mask, "old_per_token_logps": rows.old_logprobs.detach()}
    names["sampling_per_token_logps"] = sampling_logprobs
    exec(compile(ast.Module([block], type_ignores=[]), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "cispo", "sapo", "vespo", "luspo"])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_corrections_equal_trl(mode: str, algorithm: str, beta: float) -> None:
    if algorithm == "vespo" and mode.startswith("sequence"):
        pytest.skip("both refuse it")
    cap = 1.3
    config = replace(loss_config(algorithm), beta=beta)
    for dtype in TOLERANCE:
        rows = make_rows(dtype, 8, with_gaps=True)
        drift = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(9), dtype=dtype) * 0.3
        trainer = StandInTrainer(
            rows=rows,
            loss_type=algorithm,
            importance_sampling_level=config.level,
            epsilon_low=config.clip_low,
            epsilon_high=config.clip_high + 1 if config.name == "cispo" else config.clip_high,
            beta=beta,
            use_vllm=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=1 / cap,
            vllm_importance_sampling_clip_max=cap,
        )
        ratio = importance_ratio(trainer, rows, rows.old_logprobs + drift)
        theirs = GRPOTrainer._compute_loss(trainer, None, padded_inputs(rows) | {"importance_sampling_ratio": ratio})
        inputs = packed_inputs(replace(rows, sampling_logprobs=rows.old_logprobs + drift))
        assert_equal(rows, policy_loss(inputs, config, CorrectionConfig(mode=mode, cap=cap)), theirs)


@pytest.mark.parametrize(("floor", "cap"), [(None, 3.0), (0.0, 3.0), (0.9, 1.2), (0.5, None), (0.9, None)])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_unequal_bounds_and_missing_log_probs_equal_trl(mode: str, floor: float | None, cap: float | None) -> None:
    config = loss_config("dapo")
    for dtype in TOLERANCE:
        rows = make_rows(dtype, 11, with_gaps=True)
        drift = torch.randn(BATCH, LENGTH, generator=torch.Generator().manual_seed(12), dtype=dtype) * 0.3
        drift[::3, ::2] = math.nan
        trainer = StandInTrainer(
            rows=rows,
            loss_type="dapo",
            epsilon_low=config.clip_low,
            epsilon_high=config.clip_high,
            use_vllm=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=1 / cap if floor is None and cap is not None else floor or None,
            vllm_importance_sampling_clip_max=cap,
        )
        ratio = importance_ratio(trainer, rows, rows.old_logprobs + drift)
        theirs = GRPOTrainer._compute_loss(trainer, None, padded_inputs(rows) | {"importance_sampling_ratio": ratio})
        inputs = packed_inputs(replace(rows, sampling_logprobs=rows.old_logprobs + drift))
        ours = policy_loss(inputs, config, CorrectionConfig(mode=mode, floor=floor, cap=cap))
        assert_equal(rows, ours, theirs)
        missing = (rows.mask.bool() & drift.isnan()).sum() / rows.mask.sum()
        assert ours.metrics.values()["sampling/missing_ratio"] == pytest.approx(missing.item())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.7])
@pytest.mark.parametrize(("loss_type", "algorithm"), [("grpo", "grpo"), ("dapo", "dapo"), ("vespo", "vespo")])
def test_tokens_of_high_entropy_equal_trl(loss_type: str, algorithm: str, share: float) -> None:
    config = replace(loss_config(algorithm), top_entropy_quantile=share, beta=0.1)
    for dtype in TOLERANCE:
        rows = make_rows(dtype, 13, with_gaps=True)
        trainer = StandInTrainer(
            rows=rows,
            loss_type=loss_type,
            epsilon_low=config.clip_low,
            epsilon_high=config.clip_high,
            beta=0.1,
            top_entropy_quantile=share,
        )
        ours = policy_loss(packed_inputs(rows), config)
        assert_equal(rows, ours, GRPOTrainer._compute_loss(trainer, None, padded_inputs(rows)))
        expected = max(share, 1 / int(rows.mask.sum()))
        assert ours.metrics.values()["entropy/trained_ratio"] == pytest.approx(expected, abs=1 / int(rows.mask.sum()))


def test_off_policy_sequence_mask_equals_trl() -> None:
    rows = make_rows(torch.float64, 10, with_gaps=True)
    sampling = rows.logprobs.detach() + torch.linspace(-0.3, 0.3, BATCH, dtype=torch.float64)[:, None]
    trainer = StandInTrainer(rows=rows, loss_type="dapo", off_policy_mask_threshold=0.1)
    inputs = {name: value for name, value in padded_inputs(rows).items() if name != "old_per_token_logps"}
    inputs |= {"sampling_per_token_logps": sampling, "advantages": rows.advantages[:, None].expand(BATCH, LENGTH)}
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    ours = replace(packed_inputs(replace(rows, sampling_logprobs=sampling)), old_logprobs=None)
    correction = CorrectionConfig(mode="none", off_policy_threshold=0.1)
    assert_equal(rows, policy_loss(ours, LossConfig(aggregate="token"), correction), theirs)
    assert policy_loss(ours, LossConfig(aggregate="token"), correction).metrics.values()["sampling/dropped_ratio"] > 0
