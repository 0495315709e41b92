"""Reward for code: it runs each completion's program on the row's tests, and belongs in a sandbox."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from select import PIPE_BUF
from selectors import EVENT_READ, EVENT_WRITE, DefaultSelector

from rlpipe.common.formatting import shortened
from rlpipe.scoring.remote_program import end_program, passes, runs_nothing, start_program
from rlpipe.scoring.toolbox import Completion, completion_text, extract_tag, last_fenced

Test = str | Mapping[str, str]
"""Python code that asserts, or a mapping of ``input`` and the expected ``output``."""
ParsedTest = ast.Module | Mapping[str, str]
MAX_OUTPUT_BYTES = 2**22
"""Longest output of a program."""
SUSPICIOUS = re.compile(
    r"__file__|__subclasses__|/proc\b|\b_getframe\b|\bco_consts\b|\bsettrace\b|\bsetprofile\b|\bgetppid\b"
    r"|\bimport\s+(?:gc|inspect|ctypes|atexit|signal|mmap)\b|\b_exit\b|\bexecv"
)
"""Pattern of programs that look for their tests or end before these do; honest programs rarely match."""


def passes_tests(
    completions: Sequence[Completion],
    tests: Sequence[Test | Sequence[Test]],
    *,
    answer_tag: str | None = None,
    partial: bool = False,
    timeout_s: float = 5.0,
    log_metric: Callable[[str, float], None] | None = None,
) -> list[float]:
    """Return 1 where a completion's Python program passes all tests of the row, else 0 (``partial``: share passed).

    The program is the last fenced block of the completion, or of its last ``answer_tag``, or else all of it. A test is
    code that calls the program's functions and must reach its end, or a mapping with what the program reads (``input``)
    and must print (``output``), ignoring white space at the end of lines. Each test runs the program in a new Python
    process and an empty folder, for at most ``timeout_s`` seconds; the test's own code runs outside of that process,
    which never sees expected values. ``log_metric`` gets the share of programs that match ``SUSPICIOUS``, as
    ``programs/suspicious``. Set the reward's ``isolation`` to ``sandbox``. Raises ``ValueError`` for a row without
    tests, and ``SyntaxError`` for a test that is not Python.
    """
    texts = [completion_text(completion) for completion in completions]
    programs = [_program(text, answer_tag) for text in texts]
    if log_metric is not None:
        for program in programs:
            log_metric("programs/suspicious", float(program is not None and SUSPICIOUS.search(program) is not None))
    return [
        _score(program, _parsed(row_tests), partial, timeout_s)
        for program, row_tests in zip(programs, tests, strict=True)
    ]


passes_tests.needs_sandbox = True  # type: ignore[attr-defined]
passes_tests.scores_each = True  # type: ignore[attr-defined]


def _program(text: str, answer_tag: str | None) -> str | None:
    answer = text if answer_tag is None else extract_tag(text, answer_tag)
    return None if answer is None else last_fenced(answer) or answer


def _parsed(tests: Test | Sequence[Test]) -> list[ParsedTest]:
    listed = [tests] if isinstance(tests, str | Mapping) else list(tests)
    if not listed:
        raise ValueError("the row has no tests")
    parsed = [ast.parse(test) if isinstance(test, str) else test for test in listed]
    counting = [test for test in parsed if not isinstance(test, ast.Module) or not runs_nothing(test)]
    if not counting:
        shown = shortened(str(listed[0]), 60)
        raise ValueError(
            f"the test {shown!r} runs nothing: call or assert something outside of functions and classes, "
            "such as check(f) at its end; a list of tests must be a list, not its text"
        )
    return counting


def _score(program: str | None, tests: list[ParsedTest], partial: bool, timeout_s: float) -> float:
    if program is None:
        return 0.0
    num_passed = 0
    for test in tests:
        passed = _passes(program, test, timeout_s)
        if not passed and not partial:
            return 0.0
        num_passed += passed
    return num_passed / len(tests)


def _passes(program: str, test: ParsedTest, timeout_s: float) -> bool:
    if isinstance(test, ast.Module):
        return passes(program, test, timeout_s)
    for name in ("input", "output"):
        if not isinstance(test.get(name), str):
            raise ValueError(f"a test's {name} is {shortened(repr(test.get(name)), 60)}, not a text; write it as one")
    output = _run(program, test["input"], timeout_s)
    return output is not None and _normalized_lines(output) == _normalized_lines(test["output"])


def _run(code: str, stdin: str, timeout_s: float) -> str | None:
    """Return what the code prints, or None if it fails, takes too long or prints too much."""
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "program.py"
        file.write_text(code, errors="surrogatepass")
        process = start_program([str(file)], folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            output = _exchange(process, stdin.encode(errors="surrogatepass"), deadline)
            if output is None or process.wait(max(0.0, deadline - time.monotonic())) != 0:
                return None
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_program(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
    return output.decode(errors="replace")


def _exchange(process: subprocess.Popen[bytes], stdin: bytes, deadline: float) -> bytes | None:
    """Write the input and return the output, or None if that takes too long or the output is too long."""
    assert process.stdin is not None
    assert process.stdout is not None
    remaining, output = memoryview(stdin), bytearray()
    with DefaultSelector() as selector:
        selector.register(process.stdout, EVENT_READ)
        if remaining:
            selector.register(process.stdin, EVENT_WRITE)
        else:
            process.stdin.close()
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready or len(output) > MAX_OUTPUT_BYTES:
                return None
            for key, _ in ready:
                if key.fileobj is process.stdout:
                    piece = os.read(key.fd, 2**16)
                    output += piece
                    if not piece:
                        selector.unregister(process.stdout)
                else:
                    with suppress(BrokenPipeError):
                        remaining = remaining[os.write(key.fd, remaining[:PIPE_BUF]) :]
                        if remaining:
                            continue
                    selector.unregister(process.stdin)
                    with suppress(BrokenPipeError):
                        process.stdin.close()
    return bytes(output)


def _normalized_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
