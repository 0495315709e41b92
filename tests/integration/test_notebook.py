"""The notebook of the examples runs from top to bottom, in an empty folder, and is stored without outputs."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from run_cases import trained_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


def test_it_is_stored_without_outputs() -> None:
    cells = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert cells
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]


def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=800, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    steps = trained_steps(tmp_path / "outputs" / "notebook")
    assert len(steps) == 20
    assert steps[-1]["reward"] > steps[0]["reward"]
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert any("did you mean algorithm.loss.clip_high?" in output.get("text", "") for output in shown)
    assert any("TRAINED" in output.get("text", "") for output in shown)
