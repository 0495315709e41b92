"""EBFT's strided loss and its gradient, against every block run alone through plain transformers models."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from family_cases import make_family
from feature_cases import baseline_reference, join_reference, score_reference, score_whitened, whiten_layers_reference
from learner_cases import make_document, make_model_config
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from rlpipe.configs.schema.algorithm_config import (
    AdvantageConfig,
    AlgorithmConfig,
    EbftConfig,
    FeatureConfig,
    LossConfig,
    StridedConfig,
)
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.data.packing import empty_micro_batch, pack_step
from rlpipe.learner.objectives import FrozenCopy, make_reference
from rlpipe.learner.policy import Policy, load_policy
from rlpipe.learner.step import Learner
from rlpipe.learner.strided_objective import Strided, StridedInputs
from rlpipe.types import MiniBatch, TrainBatch

TEMPERATURE = 0.6
SAMPLES = 3
FRACTIONS = [0.5, 1.0]
DEPTHS = [1, 2]
"""The depths of hidden states in the tests' models, which have two layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def make_algorithm(*, advantage: str = "rloo", ce_coef: float = 0.0, **features: object) -> AlgorithmConfig:
    return AlgorithmConfig(
        kind="ebft_strided",
        group_size=SAMPLES,
        advantage=AdvantageConfig(name=advantage),
        loss=LossConfig(name="reinforce"),
        ebft=EbftConfig(
            features=FeatureConfig(layers=FRACTIONS, **features),
            strided=StridedConfig(stride=4, context_length=5, generate_tokens=3, temperature=TEMPERATURE),
            ce_coef=ce_coef,
        ),
    )


