"""Tests that every message in docs/troubleshooting.md is one that the code raises, with the words that it has there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GAP = "…"
MESSAGE = re.compile(r"^### `(.+)`$", re.MULTILINE)
MESSAGES = MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text())


def texts() -> Iterator[str]:
    """Yield each text of the source, with a gap for each value that is put in."""
    for folder in ("rlpipe", "actors", "configs", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp) and (text := template(node)):
                    yield text


def template(node: ast.AST) -> str:
    """Return the text that an expression makes, with a gap for each value; an empty string if it makes none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(template(value) or GAP for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return (template(left) or GAP) + (template(right) or GAP)
    return ""


def is_of(message: str, text: str) -> bool:
    """Return whether the parts of a message between its gaps are in ``text``, in order, and begin and end it."""
    parts = message.split(GAP)
    if not all(part in text for part in parts):
        return False
    return re.fullmatch(".*".join(map(re.escape, parts)), text, re.DOTALL) is not None


@pytest.fixture(scope="module")
def sources() -> set[str]:
    return {text for text in texts() if 10 < len(text) < 1000}


def test_the_page_has_many_messages() -> None:
    assert len(MESSAGES) >= 40
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_in_the_source(message: str, sources: set[str]) -> None:
    assert len(message.replace(GAP, "")) >= 10, "too little of the message is constant"
    assert any(is_of(message, text) for text in sources), f"nothing raises {message!r}"


def test_another_message_is_not_in_the_source(sources: set[str]) -> None:
    assert not any(is_of("the run needs … but the cloud has …: …", text) for text in sources)
