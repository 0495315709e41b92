"""Tests that a learner trains reward models, which scorers load as they are exported."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import assert_close, make_model_config
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from rlpipe.configs.compose import load_config
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.configs.schema.preference_config import ProcessRewardConfig, RewardModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.data.pairs import RewardRenderer, StepRenderer
from rlpipe.data.row import RowLocation
from rlpipe.errors import ModelError
from rlpipe.learner.checkpoints import CheckpointStore, export_checkpoint, export_policy
from rlpipe.learner.policy import load_policy
from rlpipe.learner.step import Learner
from rlpipe.learner.workload import Workload, head_of, num_sequences, read_workload
from rlpipe.models.tiny_model import make_tiny_policy, make_tokenizer
from rlpipe.scoring.reward_model import SequenceReward, StepReward
from rlpipe.types import Prompt, Rollout, RolloutGroup

PAIRS = 6
CENTER = 0.05
TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny") / "policy", hidden_size=64, num_layers=2)


def rows() -> list[dict[str, Any]]:
    """Return pairs, in some of which the chosen answer begins the rejected one or the other way round."""
    return [
        {
            "prompt": f"{n}+{n}?",
            "chosen": f"{2 * n}" + "." * (n % 3),
            "rejected": f"{2 * n}1" + "!" * n,
            "margin": n / 4,
        }
        for n in range(1, PAIRS + 1)
    ]


def make_pairs(margin_column: str | None = None, **options: Any) -> list[Rollout]:
    config = RewardModelConfig(margin_column=margin_column)
    renderer = RewardRenderer(TOKENIZER, DataConfig(source="jsonl", **options), config, max_tokens=200)
    places = [RowLocation(row=index, epoch=0, location="rows") for index in range(PAIRS)]
    return [renderer.fit(renderer.whole(row, place), place) for row, place in zip(rows(), places, strict=True)]


def learner_of(tiny: Path, *, kind: str = "reward_model", adapter: str = "lora", **options: Any) -> Learner:
    config = RewardModelConfig(**options)
    algorithm = AlgorithmConfig(kind=kind, group_size=1, num_steps=30, reward_model=config)
    learner = LearnerConfig(optimizer=OptimizerConfig(lr=3e-3))
    model = make_model_config(tiny, adapter=adapter)
    policy = load_policy(model, learner, torch.device("cpu"), workload=Workload(head=head_of(algorithm)))
    return Learner(policy, learner, algorithm)


def perturb(learner: Learner) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in learner.policy.trainable_parameters().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)


def rewards_alone(learner: Learner, pairs: list[Rollout]) -> Tensor:
    """Return the rewards ``[P, 2]`` of sequences that transformers runs one after the other."""
    sequences = [torch.from_numpy(sequence.token_ids[:-1].astype(np.int64)) for p in pairs for sequence in p.sequences]
    model = learner.policy.model
    learner.policy.module.causal_model.set_attn_implementation("sdpa")
    model.config.pad_token_id = None  # then the last token counts
    return torch.stack([model(input_ids=tokens[None]).logits[0, 0] for tokens in sequences]).view(-1, 2)


def gradients(learner: Learner) -> dict[str, Tensor]:
    trained = learner.policy.trainable_parameters()
    return {name: parameter.grad.clone() for name, parameter in trained.items() if parameter.grad is not None}


@pytest.mark.covering(1)
@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("margin_column", [None, "margin"])
def test_the_loss_of_packed_pairs_is_that_of_pairs_run_alone(
    tiny: Path, adapter: str, margin_column: str | None
) -> None:
    learner, pairs = learner_of(tiny, adapter=adapter, center_coef=CENTER), make_pairs(margin_column)
    perturb(learner)
    (batch,) = pack_step(pairs, step=0, num_ranks=1, max_tokens=60)
    (mini_batch,) = batch.mini_batches
    assert len(mini_batch.micro_batches) > 1
    total, shared = 0.0, 0
    for inputs in learner._objective.prepare(mini_batch):
        output = learner._objective.loss(mini_batch, inputs)
        output.loss.backward()
        total += output.loss.item()
        shared += inputs.row.num_shared
    assert shared >= sum(len(row["prompt"]) for row in rows())
    packed = gradients(learner)
    assert any("score" in name for name in packed)
    learner.policy.model.zero_grad(set_to_none=True)
    chosen, rejected = rewards_alone(learner, pairs).unbind(1)
    margins = torch.tensor([row["margin"] for row in rows()]) if margin_column else 0
    alone = -logsigmoid(chosen - rejected - margins).mean() + CENTER * ((chosen + rejected) ** 2).mean()
    alone.backward()
    assert total == pytest.approx(alone.item(), rel=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in packed.values())
    assert_close(packed, gradients(learner), 1e-5 * max(1.0, largest))


@pytest.mark.covering(0)
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_training_raises_the_accuracy_and_the_export_gives_the_same_rewards(
    tiny: Path, tmp_path: Path, adapter: str
) -> None:
    learner, pairs = learner_of(tiny, adapter=adapter), make_pairs()
    (batch,) = pack_step(pairs, step=0, num_ranks=1, max_tokens=1000)
    before = learner.evaluate(batch.mini_batches)
    for step in range(20):
        learner.train_step(replace(batch, step=step))
    after = learner.evaluate(batch.mini_batches)
    assert after["eval/loss"] < before["eval/loss"]
    assert after["eval/rewards/margins"] > before["eval/rewards/margins"]
    assert after["eval/rewards/accuracies"] == 1.0
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    extra = {"model": to_tree(learner.policy.config), "config": {"algorithm": {"kind": "reward_model"}}}
    checkpoint = store.save(learner, step=20, extra=extra)
    resumed = learner_of(tiny, adapter=adapter)
    store.load(checkpoint, resumed)
    assert resumed.evaluate(batch.mini_batches) == after
    export_checkpoint(checkpoint, tmp_path / "later")
    export_policy(learner.policy, tmp_path / "policy")
    with torch.no_grad():
        expected = rewards_alone(learner, pairs)
    for folder in (tmp_path / "policy", tmp_path / "later"):
        loaded = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        assert type(loaded).__name__ == "Qwen3ForSequenceClassification"
        assert loaded.config.pad_token_id == TOKENIZER.pad_token_id
        torch.testing.assert_close(scores(folder), expected, rtol=1e-4, atol=1e-4)


def scores(folder: Path) -> Tensor:
    """Return what the scorer gives each chosen and each rejected answer ``[P, 2]``."""
    reward = SequenceReward(model=str(folder), dtype="float32")
    reward.setup()
    found = []
    for row in rows():
        group = group_of(row["prompt"])
        found.append(reward.score_answers([(group, row["chosen"]), (group, row["rejected"])]))
    return torch.tensor(found)


def group_of(question: str) -> RolloutGroup:
    messages = [{"role": "user", "content": question}]
    prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(0, np.int32), prompt=messages, task={})
    return RolloutGroup(group_id=0, prompt=prompt, rollouts=[])


STEPS = [
    {
        "prompt": f"{n}+{n}+1?",
        "completions": [f"{n}+{n}={2 * n}.", f"So {2 * n + 1 + n % 2}."],
        "labels": [1, n % 2 == 0],
    }
    for n in range(1, PAIRS + 1)
]


def make_steps(**options: Any) -> list[Rollout]:
    config = ProcessRewardConfig(**options)
    renderer = StepRenderer(TOKENIZER, DataConfig(source="jsonl"), config, max_tokens=200)
    places = [RowLocation(row=index, epoch=0, location="rows") for index in range(PAIRS)]
    return [renderer.fit(renderer.whole(row, place), place) for row, place in zip(STEPS, places, strict=True)]


@pytest.mark.covering(0)
@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("step_token", [None, "<|tool|>"])
def test_a_process_reward_model_learns_labels_that_its_export_reads_at_the_steps(
    tiny: Path, tmp_path: Path, adapter: str, step_token: str | None
) -> None:
    learner = learner_of(tiny, kind="process_reward_model", adapter=adapter)
    rollouts = make_steps(step_token=step_token)
    (batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=60)
    assert len(batch.mini_batches[0].micro_batches) > 1
    before = learner.evaluate(batch.mini_batches)
    for step in range(20):
        learner.train_step(replace(batch, step=step))
    after = learner.evaluate(batch.mini_batches)
    assert after["eval/loss"] < before["eval/loss"]
    assert before["eval/rewards/first_errors"] <= before["eval/rewards/accuracies"] < 1
    assert after["eval/rewards/accuracies"] == after["eval/rewards/first_errors"] == 1.0
    assert not any(name.startswith("eval/count") for name in after)
    export_policy(learner.policy, tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    losses, values = [], []
    for rollout in rollouts:
        tokens = torch.from_numpy(rollout.token_ids[:-1].astype(np.int64))
        ends = torch.from_numpy(np.flatnonzero(rollout.loss_mask) - 1)
        labels = torch.from_numpy(rollout.advantages[rollout.loss_mask]).long()
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, ends]
        losses.append(cross_entropy(logits, labels, reduction="none"))
        values.append(float(logits.softmax(1)[:, 1].min()))
    assert after["eval/loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-3, abs=1e-5)
    scorer = StepReward(model=str(tmp_path), step_token=step_token, dtype="float32")
    scorer.setup()
    found = scorer.score_answers([(group_of(row["prompt"]), "\n\n".join(row["completions"])) for row in STEPS])
    assert found == pytest.approx(values, abs=1e-4)
    assert [value > 0.5 for value in found] == [all(row["labels"]) for row in STEPS]


@pytest.mark.parametrize(("kind", "per_row"), [("reward_model", 2), ("process_reward_model", 1)])
def test_the_work_of_a_reward_model_has_no_reference(kind: str, per_row: int) -> None:
    options = [f"algorithm={kind}", "data=jsonl", "data.path=rows.jsonl", "model=full", "model.path=tiny"]
    config = load_config([*options, "algorithm.groups_per_step=6"], need_files=False)
    workload = read_workload(config)
    assert workload.head == kind
    assert workload.copied_for is None
    assert num_sequences(config.algorithm) == 6 * per_row


def test_a_trained_head_is_kept_and_a_missing_one_is_initialised_from_the_seed(tiny: Path, tmp_path: Path) -> None:
    learner = learner_of(tiny, adapter="none")
    perturb(learner)
    export_policy(learner.policy, tmp_path)
    again = learner_of(tmp_path)
    weights = [policy.module.classifier.state_dict() for policy in (learner.policy, again.policy)]
    assert torch.equal(weights[0]["weight"], weights[1]["modules_to_save.default.weight"])
    assert not any("score" in name and "lora" in name for name in again.policy.trainable_parameters())
    drawn = [load_head(tiny, seed) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def load_head(path: Path, seed: int) -> Tensor:
    model, workload = make_model_config(path, adapter="none"), Workload(head="reward_model")
    head = load_policy(model, LearnerConfig(), torch.device("cpu"), seed=seed, workload=workload).module.classifier
    assert isinstance(head, torch.nn.Linear)
    return head.weight


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("mamba", "transformers has no class for mamba models in AutoModelForSequenceClassification"),
        ("gemma3", "gemma3 models take images, which reward models can't be trained on so far"),
    ],
)
def test_models_without_a_class_for_rewards_are_refused(tmp_path: Path, model_type: str, message: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, 0)


def test_a_head_of_another_number_of_labels_is_named(tiny: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=3).save_pretrained(tmp_path)
    message = "has a head of 3 labels, and this kind of reward model has 1: give a model with 1, or one without a head"
    with pytest.raises(ModelError, match=message):
        load_head(tmp_path, 0)
    TOKENIZER.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"label=3 of the reward model .*: it has labels 0 to 2"):
        SequenceReward(model=str(tmp_path), label=3).setup()
