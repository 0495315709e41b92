"""Tests that a learner trains preferences with the loss of completions that are run one by one."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from learner_cases import assert_close, make_adapter_config, make_learner, make_model_config, parameters_of
from plain_training import load_plain
from preference_cases import PAIRS, algorithm_of, make_pairs, rollout_of
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rlpipe.algorithms.preferences import LabelledInputs, PairInputs, kto_loss, pair_loss
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.configs.schema.preference_config import PAIR_LOSSES, WITHOUT_REFERENCE
from rlpipe.data.packing import pack_labelled, pack_step
from rlpipe.data.reference_cache import ReferenceCache
from rlpipe.learner.forward import LmHead
from rlpipe.learner.objectives import FrozenCopy
from rlpipe.learner.row_plan import AttentionLayout
from rlpipe.learner.step import Learner
from rlpipe.models.nf4 import from_nf4
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.types import MiniBatch, Rollout, TrainBatch

LOSSES = [
    (loss, reference)
    for loss in (*PAIR_LOSSES, "kto")
    for reference in (["none"] if loss in WITHOUT_REFERENCE else ["run", "precomputed"])
]
SMOOTHED = ("dpo", "robust", "exo", "simpo", "cpo")
ONE_PAIR = 30
"""Tokens that the longest pair may have."""
SAME = 1e-6
"""Largest difference of losses and gradients, relative to the largest gradient where that exceeds 1."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float64 what is float32 in any model of transformers and bitsandbytes, or in a float32 run's head."""
    softmax, read = nn.functional.softmax, LmHead.read
    monkeypatch.setattr(LmHead, "read", classmethod(lambda _, model, dtype: read(model, torch.float64)))
    monkeypatch.setattr(nn.functional, "softmax", lambda scores, dim, dtype: softmax(scores, dim))
    monkeypatch.setattr(Qwen3RMSNorm, "forward", rms_norm)
    monkeypatch.setattr(Linear4bit, "forward", lambda self, x: x @ from_nf4(self.weight, self).to(x.dtype).T)


def rms_norm(module: Qwen3RMSNorm, x: Tensor) -> Tensor:
    return module.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)


def to_float64(model: nn.Module) -> None:
    """Convert all parameters but NF4 codes."""
    for module in model.modules():
        if not isinstance(module, Linear4bit):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.double()


class Case:
    """Random rows, coefficients and ways to run them, of one loss and kind of reference."""

    def __init__(self, loss: str, reference: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        options = {"beta": float(random.uniform(0.05, 2)), "precompute_ref_log_probs": reference == "precomputed"}
        if loss in SMOOTHED:
            options["label_smoothing"] = float(random.uniform(0.01, 0.4))
        if loss == "orpo" or (loss != "kto" and random.random() < 0.5):
            options["cross_entropy_coef"] = float(random.uniform(0.1, 2))
        self.algorithm = algorithm_of(loss, **options)
        self.pairs = make_pairs(seed)
        self.max_tokens = int(random.choice([ONE_PAIR, 40, 1000]))
        self.attention = str(random.choice(["sdpa", "eager"]))  # which shares no prompts
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self) -> TrainBatch:
        pack = pack_labelled if self.algorithm.preference.loss == "kto" else pack_step
        (batch,) = pack(self.pairs, step=0, num_ranks=1, max_tokens=self.max_tokens)
        return batch

    def leave_reference(self, parameters: Iterable[Tensor]) -> None:
        """Change parameters, so that the policy is not its reference."""
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(torch.randn(parameter.shape, generator=self.generator) * 0.05)


def sums_alone(model: nn.Module, rollouts: list[Rollout], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the log-probs ``[S]`` of completions that transformers runs one after the other.

    ``dtype`` is the type that those of single tokens are rounded to.
    """
    found = []
    for rollout in rollouts:
        tokens = torch.from_numpy(rollout.token_ids.astype(np.int64))
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        picked = logprobs.gather(1, tokens[1:, None])[:, 0]
        found.append(picked[torch.from_numpy(rollout.loss_mask[1:])].to(dtype).sum(dtype=torch.float64))
    return torch.stack(found)


def mismatched(sequences: list[Rollout]) -> list[Rollout]:
    """Return each prompt with the completion before it."""
    found = []
    for one, other in zip(sequences, [sequences[-1], *sequences[:-1]], strict=True):
        first, start = int(np.argmax(one.loss_mask)), int(np.argmax(other.loss_mask))
        found.append(rollout_of(0, one.token_ids[:first].tolist(), other.token_ids[start:].tolist(), 1.0))
    return found


def plain_loss(case: Case, model: nn.Module, reference: nn.Module) -> Tensor:
    """Return the loss of completions that plain models run one by one."""
    preference = case.algorithm.preference
    stored = torch.float32 if preference.precompute_ref_log_probs else torch.float64
    if preference.loss == "kto":
        good, bad = case.pairs, [pair.rejected for pair in case.pairs if pair.rejected is not None]
        sequences = [*good, *bad]
        with torch.no_grad():
            others = mismatched(sequences)
            kl = (sums_alone(model, others) - sums_alone(reference, others, stored)).mean().clamp(min=0)
            ref_logprobs = sums_alone(reference, sequences, stored)
        labels = torch.tensor([True] * PAIRS + [False] * PAIRS)
        logprobs = sums_alone(model, sequences)
        inputs = LabelledInputs(
            logprobs=logprobs, ref_logprobs=ref_logprobs, is_good=labels, kl=kl, num_sequences=2 * PAIRS
        )
        return kto_loss(inputs, preference).loss
    sequences = [sequence for pair in case.pairs for sequence in pair.sequences]
    with torch.no_grad():
        pair_reference = sums_alone(reference, sequences, stored).view(-1, 2)
    inputs = PairInputs(
        logprobs=sums_alone(model, sequences).view(-1, 2),
        ref_logprobs=pair_reference if preference.needs_reference else None,
        lengths=torch.tensor([sequence.num_loss_tokens for sequence in sequences]).view(-1, 2),
        num_pairs=PAIRS,
        num_chosen_tokens=sum(pair.num_loss_tokens for pair in case.pairs),
    )
    return pair_loss(inputs, preference).loss


def run_losses(learner: Learner, batch: TrainBatch) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a batch with one update."""
    (mini_batch,) = batch.mini_batches
    parameters, total = learner.policy.trainable_parameters(), 0.0
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for inputs in learner._objective.prepare(mini_batch):
        output = learner._objective.loss(mini_batch, inputs)
        output.loss.backward()
        total += output.loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in parameters.items()}


