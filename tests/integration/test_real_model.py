"""A real model in every part: a vocabulary of 49,152, tied embeddings, and three query heads per key head."""

from __future__ import annotations

import ctypes
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_cases import OpenVllm, load, request, rollout_config, sample
from learner_cases import assert_close, make_adapter_config, make_learner, make_model_config, parameters_of
from rank_cases import Ranks
from real_cases import QUESTIONS, gsm8k_rows, real_model, real_rollouts, require_real_model
from run_cases import HOLDS_LOGP_TO, make_config, read_adapter, read_jsonl, trained_steps
from serving_cases import largest_gap, publish_policy
from torch import Tensor
from transformers import AutoConfig

import rlpipe
from rlpipe import cli, quickstart
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, EbftConfig, FeatureConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.data.packing import pack_step
from rlpipe.learner.checkpoints import CheckpointStore
from rlpipe.learner.policy import Policy, load_policy
from rlpipe.learner.step import Learner
from rlpipe.offload.planner.profiler import resident_bytes
from rlpipe.offload.planner.trace import TensorTracker
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.engine_thread import open_engine
from rlpipe.run.prepare import prepare_run
from rlpipe.scoring.feature_scorer import learner_feature_scorer, make_feature_scorer
from rlpipe.types import ALIGNMENT, DIVERSITY, GroundTruth, Prompt, RolloutGroup, TrainBatch

CPU = torch.device("cpu")
GIB = 2**30
FULL = 256
"""The tokens of a full micro batch."""
KINDS: dict[str, dict[str, object]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "qlora": {"kind": "qlora"},
    "full": {"kind": "none"},
}
NUM_SAMPLED = 1250
"""The tokens that an engine samples with each kind of policy, 5,000 in total."""
Record = Callable[[str, object], None]

require_real_model()


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    """Give memory back after each test: what stays with the process would be missing for the tests beside it."""
    yield
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


@pytest.fixture(scope="module")
def path() -> Path:
    return real_model()


@pytest.fixture(scope="module")
def chat_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of text prompts, and of message prompts with a system turn and an earlier answer."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": question, "answer": answers[1]} for question, answers in QUESTIONS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_run_makes_the_model_of_the_wheel_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "hub_has", lambda *_, **__: False)
    model, output = tmp_path / "model", tmp_path / "run"
    prepare_run(rlpipe.load_config(["experiment=smollm2", f"model.path={model}", f"output={output}"]))
    assert AutoConfig.from_pretrained(model).vocab_size == 49_152


@pytest.mark.ray
@pytest.mark.vllm
def test_vllm_samples_what_the_learner_trains_an_adapter_on(
    local_ray: None, path: Path, chat_prompts: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    options = [
        "rollout.engine=vllm",
        "rollout.sampling.max_tokens=16",
        "data.max_prompt_tokens=96",
        "algorithm.num_steps=2",
        "algorithm.groups_per_step=2",
        "algorithm.group_size=3",
        "learner.optimizer.lr=1e-3",
    ]
    rlpipe.train(make_config(path, chat_prompts, tmp_path, *options))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["engine"]) == (2, "vllm")
    assert summary["max_logprob_difference"] <= 1e-3
    assert all(row["sampling/logp_difference/max"] <= 1e-3 for row in trained_steps(tmp_path))
    adapter = read_adapter(tmp_path / "policy")
    trained = [tensor for name, tensor in adapter.items() if "lora_B" in name]
    assert len(trained) == 30 * 7, "every linear layer of every block"
    assert any(tensor.any() for tensor in trained)


def config_of(path: Path, kind: str) -> ModelConfig:
    return make_model_config(path, adapter=make_adapter_config(**KINDS[kind]))


def changed_policy(config: ModelConfig) -> Policy:
    """Return a policy whose trained parameters all differ from the weights that engines load, as after training."""
    policy = load_policy(config, LearnerConfig(), CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.1 if "lora_B" in name else 0.05 * parameter.std()))
    return policy


