"""Tests that a learner trains preferences with the loss of completions that are run one by one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import assert_close, make_learner, micro_batch_of, parameters_of
from preference_cases import PAIRS, algorithm_of, make_pairs, rollout_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlpipe.algorithms.preferences import LabelledInputs, PairInputs, kto_loss, pair_loss
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.configs.schema.preference_config import PAIR_LOSSES
from rlpipe.data.packing import pack_labelled, pack_step
from rlpipe.learner.row_plan import AttentionLayout
from rlpipe.learner.step import Learner
from rlpipe.models.tiny import make_tiny_policy
from rlpipe.types import MiniBatch, Rollout, TrainBatch


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy")


def learner_of(tiny: Path, loss: str, *, adapter: str = "lora", seed: int = 0) -> Learner:
    learner = make_learner(tiny, adapter=adapter, algorithm=algorithm_of(loss))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # away from the reference
        for parameter in learner.policy.trainable_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return learner


def sums_by_transformers(model: torch.nn.Module, rollouts: list[Rollout]) -> Tensor:
    """Return the log-probs ``[S]`` of completions that are run one after the other."""
    found = []
    for rollout in rollouts:
        tokens = torch.from_numpy(rollout.token_ids.astype(np.int64))
        logprobs = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
        picked = logprobs.gather(1, tokens[1:, None])[:, 0]
        found.append(picked[torch.from_numpy(rollout.loss_mask[1:])].sum())
    return torch.stack(found)


def sums_alone(learner: Learner, rollouts: list[Rollout]) -> Tensor:
    """Return the policy's log-probs ``[S]`` of completions that are run one after the other, with gradient."""
    policy = learner.policy
    rows = [policy.plan(micro_batch_of([replace(rollout, rejected=None)])) for rollout in rollouts]
    return torch.stack([policy.scorer.logprobs(row, 1.0, 4096)[0].sum() for row in rows])


def gradients(learner: Learner) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in learner.policy.trainable_parameters().items()}


def run_losses(learner: Learner, batch: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of a batch with one update."""
    (mini_batch,) = batch.mini_batches
    total = 0.0
    for parameter in learner.policy.trainable_parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    for inputs in learner._objective.prepare(mini_batch):
        output = learner._objective.loss(mini_batch, inputs)
        output.loss.backward()
        total += output.loss.item()
    return total, gradients(learner)


@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("loss", PAIR_LOSSES)
def test_losses_of_packed_pairs_are_those_of_pairs_run_alone(tiny: Path, loss: str, adapter: str) -> None:
    learner, pairs = learner_of(tiny, loss, adapter=adapter), make_pairs()
    (batch,) = pack_step(pairs, step=0, num_ranks=1, max_tokens=40)
    assert len(batch.mini_batches[0].micro_batches) > 1
    total, packed = run_losses(learner, batch)
    base = AutoModelForCausalLM.from_pretrained(tiny).eval()
    sequences = [sequence for pair in pairs for sequence in pair.sequences]
    with torch.no_grad():
        reference = sums_by_transformers(base, sequences).view(-1, 2)
    for parameter in learner.policy.trainable_parameters().values():
        parameter.grad = None
    inputs = PairInputs(
        logprobs=sums_alone(learner, sequences).view(-1, 2),
        ref_logprobs=reference if algorithm_of(loss).preference.needs_reference else None,
        lengths=torch.tensor([sequence.num_loss_tokens for sequence in sequences]).view(-1, 2),
        num_pairs=PAIRS,
        num_chosen_tokens=sum(pair.num_loss_tokens for pair in pairs),
    )
    output = pair_loss(inputs, algorithm_of(loss).preference)
    output.loss.backward()
    assert total == pytest.approx(output.loss.item(), rel=1e-5, abs=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in packed.values())
    assert_close(packed, gradients(learner), 1e-5 * max(1.0, largest))


def test_kto_is_the_loss_of_completions_run_alone(tiny: Path) -> None:
    learner, pairs = learner_of(tiny, "kto", seed=2), make_pairs()
    (batch,) = pack_labelled(pairs, step=0, num_ranks=1, max_tokens=40)
    total, packed = run_losses(learner, batch)
    sequences = [*pairs, *(pair.rejected for pair in pairs if pair.rejected is not None)]
    base = AutoModelForCausalLM.from_pretrained(tiny).eval()
    mismatched = []
    for one, other in zip(sequences, [sequences[-1], *sequences[:-1]], strict=True):
        first, start = int(np.argmax(one.loss_mask)), int(np.argmax(other.loss_mask))
        mismatched.append(rollout_of(0, one.token_ids[:first].tolist(), other.token_ids[start:].tolist(), 1.0))
    with torch.no_grad():
        reference = sums_by_transformers(base, sequences)
        ratios = sums_alone(learner, mismatched) - sums_by_transformers(base, mismatched)
    kl = ratios.mean()
    assert kl > 0.001
    for parameter in learner.policy.trainable_parameters().values():
        parameter.grad = None
    inputs = LabelledInputs(
        logprobs=sums_alone(learner, sequences),
        ref_logprobs=reference,
        is_good=torch.tensor([True] * PAIRS + [False] * PAIRS),
        kl=kl,
        num_sequences=2 * PAIRS,
    )
    output = kto_loss(inputs, learner._algorithm.preference)
    output.loss.backward()
    assert total == pytest.approx(output.loss.item(), rel=1e-5, abs=1e-6)
    assert_close(packed, gradients(learner), 1e-5)
    values = learner.train_step(batch)
    assert values["kl"] == pytest.approx(float(kl), rel=1e-2)
    assert values["rewards/margins"] == pytest.approx(values["rewards/chosen"] - values["rewards/rejected"])


def test_a_pair_runs_its_prompt_once(tiny: Path) -> None:
    learner, pairs = learner_of(tiny, "dpo"), make_pairs()
    assert learner.policy.scorer.layout is AttentionLayout.SHARED
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


def test_sampled_pairs_are_compared_at_the_temperature_that_drew_them(tiny: Path) -> None:
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
        logprobs = learner.policy.scorer.logprobs(learner.policy.plan(micro), temperature, 4096)[0]
    micro.logprobs[micro.loss_mask] = logprobs.numpy()
    mini_batch = MiniBatch(micro_batches=[micro], num_loss_tokens=len(logprobs), num_sequences=PAIRS)
    values = learner.train_step(TrainBatch(step=0, mini_batches=[mini_batch]))
    assert values["sampling/logp_difference/max"] < 1e-5
