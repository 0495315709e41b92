"""Whole models that vLLM holds in another form than their files; a mixture is first, because it sets up the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_cases import OpenVllm, load, request, sample, versions
from family_cases import make_family
from learner_cases import make_adapter_config, make_batches, make_learner, make_model_config
from serving_cases import largest_gap, publish_policy

from rlpipe.types import WeightsKind

EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    ("family", "adapter", "kind"),
    [
        ("qwen3-moe", EXPERTS, "full"),
        ("qwen3-moe", EXPERTS, "merged"),
        ("qwen3-moe", {"target_modules": ["q_proj"]}, "merged"),
        ("mixtral", {"kind": "none"}, "full"),
        ("gemma4", {"use_dora": True}, "full"),
        ("gemma4", {"use_dora": True}, "merged"),
    ],
)
def test_whole_models_of_other_families(
    open_vllm: OpenVllm, tmp_path: Path, family: str, adapter: dict[str, Any], kind: str
) -> None:
    """Check experts that vLLM packs, in widths with and without padding, and saved buffers, sent whole or merged."""
    folder = make_family(family, tmp_path)
    config = make_model_config(folder, adapter=make_adapter_config(**adapter))
    learner = make_learner(folder, model=config)
    engine = open_vllm(model=config, serve="merged" if kind == "merged" else "auto")
    for version in (1, 2):
        learner.train_step(make_batches(step=version)[0])
        published = publish_policy(learner.policy, version, WeightsKind(kind))
        assert load(engine, published) == published[0].digest
        groups = sample(engine, [request(i, temperature=1.0) for i in range(2)])
        assert versions(groups) == {version}
        assert largest_gap(learner.policy, groups) < 1e-4
