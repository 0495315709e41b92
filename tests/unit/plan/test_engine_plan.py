"""Plans of rollout engines: memory and speed against numbers by hand, and proposed changes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from transformers import Gemma3nTextConfig, Gemma4TextConfig, NemotronHConfig, PreTrainedConfig

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import ADDINGS, Curve, Device, Link
from rlpipe.hardware.device_profiles import DEVICES
from rlpipe.plan.engine_memory import COLLECTIVE_BYTES, OUTSIDE_TORCH_BYTES
from rlpipe.plan.engine_plan import HF_LAYER_S, VLLM_PASS_S, EnginePlan, plan_engine
from rlpipe.plan.model_shape import describe_offline

ROUND = Device(
    name="round",
    memory_bytes=100 * 10**9,
    matmul_flops={"bfloat16": 100e12, "float32": 10e12},
    memory_bandwidth=1e12,
    host_to_device=10e9,
    device_to_host=10e9,
    both=10e9,
    link=Link.at_rate(100e9),
    device_adam={"float32": 1e10, "bfloat16": 2e10},
    host_adam={"float32": 1e9, "bfloat16": 2e9},
    host_adding=dict.fromkeys(ADDINGS, 1e10),
    host_bandwidth=1e11,
    host_memory_bytes=10**12,
)
BASE = (
    "experiment=gsm8k",  # 32 groups of 8, prompts of 512 tokens, completions of 1,024, LoRA of rank 32
    "model.dtype=bfloat16",
    "rollout.engine_args.gpu_memory_utilization=0.5",
    "rollout.engine_args.max_num_seqs=100",
    "rollout.engine_args.max_num_batched_tokens=1000",
    "learner.max_tokens_per_microbatch=1000000",
)
QWEN_8B, LLAMA_8B, LLAMA_70B = "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"


def config_of(model: str, *overrides: str) -> Config:
    return load_config([*BASE, f"model.path={model}", *overrides], need_files=False)


def plan(model: str, *overrides: str, device: Device = ROUND) -> EnginePlan:
    config = config_of(model, *overrides)
    return plan_engine(config, describe_offline(model, config.model), device)


def changes(found: EnginePlan) -> Sequence[str]:
    return [entry.change for entry in found.changes]


def test_memory_of_qwen3_8b() -> None:
    memory = plan(QWEN_8B).memory
    assert memory.budget_bytes == 50 * 10**9
    assert memory.weights_bytes == 2 * 8_190_735_360
    assert memory.adapter_bytes == 3 * 32 * 2 * 36 * (8192 + 2 * 5120 + 8192 + 3 * 16384)
    assert memory.reserve_bytes == (1000 * 2 * (2 * 4096 + 3 * 12288) + 100 * 151_936 * 12 + OUTSIDE_TORCH_BYTES)
    assert memory.kv_bytes == 50 * 10**9 - memory.weights_bytes - memory.adapter_bytes - memory.reserve_bytes
    assert memory.sequences_full == memory.kv_bytes // (147_456 * 1536)
    assert memory.sequences_mean == memory.kv_bytes // (147_456 * 1024)


def test_memory_of_llama_3_1_8b_in_full() -> None:
    found = plan(LLAMA_8B, "model=full")
    assert found.memory.weights_bytes == 2 * 8_030_261_248
    assert found.memory.adapter_bytes == 0
    assert found.kv_token_bytes == 131_072
    assert found.memory.host_bytes > 256 * 2**20


def test_memory_of_llama_3_1_70b_on_four_gpus() -> None:
    found = plan(LLAMA_70B, "rollout.tensor_parallel_size=4", "rollout.num_gpus=4")
    assert found.memory.weights_bytes == 2 * 70_553_706_496 // 4
    assert found.kv_token_bytes == 80 * 2 * 2 * 128 * 2
    reserve = 1000 * 2 * (2 * 8192 + 3 * 28672 // 4) + 100 * 128_256 * 12
    assert found.memory.reserve_bytes == reserve + OUTSIDE_TORCH_BYTES + COLLECTIVE_BYTES
    assert found.fits


def test_a_known_profile_of_vllm_is_met() -> None:
    # https://github.com/vllm-project/vllm/pull/10511: Llama-3-8B on 79.22 GiB, with 0.9 of them for vLLM and its
    # defaults of that time: the weights took 14.96 GiB, and 53.29 GiB were left for keys and values.
    device = replace(DEVICES["h100-80g"], memory_bytes=int(79.22 * 2**30))
    engine = ("gpu_memory_utilization=0.9", "max_num_seqs=256", "max_num_batched_tokens=8192")
    memory = plan(LLAMA_8B, "model=full", *(f"rollout.engine_args.{name}" for name in engine), device=device).memory
    assert memory.weights_bytes / 2**30 == pytest.approx(14.96, abs=0.01)
    assert memory.kv_bytes / 2**30 == pytest.approx(53.29, rel=0.02)


@pytest.mark.parametrize("described", [Gemma4TextConfig(), Gemma3nTextConfig(), NemotronHConfig()])
def test_models_whose_layers_differ_are_planned(described: PreTrainedConfig) -> None:
    found = plan_engine(config_of("x"), described, ROUND)
    assert found.fits
    assert found.speed is not None
    assert found.kv_token_bytes < 2**18


def test_fewer_slots_and_smaller_types_take_less() -> None:
    base = plan(QWEN_8B).memory
    inflight = plan(QWEN_8B, "replay=async", "weights.on_update=inflight").memory
    assert inflight.adapter_bytes == base.adapter_bytes // 3
    fp8 = plan(QWEN_8B, "rollout.engine_args.quantization=fp8").memory
    in_layers = 36 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 12288)
    assert fp8.weights_bytes == base.weights_bytes - in_layers
    cache = plan(QWEN_8B, "rollout.engine_args.kv_cache_dtype=fp8")
    assert cache.kv_token_bytes == 147_456 // 2


def test_longer_sequences_are_fewer() -> None:
    lengths = (128, 1024, 4096, 16384)
    found = [plan(QWEN_8B, f"rollout.sampling.max_tokens={length}") for length in lengths]
    for shorter, longer in pairwise(found):
        assert shorter.memory.sequences_full > longer.memory.sequences_full
        assert shorter.memory.sequences_mean > longer.memory.sequences_mean
        assert shorter.speed is not None
        assert longer.speed is not None
        assert shorter.speed.seconds < longer.speed.seconds


def test_vllm_on_a_gpu_has_its_own_number_of_sequences() -> None:
    unset = plan(QWEN_8B, "rollout.engine_args.max_num_seqs=null").speed
    assert unset is not None
    assert (unset.running, unset.limit) == (128, "rollout.engine_args.max_num_seqs")


def test_a_pass_of_decoding_reads_weights_and_the_sequences() -> None:
    speed = plan(QWEN_8B).speed
    assert speed is not None
    assert (speed.running, speed.limit) == (100, "rollout.engine_args.max_num_seqs")
    multiplied = 8_190_735_360 - 151_936 * 4096
    assert speed.decode.weights_s == pytest.approx(2 * multiplied / 1e12)
    assert speed.decode.kv_s == pytest.approx(100 * 147_456 * 1024 / 1e12)
    attention = 4 * 36 * 32 * 128 * 1024
    assert speed.decode.compute_s == pytest.approx(100 * (2 * multiplied + attention) / 100e12)
    pass_s = speed.decode.weights_s + speed.decode.kv_s + VLLM_PASS_S
    assert speed.decode.seconds == pytest.approx(pass_s)
    assert speed.decode_tokens_per_s == pytest.approx(100 / pass_s)
    assert speed.decode_s == pytest.approx(2.56 * 1024 * pass_s)
    assert speed.decode.bottleneck == "reading weights"
    longer = plan(QWEN_8B, "rollout.sampling.max_tokens=4096", "rollout.engine_args.max_num_seqs=64").speed
    assert longer is not None
    assert longer.decode.bottleneck == "reading the KV cache"


def test_prompts_are_computed_once_a_group() -> None:
    speed = plan(QWEN_8B).speed
    assert speed is not None
    multiplied = 8_190_735_360 - 151_936 * 4096
    token_s = (2 * multiplied + 4 * 36 * 32 * 128 * 256) / 100e12
    assert speed.prefill_s == pytest.approx(32 * 512 * (token_s + VLLM_PASS_S / 1000))
    assert speed.seconds == speed.prefill_s + speed.decode_s


def test_slow_arithmetic_becomes_the_bottleneck() -> None:
    speed = plan(QWEN_8B, device=replace(ROUND, matmul_flops={"bfloat16": 10e12})).speed
    assert speed is not None
    assert speed.decode.bottleneck == "arithmetic"
    assert speed.decode.seconds == pytest.approx(speed.decode.compute_s + VLLM_PASS_S)


def test_gpus_that_share_an_engine_exchange_sums() -> None:
    speed = plan(QWEN_8B, "rollout.tensor_parallel_size=2", "rollout.num_gpus=2").speed
    assert speed is not None
    # Two all-reduces per layer; in each, a GPU sends one half, and then the half that it has summed.
    assert speed.decode.exchange_s == pytest.approx(36 * 2 * 100 * 4096 * 2 * 2 * 0.5 / 100e9)
    sums = Curve(num_bytes=(2**16, 2**24), seconds=(1e-4, 1e-3))
    slow_start = replace(ROUND, link=replace(Link.at_rate(100e9), all_reduce=sums))
    speed = plan(QWEN_8B, "rollout.tensor_parallel_size=2", "rollout.num_gpus=2", device=slow_start).speed
    assert speed is not None
    assert speed.decode.exchange_s == pytest.approx(36 * 2 * sums.time(100 * 4096 * 2))


def test_few_groups_are_all_sampled_at_one_time() -> None:
    speed = plan(QWEN_8B, "algorithm.groups_per_step=8").speed
    assert speed is not None
    assert (speed.running, speed.limit) == (64, "all sequences of a step")
    assert speed.decode_s == pytest.approx(1024 * speed.decode.seconds)


def test_engines_share_a_steps_groups() -> None:
    one, four = plan(QWEN_8B).speed, plan(QWEN_8B, "rollout.num_engines=4").speed
    assert one is not None
    assert four is not None
    assert four.running == 64
    assert four.seconds < one.seconds / 2


def test_vllms_own_defaults_hold_where_nothing_is_said() -> None:
    config = load_config(["experiment=gsm8k", f"model.path={QWEN_8B}", "model.dtype=bfloat16"], need_files=False)
    setup = plan_engine(config, describe_offline(QWEN_8B, config.model), ROUND).setup
    assert (setup.utilization, setup.max_sequences, setup.batched_tokens) == (0.92, 128, 2048)


EPISODES = ("environment.path=m:E", "environment.max_turns=4", "rollout.max_model_len=6144")


def test_an_episode_is_as_long_as_a_conversation_may_be_and_its_turns_are_prefilled() -> None:
    setup = plan(QWEN_8B, *EPISODES).setup
    assert (setup.prompt_tokens, setup.completion_tokens, setup.observed_tokens) == (512, 4 * 1024, 1536)
    assert setup.num_tokens == setup.max_model_len == 6144
    assert setup.prefill_tokens == 32 * 512 + 32 * 8 * 1536
    single = plan(QWEN_8B)
    found = plan(QWEN_8B, *EPISODES)
    assert single.speed is not None
    assert found.speed is not None
    assert found.speed.prefill_s > 5 * single.speed.prefill_s
    assert found.speed.decode_s > 4 * single.speed.decode_s
    with_hf = plan(QWEN_8B, *EPISODES, "rollout.engine=hf").setup
    assert with_hf.prefill_tokens == 32 * 512 + 32 * 8 * 3 * (512 + 5632 / 2)


def test_a_shorter_conversation_is_proposed_for_episodes_that_do_not_fit() -> None:
    found = plan(QWEN_8B, *EPISODES[:2], "rollout.max_model_len=400000")
    assert found.problem is not None
    (proposed,) = [int(text.partition("=")[2]) for text in changes(found) if text.startswith("rollout.max_model_len")]
    assert plan(QWEN_8B, *EPISODES[:2], f"rollout.max_model_len={proposed}").problem is None


def test_memory_that_is_not_used_is_proposed() -> None:
    found = plan(QWEN_8B)
    assert "rollout.engine_args.max_num_seqs=" in changes(found)[0]
    assert "rollout.num_engines=2" in changes(found)
    assert found.speed is not None
    assert all(entry.seconds < found.speed.seconds for entry in found.changes)


def test_what_would_make_it_fit_makes_it_fit() -> None:
    found = plan("Qwen/Qwen2.5-32B")
    assert found.problem == "the engine needs 64.4 GiB without any sequence, and may use 46.6 GiB of round"
    assert found.speed is None
    assert changes(found) == [
        "rollout.engine_args.gpu_memory_utilization=0.95",
        "rollout.tensor_parallel_size=2 rollout.num_gpus=2",
        "--device h200-141g",
    ]
    for entry in found.changes[:2]:
        fitting = plan("Qwen/Qwen2.5-32B", *entry.change.split())
        assert fitting.speed is not None
        assert fitting.speed.seconds == pytest.approx(entry.seconds)


def test_too_long_a_sequence_is_cut_or_spread() -> None:
    device = replace(ROUND, memory_bytes=40 * 10**9)
    found = plan(QWEN_8B, "rollout.sampling.max_tokens=200000", device=device)
    assert found.problem is not None
    assert found.problem.startswith("one sequence of 200,512 tokens needs 27.5 GiB, but only ")
    cut = next(change for change in changes(found) if change.startswith("rollout.sampling.max_tokens="))
    assert plan(QWEN_8B, cut, device=device).fits
    longer = int(cut.rpartition("=")[2]) + 64
    assert not plan(QWEN_8B, f"rollout.sampling.max_tokens={longer}", device=device).fits
    bound = plan(QWEN_8B, "rollout.max_model_len=200000", device=device)
    assert "rollout.max_model_len=1536" in changes(bound)
    assert plan(QWEN_8B, "rollout.max_model_len=1536", device=device).fits


def test_two_changes_are_proposed_where_none_alone_is_enough() -> None:
    options = ("Qwen/Qwen2.5-72B", "model.dtype=float32")
    found = plan(*options, device=replace(ROUND, memory_bytes=30 * 10**9))
    assert not found.fits
    (pair,) = changes(found)
    spread, _, device = pair.partition(" --device ")
    # 291 GB of weights: too much for half the memory of eight GPUs of 24 GB, or of four of 80 GB.
    assert spread == "rollout.tensor_parallel_size=4 rollout.num_gpus=4"
    larger = replace(DEVICES[device], matmul_flops=ROUND.matmul_flops)
    assert plan(*options, *spread.split(), device=larger).fits
    assert not plan(*options, *spread.split(), device=replace(ROUND, memory_bytes=80 * 10**9)).fits
    assert found.changes[0].seconds > 0


def test_a_model_that_no_two_changes_make_fit_has_no_remedy() -> None:
    shared = ("rollout.num_engines=2", "rollout.num_gpus=0.5")
    found = plan("Qwen/Qwen2.5-72B", "model.dtype=float32", *shared, device=replace(ROUND, memory_bytes=10 * 10**9))
    assert not found.fits
    assert not found.changes


def test_engines_on_one_gpu_must_leave_room_for_each_other() -> None:
    shares = ("rollout.num_engines=2", "rollout.num_gpus=0.5", "rollout.engine_args.gpu_memory_utilization=0.6")
    found = plan("Qwen/Qwen3-1.7B", *shares)
    assert found.problem == "2 engines share a GPU, and each uses 60% of its memory"
    assert "rollout.engine_args.gpu_memory_utilization=0.47" in changes(found)
    fitting = plan("Qwen/Qwen3-1.7B", *shares[:2], "rollout.engine_args.gpu_memory_utilization=0.4")
    assert fitting.sharing is not None
    assert fitting.sharing.engines == 2
    assert fitting.sharing.left_bytes == pytest.approx(0.2 * ROUND.memory_bytes, abs=1)
    alone = plan("Qwen/Qwen3-1.7B", "rollout.engine_args.gpu_memory_utilization=0.4")
    assert alone.sharing is None
    assert alone.speed is not None
    assert fitting.speed is not None
    per_sequence = alone.speed.decode.kv_s / alone.speed.running
    assert fitting.speed.decode.kv_s / fitting.speed.running == pytest.approx(2 * per_sequence)


def test_a_learner_may_share_the_engines_gpu() -> None:
    found = plan("Qwen/Qwen3-1.7B", "rollout.num_gpus=0.5", "learner.num_gpus=0.5")
    assert found.sharing is not None
    assert found.sharing.others == ("the learner's ranks",)
    assert found.sharing.left_bytes == ROUND.memory_bytes // 2
    assert plan("Qwen/Qwen3-1.7B", "rollout.num_gpus=0.5").sharing.others == ()  # type: ignore[union-attr]


def hf(*overrides: str, **options: object) -> EnginePlan:
    given = ["experiment=gsm8k", "rollout.engine=hf", "model.path=Qwen/Qwen3-8B", "model.dtype=bfloat16"]
    config = load_config([*given, *overrides], need_files=False)
    return plan_engine(config, describe_offline(QWEN_8B, config.model), replace(ROUND, **options))


def test_transformers_hold_a_whole_batch() -> None:
    found = hf()
    assert found.problem is None
    assert found.speed is not None
    assert found.speed.running == 256
    assert found.speed.decode.overhead_s == 36 * HF_LAYER_S
    assert found.memory.adapter_bytes == 0
    crowded = hf(memory_bytes=60 * 10**9)
    assert crowded.problem is not None
    assert crowded.problem.startswith("a batch has 256 sequences, but only ")
    assert crowded.problem.endswith(" of full length fit in memory")
    smaller = changes(crowded)[0]
    assert smaller.startswith("rollout.engine_args.max_batch_size=")
    assert hf(smaller, memory_bytes=60 * 10**9).fits


def test_engines_on_the_cpu_are_planned_with_its_measurement() -> None:
    cpu = replace(ROUND, name="laptop", kind="cpu", measured_at="2026-11-22")
    found = plan("Qwen/Qwen3-0.6B", "rollout.num_gpus=0", "learner.num_gpus=0", device=cpu)
    assert found.memory.kv_bytes == 2**30  # the VLLM_CPU_KVCACHE_SPACE that rlpipe sets
    assert found.memory.host_bytes > found.memory.weights_bytes
    assert "rollout.tensor_parallel_size=2 rollout.num_gpus=2" not in changes(found)
    with pytest.raises(ConfigError, match=r"rollout\.num_gpus=1: laptop has no GPU"):
        plan("Qwen/Qwen3-0.6B", device=cpu)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.num_gpus=0", "rollout.num_gpus=0: engines run on the CPU, not on round"),
        ("rollout.engine_args.gpu_memory_utilization=1.5", "gpu_memory_utilization=1.5 is not a number above 0, and u"),
        ("rollout.engine_args.max_num_seqs=many", "max_num_seqs='many' is not a number"),
        ("rollout.engine_args.quantization=awq", "the size of awq weights; it supports bitsandbytes, fp8"),
        ("rollout.engine_args.kv_cache_dtype=int4", "kv_cache_dtype=int4: a plan supports auto, fp8"),
        ("model.dtype=float16", "model.dtype=float16: device round has no rate for it"),
        ("model.adapter.r=1024 weights.serve=adapter", "model.adapter.r=1024 is more than vllm serves"),
    ],
)
def test_what_can_not_be_planned_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(QWEN_8B, *override.split())
    assert message in str(caught.value)
