"""Tests that two gloo ranks train as one does, and that either reads the checkpoints of the other."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import one_in
from learner_cases import assert_close, make_batches, make_learner, make_rewarded, parameters_of
from rank_cases import Ranks

from rlpipe.configs.schema.algorithm_config import (
    AdvantageConfig,
    AlgorithmConfig,
    CriticConfig,
    LossConfig,
    ReferenceConfig,
    RewardKlConfig,
)
from rlpipe.configs.schema.learner_config import ChunkedConfig, FsdpConfig, LearnerConfig, OptimizerConfig, Zero3Config
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.errors import LearnerFailed
from rlpipe.learner.checkpoints import CheckpointStore, export_policy
from rlpipe.learner.publish import publish_weights
from rlpipe.learner.step import Learner

pytestmark = pytest.mark.covering(1)
NUM_RANKS = 2
LEARNING_RATES = {"lora": 1e-3, "none": 1e-4}
WITH_REFERENCE = LossConfig(beta=0.1)
BY_SEQUENCE = LossConfig(level="sequence", aggregate="sequence")
CHUNKED = {"strategy": "fsdp2", "offload": "chunked", "max_tokens_per_microbatch": 256}
CHUNKS = ChunkedConfig(chunk_mib=0.06, num_persistent=0, num_checkpointed=1, num_offloaded=1)
CASES: dict[str, tuple[str, LossConfig, dict[str, Any]]] = {
    "fsdp2 lora": ("lora", WITH_REFERENCE, {"strategy": "fsdp2"}),
    "fsdp2 full": ("none", WITH_REFERENCE, {"strategy": "fsdp2"}),
    "fsdp2 sequence": ("none", BY_SEQUENCE, {"strategy": "fsdp2", "fsdp": FsdpConfig(reshard_after_forward=False)}),
    "fsdp2 offload": ("lora", LossConfig(), {"strategy": "fsdp2", "offload": "policy"}),
    "chunked lora": ("lora", WITH_REFERENCE, CHUNKED | {"chunked": CHUNKS}),
    "chunked full": ("none", WITH_REFERENCE, CHUNKED | {"chunked": replace(CHUNKS, sharing="sharded")}),
    "chunked sequence": ("none", BY_SEQUENCE, CHUNKED | {"chunked": replace(CHUNKS, sharing="replicated")}),
    "zero3 lora": ("lora", WITH_REFERENCE, {"strategy": "zero3"}),
    "zero3 full": ("none", WITH_REFERENCE, {"strategy": "zero3"}),
    "zero3 sequence": ("none", BY_SEQUENCE, {"strategy": "zero3", "zero3": Zero3Config(offload_optimizer=True)}),
}
STRATEGIES = ["fsdp2", "zero3", "chunked"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(NUM_RANKS)
    yield started
    started.end()


def make(tiny: Path, case: str, *, num_ranks: int, model: ModelConfig | None = None) -> Learner:
    adapter, loss, options = CASES[case]
    reference = ReferenceConfig(sync_steps=2 if adapter == "none" and loss.beta else 0)
    return make_learner(
        tiny,
        adapter=adapter,
        model=model,
        learner=LearnerConfig(
            num_ranks=num_ranks,
            max_grad_norm=0.05,
            optimizer=OptimizerConfig(lr=LEARNING_RATES[adapter], weight_decay=0.01),
            **(options if num_ranks > 1 else {}),
        ),
        algorithm=AlgorithmConfig(num_steps=8, num_minibatches=2, loss=loss, reference=reference),
    )


def train(learner: Learner, case: str, first: int, last: int) -> list[dict[str, float]]:
    algorithm = AlgorithmConfig(num_minibatches=2, loss=CASES[case][1])
    sharding = learner.policy.sharding
    found = []
    for step in range(first, last):
        batches = make_batches(step=step, num_ranks=sharding.num_ranks, max_tokens=60, algorithm=algorithm)
        metrics = learner.train_step(batches[sharding.rank])
        differences = learner.token_differences(batches[sharding.rank])
        sizes = {f"differences/{group_id}": float(abs(values).sum()) for group_id, values in differences.items()}
        found.append(metrics | sizes)
    return found


def train_on_ranks(tiny: Path, folder: Path, case: str) -> None:
    learner, rank = make(tiny, case, num_ranks=NUM_RANKS), dist.get_rank()
    store = CheckpointStore(folder / "checkpoints", keep=5)
    metrics = train(learner, case, 0, 3)
    store.save(learner, step=3, extra={"cursor": 3})
    metrics += train(learner, case, 3, 5)
    parameters = parameters_of(learner)
    buckets: list = []
    manifest = publish_weights(learner.policy, version=5, bucket_bytes=50_000, emit=buckets.append)
    export_policy(learner.policy, folder / "export")
    assert (manifest is not None) == (rank == 0)
    torch.save((metrics, parameters, manifest, buckets), folder / f"rank{rank}.pt")


CREDITED = AlgorithmConfig(
    advantage=AdvantageConfig(name="optimal_token_baseline"),
    reward_kl=RewardKlConfig(coef=0.1, kl="k2", target=1e-4, horizon=100),
    num_minibatches=2,
    num_epochs_per_step=2,
)
"""Advantages that the learner computes of the rollouts of all ranks."""
WITH_CRITIC = replace(
    CREDITED, advantage=AdvantageConfig(name="gae", lam=0.9), critic=CriticConfig(lr=0.01, value_clip=0.1)
)


def credit(
    tiny: Path, case: str, algorithm: AlgorithmConfig, num_ranks: int
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    adapter, _, options = CASES[case]
    config = LearnerConfig(num_ranks=num_ranks, **(options if num_ranks > 1 else {}))
    config = replace(config, optimizer=OptimizerConfig(lr=LEARNING_RATES[adapter]))
    learner = make_learner(tiny, adapter=adapter, learner=config, algorithm=algorithm)
    rank, metrics = learner.policy.sharding.rank, []
    for step in range(3):
        batches, _ = make_rewarded(algorithm, step=step, num_ranks=num_ranks, max_tokens=60)
        metrics.append(learner.train_step(batches[rank]))
    return metrics, parameters_of(learner)


def credit_on_ranks(tiny: Path, folder: Path, case: str, algorithm: AlgorithmConfig) -> None:
    torch.save(credit(tiny, case, algorithm, NUM_RANKS), folder / f"rank{dist.get_rank()}.pt")


@pytest.mark.covering(0)
@pytest.mark.parametrize("case", ["fsdp2 lora", "fsdp2 full", "zero3 full", "chunked full"])
@pytest.mark.parametrize("algorithm", [CREDITED, WITH_CRITIC], ids=["token baseline", "critic"])
def test_advantages_of_the_learner_compare_rollouts_of_all_ranks(
    ranks: Ranks, tiny: Path, tmp_path: Path, case: str, algorithm: AlgorithmConfig
) -> None:
    ranks.run(credit_on_ranks, tiny, tmp_path, case, algorithm)
    expected, parameters = credit(tiny, case, algorithm, 1)
    assert expected[1]["kl/coefficient"] != expected[2]["kl/coefficient"]
    for rank in range(NUM_RANKS):
        metrics, own = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert_close(parameters, own, 1e-5)
        for mine, theirs in zip(expected, metrics, strict=True):
            names = [name for name in mine if name.startswith(("loss", "grad_norm", "kl/", "critic/"))]
            assert len(names) == (8 if algorithm is WITH_CRITIC else 4)
            for name in names:
                assert theirs[name] == pytest.approx(mine[name], abs=1e-5), name


@pytest.mark.parametrize("case", one_in(2, CASES))
def test_two_ranks_train_as_one(ranks: Ranks, tiny: Path, tmp_path: Path, case: str) -> None:
    ranks.run(train_on_ranks, tiny, tmp_path, case)
    single = make(tiny, case, num_ranks=1)
    expected = train(single, case, 0, 5)
    expected_parameters = parameters_of(single)
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
    for metrics, parameters, _, _ in results:
        assert_close(expected_parameters, parameters, 1e-5)
        for mine, theirs in zip(expected, metrics, strict=True):
            for name in mine.keys() - {"time/train", "tokens/run", "tokens/shared_ratio"}:  # other micro batches
                assert theirs[name] == pytest.approx(mine[name], abs=1e-5), name
    assert max(metrics["grad_norm"] for metrics in expected) > 0.05  # clipping has something to do

    resumed = make(tiny, case, num_ranks=1)
    CheckpointStore(tmp_path / "checkpoints", keep=5).load(tmp_path / "checkpoints" / "step_000003", resumed)
    train(resumed, case, 3, 5)
    assert_close(expected_parameters, parameters_of(resumed), 1e-5)

    buckets: list = []
    manifest = publish_weights(single.policy, version=5, bucket_bytes=50_000, emit=buckets.append)
    published, published_buckets = results[0][2:]
    assert manifest is not None
    assert (published.num_buckets, published.num_bytes) == (manifest.num_buckets, manifest.num_bytes)
    assert published.adapter_config == manifest.adapter_config
    assert len(published_buckets) == len(buckets)
    assert not results[1][3]
    exported = tmp_path / "export"
    adapter = CASES[case][0]
    config = ModelConfig(
        path=str(tiny if adapter == "lora" else exported),
        dtype="float32",
        adapter=AdapterConfig(kind=adapter, path=str(exported) if adapter == "lora" else None),
    )
    assert_close(expected_parameters, parameters_of(make(tiny, case, num_ranks=1, model=config)), 1e-5)


def resume_on_ranks(tiny: Path, folder: Path, case: str) -> None:
    learner = make(tiny, case, num_ranks=NUM_RANKS)
    checkpoint = CheckpointStore(folder, keep=5).load(folder / "step_000003", learner)
    assert (checkpoint.step, checkpoint.extra) == (3, {"cursor": 3})
    train(learner, case, 3, 5)
    torch.save(parameters_of(learner), folder / f"rank{dist.get_rank()}.pt")


@pytest.mark.covering(0)
@pytest.mark.parametrize("case", [f"{strategy} {kind}" for strategy in STRATEGIES for kind in ("lora", "full")])
def test_two_ranks_continue_where_one_stopped(ranks: Ranks, tiny: Path, tmp_path: Path, case: str) -> None:
    single = make(tiny, case, num_ranks=1)
    train(single, case, 0, 3)
    CheckpointStore(tmp_path, keep=5).save(single, step=3, extra={"cursor": 3})
    train(single, case, 3, 5)
    ranks.run(resume_on_ranks, tiny, tmp_path, case)
    for rank in range(NUM_RANKS):
        assert_close(parameters_of(single), torch.load(tmp_path / f"rank{rank}.pt"), 1e-5)


def train_with_idle_and_bad_rank(tiny: Path, strategy: str) -> None:
    rank = dist.get_rank()
    for kind, adapter in {"lora": "lora", "full": "none"}.items():
        model = ModelConfig(
            path=str(tiny),
            dtype="bfloat16",
            gradient_checkpointing=strategy != "chunked",
            adapter=AdapterConfig(kind=adapter, r=4),
        )
        learner = make(tiny, f"{strategy} {kind}", num_ranks=NUM_RANKS, model=model)
        assert {parameter.dtype for parameter in parameters_of(learner).values()} == {torch.float32}
        batch = make_batches(num_ranks=NUM_RANKS)[rank]
        if rank == 1:
            batch.mini_batches[0].micro_batches[0].loss_mask[:] = False
        assert learner.train_step(batch)["grad_norm"] > 0
        before = parameters_of(learner)
        bad = make_batches(num_ranks=NUM_RANKS, step=1)[rank]
        if rank == 0:
            bad.mini_batches[0].micro_batches[0].advantages[:] = float("nan")
        assert learner.train_step(bad)["bad_steps"] == 1
        assert_close(before, parameters_of(learner), 0)
        assert learner.train_step(make_batches(num_ranks=NUM_RANKS, step=2)[rank])["bad_steps"] == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_may_be_idle_and_a_bad_one_holds_back_all(ranks: Ranks, tiny: Path, strategy: str) -> None:
    ranks.run(train_with_idle_and_bad_rank, tiny, strategy)


def name_bad_groups(tiny: Path) -> None:
    rank = dist.get_rank()
    learner = make_learner(tiny, learner=LearnerConfig(strategy="fsdp2", num_ranks=NUM_RANKS, max_bad_steps=1))
    batch = make_batches(num_ranks=NUM_RANKS, max_tokens=40)[rank]
    if rank == 1:
        micro_batch = batch.mini_batches[0].micro_batches[0]
        micro_batch.advantages[:] = float("nan")
        assert micro_batch.group_ids.tolist() == [1, 3, 3], "what the message is to name"
    with pytest.raises(LearnerFailed, match="last in groups 1, 3; inspect"):
        learner.train_step(batch)
    for parameter in learner.policy.trainable_parameters().values():
        parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.fill_(float("inf")))
    with pytest.raises(LearnerFailed, match="last in groups 0, 1, 2, 3; inspect"):
        learner.train_step(make_batches(num_ranks=NUM_RANKS)[rank])


def test_every_rank_names_the_bad_groups_of_all(ranks: Ranks, tiny: Path) -> None:
    ranks.run(name_bad_groups, tiny)


def fail_to_write(tiny: Path, folder: Path) -> None:
    learner = make(tiny, "fsdp2 lora", num_ranks=NUM_RANKS)
    with pytest.raises(OSError):  # noqa: PT011  each rank words it as it knows it
        CheckpointStore(folder / "file" / "checkpoints", keep=1).save(learner, step=1, extra={})
    train(learner, "fsdp2 lora", 0, 1)


def test_a_checkpoint_that_cannot_be_written_is_an_error_on_every_rank(
    ranks: Ranks, tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ranks.run(fail_to_write, tiny, tmp_path)
