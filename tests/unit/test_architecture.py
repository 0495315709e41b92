"""Tests of docs/architecture.md: imports point downwards, heavy libraries are isolated, and names are unique."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("actors", "kernels", "configs")
FRAGMENTS = ("Of ", "That ", "Those ", "By which", "By when", "As ", "Into which", "In which", "What ")
BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MAX_LOOSE_FILES, MAX_FILE_LINES, MAX_FUNCTION_LINES = 6, 500, 60


def modules() -> Iterator[tuple[str, Path]]:
    for folder in ("rlpipe", *LINKED):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder == "rlpipe" and parts[1] in LINKED:
                continue  # symbolic links, whose targets are visited themselves
            name = ".".join(parts if folder == "rlpipe" else ("rlpipe", *parts)).removesuffix(".__init__")
            yield name, path


MODULES = dict(modules())
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
OUTSIDE = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for folder in ("tests", "benchmarks", "examples")
    for path in (ROOT / folder).rglob("*.py")
}
"""Files that are no part of the package, by their paths."""


def test_the_tree_is_found() -> None:
    assert {
        "rlpipe.types",
        "rlpipe.actors.replay",
        "rlpipe.kernels.logprob",
        "rlpipe.configs.compose",
    } <= MODULES.keys()


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of pyproject.toml on a copy without links, because import-linter does not follow them."""
    if not (folder / "rlpipe").exists():
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "rlpipe", folder / "rlpipe", symlinks=False, ignore=skipped)
        examples = folder / "rlpipe" / "examples"
        for package in (*(folder / "rlpipe" / name for name in LINKED), examples, *examples.iterdir()):
            if package.is_dir():
                (package / "__init__.py").touch()
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


def test_imports_keep_the_contracts(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ended = lint_imports(tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "0 broken" in ended.stdout
    with (tmp_path / "rlpipe" / "kernels" / "logprob.py").open("a") as file:
        file.write("\n\ndef _upwards() -> None:\n    import ray  # noqa\n    import rlpipe.actors.replay  # noqa\n")
    ended = lint_imports(tmp_path)
    assert ended.returncode == 1
    for contract in ("imports point down", "only processes of a run know Ray", "whatever needs no cluster"):
        assert any(line.startswith(contract) and "BROKEN" in line for line in ended.stdout.splitlines()), ended.stdout


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_absolute(module: str) -> None:
    assert not [node.lineno for node in ast.walk(TREES[module]) if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("module", MODULES)
def test_every_file_says_what_it_does(module: str) -> None:
    assert ast.get_docstring(TREES[module]), f"{module} has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_stay_short(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{module}.{node.name}"


@pytest.mark.parametrize("module", [*MODULES, *OUTSIDE])
def test_summaries_stand_alone(module: str) -> None:
    """Check that no docstring starts as a fragment that needs the name above it; ruff checks mood and layout."""
    for node in ast.walk(TREES[module] if module in TREES else OUTSIDE[module]):
        for text in _docstrings(node):
            assert not text.lstrip().startswith(FRAGMENTS), f"{module}: {text.splitlines()[0]}"


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield a node's docstring, and the strings below its fields."""
    body = node.body if isinstance(node, BODIES) else []
    for before, statement in pairwise([None, *body]):
        match statement:
            case ast.Expr(value=ast.Constant(value=str(text))) if isinstance(before, None | ast.Assign | ast.AnnAssign):
                yield text


def test_names_are_used_once() -> None:
    names = Counter(name.rpartition(".")[2] for name, path in MODULES.items() if path.name != "__init__.py")
    assert not [name for name, times in names.items() if times > 1]
    classes = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert not [name for name, times in classes.items() if times > 1]


def test_private_modules_of_ray_have_one_home() -> None:
    """Check that only these files import Ray's private modules: the core's, Ray Train's and Serve's."""
    homes = {"rlpipe.actors.ray_internals", "rlpipe.actors.trainer", "rlpipe.actors.served"}
    private = re.compile(r"^\s*(from|import) ray\.(_|core\.|\S*\._)", re.MULTILINE)
    assert {name for name, path in MODULES.items() if private.search(path.read_text())} == homes


def test_few_files_lie_loose() -> None:
    loose = [path.name for path in (ROOT / "rlpipe").glob("*.py")]
    assert len(loose) <= MAX_LOOSE_FILES, loose


def test_the_linked_folders_are_no_packages_of_their_own() -> None:
    for folder in LINKED:
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "rlpipe" / folder).resolve() == ROOT / folder
