"""The host memory of a machine: its processes, their total, and changes that would make them fit."""

from dataclasses import replace

import pytest

from rlpipe.configs.compose import load_config
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import DEVICES
from rlpipe.plan.actors import ActorKind, engine_kind, rank_kind
from rlpipe.plan.engine_memory import HOST_BYTES as ENGINE_BYTES
from rlpipe.plan.engine_plan import plan_engine
from rlpipe.plan.learner_estimate import LearnerEstimate, TraceCache
from rlpipe.plan.learner_memory import CPU_HOST_BYTES, HOST_BYTES
from rlpipe.plan.learner_plan import with_options
from rlpipe.plan.machine_plan import REWARD_BYTES, RUN_BYTES, MachineEstimate, MachinePlan, plan_machine
from rlpipe.plan.model_shape import describe_offline

GIB = 2**30
H100 = DEVICES["h100-80g"]
CPU = replace(H100, name="laptop", kind="cpu", memory_bytes=32 * GIB, host_memory_bytes=32 * GIB)
ON_CPU = ("rollout.num_gpus=0", "learner.num_gpus=0")


def cases(*overrides: str, device: Device = H100) -> tuple[LearnerEstimate, ActorKind]:
    """Return cases with one engine, one rank, and one process of reward functions."""
    options = ["experiment=gsm8k", "model.path=Qwen/Qwen3-0.6B", "learner.max_tokens_per_microbatch=1536"]
    config = load_config([*options, "model.dtype=bfloat16", "scoring.num_processes=1", *overrides], need_files=False)
    described = describe_offline(config.model.path, config.model)
    engine = plan_engine(config, described, device)
    learner = LearnerEstimate(config=config, drafts=TraceCache(described, device), engines=engine.setup)
    return learner, engine_kind(config, engine)


def plan(*overrides: str, device: Device = H100) -> MachinePlan:
    learner, engine = cases(*overrides, device=device)
    return plan_machine(learner, engine, [], device)


def counts(found: MachinePlan) -> dict[str, int]:
    return {kind.name: count for kind, count in found.placed}


def test_all_actors_of_a_small_run_are_added_up() -> None:
    learner, engine = cases()
    found = plan_machine(learner, engine, [], H100)
    assert counts(found) == {"rollout engine": 1, "learner rank": 1, "reward worker": 1, "driver with Ray": 1}
    assert found.num_bytes == engine.host_bytes + HOST_BYTES + REWARD_BYTES + RUN_BYTES
    assert engine.host_bytes > ENGINE_BYTES["cuda"]
    assert (found.num_machines, found.problem) == (1, None)


def test_the_object_store_has_two_versions_of_a_whole_model() -> None:
    for options in (("model=full",), ("model.adapter.merge=true",)):
        learner, engine = cases(*options)
        found = plan_machine(learner, engine, [], H100)
        stored = next(kind for kind, _ in found.placed if kind.name == "published version")
        assert (counts(found)[stored.name], stored.host_bytes) == (2, 2 * learner.policy.num_parameters)
    direct = cases("model=full", "weights.transport=nccl", "rollout.num_gpus=1")
    assert "published version" not in counts(plan_machine(*direct, [], H100))


def test_an_engine_over_several_gpus_has_a_process_for_each() -> None:
    one, two = cases()[1], cases("rollout.tensor_parallel_size=2", "rollout.num_gpus=2")[1]
    assert two.host_bytes == 2 * one.host_bytes


def test_eight_gpus_are_one_machine() -> None:
    ranks = ActorKind(name="rank", count=8, num_gpus=1, gpu_bytes=0, host_bytes=3 * GIB)
    engines = ActorKind(name="engine", count=6, num_gpus=1, gpu_bytes=0, host_bytes=5 * GIB)
    worker = ActorKind(name="worker", count=4, num_gpus=0, gpu_bytes=0, host_bytes=GIB)
    case = MachineEstimate(kinds=[ranks, engines, worker], device=H100)
    assert case.num_machines == 2
    assert case.placed == [(ranks, 2), (engines, 6), (worker, 4)]  # most memory per GPU first
    assert case.num_bytes == (2 * 3 + 6 * 5 + 4) * GIB
    assert MachineEstimate(kinds=[engines, replace(ranks, count=2)], device=H100).num_machines == 1


