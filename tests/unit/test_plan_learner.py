"""The plan of a learner: memory and time against numbers by hand, what fits, and what is proposed."""

from dataclasses import replace
from itertools import pairwise

import pytest

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema import Config
from rlpipe.errors import ConfigError, ModelError
from rlpipe.hardware.device import Device
from rlpipe.hardware.devices import DEVICES
from rlpipe.plan.engine import plan_engine
from rlpipe.plan.known_models import describe_offline
from rlpipe.plan.learner import LearnerPlan, plan_learner
from rlpipe.plan.learner_changes import with_options
from rlpipe.plan.learner_outline import nf4_bytes, outline_policy
from rlpipe.plan.learner_room import BESIDE_TORCH_BYTES, HOST_BYTES
from rlpipe.plan.learner_section import learner_section
from rlpipe.plan.learner_work import read_work
from rlpipe.plan.loop_section import read_loop

H100 = DEVICES["h100-80g"]
BIG_HOST = replace(H100, host_memory_bytes=2**41)
SMALL, QWEN_8B, LLAMA_70B = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-70B"
NUM_SMALL, NUM_8B = 596_049_920, 8_190_735_360
CHUNKED = ("learner.offload=chunked", "model.gradient_checkpointing=false")
GIB = 2**30


def config_of(model: str, *overrides: str) -> Config:
    """32 groups of 8, of 1,536 tokens; LoRA of rank 32, gradient checkpointing, one GPU."""
    return load_config(["experiment=gsm8k", f"model.path={model}", *overrides], need_files=False)


def plan(model: str, *overrides: str, device: Device = H100) -> LearnerPlan:
    config = config_of(model, *overrides)
    return plan_learner(config, describe_offline(model, config.model), device)


def memory(found: LearnerPlan) -> tuple[dict[str, int], dict[str, int]]:
    assert found.memory is not None
    data = learner_section(found, H100).data["memory"]
    return data["device"], data["host"]


def test_full_training_holds_four_numbers_in_float32() -> None:
    found = plan(SMALL, "model=full")
    device, host = memory(found)
    assert found.num_parameters == found.num_trained == NUM_SMALL
    assert device["weights"] == device["gradients"] == 4 * NUM_SMALL
    assert device["optimizer"] == 8 * NUM_SMALL
    assert device["reference"] == device["slots"] == device["gathered"] == 0
    assert host["total"] == HOST_BYTES + 4 * NUM_SMALL  # while the files' bfloat16 is read as float32
    assert found.time is not None
    assert found.time.device_adam_s == pytest.approx(NUM_SMALL / H100.device_adam)


def test_an_adapter_is_trained_over_a_base_in_its_own_type() -> None:
    found = plan(SMALL)
    adapter = 32 * 28 * ((1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024) + 3 * (1024 + 3072))
    device, host = memory(found)
    assert found.num_trained == adapter
    assert device["weights"] == 2 * NUM_SMALL + 4 * adapter
    assert (device["gradients"], device["optimizer"]) == (4 * adapter, 8 * adapter)
    assert host["loading"] == 0


def test_qlora_holds_linear_layers_in_four_bits() -> None:
    config = config_of(SMALL, "model=qlora", "rollout.engine_args.quantization=bitsandbytes")
    outline = outline_policy(describe_offline(SMALL, config.model), config.model)
    linear = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    assert sum(outline.nf4.values()) == linear
    assert nf4_bytes(64 * 256) == 32 * 256 + 256 + 4
    assert outline.stored_bytes() == 2 * (NUM_SMALL - linear) + nf4_bytes(linear) + 4 * outline.num_trained
    found = plan(SMALL, "model=qlora", "rollout.engine_args.quantization=bitsandbytes")
    assert found.memory is not None
    assert found.memory.device.weights == outline.stored_bytes()
    assert found.time is not None
    plain = plan(SMALL).time
    assert plain is not None
    assert found.time.forward_s > plain.forward_s