def make_policy(folder: Path, adapter: str) -> Policy:
    """Return a policy that differs from its initial model."""
    policy = load_policy(make_model_config(folder, adapter=adapter), LearnerConfig(), torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.trainable_parameters().values():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return policy


def make_mini_batch(*lengths: int, prompt: int = 1, max_tokens: int = 512) -> MiniBatch:
    """Return documents that begin with the same token."""
    rng = np.random.default_rng(2)
    documents = [
        make_document(index, np.r_[7, rng.integers(7, 100, length - 1)], prompt=prompt)
        for index, length in enumerate(lengths)
    ]
    (batch,) = pack_step(documents, step=0, num_ranks=1, max_tokens=max_tokens)
    (mini_batch,) = batch.mini_batches
    return mini_batch


def make_objective(policy: Policy, algorithm: AlgorithmConfig) -> Strided:
    reference = make_reference(policy, algorithm)
    assert reference is not None
    return Strided(policy, LearnerConfig(), algorithm, reference, seed=0)


def plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


@torch.no_grad()
def features_alone(model: PreTrainedModel, tokens: Tensor, normalize: str = "each") -> np.ndarray:
    """Return the last token's features."""
    states = model.eval()(input_ids=tokens[None], output_hidden_states=True).hidden_states
    return join_reference([states[depth][0, -1].double().numpy() for depth in DEPTHS], normalize)


def loss_alone(
    policy: PreTrainedModel, frozen: PreTrainedModel, inputs: StridedInputs, sampled: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, list[list[float]]]:
    """Return the policy gradient's loss, computed block by block, and the advantages of each block."""
    plan, features = inputs.plan, algorithm.ebft.features
    whitening, normalize = features.whitening, features.normalize_layers
    losses, advantages = [], []
    for block in range(plan.num_columns // SAMPLES):
        column = block * SAMPLES
        document = inputs.documents[torch.from_numpy(plan.document_ids == plan.column_documents[column])]
        context = int(plan.contexts[column])
        sequences = [torch.cat([document[:context], sampled[:, column + j]]) for j in range(SAMPLES)]
        samples = np.stack([features_alone(frozen, sequence, normalize) for sequence in sequences])
        truth = features_alone(frozen, document[: context + plan.num_steps], normalize)
        layers = len(DEPTHS) if features.whiten_layers == "each" else 1
        whitened, others = whiten_layers_reference(samples, truth, whitening, layers)
        alignment, _, _ = score_whitened(whitened, others)
        advantages.append(baseline_reference(np.array(alignment), whitened @ whitened.T, 1.0, 1.0))
        for sequence, advantage in zip(sequences, advantages[-1], strict=True):
            logits = policy(input_ids=sequence[None]).logits[0, context - 1 : -1]
            logprobs = (logits / TEMPERATURE).log_softmax(1).gather(1, sequence[context:, None])
            losses.append(-advantage * logprobs.sum())
    return torch.stack(losses).sum() / sampled.numel(), advantages


@pytest.mark.parametrize(
    "features",
    [
        {"whitening": "sample"},
        {"whitening": "feature"},
        {"whitening": "none"},
        {"whitening": "sample", "whiten_layers": "each"},
        {"whitening": "sample", "normalize_layers": "joint"},
        {"whitening": "sample", "normalize_layers": "none"},
    ],
)
def test_loss_and_gradient_are_those_of_the_blocks_alone(folder: Path, features: dict[str, str]) -> None:
    policy, algorithm = make_policy(folder, "none"), make_algorithm(**features)
    objective, mini_batch = make_objective(policy, algorithm), make_mini_batch(17, 4, 14)
    (inputs,) = objective.prepare(mini_batch)
    objective.begin(0)
    sampled = objective.sample(inputs)
    objective.begin(0)
    output = objective.loss(mini_batch, inputs)
    output.loss.backward()
    alone = plain(folder)
    alone.load_state_dict(policy.model.state_dict())
    expected, advantages = loss_alone(alone, plain(folder), inputs, sampled, algorithm)
    expected.backward()
    assert np.abs(advantages).max() > 0.05
    torch.testing.assert_close(output.loss, expected, atol=1e-5, rtol=1e-4)
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for name, parameter in policy.model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-5, rtol=1e-3)


def test_what_fills_a_micro_batch_has_no_blocks_and_is_no_document(folder: Path) -> None:
    algorithm = make_algorithm()
    shortest = replace(algorithm.ebft, strided=StridedConfig(context_length=1, generate_tokens=1))
    algorithm = replace(algorithm, ebft=shortest)
    objective = make_objective(make_policy(folder, "none"), algorithm)
    filler = MiniBatch(
        micro_batches=[empty_micro_batch(with_reference=False)], num_loss_tokens=8, num_sequences=1, num_chosen_tokens=0
    )
    (inputs,) = objective.prepare(filler)
    assert inputs.plan.num_columns == 0
    objective.begin(0)
    values = objective.loss(filler, inputs).metrics.values()
    assert values["ebft/documents_skipped"] == values["ebft/num_blocks"] == 0


def test_metrics_are_those_of_the_reference(folder: Path) -> None:
    policy, algorithm = make_policy(folder, "none"), make_algorithm()
    objective, mini_batch = make_objective(policy, algorithm), make_mini_batch(17, 4, 14)
    (inputs,) = objective.prepare(mini_batch)
    objective.begin(0)
    sampled = objective.sample(inputs)
    objective.begin(0)
    values = objective.loss(mini_batch, inputs).metrics.values()
    frozen, plan = plain(folder), inputs.plan
    rows = []
    for column in range(0, plan.num_columns, SAMPLES):
        document = inputs.documents[torch.from_numpy(plan.document_ids == plan.column_documents[column])]
        context = int(plan.contexts[column])
        samples = [
            features_alone(frozen, torch.cat([document[:context], sampled[:, column + j]])) for j in range(SAMPLES)
        ]
        truth = features_alone(frozen, document[: context + plan.num_steps])
        alignment, diversity, cfm = score_reference(np.stack(samples), truth, "sample")
        rows.append((np.mean(alignment), np.mean(diversity), cfm))
    expected = np.mean(rows, axis=0)
    names = ("ebft/alignment", "ebft/diversity", "ebft/cfm_loss")
    assert [values[name] for name in names] == pytest.approx(expected.tolist(), abs=1e-4)
    assert values["ebft/reward"] == pytest.approx(2 * expected[0] - 2 * expected[1], abs=1e-4)
    assert values["ebft/num_blocks"] == len(rows)
    assert values["ebft/documents_skipped"] == 1
    assert values["ebft/num_unwhitened"] == 0


def test_cross_entropy_on_the_documents_is_added_as_weighed(folder: Path) -> None:
    policy, mini_batch = make_policy(folder, "none"), make_mini_batch(17, 4, 14)
    without, added = (make_objective(policy, make_algorithm(ce_coef=coef)) for coef in (0.0, 0.3))
    losses = {}
    for coef, objective in ((0.0, without), (0.3, added)):
        objective.begin(0)
        (inputs,) = objective.prepare(mini_batch)
        losses[coef] = objective.loss(mini_batch, inputs)
    alone = plain(folder)
    alone.load_state_dict(policy.model.state_dict())
    starts = np.cumsum([0, 17, 4, 14])
    documents = [inputs.documents[start:end] for start, end in pairwise(starts)]
    total = 0.0
    for document in documents:
        logits = alone(input_ids=document[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum"))
    values = losses[0.0].metrics.values()
    assert values["ebft/ce_loss"] == pytest.approx(total / (16 + 3 + 13), abs=1e-5)
    assert float(losses[0.3].loss - losses[0.0].loss) == pytest.approx(0.3 * values["ebft/ce_loss"], abs=1e-5)
    assert values["loss"] == pytest.approx(values["ebft/rl_loss"])


def test_blocks_of_rows_with_prompts_stand_in_their_completions(folder: Path) -> None:
    policy = make_policy(folder, "none")
    (inputs,) = make_objective(policy, make_algorithm()).prepare(make_mini_batch(20, prompt=9))
    assert inputs.plan.contexts.tolist() == [context for context in (9, 13, 17) for _ in range(SAMPLES)]
    assert inputs.truth.tolist() == list(range(9, 20))


def test_a_step_leaves_the_feature_network_as_it_was(folder: Path) -> None:
    for adapter in ("lora", "none"):
        policy, algorithm = make_policy(folder, adapter), make_algorithm()
        learner = Learner(policy, LearnerConfig(optimizer=OptimizerConfig(lr=1e-2)), algorithm)
        frozen = (
            {name: p for name, p in policy.model.named_parameters() if not p.requires_grad}
            if adapter == "lora"
            else dict(learner.reference.module.named_parameters())  # type: ignore[union-attr]
        )
        before = {name: parameter.clone() for name, parameter in frozen.items()}
        trained = {name: parameter.detach().clone() for name, parameter in policy.trainable_parameters().items()}
        metrics = learner.train_step(TrainBatch(step=0, mini_batches=[make_mini_batch(17, 30)]))
        assert metrics["grad_norm"] > 0
        assert all(torch.equal(parameter, before[name]) for name, parameter in frozen.items())
        assert any(not torch.equal(p, trained[name]) for name, p in policy.trainable_parameters().items())


def test_the_adapter_off_and_a_frozen_copy_give_the_same_rewards(folder: Path) -> None:
    """Check rewards of equal samples, since both policies equal the initial model."""
    values = []
    for adapter in ("lora", "none"):
        policy = load_policy(make_model_config(folder, adapter=adapter), LearnerConfig(), torch.device("cpu"))
        objective, mini_batch = make_objective(policy, make_algorithm()), make_mini_batch(17, 14)
        objective.begin(0)
        (inputs,) = objective.prepare(mini_batch)
        values.append(objective.loss(mini_batch, inputs).metrics.values())
    names = [name for name in values[0] if name.startswith("ebft/")]
    assert [values[0][name] for name in names] == pytest.approx([values[1][name] for name in names], abs=1e-5)


def test_a_copy_without_a_kl_penalty_ends_at_the_deepest_features(folder: Path) -> None:
    policy, algorithm = make_policy(folder, "none"), make_algorithm()
    algorithm.ebft.features.layers = [0.25, 0.5]
    metrics = []
    for beta, num_layers in ((0.0, 1), (1e-9, 2)):
        algorithm.loss.beta = beta
        objective = make_objective(policy, algorithm)
        copy = objective._reference
        assert isinstance(copy, FrozenCopy)
        assert len(copy.module.causal_model.get_decoder().layers) == num_layers
        mini_batch = make_mini_batch(17, 30)
        objective.begin(0)
        (inputs,) = objective.prepare(mini_batch)
        metrics.append(objective.loss(mini_batch, inputs).metrics.values())
    assert metrics[0] == pytest.approx({name: metrics[1][name] for name in metrics[0]}, abs=1e-6)


def test_chunks_of_one_row_are_sampled_with_random_numbers_of_their_own(folder: Path) -> None:
    objective = make_objective(make_policy(folder, "none"), make_algorithm())
    chunks = [make_document(5, np.arange(start, start + 14)) for start in (10, 23)]
    (batch,) = pack_step(chunks, step=0, num_ranks=1, max_tokens=512)
    (inputs,) = objective.prepare(batch.mini_batches[0])
    first, second = objective._uniforms(inputs).chunk(2, dim=1)
    assert not (first == second).any()
    assert torch.equal(objective._uniforms(inputs)[:, : first.shape[1]], first)


def test_rows_without_blocks_are_kept_apart_as_ever(folder: Path) -> None:
    mini_batch, losses = make_mini_batch(17, 9, 14), []
    for algorithm in (make_algorithm(), AlgorithmConfig(kind="sft")):
        learner = Learner(make_policy(folder, "none"), LearnerConfig(), algorithm)
        losses.append(learner.evaluate([mini_batch])["eval/loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
