"""The reward that runs programs, tested on assertions, on input and output, and on programs that misbehave."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from rlpipe.scoring.code_execution import passes_tests

DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTIONS = ["assert double(2) == 4", "assert double('a') == 'aa'"]
SUM = {"input": "1 2\n3\n", "output": "6\n"}


def fenced(program: str) -> str:
    return f"Let me think.\n```python\n{program}```\nThat should do."


def test_programs_that_pass_all_assertions_score_1() -> None:
    wrong = "def double(x):\n    return x + 2\n"
    programs = [DOUBLE, fenced(DOUBLE), fenced(wrong) + fenced(DOUBLE), fenced(wrong), "no program at all"]
    assert passes_tests(programs, [ASSERTIONS] * 5) == [1, 1, 1, 0, 0]


def test_partial_is_the_share_of_tests() -> None:
    numbers_only = "def double(x):\n    return x + int(x)\n"
    assert passes_tests([numbers_only, DOUBLE], [ASSERTIONS] * 2, partial=True) == [0.5, 1]
    assert passes_tests([numbers_only], [ASSERTIONS]) == [0]


def test_a_single_test_needs_no_list() -> None:
    assert passes_tests([DOUBLE], ["assert double(1) == 2"]) == [1]
    assert passes_tests(["print(sum(map(int, open(0).read().split())))"], [SUM]) == [1]


def test_programs_read_their_input_and_print() -> None:
    right = "import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')\n"
    assert passes_tests([right, "print(7)", "print(6)\nraise SystemExit(1)"], [[SUM]] * 3) == [1, 0, 0]


def test_only_line_feeds_end_the_lines_of_an_output() -> None:
    programs = ["print('1\\x0b2')", "print('1\\r\\n2 ')"]
    assert passes_tests(programs, [{"input": "", "output": "1\n2"}] * 2) == [0, 1]


@pytest.mark.parametrize("test", [{"input": 5, "output": "5"}, {"input": "5", "output": 5}, {"input": "5"}])
def test_a_test_whose_input_or_output_is_no_text_is_refused(test: Any) -> None:
    with pytest.raises(ValueError, match=r"a test's (input|output) is (5|None), not a text; write it as one"):
        passes_tests(["print(5)"], [test])


def test_the_content_of_a_tag_is_run() -> None:
    assert passes_tests([f"<answer>{fenced(DOUBLE)}</answer>", DOUBLE], [ASSERTIONS] * 2, answer_tag="answer") == [1, 0]


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "def double(x): raise SystemExit(0)",
        "print('passed')\nexit()",
        "def double(:",
        "\ud800",
    ],
)
def test_programs_that_do_not_come_to_their_end_score_0(program: str) -> None:
    assert passes_tests([program], [ASSERTIONS], timeout_s=1.0) == [0]


@pytest.mark.parametrize(
    "test",
    [
        "",
        "# nothing yet",
        "METADATA = {'author': 'x', 'level': -1}\n\ndef check(candidate):\n    assert candidate(2) == 4\n",
        "from solution import double\n\ndef test_double():\n    assert double(2) == 4\n",
        '["assert double(2) == 4"]',
        "import unittest\nclass T(unittest.TestCase):\n    'Case.'\n    def test(self): assert double(2) == 4\n"
        "if __name__ == '__main__':\n    unittest.main()\n",
    ],
)
def test_a_test_that_every_program_would_pass_is_refused(test: str) -> None:
    with pytest.raises(ValueError, match="runs nothing: call or assert something outside of functions and classes"):
        passes_tests([DOUBLE], [[test]])


def test_tests_may_define_and_call_functions() -> None:
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    tests = [f"{check}check(double)", "class T:\n    assert double(2) == 4", "for x in [1]:\n    assert double(x) == 2"]
    assert passes_tests([DOUBLE], [tests]) == [1]


def test_tests_run_by_decorators_defaults_and_names_count_and_imports_beside_them_do_not() -> None:
    tests = [
        "import math",
        "@(lambda test: test())\ndef test():\n    assert double(2) == 5",
        "def test(value=double(2)):\n    pass",
        "if __name__ != 'x':\n    assert double(2) == 4",
    ]
    assert passes_tests([DOUBLE], [tests], partial=True) == [2 / 3]


def test_each_test_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, parse = list[str](), ast.parse
    monkeypatch.setattr(ast, "parse", lambda source, *more, **named: parsed.append(source) or parse(source))
    assert passes_tests([DOUBLE], [ASSERTIONS]) == [1]
    assert parsed == ASSERTIONS


def test_a_row_without_tests_is_refused() -> None:
    with pytest.raises(ValueError, match="the row has no tests"):
        passes_tests([DOUBLE], [[]])