def assert_log_probs_agree(engine: Engine, config: ModelConfig, record: Record) -> None:
    """Check that the engine, which samples with a published policy, agrees with the learner, which packs its tokens."""
    policy = changed_policy(config)
    published = publish_policy(policy, 1)
    assert load(engine, published) == published[0].digest
    prompts = {r.group_id: r.token_ids[~r.loss_mask] for r in real_rollouts()}
    num_sampled, gaps, untrained = 0, [], []
    while num_sampled < NUM_SAMPLED:
        asked = [
            request(index, prompt_ids=ids.tolist(), group_size=6, max_tokens=72, seed=num_sampled + index)
            for index, ids in prompts.items()
        ]
        groups = sample(engine, asked)
        num_sampled += sum(group.num_loss_tokens for group in groups)
        gaps.append(largest_gap(policy, groups))
        if config.adapter.kind != "none" and not untrained:
            with policy.adapter_off():
                untrained.append(largest_gap(policy, groups[:1]))
    record("tokens", num_sampled)
    record("largest difference", max(gaps))
    record("largest difference without the adapter", untrained)
    assert max(gaps) < HOLDS_LOGP_TO
    assert not untrained or untrained[0] > 0.1, "the adapter matters"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_hf_samples_tokens_with_the_learners_log_probs(path: Path, kind: str, record_property: Record) -> None:
    config, rollout = config_of(path, kind), rollout_config("hf", sampling={"max_tokens": 72})
    engine = open_engine("hf-0", config, rollout, WeightsConfig(), max_prompt_tokens=256)
    assert_log_probs_agree(engine, config, record_property)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("kind", KINDS)
def test_vllm_samples_tokens_with_the_learners_log_probs(
    path: Path, kind: str, open_vllm: OpenVllm, record_property: Record
) -> None:
    pytest.importorskip("vllm")
    config = config_of(path, kind)
    assert_log_probs_agree(open_vllm(model=config, sampling={"max_tokens": 72}), config, record_property)