@pytest.mark.slow
def test_on_a_cpu_all_memory_is_the_machines() -> None:
    learner, engine = cases(*ON_CPU, device=CPU)
    memory = learner.memory
    assert memory is not None
    ranks = rank_kind(learner.config, memory, learner.budget, CPU)
    assert memory.host.process == CPU_HOST_BYTES
    assert ranks.gpu_bytes == 0
    assert ranks.host_bytes == CPU_HOST_BYTES + memory.device.total
    assert engine.host_bytes > ENGINE_BYTES["cpu"] + 2**30  # including its keys and values
    small = replace(CPU, memory_bytes=16 * GIB, host_memory_bytes=16 * GIB)
    found = plan(*ON_CPU, "rollout.num_engines=3", device=small)
    assert learner.problem is None
    assert found.problem is not None
    assert found.problem.startswith("the actors need ")
    assert "--host-memory-gib 32" in found.changes
    assert plan(*ON_CPU, "rollout.num_engines=3", device=replace(small, host_memory_bytes=32 * GIB)).fits
    fewer = next(change for change in found.changes if change.startswith("rollout.num_engines="))
    assert plan(*ON_CPU, fewer, device=small).fits
    assert not plan(*ON_CPU, f"rollout.num_engines={int(fewer[-1]) + 1}", device=small).fits


def test_transformers_engine_holds_keys_and_values_of_its_batch_alone() -> None:
    small, large = (
        cases(*ON_CPU, "rollout.engine=hf", device=replace(CPU, memory_bytes=size * GIB))[1] for size in (64, 128)
    )
    assert small.host_bytes == large.host_bytes


def test_more_machines_have_less_each() -> None:
    options = ("rollout.num_engines=4", "algorithm.groups_per_step=32")
    device = replace(H100, host_memory_bytes=24 * GIB)
    found = plan(*options, device=device)
    assert not found.fits
    assert "machines with 3 of these GPUs each" in found.changes
    assert "rollout.num_engines=2" in found.changes


@pytest.mark.slow
def test_chunks_are_bounded_by_what_the_others_leave() -> None:
    options = ("model=full", "learner.offload=chunked", "model.gradient_checkpointing=false", "rollout.num_engines=6")
    tight = ("learner.chunked.device_memory_gib=6",)
    base = plan(*options, *tight)
    learner, engine = cases(*options, *tight, device=replace(H100, host_memory_bytes=base.num_bytes - GIB))
    device = learner.device
    found = plan_machine(learner, engine, [], device)
    assert not found.fits
    bounds = [change for change in found.changes if change.startswith("learner.chunked.host_memory_gib=")]
    assert len(bounds) == 1
    bound = {"learner.chunked.host_memory_gib": float(bounds[0].partition("=")[2])}
    again = replace(learner, config=with_options(learner.config, bound))
    assert again.problem is None
    assert plan_machine(again, engine, [], device).fits
    assert not any(change.startswith("--host-memory-gib") for change in found.changes)


@pytest.mark.slow
def test_runs_without_engines_have_ranks_and_a_driver() -> None:
    options = ["algorithm=sft", "data=jsonl", "data.path=x.jsonl", "model.path=Qwen/Qwen3-0.6B"]
    config = load_config(
        [*options, "model.dtype=bfloat16", "learner=single_gpu", "scoring.rewards={}"], need_files=False
    )
    drafts = TraceCache(describe_offline(config.model.path, config.model), H100)
    found = plan_machine(LearnerEstimate(config=config, drafts=drafts, engines=None), None, [], H100)
    assert counts(found) == {"learner rank": 1, "driver with Ray": 1}
