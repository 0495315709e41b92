"""Traces of chosen steps, and the memory that is reported for each."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import psutil
import pytest
import torch

from rlpipe.learner.profiling import StepProfiler, memory_metrics

CPU = torch.device("cpu")


def test_only_the_steps_asked_for_are_traced(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path / "profiles", [2], rank=1, device=CPU)
    for step in (1, 2, 3):
        with profiler.step(step):
            torch.ones(8, 8) @ torch.ones(8, 8)
    (path,) = (tmp_path / "profiles").iterdir()
    assert path.name == "step_000002_rank_1.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


def test_nothing_is_written_where_no_step_is_asked_for(tmp_path: Path) -> None:
    with StepProfiler(tmp_path / "profiles", [], rank=0, device=CPU).step(1):
        pass
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_step_passes_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), StepProfiler(tmp_path, [1], rank=0, device=CPU).step(1):
        raise ZeroDivisionError
    with StepProfiler(tmp_path, [2], rank=0, device=CPU).step(2):
        torch.ones(2).sum()
    assert (tmp_path / "step_000002_rank_0.json.gz").exists()


def test_the_memory_is_that_of_the_process() -> None:
    found = memory_metrics(CPU)
    assert found.keys() == {"memory/resident"}
    assert found["memory/resident"] == pytest.approx(psutil.Process().memory_info().rss / 2**30, rel=0.2)