@pytest.mark.slow
@pytest.mark.ray
def test_sft_learns_how_gsm8k_answers(local_ray: None, path: Path, tmp_path: Path, record_property: Record) -> None:
    """Check SFT on short rows, so that a step takes seconds."""
    rows = [json.loads(line) for line in gsm8k_rows().read_text().splitlines()[:500]]
    short = sorted(rows, key=lambda row: len(row["question"] + row["answer"]))[:38]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in short))
    options = [
        "algorithm=sft",
        "algorithm.num_steps=8",
        "algorithm.groups_per_step=4",
        f"model.path={path}",
        "model.dtype=float32",
        "data.source=jsonl",
        f"data.path={file}",
        "data.prompt_column=question",
        "data.completion_column=answer",
        "data.held_out.size=6",
        "learner.num_threads=1",
        "learner.optimizer.lr=1e-3",
        "tracking=quiet",
        f"output={tmp_path / 'run'}",
    ]
    rlpipe.train(rlpipe.load_config(options))
    losses = [row["loss"] for row in trained_steps(tmp_path / "run")]
    held_out = [row["eval/loss"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "eval/loss" in row]
    record_property("losses", losses)
    record_property("held-out losses", held_out)
    assert len(losses) == 8
    assert 1.3 < held_out[0] < 1.7
    assert held_out[-1] < held_out[0] - 0.4
    assert sum(losses[4:]) / 4 < losses[0] - 0.4


def answer_batches(num_ranks: int = 1) -> list[list[TrainBatch]]:
    """Return two steps of fine-tuning on answers, for every rank."""
    return [pack_step(real_rollouts()[step::2], step=step, num_ranks=num_ranks, max_tokens=256) for step in range(2)]


def make_supervised(path: Path, adapter: str, **options: object) -> Learner:
    learner = LearnerConfig(optimizer=OptimizerConfig(lr=1e-3 if adapter == "lora" else 1e-5), **options)
    return make_learner(path, adapter=adapter, learner=learner, algorithm=AlgorithmConfig(kind="sft", num_steps=2))


def scores(policy: Policy) -> Tensor:
    (micro_batch,) = pack_step(real_rollouts(), step=0, num_ranks=1, max_tokens=4096)[0].mini_batches[0].micro_batches
    with policy.inference():
        return policy.logprobs(micro_batch, temperature=1.0)[0]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.end()


def train_on_ranks(path: Path, adapter: str, batches: list[list[TrainBatch]], folder: Path) -> None:
    """Train two steps with a checkpoint between them, then resume from it and compare."""
    rank, store = dist.get_rank(), CheckpointStore(folder, keep=1)
    learner = make_supervised(path, adapter, strategy="fsdp2", num_ranks=2)
    losses = [learner.train_step(batches[0][rank])["loss"]]
    checkpoint = store.save(learner, step=1, extra={"model": to_tree(make_model_config(path, adapter=adapter))})
    first = scores(learner.policy)
    losses.append(learner.train_step(batches[1][rank])["loss"])
    expected = parameters_of(learner)
    del learner
    resumed = make_supervised(path, adapter, strategy="fsdp2", num_ranks=2)
    store.load(checkpoint, resumed)
    assert resumed.train_step(batches[1][rank])["loss"] == losses[1]
    assert_close(expected, parameters_of(resumed), 0)
    if rank == 0:
        torch.save((losses, first), folder / "found.pt")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_two_ranks_resume_and_what_they_export_is_what_they_trained(
    path: Path, ranks: Ranks, adapter: str, tmp_path: Path, record_property: Record
) -> None:
    ranks.run(train_on_ranks, path, adapter, answer_batches(2), tmp_path)
    losses, expected = torch.load(tmp_path / "found.pt", weights_only=False)
    alone = make_supervised(path, adapter)
    assert losses == pytest.approx([alone.train_step(batch)["loss"] for (batch,) in answer_batches()], abs=1e-4)
    del alone
    exported = tmp_path / "policy"
    assert cli.main(["export", str(tmp_path / "step_000001"), str(exported)]) == 0
    if adapter == "lora":
        assert cli.main(["merge", str(exported), str(tmp_path / "merged")]) == 0
        exported = tmp_path / "merged"
    found = scores(load_policy(make_model_config(exported, adapter="none"), LearnerConfig(), CPU))
    unchanged = scores(load_policy(make_model_config(path, adapter="none"), LearnerConfig(), CPU))
    record_property("largest difference", float((found - expected).abs().max()))
    record_property("what training changed", float((unchanged - expected).abs().max()))
    torch.testing.assert_close(found, expected, atol=HOLDS_LOGP_TO, rtol=0)
    assert (unchanged - expected).abs().max() > 100 * HOLDS_LOGP_TO


EBFT = (
    "algorithm=ebft",
    "algorithm.ebft.truth_column=answer",
    "algorithm.ebft.features.weights=learner",
    "algorithm.num_steps=2",
    "algorithm.groups_per_step=2",
    "algorithm.group_size=3",
    "data.max_prompt_tokens=96",
    "rollout.sampling.max_tokens=16",
    "scoring.rewards.digits.weight=0",
    "learner.optimizer.lr=1e-3",
)


@pytest.mark.slow
@pytest.mark.ray
def test_ebft_rewards_completions_by_the_models_own_features(
    local_ray: None, path: Path, chat_prompts: Path, tmp_path: Path, record_property: Record
) -> None:
    rlpipe.train(make_config(path, chat_prompts, tmp_path, *EBFT))
    steps = trained_steps(tmp_path)
    assert len(steps) == 2
    for row in steps:
        assert -1 < row["ebft/alignment"] < 1
        assert row["ebft/cfm_loss"] > 0
        assert row["ebft/advantages_std"] > 1e-3
        assert row["sampling/logp_difference/max"] <= HOLDS_LOGP_TO
    record_property("alignment", [row["ebft/alignment"] for row in steps])


def feature_groups() -> list[RolloutGroup]:
    """Return groups of answers to each question, with the last answer as the ground truth."""
    groups = []
    for group_id in range(len(QUESTIONS)):
        *members, last = (rollout for rollout in real_rollouts() if rollout.group_id == group_id)
        wanted = last.token_ids[last.loss_mask]
        truth = GroundTruth(token_ids=wanted, is_assistant=np.ones(len(wanted), np.bool_))
        asked = last.token_ids[~last.loss_mask]
        prompt = Prompt(prompt_id=group_id, epoch=0, token_ids=asked, prompt="", task={}, truth=truth)
        groups.append(RolloutGroup(group_id=group_id, prompt=prompt, rollouts=members))
    return groups


@pytest.mark.slow
def test_a_trained_policy_reads_the_features_of_the_model_that_it_began_as(path: Path) -> None:
    features, groups = FeatureConfig(weights="learner", micro_batch_tokens=256), feature_groups()
    expected = make_feature_scorer(make_model_config(path), features).score(groups)
    algorithm = AlgorithmConfig(num_steps=2, ebft=EbftConfig(reward=True, features=features))
    learner = make_learner(path, learner=LearnerConfig(), algorithm=algorithm)
    assert learner.reference is not None
    with torch.no_grad():
        for name, parameter in learner.policy.trainable_parameters().items():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    found = learner_feature_scorer(learner.policy, learner.reference, features).score(groups)
    for mine, theirs in zip(found, expected, strict=True):
        for name in (ALIGNMENT, DIVERSITY):
            assert mine.scores[name] == pytest.approx(theirs.scores[name], abs=1e-5)


def weights_bytes(learner: Learner) -> int:
    return sum(parameter.nbytes for parameter in learner.policy.model.parameters())


def plan_options(path: Path, adapter: str, *options: str) -> list[str]:
    return [
        "experiment=gsm8k",
        f"model.path={path}",
        "model.dtype=float32",
        f"model.adapter.kind={adapter}",
        "model.adapter.r=4",
        "model.gradient_checkpointing=false",
        "data.max_prompt_tokens=64",
        "rollout.sampling.max_tokens=192",
        f"learner.max_tokens_per_microbatch={FULL}",
        *options,
    ]


def planned(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, int]:
    """Return the bytes that `rlpipe plan` predicts for a rank on its device."""
    capsys.readouterr()
    assert cli.main(["plan", "--json", "--device", "h100-80g", *arguments]) == 0
    memory = json.loads(capsys.readouterr().out)["learner"]["memory"]
    assert isinstance(memory, dict)
    found: dict[str, int] = memory["device"]
    return found


def full_batch(num_micro_batches: int) -> TrainBatch:
    """Return a batch of sequences that each fill a micro batch."""
    rollouts = real_rollouts()
    token_ids = np.resize(np.concatenate([rollout.token_ids for rollout in rollouts]), FULL)
    long = replace(
        rollouts[0],
        token_ids=token_ids,
        loss_mask=np.arange(FULL) > 0,
        logprobs=np.full(FULL, -2.0, np.float32),
        policy_versions=np.zeros(FULL, np.int32),
        advantages=np.ones(FULL, np.float32),
    )
    alike = [replace(long, group_id=group_id) for group_id in range(num_micro_batches)]
    (batch,) = pack_step(alike, step=0, num_ranks=1, max_tokens=FULL)
    assert len(batch.mini_batches[0].micro_batches) == num_micro_batches
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_plan_says_what_an_update_takes(
    path: Path, adapter: str, capsys: pytest.CaptureFixture[str], record_property: Record
) -> None:
    expected = planned(capsys, plan_options(path, adapter))
    learner = make_learner(path, adapter=adapter)
    with TensorTracker() as tracker:
        learner.train_step(pack_step(real_rollouts()[:1], step=0, num_ranks=1, max_tokens=FULL)[0])
        learner.train_step(full_batch(2))
    measured = weights_bytes(learner) + tracker.peak
    record_property("planned, in MiB", expected["total"] / 2**20)
    record_property("measured, in MiB", measured / 2**20)
    assert expected["total"] == pytest.approx(measured, rel=0.05)


BUDGETS = {"lora": 0.5, "none": 1.5}
"""The memory budgets, as shares of the bytes of the weights.

Without offload, a learner takes more than their bytes, and four times as much if it trains all weights.
"""


@pytest.mark.slow
@pytest.mark.parametrize("adapter", BUDGETS)
def test_chunks_train_within_a_small_budget_as_without(path: Path, adapter: str, record_property: Record) -> None:
    # The host's buffers of activations grow between two steps, and have their full size in the third one.
    batches = [full_batch(1), answer_batches()[0][0], full_batch(1)]
    plain = make_supervised(path, adapter)
    budget = BUDGETS[adapter] * weights_bytes(plain)
    expected = [plain.train_step(batch)["loss"] for batch in batches]
    parameters = parameters_of(plain)
    del plain
    chunks = ChunkedConfig(device_memory_gib=budget / GIB)
    learner = make_supervised(path, adapter, max_tokens_per_microbatch=FULL, offload="chunked", chunked=chunks)
    record_property("decision", learner.policy.notes)
    found = [learner.train_step(batch)["loss"] for batch in batches[:2]]
    (offloaded,) = learner.policy.sharding._offloaded
    peak = 0

    def look(_: object) -> None:
        nonlocal peak
        peak = max(peak, tracker.live + offloaded.device_bytes)

    tracker = TensorTracker(look)
    with tracker:
        found.append(learner.train_step(batches[2])["loss"])
    peak += resident_bytes(learner.policy.module, offloaded.inventory)
    record_property("budget and peak, in MiB", (budget / 2**20, peak / 2**20))
    assert peak <= budget
    predicted = learner.policy.sharding.decision.prediction.device_bytes
    assert predicted == pytest.approx(peak, rel=0.05)
    assert found == pytest.approx(expected, abs=1e-5)
    assert_close(parameters, parameters_of(learner), 1e-5)
