"""A full run of ``rlpipe plan --calibrate`` on the machine of the tests."""

import json

import pytest
import torch

from rlpipe import cli
from rlpipe.hardware.device_profiles import load_stored, own_name, path_of, stored_names

pytestmark = [
    pytest.mark.usefixtures("empty_cache"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="its GPU would be measured"),
]
ON_CPU = ("experiment=gsm8k", "model.path=Qwen/Qwen3-0.6B", "rollout.num_gpus=0", "learner.num_gpus=0")


@pytest.mark.slow
def test_the_machine_is_measured_and_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--calibrate"]) == 0
    path = path_of(own_name("cpu"))
    text = capsys.readouterr().out
    assert text.startswith(f"device {own_name('cpu')}\n  rates          measured ")
    assert "FLOP/s in float32\n" in text
    assert text.endswith(f"\n\nstored in {path}\n")
    assert path.is_file()
    assert cli.main(["plan", *ON_CPU, "--device", "this", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["device"]
    assert shown["host_adam"] == load_stored(own_name("cpu")).host_adam


@pytest.mark.slow
def test_a_plan_follows_where_a_config_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *ON_CPU, "--calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [*found] == ["device", "model", "engine", "learner", "machine", "step"]
    assert found["device"]["name"] == own_name("cpu")
    assert stored_names() == [own_name("cpu")]
