"""Tests of ``rlpipe plan``, from its arguments to its output."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from rlpipe import cli
from rlpipe.commands.preflight import print_measurement
from rlpipe.configs.compose import load_config
from rlpipe.hardware.device import Curve, Link
from rlpipe.hardware.device_profiles import find_device, path_of, stored_names
from rlpipe.plan.engine_plan import plan_engine
from rlpipe.plan.learner_plan import plan_learner
from rlpipe.plan.model_shape import describe_offline

pytestmark = pytest.mark.usefixtures("empty_cache")

EXPERIMENT = "experiment=gsm8k_qwen3_8b_lora"
RUN = ("plan", EXPERIMENT, "--device", "h100-80g")


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(arguments) == 2
    streams = capsys.readouterr()
    assert streams.err.count("\n") == 1
    assert streams.out == ""
    return streams.err


def test_the_experiment_fits_on_an_h100(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN]) == 0
    text = capsys.readouterr().out
    assert "device h100-80g\n" in text
    assert "assumed from data sheets" in text
    assert "parameters      8.19B\n" in text
    assert "fits            yes\n" in text
    assert "256 at a time" in text
    assert "\nlearner\n  fits " in text
    assert "\nstep\n  time " in text
    assert text.endswith("Shorter ones take less time.\n")


@pytest.mark.slow
def test_a_machine_may_have_more_memory_than_its_name_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "--host-memory-gib", "512"]) == 0
    assert "host memory     512.0 GiB, 150 GB/s\n" in capsys.readouterr().out


def test_the_memory_of_a_machine_is_above_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "--host-memory-gib", "-1"]) == 2
    assert "--host-memory-gib is -1: give a number above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_json_says_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = load_config([EXPERIMENT, "model.dtype=bfloat16"], need_files=False)
    described = describe_offline(config.model.path, config.model)
    plan = plan_engine(config, described, find_device("h100-80g"))
    assert [*found] == ["device", "model", "engine", "learner", "machine", "step"]
    assert found["engine"]["fits"] is True
    assert found["engine"]["memory"]["weights_bytes"] == plan.memory.weights_bytes
    assert plan.speed is not None
    assert found["engine"]["speed"]["seconds"] == plan.speed.seconds
    assert found["engine"]["speed"]["decode"]["weights_s"] == plan.speed.decode.weights_s
    assert found["engine"]["changes"] == [{"change": entry.change, "seconds": entry.seconds} for entry in plan.changes]
    learner = plan_learner(config, described, find_device("h100-80g"), plan.setup)
    assert learner.memory is not None
    assert learner.time is not None
    assert found["learner"]["fits"] is True
    assert found["learner"]["memory"]["device"]["total"] == learner.memory.device.total
    assert found["learner"]["time"]["seconds"] == learner.time.seconds
    assert found["learner"]["tokens_per_s"] == learner.tokens_per_s
    assert found["machine"]["fits"] is True
    assert [actor["name"] for actor in found["machine"]["actors"]] == [
        "rollout engine",
        "learner rank",
        "reward worker",
        "driver with Ray",
    ]
    assert found["machine"]["actors"][0]["host_bytes"] == plan.memory.host_bytes
    assert found["step"]["seconds"] == max(plan.speed.seconds, learner.time.seconds)
    assert found["model"]["num_parameters"] == 8_190_735_360
    assert found["device"]["matmul_flops"]["bfloat16"] == pytest.approx(544e12, rel=1e-3)


@pytest.mark.slow
def test_what_does_not_fit_is_said_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    short = "learner.max_tokens_per_microbatch=1536"
    arguments = ["plan", EXPERIMENT, "--device", "rtx3090-24g", "model.path=Qwen/Qwen3-14B", short]
    assert cli.main(arguments) == 0
    text = capsys.readouterr().out
    assert "fits           NO: the engine needs " in text
    assert " without any sequence, and may use " in text
    assert "fits with      rollout.tensor_parallel_size=2 rollout.num_gpus=2 (" in text
    assert "--device l40s-48g (" in text
    assert "fits           NO: a rank needs " in text
    assert "fits with      learner.offload=chunked model.gradient_checkpointing=false (" in text
    assert cli.main([*arguments, "--json"]) == 0
    engine = json.loads(capsys.readouterr().out)["engine"]
    assert (engine["fits"], engine["speed"]) == (False, None)


def test_runs_without_engines_have_no_section_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    sft = ["algorithm=sft", "data=jsonl", "data.path=rows.jsonl", "model.path=Qwen/Qwen3-0.6B", "learner=single_gpu"]
    assert cli.main(["plan", *sft, "--device", "h100-80g", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)] == ["device", "model", "learner", "machine"]


@pytest.mark.slow
def test_the_learner_is_printed_with_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RUN, "model.gradient_checkpointing=false", "learner.offload=chunked"]) == 0
    text = capsys.readouterr().out
    assert "\nlearner\n  fits            yes\n" in text
    assert "chunks stay" in text
    assert "  parameters      8.28B, 87.3M trained\n" in text
    assert "work per step   256 sequences of 1,536 tokens: 1 x 26 micro batches per rank\n" in text
    assert "\nstep\n  time " in text


SCORERS = (
    *("plan", "experiment=reward_model", "model.path=Qwen/Qwen3-0.6B"),
    *("+scoring.rewards.mine={path: 'mine.py:Model', num_gpus: 1}", "--device", "h100-80g"),
)


@pytest.mark.slow
def test_scorers_are_printed_with_their_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SCORERS]) == 0
    text = capsys.readouterr().out
    assert "  mine            1 process, requesting 1 of a GPU; the memory of mine.py:Model is not known\n" in text
    model = "SequenceReward Skywork/Skywork-Reward-V2-Qwen3-0.6B: 2 processes, each on 0.15 GPU"
    assert f"  preference      {model}\n    fits          yes\n" in text
    assert " are left next to 1 preference scorer and 1 rollout engine\n" in text
    assert " and then scoring " in text


@pytest.mark.slow
def test_json_has_the_scorers_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SCORERS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["scorers"]
    assert found["mine"]["planned"] is False
    assert found["preference"]["fits"] is True
    assert found["preference"]["memory"]["total"] < found["preference"]["room_bytes"]


def test_a_learner_that_is_not_planned_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    strided = ["experiment=ebft_strided", "model.path=Qwen/Qwen3-0.6B"]
    assert cli.main(["plan", *strided, "--device", "h100-80g"]) == 0
    assert "no: algorithm.kind=ebft_strided" in capsys.readouterr().out


def test_an_engine_is_planned_without_its_learner(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def untraceable(*_: object, **__: object) -> None:
        raise RuntimeError("shapes depend on values")

    monkeypatch.setattr("rlpipe.plan.learner_estimate.trace_on", untraceable)
    run = ["plan", "experiment=gsm8k", "model.path=Qwen/Qwen3-0.6B", "--device", "h100-80g"]
    assert cli.main([*run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["device", "model", "engine", "learner"]
    assert found["engine"]["fits"] is True
    assert found["learner"]["planned"] is False
    assert "can't trace Qwen3ForCausalLM" in found["learner"]["reason"]


def test_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        "this machine is not measured yet: measure it with rlpipe plan --calibrate, or set --device to one of"
        in fails(["plan", EXPERIMENT], capsys)
    )
    assert "did you mean h100-80g?" in fails(["plan", EXPERIMENT, "--device", "h100"], capsys)
    assert "config.json" in fails([*RUN, "model.path=a/b/c"], capsys)
    assert "did you mean algorithm.group_size?" in fails([*RUN, "algorithm.group_sizes=3"], capsys)
    assert "rollout.num_gpus=0: engines run on the CPU" in fails([*RUN, "rollout.num_gpus=0"], capsys)


def test_a_machine_is_not_measured_under_the_name_of_another(capsys: pytest.CaptureFixture[str]) -> None:
    message = "--calibrate measures this machine, not --device h100-80g: leave one of them out"
    assert message in fails(["plan", "--calibrate", "--device", "h100-80g"], capsys)
    assert message in fails([*RUN, "--calibrate"], capsys)


def test_a_wrong_config_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert "algorithm.group_sizes" in fails(["plan", "--calibrate", "algorithm.group_sizes=3"], capsys)
    assert stored_names() == []


def test_a_measurement_is_shown_with_all_of_its_rates(capsys: pytest.CaptureFixture[str]) -> None:
    device = replace(find_device("h100-80g"), name="node-cuda", link=None, hardware="GPU X", measured_at="2026-11-22")
    print_measurement(device, as_json=False)
    text = capsys.readouterr().out
    assert "  rates          measured 2026-11-22\n  hardware       GPU X\n" in text
    assert "544.0 TFLOP/s in bfloat16\n                 544.0 TFLOP/s in float16\n" in text
    assert "between ranks  45 GB/s (link not known: the rate of both directions at once)\n" in text
    assert "Adam           96 billion elements/s on the device, 5.4 on the host in float32\n" in text
    assert "                 191 billion elements/s on the device, 11 on the host in bfloat16\n" in text
    assert "gradient sums  billion elements/s on the host: 12 of float32, 15 of bfloat16, into float32\n" in text
    assert "                 billion elements/s on the host: 19 of float32, 25 of bfloat16, into bfloat16\n" in text
    assert "host memory    128.0 GiB, 150 GB/s\n" in text
    assert text.endswith(f"stored in {path_of('node-cuda')}\n")
    sums = Curve(num_bytes=(2.0**19, 2.0**26), seconds=(2**19 / 1e9, 2**26 / 20e9))
    print_measurement(replace(device, link=replace(Link.at_rate(1e9), all_reduce=sums)), as_json=False)
    assert "                 all-reduce of 512.0 KiB at 1, 64.0 MiB at 20 GB/s\n" in capsys.readouterr().out
    print_measurement(device, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["device"]["hardware"], found["path"]) == ("GPU X", str(path_of("node-cuda")))


def test_an_unknown_device_is_refused_without_torch() -> None:
    run = f"main(['plan', {EXPERIMENT!r}, '--device', 'x'])"
    code = f"import sys; from rlpipe.cli import main; {run}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    assert "there is no x" in done.stderr