@pytest.mark.covering(1)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("adapter", ["lora", "qlora", "none"])
@pytest.mark.parametrize(("loss", "reference"), LOSSES)
def test_losses_and_gradients_are_those_of_completions_run_alone(
    tiny: Path, tmp_path: Path, loss: str, reference: str, adapter: str, seed: int
) -> None:
    case = Case(loss, reference, seed)
    model = make_model_config(tiny, adapter=adapter, attention=case.attention)
    learner, batch = make_learner(tiny, algorithm=case.algorithm, model=model), case.batch()
    plain, untrained = (load_plain(tiny, make_adapter_config(adapter)).eval() for _ in range(2))
    copy = [learner.reference.module.model] if isinstance(learner.reference, FrozenCopy) else []
    for module in (learner.policy.model, plain, untrained, *copy):
        to_float64(module)
    if reference == "precomputed":
        cache = ReferenceCache(tmp_path)
        cache.add(learner.reference_logprobs(batch.mini_batches))
        cache.fill([batch])
    parameters = learner.policy.trainable_parameters()
    case.leave_reference(parameters.values())
    found, gradients = run_losses(learner, batch)

    plain.load_state_dict(parameters, strict=False)
    trained = dict(plain.named_parameters())
    loss_alone = plain_loss(case, plain, untrained)
    loss_alone.backward()
    assert found == pytest.approx(loss_alone.item(), rel=SAME, abs=SAME)
    expected = {name: trained[name].grad for name in parameters}
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert_close(gradients, expected, SAME * max(1.0, largest))


def test_a_pair_runs_its_prompt_once(tiny: Path) -> None:
    learner, pairs = make_learner(tiny, algorithm=algorithm_of("dpo")), make_pairs()
    assert learner.policy.module.layout is AttentionLayout.SHARED
    (batch,) = pack_step(pairs, step=0, num_ranks=1, max_tokens=1000)
    values = learner.train_step(batch)
    prompts = sum(int(np.argmax(pair.loss_mask)) for pair in pairs)
    assert values["tokens/shared_ratio"] * sum(len(s.token_ids) for p in pairs for s in p.sequences) >= prompts - PAIRS


@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo", "simpo"])
def test_training_raises_the_accuracy_on_its_pairs(tiny: Path, loss: str) -> None:
    settings = LearnerConfig(optimizer=OptimizerConfig(lr=3e-3))
    learner, pairs = make_learner(tiny, algorithm=algorithm_of(loss), learner=settings), make_pairs()
    pack = pack_labelled if loss == "kto" else pack_step
    (batch,) = pack(pairs, step=0, num_ranks=1, max_tokens=1000)
    margins = []
    for step in range(20):
        values = learner.train_step(replace(batch, step=step))
        margins.append(values["rewards/margins"])
    assert margins[-1] > margins[0]
    held_out = learner.evaluate(batch.mini_batches)
    assert held_out["eval/rewards/margins"] > margins[0]
    assert not any(name.startswith("eval/tokens") for name in held_out)
    if loss != "kto":
        assert held_out["eval/rewards/accuracies"] == 1.0
    assert parameters_of(learner)


def test_sampled_pairs_are_compared_at_the_temperature_that_sampled_them(tiny: Path) -> None:
    rows, online = algorithm_of("dpo"), AlgorithmConfig(loss=LossConfig(name="dpo"), num_steps=10)
    settings = LearnerConfig(optimizer=OptimizerConfig(lr=3e-3))
    found = {}
    for name, algorithm, pairs in (("rows", rows, make_pairs()), ("sampled", online, make_pairs())):
        learner = make_learner(tiny, algorithm=algorithm, learner=settings)
        (batch,) = pack_step(pairs, step=0, num_ranks=1, max_tokens=1000)
        learner.train_step(batch)
        found[name] = learner.train_step(replace(batch, step=1))
    temperature = 0.9  # of make_learner
    assert found["rows"]["logps/chosen"] != pytest.approx(found["sampled"]["logps/chosen"], rel=1e-3)
    assert "sampling/logp_difference/max" not in found["rows"]
    learner = make_learner(tiny, algorithm=online, learner=settings)
    pairs = make_pairs()
    (micro,) = pack_step(pairs, step=0, num_ranks=1, max_tokens=1000)[0].mini_batches[0].micro_batches
    with torch.no_grad():
        logprobs = learner.policy.module.logprobs(learner.policy.plan(micro), temperature, 4096)[0]
    micro.logprobs[micro.loss_mask] = logprobs.numpy()
    mini_batch = MiniBatch(micro_batches=[micro], num_loss_tokens=len(logprobs), num_sequences=PAIRS)
    values = learner.train_step(TrainBatch(step=0, mini_batches=[mini_batch]))
    assert values["sampling/logp_difference/max"] < 1e-5
