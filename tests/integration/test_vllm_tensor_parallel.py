"""An engine whose model is split over two processes, on the CPU: what it samples, and what it proves of its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_cases import (
    OpenVllm,
    adapted,
    corrupted,
    largest_difference,
    load,
    publish_adapter,
    publish_full,
    publish_merged,
    request,
    retrained,
    sample,
    versions,
)
from torch import nn

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize("kind", ["lora", "merged", "none"])
def test_a_split_model_serves_what_is_published(
    open_vllm: OpenVllm, tiny_policy: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by default each process needs a NUMA node
    engine = open_vllm(
        "none" if kind == "none" else "lora", tensor_parallel_size=2, serve="merged" if kind == "merged" else "auto"
    )
    for version, seed in ((1, 0), (2, 1)):
        policy: nn.Module
        if kind == "none":
            policy = retrained(tiny_policy, seed)
            published = publish_full(policy, version)
        else:
            policy = adapted(tiny_policy, seed)
            publish = publish_adapter if kind == "lora" else publish_merged
            published = publish(policy, version, *([tiny_policy] if kind == "merged" else []))
        assert load(engine, published) == published[0].digest
        groups = sample(engine, [request(i) for i in range(6)])
        assert versions(groups) == {version}
        assert largest_difference(policy, groups, 1.0) < 1e-4
    damaged = corrupted(published, "1.mlp.down_proj.weight" if kind == "none" else "1.self_attn.v_proj.lora_A")
    assert load(engine, damaged) != published[0].digest


def test_every_rank_counts_its_shard_of_parameters_that_a_module_shards_itself() -> None:
    from rlpipe.rollout.vllm.vllm_worker import _is_sharded

    published = {"attention.sinks": (8,), "norm.weight": (32,), "gate.weight": (4, 32)}
    assert _is_sharded(nn.Module(), "attention.sinks", (4,), published)
    assert not _is_sharded(nn.Module(), "norm.weight", (32,), published)
    assert not _is_sharded(nn.Module(), "fused.weight", (96, 32), published), "it was published in other tensors"
    assert _is_sharded(nn.Module(), "mlp.experts.w13_weight", (4, 32, 16), published)
