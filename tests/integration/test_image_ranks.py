"""Tests that batches with images in some rows train alike on one rank and on several, whose calls have to match."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from image_cases import IMAGE_FAMILIES, render_rows
from learner_cases import assert_close, make_learner, parameters_of
from rank_cases import Ranks

from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.learner.step import Learner

pytestmark = pytest.mark.covering(0)
NUM_STEPS = 2
STRATEGIES = ["fsdp2", "zero3"]
CHUNKED: dict[str, Any] = {
    "strategy": "single",
    "offload": "chunked",
    "max_tokens_per_microbatch": 512,
    "chunked": ChunkedConfig(
        chunk_mib=0.06, num_persistent=1, num_slots=8, num_swapped=1, num_checkpointed=0, num_offloaded=1
    ),
}
FAMILIES = ["qwen3-vl", "qwen3.5", "gemma3", "idefics3"]


@pytest.fixture(scope="module", params=FAMILIES)
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return IMAGE_FAMILIES[request.param].write(tmp_path_factory.mktemp("model"))


def make(model_folder: Path, strategy: str, num_ranks: int, adapter: str) -> Learner:
    options = CHUNKED if strategy == "chunked" else {"strategy": strategy}
    adapter_config = AdapterConfig(kind=adapter, r=4)
    model = ModelConfig(path=str(model_folder), dtype="float32", images=True, adapter=adapter_config)
    # A large epsilon, because AdamW would turn rounding errors of zero gradients, as of key biases, into steps.
    learner = LearnerConfig(**options, num_ranks=num_ranks, optimizer=OptimizerConfig(lr=1e-2, eps=1e-2))
    return make_learner(model_folder, adapter=adapter, learner=learner, model=model)


def train(model_folder: Path, strategy: str, num_ranks: int, adapter: str, folder: Path) -> None:
    learner = make(model_folder, strategy, num_ranks, adapter)
    rank = learner.policy.sharding.rank
    losses = []
    for step in range(NUM_STEPS):
        without, with_image, *_ = render_rows(learner.policy.config)
        texts = [replace(without, group_id=index + 2) for index in range(3)]
        batches = pack_step([with_image, *texts], step=step, num_ranks=num_ranks, max_tokens=512)
        with_images = [bool(m.images) for b in batches for m in b.mini_batches[0].micro_batches]
        assert sorted(with_images) == [False, True][2 - num_ranks :]
        losses.append(learner.train_step(batches[rank])["loss"])
    torch.save((losses, parameters_of(learner)), folder / f"{strategy}{rank}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_train_as_one(ranks: Ranks, model_folder: Path, strategy: str, adapter: str, tmp_path: Path) -> None:
    train(model_folder, "single", 1, adapter, tmp_path)
    ranks.run(train, model_folder, strategy, 2, adapter, tmp_path)
    _, expected = torch.load(tmp_path / "single0.pt")
    for rank in range(2):
        _, parameters = torch.load(tmp_path / f"{strategy}{rank}.pt")
        assert_close(parameters, expected, 1e-6)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_chunked_offload_gives_the_same_weights_as_no_offload(model_folder: Path, adapter: str, tmp_path: Path) -> None:
    for strategy in ("single", "chunked"):
        train(model_folder, strategy, 1, adapter, tmp_path)
    (_, expected), (_, parameters) = (torch.load(tmp_path / f"{name}0.pt") for name in ("single", "chunked"))
    assert_close(parameters, expected, 1e-6)
