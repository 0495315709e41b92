"""Reward for code: it runs each completion's program on the row's tests, and belongs in a sandbox."""

from __future__ import annotations

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlpipe.scoring.toolbox import Completion, completion_text, extract_tag, last_fenced

Test = str | Mapping[str, str]
"""Python code that asserts, or a mapping of ``input`` and the expected ``output``."""


def passes_tests(
    completions: Sequence[Completion],
    tests: Sequence[Test | Sequence[Test]],
    *,
    answer_tag: str | None = None,
    partial: bool = False,
    timeout_s: float = 5.0,
) -> list[float]:
    """Return 1 where a completion's Python program passes all tests of the row, else 0 (``partial``: share passed).

    The program is the last fenced block of the completion, or of its last ``answer_tag``, or else all of it. A test is
    code that runs after the program and must reach its end, or a mapping with what the program reads (``input``) and
    must print (``output``), ignoring white space at the end of lines. Each test runs in a new Python process and an
    empty folder, for at most ``timeout_s`` seconds. Set the reward's ``isolation`` to ``sandbox``. Raises
    ``ValueError`` for a row without tests.
    """
    texts = [completion_text(completion) for completion in completions]
    programs = [_program(text, answer_tag) for text in texts]
    return [_score(program, _listed(own), partial, timeout_s) for program, own in zip(programs, tests, strict=True)]


passes_tests.needs_sandbox = True  # type: ignore[attr-defined]


def _program(text: str, answer_tag: str | None) -> str | None:
    inside = text if answer_tag is None else extract_tag(text, answer_tag)
    return None if inside is None else last_fenced(inside) or inside


def _listed(tests: Test | Sequence[Test]) -> list[Test]:
    listed = [tests] if isinstance(tests, str | Mapping) else list(tests)
    if not listed:
        raise ValueError("the row has no tests")
    return listed


def _score(program: str | None, tests: list[Test], partial: bool, timeout_s: float) -> float:
    if program is None:
        return 0.0
    num_passed = 0
    for test in tests:
        passed = _passes(program, test, timeout_s)
        if not passed and not partial:
            return 0.0
        num_passed += passed
    return num_passed / len(tests)


def _passes(program: str, test: Test, timeout_s: float) -> bool:
    if isinstance(test, str):
        token = secrets.token_hex(16)  # unknown to the program, which may end early or print what it likes
        printed = _run(f"{program}\n{test}\nprint('\\n{token}')\n", "", timeout_s)
        return printed is not None and printed.splitlines()[-1:] == [token]
    printed = _run(program, test["input"], timeout_s)
    return printed is not None and _normal(printed) == _normal(test["output"])


def _run(code: str, given: str, timeout_s: float) -> str | None:
    """Return what the code prints, or None if it fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(code, errors="surrogatepass")
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(file)],
                input=given.encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _normal(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
