"""Tests of ``dtype: auto``: what a device computes in, the one dtype of a run, and the line that explains it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlpipe import cli
from rlpipe.configs.compose import load_config
from rlpipe.configs.options import changed_options, to_tree
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RewardConfig, RolloutConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import DEVICES
from rlpipe.hardware.dtypes import DeviceTypes, choose_dtype, gpu_types
from rlpipe.models import loading
from rlpipe.models.loading import with_dtype
from rlpipe.plan import report
from rlpipe.plan.model_shape import describe_offline
from rlpipe.plan.report import make_report
from rlpipe.plan.scorer_model import meta_scorer, read_scorer_setups
from rlpipe.run.cluster import ResourceRequest
from rlpipe.run.precision import nodes_for, resolve_dtype
from rlpipe.run.prepare import Run

OLD = DeviceTypes(device="an old CPU", rates={"float32": 127e9, "bfloat16": 1.3e9})
NEW = DeviceTypes(device="a new CPU", rates={"float32": 300e9, "bfloat16": 900e9})
H100 = gpu_types("H100", (9, 0))
ENGINE, RANK = ResourceRequest(name="rollout-0", num_cpus=1), ResourceRequest(name="learner-0", num_cpus=2)


def cpu(speedup: float) -> DeviceTypes:
    """Return a CPU with the given speedup in bfloat16."""
    return DeviceTypes(device="a CPU", rates={"float32": 100e9, "bfloat16": speedup * 100e9})


def run_of(*overrides: str) -> Run:
    config = load_config(
        ["experiment=quickstart", "model.dtype=auto", "model.path=x", "model.prepare=null", *overrides],
        need_files=False,
    )
    return Run(
        config=config,
        model=config.model,
        rewards={},
        callables={},
        output=Path("out"),
        requested_dtype=config.model.dtype,
    )


@pytest.mark.parametrize(
    ("speedup", "expected"),
    [(2.0, "bfloat16"), (1.3, "bfloat16"), (1.29, "float32"), (1.0, "float32"), (0.5, "float32")],
)
def test_auto_is_bfloat16_on_a_cpu_that_multiplies_a_third_faster_in_it(speedup: float, expected: str) -> None:
    assert cpu(speedup).auto == expected


def test_a_cpu_that_does_not_multiply_in_bfloat16_computes_in_float32() -> None:
    types = DeviceTypes(device="a CPU", rates={"float32": 1e11})
    assert types.auto == "float32"
    assert types.describe("bfloat16") == "a CPU does not multiply in bfloat16"
    assert choose_dtype("bfloat16", [types]).line is not None


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_gpus_compute_in_bfloat16_from_ampere_on(capability: tuple[int, int], expected: str) -> None:
    assert gpu_types("a GPU", capability).auto == expected


def test_the_line_says_which_type_and_why() -> None:
    assert choose_dtype("auto", [NEW]).line == (
        "model.dtype=auto: bfloat16, because a new CPU reaches 300 GFLOP/s in float32 and 900 GFLOP/s in bfloat16, "
        "3 times as fast"
    )
    assert choose_dtype("auto", [OLD]).line == (
        "model.dtype=auto: float32, because an old CPU reaches 127 GFLOP/s in float32 and 1.3 GFLOP/s in bfloat16, "
        "0.01 times as fast"
    )
    switched = replace(OLD, switches=("ONEDNN_MAX_CPU_ISA=AVX2",))
    assert "bfloat16 with ONEDNN_MAX_CPU_ISA=AVX2, 0.01" in (choose_dtype("auto", [switched]).line or "")


def test_one_device_without_it_decides_for_all() -> None:
    choice = choose_dtype("auto", [H100, OLD])
    assert choice.dtype == "float32"
    assert choice.line is not None
    assert "an old CPU" in choice.line


def test_a_slow_type_that_was_asked_for_is_kept_with_its_factor() -> None:
    choice = choose_dtype("bfloat16", [OLD])
    assert choice.dtype == "bfloat16"
    assert choice.line == (
        "model.dtype=bfloat16 is slow here: an old CPU takes 98 times as long for a matrix product as in float32; "
        "auto chooses float32"
    )


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_a_fast_type_that_was_asked_for_needs_no_line(asked: str) -> None:
    assert choose_dtype(asked, [NEW]).line is None
    assert choose_dtype(asked, [cpu(1.1)]).line is None  # not fast enough for auto, but not slow either


def test_a_run_keeps_the_type_that_it_began_in() -> None:
    choice = choose_dtype("auto", [OLD], begun="bfloat16")
    assert choice.dtype == "bfloat16"
    assert choice.line is not None
    assert "because the run began with it, although an old CPU takes 98 times as long" in choice.line
    assert choose_dtype("auto", [NEW], begun="float32").dtype == "float32"


def test_a_run_keeps_its_type_on_a_cpu_that_is_only_a_little_faster_in_it() -> None:
    choice = choose_dtype("auto", [cpu(1.1)], begun="bfloat16")
    assert choice.dtype == "bfloat16"
    assert "though a CPU reaches 100 GFLOP/s in float32 and 110 GFLOP/s in bfloat16" in (choice.line or "")


def test_auto_continues_with_either_type_and_two_types_differ() -> None:
    trees = {
        dtype: to_tree(load_config(["experiment=quickstart", f"model.dtype={dtype}"], need_files=False))
        for dtype in ("auto", "float32", "bfloat16")
    }
    assert not changed_options(trees["float32"], trees["auto"])
    assert not changed_options(trees["auto"], trees["bfloat16"])
    assert changed_options(trees["float32"], trees["bfloat16"]) == ['model.dtype: "float32" -> "bfloat16"']


@pytest.mark.parametrize(("device", "expected"), [(OLD, "float32"), (NEW, "bfloat16")])
def test_config_and_model_of_a_run_have_the_same_type(device: DeviceTypes, expected: str) -> None:
    run, lines = resolve_dtype(run_of(), [ENGINE, RANK], lambda need, dtype: [device])
    assert run.model.dtype == run.config.model.dtype == expected
    assert len(lines) == 1
    assert f"model.dtype=auto: {expected}" in lines[0]


def test_engine_and_learner_on_different_machines_share_a_type() -> None:
    run, _ = resolve_dtype(run_of(), [ENGINE, RANK], lambda need, dtype: [NEW if need is ENGINE else OLD])
    assert run.model.dtype == "float32"


def test_float32_asks_nobody() -> None:
    def ask(need: ResourceRequest, dtype: str) -> list[DeviceTypes]:
        raise AssertionError("float32 is the same everywhere")

    run, lines = resolve_dtype(run_of("model.dtype=float32"), [ENGINE], ask)
    assert (run.model.dtype, lines) == ("float32", [])


def test_an_attention_that_knows_no_float32_is_refused_with_the_reason() -> None:
    run = run_of()
    model = replace(run.config.model, attention="flash_attention_2")
    run = replace(run, config=replace(run.config, model=model), model=model)
    with pytest.raises(ConfigError, match="flash_attention_2"):
        resolve_dtype(run, [ENGINE], lambda need, dtype: [OLD])


def test_nodes_that_may_be_given_a_process_are_asked() -> None:
    nodes = [
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 1.0}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}},
        {"NodeID": "c", "Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    assert nodes_for(ResourceRequest(name="x", num_gpus=1), nodes) == ["b"]
    assert nodes_for(ResourceRequest(name="x", num_cpus=1), nodes) == ["a", "b"]
    assert nodes_for(ResourceRequest(name="x", num_gpus=4), nodes) == ["a", "b"]


def test_a_plan_takes_the_type_of_its_device() -> None:
    h100 = DEVICES["h100-80g"]
    old = replace(h100, kind="cpu", matmul_flops={"float32": 127e9, "bfloat16": 1.3e9})
    assert h100.auto_dtype() == "bfloat16"
    assert h100.auto_dtype(on_gpu=False) == "float32"
    assert old.auto_dtype() == "float32"


def test_the_quickstart_is_exact_on_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "experiment=quickstart"]) == 0
    assert "dtype: float32" in capsys.readouterr().out
    assert cli.main(["config", "experiment=quickstart_warmup"]) == 0
    assert "dtype: float32" in capsys.readouterr().out


SLOW = replace(
    DEVICES["h100-80g"], name="old", kind="cpu", matmul_flops={"float32": 127e9, "bfloat16": 1.3e9, "float16": 1.3e9}
)


@pytest.mark.parametrize(("device", "expected"), [(DEVICES["h100-80g"], "bfloat16"), (SLOW, "float32")])
def test_a_plan_is_that_of_the_type_of_its_device(device: Device, expected: str) -> None:
    places = [] if device.kind == "cuda" else ["rollout.num_gpus=0", "learner.num_gpus=0"]
    given = ["experiment=gsm8k", "model.path=Qwen/Qwen3-0.6B", *places]
    auto = load_config(given, need_files=False)
    assert report.with_planned_dtype(auto, device) == replace(auto, model=replace(auto.model, dtype=expected))


@pytest.mark.slow
@pytest.mark.parametrize(("device", "expected"), [(DEVICES["h100-80g"], "bfloat16"), (SLOW, "float32")])
def test_all_sections_of_a_plan_count_with_the_type(device: Device, expected: str) -> None:
    places = [] if device.kind == "cuda" else ["rollout.num_gpus=0", "learner.num_gpus=0"]
    given = ["experiment=gsm8k", "model.path=Qwen/Qwen3-0.6B", *places]
    auto, asked = (
        {section.name: section for section in make_report(config, device).sections}
        for config in (load_config([*given, *more], need_files=False) for more in ([], [f"model.dtype={expected}"]))
    )
    assert ("type", f"{expected} (model.dtype=auto)") in auto["model"].rows
    assert auto["model"].data["dtype"] == expected
    for name in ("device", "engine", "learner", "machine"):
        assert auto[name].data == asked[name].data


def test_a_plan_on_a_device_whose_type_an_option_refuses_says_so() -> None:
    given = ["experiment=gsm8k", "model.path=Qwen/Qwen3-0.6B", "model.attention=flash_attention_2"]
    old = replace(DEVICES["h100-80g"], name="t4", matmul_flops={"float32": 8e12, "bfloat16": 2e12})
    with pytest.raises(ConfigError, match=r"does not support float32.*model.dtype=auto is float32 on t4"):
        make_report(load_config(given, need_files=False), old)


@pytest.mark.parametrize(("num_gpus", "expected"), [(1.0, "bfloat16"), (0.0, "float32")])
def test_a_plan_has_scorers_compute_as_their_own_device_does(num_gpus: float, expected: str) -> None:
    h100 = DEVICES["h100-80g"]
    reward = load_config(
        ["experiment=reward_model", "model.path=Qwen/Qwen3-0.6B", f"scoring.rewards.preference.num_gpus={num_gpus}"],
        need_files=False,
    )
    (setup,) = read_scorer_setups(reward, h100)
    assert setup.dtype == expected
    features = ["algorithm.ebft.features.weights=own", f"algorithm.ebft.features.num_gpus={num_gpus}"]
    (setup,) = read_scorer_setups(
        load_config(["experiment=ebft", "model.path=Qwen/Qwen3-0.6B", *features], need_files=False), h100
    )
    assert setup.dtype == expected
    assert meta_scorer(setup, reward, describe_offline("Qwen/Qwen3-0.6B", reward.model)).dtype == expected


def test_a_reward_model_on_another_kind_of_device_has_a_line_of_its_own() -> None:
    path = "rlpipe.scoring.reward_model:SequenceReward"
    rewards = {
        "on_cpu": RewardConfig(path=path, kwargs={"model": "m"}),
        "on_gpu": RewardConfig(path=path, kwargs={"model": "m"}, num_gpus=1),
        "asked": RewardConfig(path=path, kwargs={"model": "m", "dtype": "bfloat16"}),
        "plain": RewardConfig(path="rlpipe.scoring.toolbox:reasoning_gym"),
    }
    run = replace(run_of(), rewards=rewards)
    gpu = ResourceRequest(name="learner-0", num_gpus=1)
    _, lines = resolve_dtype(run, [gpu], lambda need, dtype: [H100 if need.num_gpus else OLD])
    assert [line.partition(" ")[0] for line in lines] == [
        "model.dtype=auto:",
        "scoring.rewards.on_cpu.kwargs.dtype=auto:",
        "scoring.rewards.asked.kwargs.dtype=bfloat16",
    ]
    assert "float32, because an old CPU" in lines[1]


def test_a_type_that_a_reward_model_does_not_know_is_refused_in_one_line() -> None:
    reward = RewardConfig(path="rlpipe.scoring.reward_model:SequenceReward", kwargs={"model": "m", "dtype": "int8"})
    run = replace(run_of(), rewards={"quality": reward})
    with pytest.raises(ConfigError, match=r"scoring.rewards.quality.kwargs: dtype 'int8' is not one of auto"):
        resolve_dtype(run, [RANK], lambda need, dtype: [OLD])


def test_vllm_is_never_given_auto_which_means_the_type_of_the_files() -> None:
    pytest.importorskip("vllm")
    from rlpipe.rollout.vllm.vllm_options import engine_args

    with pytest.raises(AssertionError, match="type of the model's files"):
        engine_args(ModelConfig(path="m"), RolloutConfig(), WeightsConfig(), 8)


def test_a_model_that_is_loaded_without_a_run_has_the_type_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    for types in (NEW, OLD):
        monkeypatch.setattr(loading, "device_types", lambda device, layer, types=types: types)
        assert with_dtype(ModelConfig(path="m"), device).dtype == types.auto
    assert with_dtype(ModelConfig(path="m", dtype="float16"), device).dtype == "float16"