def test_moments_in_eight_bits_have_a_scale_for_each_block() -> None:
    device, _ = memory(plan(SMALL, "model=full", "learner.optimizer.name=adamw_8bit"))
    assert device["optimizer"] == pytest.approx(2 * NUM_SMALL * (1 + 4 / 256), rel=1e-3)
    device, host = memory(plan(SMALL, "model=full", "learner.optimizer.name=paged_adamw_8bit"))
    assert device["optimizer"] == 0
    assert host["optimizer"] > 2 * NUM_SMALL


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_ranks_share_what_is_stored(strategy: str) -> None:
    options = ("model=full", f"learner.strategy={strategy}", "learner.num_ranks=4")
    device, _ = memory(plan(SMALL, *options, device=BIG_HOST))
    stored = 4 if strategy == "fsdp2" else 2  # DeepSpeed's optimizer has the float32 ones
    assert device["weights"] == stored * NUM_SMALL // 4
    assert device["optimizer"] == (8 if strategy == "fsdp2" else 12) * NUM_SMALL // 4
    assert device["gathered"] > 0


def test_offload_of_fsdp2_holds_all_states_on_the_host() -> None:
    found = plan(SMALL, "model=full", "learner.strategy=fsdp2", "learner.offload=policy")
    device, host = memory(found)
    assert device["weights"] == device["optimizer"] == 0
    assert (host["weights"], host["gradients"], host["optimizer"]) == (4 * NUM_SMALL, 4 * NUM_SMALL, 8 * NUM_SMALL)
    assert found.time is not None
    assert found.time.optimizer_s == pytest.approx(NUM_SMALL / H100.host_adam)
    assert found.time.transfer_s > 0


def test_a_frozen_copy_is_held_for_the_kl_of_full_training_alone() -> None:
    device, _ = memory(plan(SMALL, "model=full", "algorithm.loss.beta=0.1"))
    assert device["reference"] == 4 * NUM_SMALL
    found = plan(SMALL, "algorithm.loss.beta=0.1")
    device, _ = memory(found)
    assert device["reference"] == 0
    assert found.time is not None
    assert found.time.logprob_s == found.time.forward_s


def test_minibatches_need_the_log_probs_of_the_start() -> None:
    found = plan(SMALL, "algorithm.num_minibatches=4")
    assert (found.work.num_updates, found.work.num_micro_batches) == (4, 7)
    assert found.time is not None
    assert found.time.logprob_s == pytest.approx(3 / 4 * found.time.forward_s)


def test_work_is_packed_as_in_a_run() -> None:
    config = config_of(SMALL)
    outline = outline_policy(describe_offline(SMALL, config.model), config.model)
    work = read_work(config, outline.scorer.layout)
    assert (work.num_sequences, work.sequence_tokens, work.step_tokens) == (256, 1536, 256 * 1536)
    assert (work.num_updates, work.num_micro_batches) == (1, 26)  # of 10 sequences each
    assert len(work.row.predictors) == 10 * 1024
    assert len(work.row.token_ids) < 10 * 1536  # siblings have their prompt once


def test_more_tokens_and_more_layers_take_more() -> None:
    tokens = [plan(SMALL, f"learner.max_tokens_per_microbatch={count}") for count in (2048, 4096, 16384)]
    models = [plan(f"Qwen/Qwen3-{size}B") for size in ("0.6", "4", "8")]
    for entries in (tokens, models):
        peaks = [entry.memory.device.total for entry in entries if entry.memory is not None]
        assert len(peaks) == 3
        assert all(less < more for less, more in pairwise(peaks))
    seconds = [entry.time.seconds for entry in models if entry.time is not None]
    assert all(less < more for less, more in pairwise(seconds))


def test_checkpointing_trades_memory_for_time() -> None:
    again, kept = plan(SMALL), plan(SMALL, "model.gradient_checkpointing=false")
    assert again.memory is not None and kept.memory is not None
    assert again.memory.device.activations < kept.memory.device.activations / 3
    assert again.time is not None
    assert again.time.backward_s > again.time.forward_s


