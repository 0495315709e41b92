"""``dtype: auto``: what a device computes in, the one type of a run, and the line that says which and why."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlpipe import cli
from rlpipe.actors.node import node_types
from rlpipe.configs.compose import load_config
from rlpipe.configs.schema import WeightsConfig
from rlpipe.configs.schema_model import ModelConfig
from rlpipe.configs.schema_rollout import RolloutConfig
from rlpipe.configs.schema_scoring import RewardConfig
from rlpipe.configs.tree import changed_options, to_tree
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Device
from rlpipe.hardware.devices import DEVICES
from rlpipe.hardware.dtypes import DeviceTypes, choose_dtype, cpu_types, gpu_types
from rlpipe.models import with_dtype
from rlpipe.placement import Need
from rlpipe.plan.known_models import describe_offline
from rlpipe.plan.report import make_report
from rlpipe.plan.scorer_model import outline_scorer
from rlpipe.plan.scorer_setup import read_scorer_setups
from rlpipe.precision import nodes_for, settle_dtype
from rlpipe.prepare import Run

AVX2 = "fma avx avx2"
AVX512 = f"{AVX2} avx512f avx512bw avx512_vnni"
OLD = DeviceTypes(device="an old CPU", narrow=frozenset(), slowdown=97.3)
NEW = DeviceTypes(device="a new CPU", narrow=frozenset({"bfloat16"}))
H100 = gpu_types("H100", (9, 0))
ENGINE, RANK = Need(name="rollout-0", num_cpus=1), Need(name="learner-0", num_cpus=2)


def cpu(tmp_path: Path, flags: str, key: str = "flags", **environment: str) -> DeviceTypes:
    """A machine whose ``/proc/cpuinfo`` has these flags."""
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nmodel name\t: Some CPU\n{key}\t: {flags}\n\nprocessor\t: 1\n")
    return cpu_types(environment, info)


def run_of(*overrides: str) -> Run:
    config = load_config(["experiment=quickstart", "model.path=x", "model.prepare=null", *overrides], need_files=False)
    return Run(
        config=config,
        model=config.model,
        rewards={},
        callables={},
        output=Path("out"),
        asked_dtype=config.model.dtype,
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (AVX2, "float32"),
        (AVX512, "float32"),
        (f"{AVX512} avx512_bf16", "bfloat16"),
        (f"{AVX512} amx_tile amx_bf16", "bfloat16"),
        ("", "float32"),
    ],
)
def test_a_cpu_computes_in_what_it_has_instructions_for(tmp_path: Path, flags: str, expected: str) -> None:
    assert cpu(tmp_path, flags).auto == expected


def test_an_arm_cpu_names_its_features_otherwise(tmp_path: Path) -> None:
    assert cpu(tmp_path, "fp asimd bf16 i8mm", key="Features").auto == "bfloat16"
    assert cpu(tmp_path, "fp asimd", key="Features").auto == "float32"


@pytest.mark.parametrize("switch", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_instructions_that_are_switched_off_are_not_there(tmp_path: Path, switch: str) -> None:
    types = cpu(tmp_path, f"{AVX512} avx512_bf16", **{switch: "avx2"})
    assert types.auto == "float32"
    assert f"under {switch}=AVX2" in types.describe("bfloat16")
    assert cpu(tmp_path, f"{AVX512} avx512_bf16", **{switch: "AVX512_CORE_AMX"}).auto == "bfloat16"


def test_a_machine_without_an_account_of_its_cpu_computes_in_float32(tmp_path: Path) -> None:
    assert cpu_types({}, tmp_path / "missing").auto == "float32"


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_gpus_compute_in_bfloat16_from_ampere_on(capability: tuple[int, int], expected: str) -> None:
    assert gpu_types("a GPU", capability).auto == expected


def test_the_line_says_which_type_and_why() -> None:
    assert choose_dtype("auto", [NEW]).line == "model.dtype=auto: bfloat16, as a new CPU computes in bfloat16"
    assert (
        choose_dtype("auto", [OLD]).line == "model.dtype=auto: float32, as an old CPU has no instructions for bfloat16"
    )


def test_one_device_without_it_decides_for_all() -> None:
    choice = choose_dtype("auto", [H100, OLD])
    assert choice.dtype == "float32"
    assert choice.line is not None
    assert "an old CPU" in choice.line


def test_a_slow_type_that_was_asked_for_is_kept_with_its_factor() -> None:
    choice = choose_dtype("bfloat16", [OLD])
    assert choice.dtype == "bfloat16"
    assert choice.line == (
        "model.dtype=bfloat16 is slow here: an old CPU has no instructions for bfloat16, and products take 97 times as "
        "long as in float32; auto takes float32"
    )


@pytest.mark.parametrize("asked", ["float32", "bfloat16"])
def test_a_fast_type_that_was_asked_for_needs_no_line(asked: str) -> None:
    assert choose_dtype(asked, [NEW]).line is None


def test_a_run_keeps_the_type_that_it_began_in() -> None:
    choice = choose_dtype("auto", [OLD], begun="bfloat16")
    assert choice.dtype == "bfloat16"
    assert choice.line is not None
    assert "as the run began in it, though an old CPU has no instructions" in choice.line
    assert choose_dtype("auto", [NEW], begun="float32").dtype == "float32"


def test_auto_goes_on_with_either_type_and_two_types_differ() -> None:
    trees = {
        dtype: to_tree(load_config(["experiment=quickstart", f"model.dtype={dtype}"], need_files=False))
        for dtype in ("auto", "float32", "bfloat16")
    }
    assert not changed_options(trees["float32"], trees["auto"])
    assert not changed_options(trees["auto"], trees["bfloat16"])
    assert changed_options(trees["float32"], trees["bfloat16"]) == ['model.dtype: "float32" -> "bfloat16"']


@pytest.mark.parametrize(("device", "expected"), [(OLD, "float32"), (NEW, "bfloat16")])
def test_config_and_model_of_a_run_have_the_same_type(device: DeviceTypes, expected: str) -> None:
    run, lines = settle_dtype(run_of(), [ENGINE, RANK], lambda need, dtype: [device])
    assert run.model.dtype == run.config.model.dtype == expected
    assert len(lines) == 1
    assert f"model.dtype=auto: {expected}" in lines[0]


def test_engine_and_learner_on_different_machines_share_a_type() -> None:
    run, _ = settle_dtype(run_of(), [ENGINE, RANK], lambda need, dtype: [NEW if need is ENGINE else OLD])
    assert run.model.dtype == "float32"


def test_float32_asks_nobody() -> None:
    def ask(need: Need, dtype: str) -> list[DeviceTypes]:
        raise AssertionError("float32 is the same everywhere")

    run, lines = settle_dtype(run_of("model.dtype=float32"), [ENGINE], ask)
    assert (run.model.dtype, lines) == ("float32", [])


def test_an_attention_that_knows_no_float32_is_refused_with_the_reason() -> None:
    run = run_of()
    model = replace(run.config.model, attention="flash_attention_2")
    run = replace(run, config=replace(run.config, model=model), model=model)
    with pytest.raises(ConfigError, match="flash_attention_2"):
        settle_dtype(run, [ENGINE], lambda need, dtype: [OLD])


def test_nodes_that_may_be_given_a_process_are_asked() -> None:
    nodes = [
        {"NodeID": "a", "Alive": True, "Resources": {"CPU": 1.0}},
        {"NodeID": "b", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 1.0}},
        {"NodeID": "c", "Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}},
    ]
    assert nodes_for(Need(name="x", num_gpus=1), nodes) == ["b"]
    assert nodes_for(Need(name="x", num_cpus=1), nodes) == ["a", "b"]
    assert nodes_for(Need(name="x", num_gpus=4), nodes) == ["a", "b"]


def test_the_slowdown_of_this_machine_is_measured_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    (types,) = node_types(on_gpu=False, dtype="bfloat16")
    assert types.slowdown is not None
    assert types.slowdown > 0
    (asked_nothing,) = node_types(on_gpu=False, dtype="auto")
    assert asked_nothing.slowdown is None


def test_a_plan_takes_the_type_of_its_device() -> None:
    h100 = DEVICES["h100-80g"]
    old = replace(h100, kind="cpu", matmul_flops={"float32": 127e9, "bfloat16": 1.3e9})
    assert h100.auto_dtype() == "bfloat16"
    assert h100.auto_dtype(on_gpu=False) == "float32"
    assert old.auto_dtype() == "float32"


def test_the_quickstart_asks_for_no_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "experiment=quickstart"]) == 0
    assert "dtype: auto" in capsys.readouterr().out
    assert cli.main(["config", "experiment=quickstart_warmup"]) == 0
    assert "dtype: auto" in capsys.readouterr().out


SLOW = replace(
    DEVICES["h100-80g"], name="old", kind="cpu", matmul_flops={"float32": 127e9, "bfloat16": 1.3e9, "float16": 1.3e9}
)


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
    with pytest.raises(ConfigError, match=r"knows no float32.*model.dtype=auto is float32 on t4"):
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
    assert outline_scorer(setup, reward, describe_offline("Qwen/Qwen3-0.6B", reward.model)).dtype == expected


def test_a_reward_model_on_another_kind_of_device_has_a_line_of_its_own() -> None:
    path = "rlpipe.scoring.reward_model:SequenceReward"
    rewards = {
        "on_cpu": RewardConfig(path=path, kwargs={"model": "m"}),
        "on_gpu": RewardConfig(path=path, kwargs={"model": "m"}, num_gpus=1),
        "asked": RewardConfig(path=path, kwargs={"model": "m", "dtype": "bfloat16"}),
        "plain": RewardConfig(path="rlpipe.scoring.toolbox:reasoning_gym"),
    }
    run = replace(run_of(), rewards=rewards)
    gpu = Need(name="learner-0", num_gpus=1)
    _, lines = settle_dtype(run, [gpu], lambda need, dtype: [H100 if need.num_gpus else OLD])
    assert [line.partition(" ")[0] for line in lines] == [
        "model.dtype=auto:",
        "scoring.rewards.on_cpu.kwargs.dtype=auto:",
        "scoring.rewards.asked.kwargs.dtype=bfloat16",
    ]
    assert "float32, as an old CPU" in lines[1]


def test_a_type_that_a_reward_model_does_not_know_is_refused_in_one_line() -> None:
    reward = RewardConfig(path="rlpipe.scoring.reward_model:SequenceReward", kwargs={"model": "m", "dtype": "int8"})
    run = replace(run_of(), rewards={"quality": reward})
    with pytest.raises(ConfigError, match=r"scoring.rewards.quality.kwargs: dtype 'int8' is none of auto"):
        settle_dtype(run, [RANK], lambda need, dtype: [OLD])


def test_vllm_is_never_given_auto_which_means_the_type_of_the_files() -> None:
    pytest.importorskip("vllm")
    from rlpipe.rollout.vllm_options import engine_args

    with pytest.raises(AssertionError, match="type of the model's files"):
        engine_args(ModelConfig(path="m"), RolloutConfig(), WeightsConfig(), 8)


def test_a_model_that_is_loaded_without_a_run_has_the_type_of_its_device() -> None:
    cpu = torch.device("cpu")
    assert with_dtype(ModelConfig(path="m"), cpu).dtype == cpu_types().auto
    assert with_dtype(ModelConfig(path="m", dtype="float16"), cpu).dtype == "float16"
