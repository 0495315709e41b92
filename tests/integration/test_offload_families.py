"""Tests that every family of models trains in chunks as it does without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_cases import FAMILIES, make_family
from learner_cases import assert_close, make_adapter_config, make_learner, make_model_config, parameters_of, train_steps

from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.learner.step import Learner

pytestmark = pytest.mark.covering(0)
CHUNKS = ChunkedConfig(chunk_mib=0.1, num_persistent=0, num_checkpointed=1, num_offloaded=1)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_family(name, tmp_path_factory.mktemp("families") / name) for name in FAMILIES}


def train(path: Path, adapter: str, **options: object) -> tuple[Learner, list[dict[str, float]]]:
    config = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-4), max_grad_norm=0.05, max_tokens_per_microbatch=128, **options
    )
    targets = make_adapter_config(adapter, target_modules=["q_proj", "v_proj", "o_proj"])
    learner = make_learner(path, learner=config, model=make_model_config(path, adapter=targets))
    return learner, train_steps(learner, 0, 2, max_tokens=70)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["lora", "none"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_in_chunks_as_without(families: dict[str, Path], family: str, adapter: str) -> None:
    plain, expected = train(families[family], adapter)
    chunked, found = train(families[family], adapter, offload="chunked", chunked=CHUNKS)
    assert "0 of" in chunked.policy.notes[0]
    assert [step["loss"] for step in found] == pytest.approx([step["loss"] for step in expected], abs=1e-5)
    # A relative bound: Gemma 4's norm is 11, where an absolute 1e-5 is a few roundings and depends on the CPU.
    norms = [step["grad_norm"] for step in expected]
    assert [step["grad_norm"] for step in found] == pytest.approx(norms, rel=5e-6, abs=0)
    assert_close(parameters_of(plain), parameters_of(chunked), 1e-5)
    with torch.no_grad(), chunked.policy.inference():
        assert all(torch.isfinite(chunked.policy.sharding.full(p)).all() for p in chunked.policy.model.parameters())
