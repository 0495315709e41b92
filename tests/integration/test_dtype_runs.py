"""Tests that engine, learner and checkpoints of a run with ``model.dtype=auto`` have one dtype, even after a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from run_cases import run_options, supervised_options, trained_steps

from rlpipe import cli
from rlpipe.hardware.dtypes import DeviceTypes, cpu_name
from rlpipe.learner.checkpoint_files import read_extra
from rlpipe.run import precision

pytestmark = pytest.mark.ray
OLD = DeviceTypes(device="an old CPU", rates={"float32": 127e9, "bfloat16": 1.3e9})
NEW = DeviceTypes(device="a new CPU", rates={"float32": 300e9, "bfloat16": 900e9})
BECAUSE = "because a new CPU reaches 300 GFLOP/s in float32 and 900 GFLOP/s in bfloat16, 3 times as fast"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, local_ray: None) -> pytest.MonkeyPatch:
    """Return the patch with which ``becomes`` sets what the cluster's nodes report; the training itself runs here."""
    return monkeypatch


def becomes(machine: pytest.MonkeyPatch, device: DeviceTypes) -> None:
    machine.setattr(precision, "ask_cluster", lambda cluster, *, is_own: lambda need, dtype: [device])


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in "".join(capsys.readouterr()).splitlines() if "model.dtype" in line]


def recorded_types(output: Path, step: int) -> list[str]:
    """Return the dtypes in the checkpoint's config and of its model."""
    extra = read_extra(output / "checkpoints" / f"step_{step:06d}").extra
    return [extra["config"]["model"]["dtype"], extra["model"]["dtype"]]


def test_engine_and_learner_have_one_type_that_one_line_names(
    tiny_policy: Path,
    prompts_file: Path,
    tmp_path: Path,
    machine: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    becomes(machine, NEW)
    options = run_options(tiny_policy, prompts_file, tmp_path / "run", "model.dtype=auto", "algorithm.num_steps=1")
    assert cli.main(["train", *options]) == 0  # an engine refuses weights of another dtype
    assert lines_of(capsys) == [f"model.dtype=auto: bfloat16, {BECAUSE}"]
    assert recorded_types(tmp_path / "run", 1) == ["bfloat16", "bfloat16"]
    assert "dtype: auto" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.slow
def test_a_run_continues_elsewhere_in_the_type_that_it_began_in(
    tiny_policy: Path, tmp_path: Path, machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    given = ["algorithm.num_steps=1", "model.adapter.kind=none", "tracking.progress=plain"]

    def train(*overrides: str) -> int:
        return cli.main(["train", *supervised_options(tiny_policy, tmp_path / "rows", output, *given, *overrides)])

    becomes(machine, NEW)
    assert train("model.dtype=auto") == 0
    assert lines_of(capsys) == [f"model.dtype=auto: bfloat16, {BECAUSE}"]
    becomes(machine, OLD)
    assert train("model.dtype=auto", "algorithm.num_steps=2") == 0
    (line,) = lines_of(capsys)
    assert line.startswith("model.dtype=auto: bfloat16, because the run began with it, although an old CPU ")
    assert line.endswith("takes 98 times as long for a matrix product as in float32")
    assert recorded_types(output, 2) == ["bfloat16", "bfloat16"]
    assert json.loads((output / "policy" / "config.json").read_text())["dtype"] == "bfloat16"
    assert train("model.dtype=bfloat16", "algorithm.num_steps=3") == 0  # the same dtype, now explicit: one notice
    (line,) = lines_of(capsys)
    assert line.startswith("model.dtype=bfloat16 is slow here: an old CPU")
    assert train("model.dtype=float32", "algorithm.num_steps=4") == 2
    assert 'model.dtype: "bfloat16" -> "float32"' in capsys.readouterr().err


WAYS = {
    "adapter": ["weights.serve=adapter"],
    "merged": ["weights.serve=merged"],
    "full": ["model.adapter.kind=none"],
    "qlora": ["model.adapter.kind=qlora"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "engine"),
    [
        *((way, "hf") for way in ("adapter", "merged", "full", "qlora")),
        *(pytest.param(way, "vllm", marks=pytest.mark.vllm) for way in ("adapter", "merged", "full")),
    ],
)
def test_engines_may_compute_in_another_type_than_the_learner(
    way: str,
    engine: str,
    tiny_policy: Path,
    prompts_file: Path,
    tmp_path: Path,
    local_ray: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "run"
    given = ["rollout.dtype=bfloat16", f"rollout.engine={engine}", "checkpoint.every_steps=1", *WAYS[way]]
    assert cli.main(["train", *run_options(tiny_policy, prompts_file, output, *given)]) == 0
    differences = [step["sampling/logp_difference/max"] for step in trained_steps(output)]
    assert len(differences) == 3
    assert all(1e-4 < difference < 0.5 for difference in differences)
    assert recorded_types(output, 3) == ["float32", "float32"]
    assert cli.main(["audit", str(output), "--weights"]) == 0
    assert "engines served the weights in the checkpoints" in capsys.readouterr().out
    back = [*given[1:], "algorithm.num_steps=4", "resume_changes=allow"]
    assert cli.main(["train", *run_options(tiny_policy, prompts_file, output, *back)]) == 0
    assert trained_steps(output)[-1]["sampling/logp_difference/max"] < 1e-4, "resumed with the learner's type"
    assert cli.main(["audit", str(output), "--weights"]) == 0


@pytest.mark.slow
def test_a_node_of_the_cluster_times_its_products_once(
    tiny_policy: Path, tmp_path: Path, local_ray: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(output: Path) -> str:
        given = ["algorithm.num_steps=1", "model.dtype=auto", "tracking.progress=plain"]
        assert cli.main(["train", *supervised_options(tiny_policy, tmp_path / "rows", output, *given)]) == 0
        (line,) = lines_of(capsys)
        return line

    first = train(tmp_path / "first")
    assert re.fullmatch(
        rf"model.dtype=auto: (float32|bfloat16), because {re.escape(cpu_name())} reaches \S+ GFLOP/s in float32 and "
        r"\S+ GFLOP/s in bfloat16.*, \S+ times as fast",
        first,
    )
    assert train(tmp_path / "second") == first  # exactly equal, because nothing was timed again
