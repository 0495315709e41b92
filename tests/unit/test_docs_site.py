"""Tests of the documentation site: it builds strictly, without the internet, and pages load nothing from there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlpipe

ROOT = Path(__file__).parents[2]
SOURCES = ("mkdocs.yml", "README.md", "docs", "examples", "tools", "rlpipe", "actors", "configs", "kernels")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)", re.IGNORECASE
)
IMPORTED = re.compile(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//")

pytest.importorskip("material")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of the repository in ``folder``, with a proxy that nothing answers in the way to the internet."""
    closed = "http://127.0.0.1:9"
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "http_proxy": closed, "https_proxy": closed}
    command = [sys.executable, "-m", "mkdocs", "build"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name in SOURCES:
        source = ROOT / name
        skipped = shutil.ignore_patterns("__pycache__", "outputs")
        (
            shutil.copytree(source, folder / name, symlinks=True, ignore=skipped)
            if source.is_dir()
            else shutil.copy(source, folder)
        )
    built = build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_pages_load_nothing_from_the_internet(repository: Path) -> None:
    assert LOADED.findall('<link rel=x href="https://fonts.example/a.css"><img src=//cdn.example/b.png>')
    pages = list((repository / "site").rglob("*.html"))
    assert len(pages) > 60
    assert {str(page): found for page in pages if (found := LOADED.findall(page.read_text()))} == {}
    styles = list((repository / "site").rglob("*.css"))
    assert [style for style in styles if IMPORTED.search(style.read_text())] == []
    assert not [page for page in pages if 'class="mermaid"' in page.read_text()]  # the theme would fetch its library


def test_files_outside_docs_are_pages(repository: Path) -> None:
    examples = (repository / "site" / "examples.html").read_text()
    assert 'href="examples/words/index.html"' in examples
    words = (repository / "site" / "examples" / "words" / "index.html").read_text()
    assert "rlpipe train --config examples/words/run.yaml" in re.sub("<[^>]*>", "", words)
    overview = (repository / "site" / "overview.html").read_text()
    assert 'src="images/quickstart.png"' in overview
    assert (repository / "site" / "images" / "quickstart.png").is_file()


def test_every_public_name_is_in_the_reference(repository: Path) -> None:
    pages = "".join(page.read_text() for page in (repository / "site" / "reference").glob("*.html"))
    names = [name for name in rlpipe.__all__ if not name.startswith("__")]
    assert len(names) > 20
    assert [name for name in names if f'id="rlpipe.{name}"' not in pages] == []


BROKEN_LINKS = {
    "docs/data.md": ["[gone](gone.md)", "[gone](config.md#no-such-place)", "[gone](../examples/gone/README.md)"],
    "examples/words/README.md": ["[gone](../../docs/gone_too.md)"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("added", "complaints"),
    [
        (BROKEN_LINKS, ["'gone.md'", "#no-such-place", "examples/gone/README.md", "docs/gone_too.md"]),
        ({"docs/reference/run.md": ["::: rlpipe.no_such_name"]}, ["rlpipe.no_such_name"]),
    ],
    ids=["links", "names"],
)
def test_what_leads_nowhere_fails_the_build(
    repository: Path, added: dict[str, list[str]], complaints: list[str]
) -> None:
    texts = {page: (repository / page).read_text() for page in added}
    for page, lines in added.items():
        (repository / page).write_text("\n\n".join([texts[page], *lines]))
    try:
        built = build(repository)
    finally:
        for page, text in texts.items():
            (repository / page).write_text(text)
    assert built.returncode != 0
    output = built.stdout + built.stderr
    assert [complaint for complaint in complaints if complaint not in output] == [], output