def test_chunks_fit_where_the_plain_learner_does_not() -> None:
    plain = plan(QWEN_8B, "model=full", "learner.max_tokens_per_microbatch=4096")
    assert not plain.fits and plain.time is None
    found = plan(QWEN_8B, "model=full", "learner.max_tokens_per_microbatch=4096", *CHUNKED)
    assert found.fits and found.memory is not None and found.time is not None and found.decision is not None
    held = found.memory.device.total + found.memory.host.total
    assert held > 18 * NUM_8B  # weights, gradients, and three more numbers of four bytes
    assert found.memory.device.total <= 0.9 * (H100.memory_bytes - BESIDE_TORCH_BYTES)
    assert f"predicted {found.memory.device.total / GIB:.2f} GiB on the device" in found.decision
    by_change = {entry.change: entry for entry in plain.changes}
    proposed = by_change["learner.offload=chunked model.gradient_checkpointing=false"]
    assert proposed.seconds == found.time.seconds
    assert proposed.device_bytes == found.memory.device.total


def test_a_large_model_with_an_adapter_fits_in_chunks() -> None:
    found = plan(LLAMA_70B, "learner.max_tokens_per_microbatch=4096", *CHUNKED)
    assert found.fits and found.memory is not None
    assert found.memory.host.weights > 60 * GIB
    assert found.time is not None
    assert found.time.transfer_s > 0


def test_changes_fit_when_they_are_made() -> None:
    config = config_of(QWEN_8B, "model.gradient_checkpointing=false", "learner.max_tokens_per_microbatch=12288")
    described = describe_offline(QWEN_8B, config.model)
    found = plan_learner(config, described, H100)
    changes = [entry.change for entry in found.changes]
    assert not found.fits
    assert changes[0] == "model.gradient_checkpointing=true"
    assert any(change.startswith("learner.max_tokens_per_microbatch=") for change in changes)
    assert all(not change.startswith("model.adapter.kind=lora") for change in changes)
    again = plan_learner(with_options(config, {"model.gradient_checkpointing": True}), described, H100)
    assert again.fits and again.memory is not None
    assert found.changes[0].device_bytes == again.memory.device.total


def test_engines_on_the_same_gpu_leave_less() -> None:
    options = (
        "rollout.num_gpus=0.5",
        "learner.num_gpus=0.5",
        "rollout.engine_args.gpu_memory_utilization=0.4",
    )
    config = config_of(SMALL, *options)
    described = describe_offline(SMALL, config.model)
    engine = plan_engine(config, described, H100)
    found = plan_learner(config, described, H100, engine.setup)
    assert found.room.engines == 1
    assert found.room.engine_bytes == int(0.4 * H100.memory_bytes)
    assert found.room.device_bytes == int(0.9 * (H100.memory_bytes - found.room.engine_bytes - BESIDE_TORCH_BYTES))
    loop = read_loop(config, engine, found)
    assert loop is not None and loop.takes_turns
    assert loop.seconds == loop.sampling_s + loop.training_s


def test_a_run_that_samples_ahead_takes_the_longer_of_both() -> None:
    config = config_of(SMALL)
    described = describe_offline(SMALL, config.model)
    engine = plan_engine(config, described, H100)
    loop = read_loop(config, engine, plan_learner(config, described, H100, engine.setup))
    assert loop is not None and not loop.takes_turns
    assert loop.seconds == max(loop.sampling_s, loop.training_s)
    assert loop.bottleneck == ("sampling" if loop.sampling_s > loop.training_s else "training")


def test_few_sequences_are_noted() -> None:
    few = plan(SMALL, "algorithm.groups_per_step=1", "algorithm.group_size=2")
    assert "an update has 2 sequences" in few.notes[0]
    assert plan(SMALL).notes == []


def test_experts_are_planned() -> None:
    found = plan("Qwen/Qwen3-30B-A3B", "model.adapter.target_modules=[q_proj,v_proj]")
    assert found.fits and found.time is not None
    dense = plan("Qwen/Qwen3-32B", "model.adapter.target_modules=[q_proj,v_proj]")
    assert dense.memory is not None
    assert found.num_parameters > 30e9
    assert found.time.forward_s < 16  # a tenth of the parameters are multiplied with


def test_what_can_not_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner.num_gpus=0: the learner runs on the CPU"):
        plan(SMALL, "learner.num_gpus=0")
    with pytest.raises(ConfigError, match=r"learner.offload=chunked: no way has num_persistent=9999"):
        plan(SMALL, *CHUNKED, "learner.chunked.num_persistent=9999")
    with pytest.raises(ModelError, match=r"model.adapter can't be outlined: .*no_such_proj"):
        plan(SMALL, "model.adapter.target_modules=[no_such_proj]")
