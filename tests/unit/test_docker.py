"""The Dockerfiles: linted everywhere, and built where Docker is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_dockerfile_has_no_warnings(path: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_images_have_versions_that_the_project_takes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    gpu = (ROOT / "docker" / "gpu.Dockerfile").read_text()
    image = re.search(r"^FROM vllm/vllm-openai:v(\S+)$", gpu, re.MULTILINE)
    assert image is not None
    assert project["optional-dependencies"]["vllm"] == [f"vllm>={image[1].rpartition('.')[0]}"]
    extras = re.search(r'"\.\[(.*)\]"', gpu)
    assert extras is not None
    assert set(extras[1].split(",")) <= project["optional-dependencies"].keys()
    python = re.search(r"^FROM python:(\S+)-slim", (ROOT / "docker" / "cpu.Dockerfile").read_text(), re.MULTILINE)
    assert python is not None
    assert project["requires-python"] == f">={python[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_is_built_and_its_doctor_is_content(path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("there is no Docker here")
    tag = f"rlpipe-test:{path.name.partition('.')[0]}"
    subprocess.run([docker, "build", "-f", str(path), "-t", tag, str(ROOT)], check=True)
    subprocess.run([docker, "run", "--rm", tag, "doctor"], check=True)
