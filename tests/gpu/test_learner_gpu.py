"""Tests that the learner on a GPU trains as on the CPU, with every strategy of one rank, and as engines sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_cases import model_config, request, rollout_config, sample
from learner_cases import assert_close, make_learner, make_model_config, micro_batch_of, parameters_of, train_steps

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig, ReferenceConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig, Zero3Config
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.learner.checkpoints import CheckpointStore
from rlpipe.learner.publish import named_weights
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.rollout.hf_engine import HfEngine

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
GPU = "cuda:0"
LEARNING_RATE = 1e-3
NUM_STEPS = 4
CHUNKED = {"offload": "chunked", "chunked": ChunkedConfig(chunk_mib=0.5)}
WAYS: dict[str, dict[str, Any]] = {
    "single": {},
    "chunked": CHUNKED,
    "chunked, nothing stays": {
        "offload": "chunked",
        "chunked": ChunkedConfig(chunk_mib=0.5, num_persistent=0, num_swapped=2, num_checkpointed=1),
    },
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2, on the host": {"strategy": "fsdp2", "offload": "policy"},
    "zero3": {"strategy": "zero3"},
    "zero3, on the host": {"strategy": "zero3", "zero3": Zero3Config(offload_optimizer=True, offload_parameters=True)},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=256, num_layers=4, intermediate_size=512)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Begin a process group, which DeepSpeed keeps for good."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def config_of(optimizer: str = "adamw", **options: Any) -> LearnerConfig:
    return LearnerConfig(optimizer=OptimizerConfig(name=optimizer, lr=LEARNING_RATE), **options)


def assert_same_training(
    expected: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
    actual: tuple[list[dict[str, float]], dict[str, torch.Tensor]],
    tolerance: float = 1e-3,
) -> None:
    """Compare losses, gradient norms, and the parameters' mean distance as a share of the way that they went."""
    for wanted, found in zip(expected[0], actual[0], strict=True):
        for name in ("loss", "grad_norm", "logprob_diff/mean"):
            if name in wanted:
                assert found[name] == pytest.approx(wanted[name], rel=tolerance, abs=tolerance / 10), name
    for name, parameter in expected[1].items():
        distance = (actual[1][name].cpu() - parameter.cpu()).abs().mean()
        assert distance < 10 * tolerance * LEARNING_RATE * NUM_STEPS, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adapter", ["none", "lora", "qlora"])
@pytest.mark.usefixtures("one_rank")
def test_every_way_to_hold_the_policy_trains_as_on_the_cpu(tiny: Path, adapter: str, way: str) -> None:
    if adapter == "qlora" and way.startswith("zero3"):
        pytest.skip("rlpipe refuses QLoRA with ZeRO-3")
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = make_learner(tiny, adapter=adapter, learner=config_of())
    expected = train_steps(plain, 0, NUM_STEPS), parameters_of(plain)
    learner = make_learner(tiny, adapter=adapter, learner=config_of(**WAYS[way]), device=GPU)
    actual = train_steps(learner, 0, NUM_STEPS), parameters_of(learner)
    assert_same_training(expected, actual)


@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("way", ["single", "chunked"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_bfloat16_trains_as_float32_to_its_rounding(tiny: Path, adapter: str, way: str, checkpointing: bool) -> None:
    if way == "chunked" and checkpointing:
        pytest.skip("chunked offload recomputes by itself")
    plain = make_learner(tiny, adapter=adapter, learner=config_of())
    expected = train_steps(plain, 0, NUM_STEPS)
    model = make_model_config(tiny, adapter=adapter, dtype="bfloat16", gradient_checkpointing=checkpointing)
    learner = make_learner(tiny, model=model, learner=config_of(**WAYS[way]), device=GPU)
    for wanted, found in zip(expected, train_steps(learner, 0, NUM_STEPS), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=0.05, abs=0.02)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=0.1)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "paged_adamw_8bit"])
def test_moments_in_eight_bit_train_about_as_in_float32(tiny: Path, optimizer: str) -> None:
    plain = make_learner(tiny, adapter="none", learner=config_of())
    expected = train_steps(plain, 0, NUM_STEPS)
    learner = make_learner(tiny, adapter="none", learner=config_of(optimizer), device=GPU)
    for wanted, found in zip(expected, train_steps(learner, 0, NUM_STEPS), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=0.05, abs=0.02)


@pytest.mark.parametrize("way", ["single", "chunked"])
def test_a_frozen_copy_alongside_the_policy_gives_the_same_penalty(tiny: Path, way: str) -> None:
    algorithm = AlgorithmConfig(loss=LossConfig(beta=0.1), reference=ReferenceConfig(sync_steps=2), num_steps=6)
    plain = make_learner(tiny, adapter="none", algorithm=algorithm, learner=config_of())
    expected = train_steps(plain, 0, NUM_STEPS)
    learner = make_learner(tiny, adapter="none", algorithm=algorithm, learner=config_of(**WAYS[way]), device=GPU)
    for wanted, found in zip(expected, train_steps(learner, 0, NUM_STEPS), strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("way", ["single", "chunked"])
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_resumed_run_ends_where_one_that_was_not_stopped_ends(
    tiny: Path, tmp_path: Path, adapter: str, way: str
) -> None:
    def make() -> Any:
        torch.manual_seed(3)
        return make_learner(tiny, adapter=adapter, learner=config_of(**WAYS[way]), device=GPU)

    store = CheckpointStore(tmp_path, keep=2)
    stopped = make()
    train_steps(stopped, 0, 2)
    path = store.save(stopped, step=2, extra={})
    train_steps(stopped, 2, 4)
    resumed = make()
    store.load(path, resumed)
    train_steps(resumed, 2, 4)
    assert_close(parameters_of(stopped), parameters_of(resumed), 1e-5)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_engines_are_sent_what_the_gpu_trained(tiny: Path, adapter: str) -> None:
    sent = []
    for way in ("single", "chunked"):
        learner = make_learner(tiny, adapter=adapter, learner=config_of(**WAYS[way]), device=GPU)
        train_steps(learner, 0, 2)
        sent.append({name: tensor.cpu().float() for name, tensor in named_weights(learner.policy)})
    assert_close(*sent, 1e-4)


def test_the_learner_finds_the_log_probs_with_which_the_engine_sampled(tiny: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = HfEngine("engine", model_config(tiny), rollout_config("hf"), WeightsConfig(), max_prompt_tokens=32)
    groups = sample(engine, [request(index) for index in range(8)])
    rollouts = [
        replace(rollout, advantages=np.zeros(len(rollout.token_ids), np.float32))
        for group in groups
        for rollout in group
    ]
    learner = make_learner(tiny, device=GPU)
    batch = micro_batch_of(rollouts)
    with learner.policy.inference():
        found, _ = learner.policy.logprobs(batch, temperature=rollout_config("hf").sampling.temperature)
    mask = np.asarray(batch.loss_mask)
    assert mask.sum() > 50
    np.testing.assert_allclose(found.float().cpu().numpy()[mask], np.asarray(batch.logprobs)[mask], atol=1e-4)
