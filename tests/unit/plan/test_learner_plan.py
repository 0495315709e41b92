"""Plans of a learner: memory and time against numbers by hand, whether it fits, and proposed changes."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from transformers import PreTrainedModel

from rlpipe.common.formatting import gib
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, ModelError
from rlpipe.hardware.device import Curve, Device, Link
from rlpipe.hardware.device_profiles import DEVICES
from rlpipe.learner.forward import find_layers
from rlpipe.offload.planner.profiler import rates_of
from rlpipe.plan.engine_plan import plan_engine
from rlpipe.plan.learner_estimate import LearnerEstimate, TraceCache
from rlpipe.plan.learner_memory import CUDA_CONTEXT_BYTES, HOST_BYTES, DeviceBytes, HostBytes, meta_policy, nf4_bytes
from rlpipe.plan.learner_plan import MAX_PAIRS, LearnerPlan, plan_case, plan_learner, with_options
from rlpipe.plan.learner_time import chunked_time, plain_time, read_work
from rlpipe.plan.model_shape import describe_offline
from rlpipe.plan.sections import read_loop

H100 = DEVICES["h100-80g"]
BIG_HOST = replace(H100, host_memory_bytes=2**41)
SMALL, QWEN_8B, LLAMA_70B = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-70B"
NUM_SMALL, NUM_8B = 596_049_920, 8_190_735_360
CHUNKED = ("learner.offload=chunked", "model.gradient_checkpointing=false")
GIB = 2**30
ROWS = ("learner=single_gpu", "data.source=jsonl", "data.path=rows.jsonl")


@cache
def config_of(model: str, *overrides: str) -> Config:
    """Return a config of 32 groups of 8 with 1,536 tokens, LoRA of rank 32, gradient checkpointing, and one GPU."""
    options = [f"model.path={model}", "model.dtype=bfloat16", "learner.max_tokens_per_microbatch=3072", *overrides]
    return load_config(["experiment=gsm8k", *options], need_files=False)


@cache
def drafts_of(model: str, device: Device) -> TraceCache:
    """Return the traces of a model on a device, which the tests share."""
    return TraceCache(describe_offline(model, config_of(model).model), device)


def case_of(config: Config, device: Device = H100) -> LearnerEstimate:
    return LearnerEstimate(config=config, drafts=drafts_of(config.model.path, device), engines=None)


@cache
def plan(model: str, *overrides: str, device: Device = H100) -> LearnerPlan:
    """Return the plan of ``config_of``, which the tests share."""
    return plan_case(case_of(config_of(model, *overrides), device))


def memory(*overrides: str, device: Device = H100) -> tuple[DeviceBytes, HostBytes]:
    """Return the device and host memory of the small model."""
    found = case_of(config_of(SMALL, *overrides), device).memory
    assert found is not None
    return found.device, found.host


def test_full_training_holds_four_numbers_in_float32() -> None:
    found = plan(SMALL, "model=full")
    device, host = memory("model=full")
    assert found.num_parameters == found.num_trained == NUM_SMALL
    assert device.weights == device.gradients == 4 * NUM_SMALL
    assert device.optimizer == 8 * NUM_SMALL
    assert device.reference == device.slots == device.gathered == 0
    assert host.total == HOST_BYTES + 4 * NUM_SMALL  # while the files' bfloat16 is read as float32
    assert found.time is not None
    assert found.time.device_adam_s == pytest.approx(NUM_SMALL / H100.device_adam["float32"])


def test_an_adapter_is_trained_over_a_base_in_its_own_type() -> None:
    found = plan(SMALL)
    adapter = 32 * 28 * ((1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024) + 3 * (1024 + 3072))
    device, host = memory()
    assert found.num_trained == adapter
    assert device.weights == 2 * NUM_SMALL + 4 * adapter
    assert (device.gradients, device.optimizer) == (4 * adapter, 8 * adapter)
    assert host.loading == 0


def test_qlora_holds_linear_layers_in_four_bits() -> None:
    config = config_of(SMALL, "model=qlora", "rollout.engine_args.quantization=bitsandbytes")
    policy = meta_policy(describe_offline(SMALL, config.model), config.model)
    linear = 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
    assert sum(policy.nf4.values()) == linear
    assert nf4_bytes(64 * 256) == 32 * 256 + 256 + 4
    assert policy.stored_bytes() == 2 * (NUM_SMALL - linear) + nf4_bytes(linear) + 4 * policy.num_trained
    found = plan(SMALL, "model=qlora", "rollout.engine_args.quantization=bitsandbytes")
    assert found.memory is not None
    assert found.memory.device.weights == policy.stored_bytes()
    assert found.time is not None
    plain = plan(SMALL).time
    assert plain is not None
    assert found.time.forward_s > plain.forward_s


def test_moments_in_eight_bits_have_a_scale_for_each_block() -> None:
    device, _ = memory("model=full", "learner.optimizer.name=adamw_8bit")
    assert device.optimizer == pytest.approx(2 * NUM_SMALL * (1 + 4 / 256), rel=1e-3)
    device, host = memory("model=full", "learner.optimizer.name=paged_adamw_8bit")
    assert device.optimizer == 0
    assert host.optimizer > 2 * NUM_SMALL


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_ranks_share_what_is_stored(strategy: str) -> None:
    options = ("model=full", f"learner.strategy={strategy}", "learner.num_ranks=4")
    device, _ = memory(*options, device=BIG_HOST)
    stored = 4 if strategy == "fsdp2" else 2  # DeepSpeed's optimizer has the float32 weights
    assert device.weights == stored * NUM_SMALL // 4
    assert device.optimizer == (8 if strategy == "fsdp2" else 12) * NUM_SMALL // 4
    assert device.gathered > 0


def test_offload_of_fsdp2_holds_all_states_on_the_host() -> None:
    options = ("model=full", "learner.strategy=fsdp2", "learner.offload=policy")
    device, host = memory(*options)
    assert device.weights == device.optimizer == 0
    assert (host.weights, host.gradients, host.optimizer) == (4 * NUM_SMALL, 4 * NUM_SMALL, 8 * NUM_SMALL)
    found = plan(SMALL, *options)
    assert found.time is not None
    assert found.time.optimizer_s == pytest.approx(NUM_SMALL / H100.host_adam["float32"])
    assert found.time.transfer_s > 0


def test_a_frozen_copy_is_held_for_the_kl_of_full_training_alone() -> None:
    device, _ = memory("model=full", "algorithm.loss.beta=0.1")
    assert device.reference == 2 * NUM_SMALL
    moving, _ = memory("model=full", "algorithm.loss.beta=0.1", "algorithm.reference.sync_steps=100")
    assert moving.reference == 4 * NUM_SMALL
    device, _ = memory("algorithm.loss.beta=0.1")
    assert device.reference == 0
    found = plan(SMALL, "algorithm.loss.beta=0.1")
    assert found.time is not None
    assert found.time.logprob_s == found.time.forward_s


def test_a_reference_is_loaded_after_the_policy_is_on_its_device() -> None:
    beta, moving = "algorithm.loss.beta=0.1", "algorithm.reference.sync_steps=100"
    for options in ((beta,), (beta, moving)):  # files in bfloat16 are mapped for a copy in bfloat16
        assert memory("model=full", *options)[1].loading == 4 * NUM_SMALL
    on_host = ("learner.strategy=fsdp2", "learner.offload=policy", "learner.num_ranks=2")
    assert memory("model=full", beta, moving, *on_host)[1].loading == (2 + 4) * NUM_SMALL
    cpu = replace(H100, name="cpu", kind="cpu", host_memory_bytes=H100.memory_bytes)
    on_cpu = ("learner.num_gpus=0", "rollout.num_gpus=0")
    assert memory("model=full", beta, moving, *on_cpu, device=cpu)[1].loading == (4 + 4) * NUM_SMALL


def test_precomputed_log_probs_need_no_reference() -> None:
    options = ["algorithm=dpo", "model=full", f"model.path={SMALL}", "model.dtype=bfloat16", *ROWS]
    for precompute, copied in (("false", 2 * NUM_SMALL), ("true", 0)):
        extra = [f"algorithm.preference.precompute_ref_log_probs={precompute}"]
        case = case_of(load_config([*options, *extra], need_files=False))
        assert case.memory is not None
        assert case.memory.device.reference == copied
        assert case.work.num_reference_passes == bool(copied)


def test_advantages_of_the_learner_take_a_pass_of_the_policy_and_one_of_the_reference() -> None:
    both = ("algorithm.num_minibatches=2", "algorithm.num_epochs_per_step=2")
    for options, passes in (
        ((), (3 / 4, 0)),
        (("algorithm.advantage.name=optimal_token_baseline",), (1, 0)),
        (("algorithm.reward_kl.coef=0.1",), (1, 1 / 2)),
        (("algorithm.advantage.name=gae",), (1 + 1 / 2 + 1, 0)),
        (("algorithm.reward_kl.coef=0.1", "algorithm.loss.beta=0.1"), (1, 1)),
    ):
        work = case_of(config_of(SMALL, *both, *options)).work
        assert (work.num_logprob_passes, work.num_reference_passes) == passes
    found = case_of(config_of(SMALL, "model=full", "algorithm.reward_kl.coef=0.1")).memory
    assert found is not None
    assert found.device.reference == 2 * NUM_SMALL


def test_a_copy_that_gives_features_alone_ends_at_the_deepest() -> None:
    with_kl, _ = memory("model=full", "algorithm=ebft_strided", "algorithm.loss.beta=0.1")
    without, _ = memory("model=full", "algorithm=ebft_strided")
    layer = 2 * sum(parameter.numel() for parameter in find_layers(drafted_copy()).parameters()) // 28
    assert with_kl.reference - without.reference == 7 * layer, "of 28 layers, 21 are read; the lm_head is tied"


@pytest.mark.covering(0)
@pytest.mark.parametrize(("kind", "num_labels"), [("reward_model", 1), ("process_reward_model", 2)])
@pytest.mark.parametrize("model", ["full", "lora"])
def test_a_reward_model_has_its_own_head_in_place_of_the_lm_head(kind: str, num_labels: int, model: str) -> None:
    options = [f"algorithm={kind}", f"model={model}", f"model.path={QWEN_8B}", "model.dtype=bfloat16", *ROWS]
    config = load_config([*options, "learner.max_tokens_per_microbatch=2048"], need_files=False)
    described = describe_offline(QWEN_8B, config.model)
    policy, rewards = meta_policy(described, config.model), meta_policy(described, config.model, head=kind)
    head = [entry for name, entry in rewards.module.named_parameters() if ".score." in name and entry.requires_grad]
    size, lm_head = sum(entry.numel() for entry in head), described.vocab_size * described.hidden_size
    assert size in (num_labels * described.hidden_size, num_labels * (described.hidden_size + 1))  # may have a bias
    assert rewards.num_trained - policy.num_trained == (size if model == "lora" else size - lm_head)
    case = case_of(config)
    assert case.policy.num_parameters == rewards.num_parameters
    assert case.memory is not None
    assert case.memory.device.weights == rewards.stored_bytes()
    for strategy in ("fsdp2", "zero3"):
        sharded = load_config(
            [*options, f"learner.strategy={strategy}", "learner.num_ranks=4", "learner.max_tokens_per_microbatch=2048"],
            need_files=False,
        )
        found = case_of(sharded).memory
        assert found is not None
        stored = rewards.stored_bytes(trained_dtype=torch.bfloat16 if strategy == "zero3" else None)
        assert found.device.weights == -(-stored // 4)


def drafted_copy() -> PreTrainedModel:
    model = config_of(SMALL).model
    return meta_policy(describe_offline(SMALL, model), model, frozen=True).module.causal_model


def test_minibatches_need_the_log_probs_of_the_start() -> None:
    found = plan(SMALL, "algorithm.num_minibatches=4")
    assert (found.work.num_updates, found.work.num_micro_batches) == (4, 32)
    assert found.time is not None
    assert found.time.logprob_s == pytest.approx(3 / 4 * found.time.forward_s)


def test_work_is_packed_as_in_a_run() -> None:
    config = config_of(SMALL, "learner.max_tokens_per_microbatch=16384")
    policy = meta_policy(describe_offline(SMALL, config.model), config.model)
    work = read_work(config, policy.module.layout)
    assert (work.num_sequences, work.sequence_tokens, work.step_tokens) == (256, 1536, 256 * 1536)
    assert (work.num_updates, work.num_micro_batches) == (1, 26)  # of 10 sequences each
    assert len(work.row.predictors) == 10 * 1024
    assert len(work.row.token_ids) < 10 * 1536  # siblings share one copy of their prompt


@pytest.mark.slow
def test_more_tokens_and_more_layers_take_more() -> None:
    tokens = [plan(SMALL, f"learner.max_tokens_per_microbatch={count}") for count in (2048, 3072)]
    models = [plan(f"Qwen/Qwen3-{size}B", "learner.max_tokens_per_microbatch=24576") for size in ("0.6", "8")]
    for entries in (tokens, models):
        peaks = [entry.memory.device.total for entry in entries if entry.memory is not None]
        assert len(peaks) == len(entries)
        assert all(less < more for less, more in pairwise(peaks))
    seconds = [entry.time.seconds for entry in models if entry.time is not None]
    assert seconds[0] < seconds[1] / 4


@pytest.mark.slow
def test_a_small_model_takes_the_time_in_which_its_operators_are_started() -> None:
    """Twice as many micro batches of half the tokens take about twice as long, though they compute the same."""
    large, small = (plan(SMALL, f"learner.max_tokens_per_microbatch={count}").time for count in (3072, 1536))
    assert large is not None
    assert small is not None
    assert small.seconds > 1.7 * large.seconds


@pytest.mark.slow
def test_checkpointing_trades_memory_for_time() -> None:
    again, kept = plan(SMALL), plan(SMALL, "model.gradient_checkpointing=false")
    assert again.memory is not None
    assert kept.memory is not None
    assert again.memory.device.activations < kept.memory.device.activations / 3
    assert again.time is not None
    assert again.time.backward_s > again.time.forward_s


def test_chunks_fit_where_the_plain_learner_does_not() -> None:
    assert "a rank needs 12" in (case_of(config_of(QWEN_8B, "model=full")).problem or "")
    found = plan(QWEN_8B, "model=full", *CHUNKED)
    assert found.fits
    assert found.memory is not None
    assert found.decision is not None
    held = found.memory.device.total + found.memory.host.total
    assert held > 18 * NUM_8B  # 2 bytes of weights, 4 of gradients, and 3 * 4 of the optimizer
    assert found.memory.device.total <= 0.9 * (H100.memory_bytes - CUDA_CONTEXT_BYTES)
    assert f"predicted {gib(found.memory.device.total)} on the device" in found.decision


@pytest.mark.slow
def test_a_large_model_with_an_adapter_fits_in_chunks() -> None:
    found = plan(LLAMA_70B, "learner.max_tokens_per_microbatch=4096", *CHUNKED)
    assert found.fits
    assert found.memory is not None
    assert found.memory.host.weights > 60 * GIB
    assert found.time is not None
    assert found.time.transfer_s > 0


@pytest.mark.slow
def test_changes_fit_when_they_are_made() -> None:
    config = config_of(SMALL, "model.gradient_checkpointing=false")
    device = replace(H100, memory_bytes=10 * 10**9)
    found = plan_case(case_of(config, device))
    assert not found.fits
    changes = {entry.change: entry for entry in found.changes}
    assert "learner.offload=chunked" in changes
    assert "model.gradient_checkpointing=true" in changes
    assert "learner.max_tokens_per_microbatch=1536" in changes
    for options in ({"learner.offload": "chunked"}, {"model.gradient_checkpointing": True}):
        again = case_of(with_options(config, options), device)
        text = " ".join(f"{name}={str(value).lower()}" for name, value in options.items())
        assert again.problem is None
        assert again.memory is not None
        assert changes[text].num_bytes == again.memory.device.total
        assert changes[text].seconds == again.time.seconds


@pytest.mark.slow
def test_two_changes_are_proposed_where_none_alone_is_enough() -> None:
    model, device = "Qwen/Qwen3-14B", DEVICES["rtx3090-24g"]
    found = plan(model, "model=full", device=device)
    assert not found.fits
    assert len(found.changes) == MAX_PAIRS
    chunked = "learner.offload=chunked model.gradient_checkpointing=false learner.chunked.state_dtype=bfloat16"
    assert [change.change for change in found.changes[:2]] == [
        f"{chunked} model.adapter.kind=lora",
        f"{chunked} --host-memory-gib 256",
    ]
    hosts = replace(device, host_memory_bytes=256 * GIB)
    fitting = [
        plan(model, "model=full", *chunked.split(), "model.adapter.kind=lora", device=device),
        plan(model, "model=full", *chunked.split(), device=hosts),
    ]
    for again, change in zip(fitting, found.changes, strict=False):
        assert again.fits
        assert again.memory is not None
        assert again.memory.device.total == change.num_bytes
    assert not plan(model, "model=full", *chunked.split(), device=device).fits


@pytest.mark.slow
def test_limits_that_the_config_sets_are_what_changes_first() -> None:
    found = plan(SMALL, *CHUNKED, "learner.chunked.device_memory_gib=0.5", "learner.chunked.host_memory_gib=50")
    assert not found.fits
    assert found.changes[0].change == "learner.chunked.device_memory_gib=null"


@pytest.mark.slow
def test_what_the_host_is_short_of_is_had_with_less_ranks_or_more_memory() -> None:
    options = ("model=full", "learner.strategy=fsdp2", "learner.num_gpus=1", "model.gradient_checkpointing=true")
    found = plan(QWEN_8B, *options, "learner.num_ranks=4")
    assert found.problem is not None
    assert found.problem.endswith("of 128.0 GiB (an assumption; set --host-memory-gib)")
    changes = [change.change for change in found.changes]
    assert "learner.num_ranks=3" in changes
    assert "--host-memory-gib 256" in changes
    assert plan(QWEN_8B, *options, "learner.num_ranks=3").fits
    larger = replace(H100, host_memory_bytes=256 * GIB)
    assert plan(QWEN_8B, *options, "learner.num_ranks=4", device=larger).fits


def test_engines_on_the_same_gpu_leave_less() -> None:
    options = ("rollout.num_gpus=0.5", "learner.num_gpus=0.5", "rollout.engine_args.gpu_memory_utilization=0.4")
    config = config_of(SMALL, *options)
    described = describe_offline(SMALL, config.model)
    engine = plan_engine(config, described, H100)
    found = plan_learner(config, described, H100, engine.setup)
    assert found.budget.engines == 1
    assert found.budget.engine_bytes == int(0.4 * H100.memory_bytes)
    assert found.budget.device_bytes == int(0.9 * (H100.memory_bytes - found.budget.engine_bytes - CUDA_CONTEXT_BYTES))
    loop = read_loop(config, engine, found)
    assert loop is not None
    assert loop.takes_turns
    assert loop.seconds == loop.sampling_s + loop.training_s


@pytest.mark.slow
def test_a_run_that_samples_ahead_takes_the_longer_of_both() -> None:
    config = config_of(SMALL)
    described = describe_offline(SMALL, config.model)
    engine = plan_engine(config, described, H100)
    loop = read_loop(config, engine, plan_learner(config, described, H100, engine.setup))
    assert loop is not None
    assert not loop.takes_turns
    assert loop.seconds == max(loop.sampling_s, loop.training_s)
    assert loop.bottleneck == ("sampling" if loop.sampling_s > loop.training_s else "training")


def test_few_sequences_are_noted() -> None:
    few = plan(SMALL, "algorithm.groups_per_step=1", "algorithm.group_size=2")
    assert "an update has 2 sequences" in few.notes[0]
    assert plan(SMALL).notes == []


@pytest.mark.slow
def test_experts_are_planned() -> None:
    found = plan("Qwen/Qwen3-30B-A3B", "model.adapter.target_modules=[q_proj,v_proj]")
    assert found.fits
    assert found.time is not None
    assert found.num_parameters > 30e9
    products = 2 * 3e9 * found.work.step_tokens / H100.flops("bfloat16")  # a tenth of the parameters
    assert products / 2 < found.time.forward_s < 10 * products


def test_what_can_not_be_planned_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner.num_gpus=0: the learner runs on the CPU"):
        plan(SMALL, "learner.num_gpus=0")
    with pytest.raises(ConfigError, match=r"learner.offload=chunked: no plan has num_persistent=9999"):
        plan(SMALL, *CHUNKED, "learner.chunked.num_persistent=9999")
    with pytest.raises(ModelError, match=r"model.adapter can't be created: .*no_such_proj"):
        plan(SMALL, "model.adapter.target_modules=[no_such_proj]")


@pytest.mark.parametrize("reshards", [True, False])
def test_fsdp2_exchanges_unit_by_unit(reshards: bool) -> None:
    """Check the number of collectives, each of which takes a second: those of each layer, and of the rest."""
    second, free = Curve(num_bytes=(1.0, 1e15), seconds=(1.0, 1.0)), Curve.at_rate(1e30)
    options = ("model=full", "learner.strategy=fsdp2", "learner.num_ranks=4")
    case = case_of(config_of(SMALL, *options, f"learner.fsdp.reshard_after_forward={reshards}"), BIG_HOST)
    stages, num_layers = case.drafts.trace(case.config, case.work.row).profiles(), 28
    gathers, sums = (2 if reshards else 1) * num_layers + 1, num_layers + 1
    for link, count in (
        (Link(all_gather=second, reduce_scatter=free, all_reduce=free), gathers),
        (Link(all_gather=free, reduce_scatter=second, all_reduce=free), sums),
    ):
        time = plain_time(case.policy, stages, case.config, case.work, replace(BIG_HOST, link=link))
        passes = case.work.num_updates * case.work.num_micro_batches
        assert (case.work.num_logprob_passes, case.work.num_reference_passes) == (0, 0)
        assert time.exchange_s == pytest.approx(passes * count)


def test_the_hosts_sums_may_be_what_a_step_waits_for() -> None:
    options = ("model=full", *CHUNKED, "learner.chunked.num_persistent=0")
    config = config_of(SMALL, *options)
    case = case_of(config, BIG_HOST)
    assert case.time.bottleneck == "arithmetic and device memory"
    decision, profile = case.decision
    work = replace(case.work, num_micro_batches=profile.num_micro_batches)
    rates = replace(rates_of(BIG_HOST), host_adding={"bfloat16 to float32": 1e9})
    slow = chunked_time(profile, decision.knobs, rates, work, case.reference)
    assert slow.bottleneck == "adding gradients on the host"
    assert slow.adding_s == pytest.approx(work.num_updates * (work.num_micro_batches - 1) * NUM_SMALL / 1e9, rel=0.1)
    assert slow.backward_s == pytest.approx(slow.adding_s)
