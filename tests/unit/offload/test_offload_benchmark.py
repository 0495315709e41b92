"""The chunked-offload benchmark's statements about its figures, and the bound for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import offload
from benchmarks.offload_cases import CASES, Case, Values, loss_of, make_module, make_row
from benchmarks.offload_chunked import Roof, make_plan, moved_bytes, precision_of, sizes_of
from benchmarks.offload_report import COLUMNS, line_of, summarize, write_report
from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.hardware.device_profiles import DEVICES
from rlpipe.offload.api import OffloadedAdamW
from rlpipe.offload.planner.profiler import rates_of
from rlpipe.offload.runtime.activations import InlineStream, StreamEvent, Streams, Work
from rlpipe.offload.runtime.runtime import OffloadedModel

CPU = torch.device("cpu")
MACHINE = {"hardware": "NVIDIA H100 80GB HBM3", "kind": "cuda", "measured_at": "2026-11-22"}


class CountingStream(InlineStream):
    count = 0

    def submit(self, work: Work, after: StreamEvent | None = None) -> StreamEvent:
        self.count += 1
        return super().submit(work, after)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "micro_batches"), [("tiny", 1), ("tiny", 3), ("tiny-lora", 3)])
def test_the_bound_counts_the_loads_that_there_are(name: str, micro_batches: int) -> None:
    # On a CPU no time goes to starting operators, and the plan for these small models swaps nothing.
    case, machine = replace(CASES[name], micro_batches=micro_batches), replace(DEVICES["h100-80g"], kind="cpu")
    module = make_module(case)
    plan = make_plan(module, case, machine, CPU)
    chunks = [replace(chunk, num_bytes=1) for chunk in plan.profile.chunks]
    stages = [replace(stage, swapped_bytes=0) for stage in plan.profile.stages]
    profile = replace(plan.profile, chunks=chunks, stages=stages)
    expected, _ = moved_bytes(profile, plan.decision.knobs, rates_of(machine))
    stream, config = CountingStream(), OptimizerConfig()
    queues = Streams(copies_in=stream, copies_out=InlineStream(), worker=ThreadPoolExecutor(max_workers=1))
    with OffloadedModel(
        module,
        plan.decision.arrangement,
        device=CPU,
        optimizer=config,
        precision=precision_of(case),
        sizes=sizes_of(case),
        fill=Values(),
        queues=queues,
    ) as offloaded:
        module.announce = offloaded.read
        optimizer = OffloadedAdamW(offloaded, config)
        for number in range(3):
            stream.count = 0
            for _ in range(micro_batches):
                loss_of(module, case, make_row(case, number, CPU)).backward()
            optimizer.step(max_norm=1.0)
        assert 0 < expected == stream.count


def test_the_slowest_resource_is_the_roof() -> None:
    roof = Roof(compute_s=2.0, recomputed_s=0.5, to_device_s=3.0, to_host_s=1.0, adam_s=2.5)
    assert (roof.bound, roof.seconds) == ("to_device", 3.0)


def test_weights_get_their_values_by_name_and_shape() -> None:
    values = Values()

    def filled(name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape)
        values(name, tensor)
        return tensor

    assert (filled("norm.weight", 8) == 1).all()
    assert (filled("q_proj.lora_B.default.weight", 8, 2) == 0).all()
    assert filled("q_proj.weight", 3000, 2000).std() == pytest.approx(0.02, rel=0.01)


def measured(seconds: float, **options: Any) -> dict[str, Any]:
    return {
        "num_parameters": 4_000_000_000,
        "seconds": seconds,
        "predicted_s": 1.1 * seconds,
        "predicted_peak_bytes": 0.99 * 2**30,
        "peak_bytes": 2**30,
        "reserved_bytes": 2**30,
        "host_bytes": 2**30,
        "predicted_host_bytes": 2**30,
        "roof": {"seconds": 0.8 * seconds, "bound": "to_device"},
        **options,
    }


def test_the_last_line_has_the_compared_case_and_the_worst_of_what_is_promised() -> None:
    cases = {
        "8b-8k": {"tokens": 8192, "rlpipe": measured(4.0, predicted_peak_bytes=0.9 * 2**30)},
        "4b-8k": {"tokens": 8192, "rlpipe": measured(2.0), "zero3": {"seconds": 3.0}, "fsdp2": {"error": "no room"}},
        "70b": {"tokens": 8192, "rlpipe": {"does_not_fit": "no way"}},
    }
    summary = summarize(MACHINE, cases)
    expected = {"device": MACHINE["hardware"], "case": "4b-8k", "tokens_per_second": 4096.0, "over_roof": 1.25}
    expected |= {"ratio_zero3_offload": 1.5, "ratio_fsdp2_offload": None, "peak_error": -0.1, "time_error": 0.1}
    assert {key: summary[key] for key in expected} == expected
    assert summary["cases"]["8b-8k"]["tokens_per_second"] == 2048.0
    lines = [line_of(name, sides) for name, sides in cases.items()]
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
    assert "1.50 | failed |" in lines[1]
    assert "does not fit" in lines[2]


def test_without_figures_the_last_line_says_null(tmp_path: Path) -> None:
    cases = {"tiny": {"tokens": 1, "rlpipe": {"error": "no"}, "zero3": {"seconds": 1.0}}}
    summary = summarize(MACHINE, cases)
    assert all(summary[key] is None for key in ("tokens_per_second", "ratio_zero3_offload", "over_roof", "time_error"))
    write_report(tmp_path, MACHINE, cases)
    assert "failed" in (tmp_path / "offload.md").read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--cases", "9b"], "invalid choice: '9b'"),
        (["--baselines", "ddp"], "invalid choice: 'ddp'"),
        (["--updates", "0"], "--updates is 0, and must be at least 1"),
        (["--minutes", "nan"], "--minutes is nan, and must be at least 0.1"),
        (["--out", "/dev/null/x"], "--out /dev/null/x can't be created as a folder: Not a directory"),
    ],
)
def test_wrong_options_are_said_in_one_line(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        offload.parse_arguments(given)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_case_goes_to_its_processes_and_comes_back() -> None:
    assert all(Case.of(asdict(case)) == case for case in CASES.values())
