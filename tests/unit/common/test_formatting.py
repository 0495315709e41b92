"""Texts of models and servers can't control a terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlpipe.cli import user_message
from rlpipe.common.formatting import printable
from rlpipe.common.imports import message_of
from rlpipe.errors import ModelError
from rlpipe.tracking.progress import LiveProgress, PlainProgress, Progress

HOSTILE = "\x1b]0;title\x07 \x9b2J \u202e \u2066 \x00 \u2028 \ud800 done\rgone"
CONTROLS = "\x1b\x07\x9b\u202e\u2066\x00\u2028\ud800\r"


@pytest.mark.parametrize("text", ["a\n\tb", "日本\u3000語", "un\u00a0été", "👨\u200d👩", "می\u200cخواهم"])
def test_texts_of_all_languages_stay(text: str) -> None:
    assert printable(text) == text


def test_a_hostile_text_is_escaped() -> None:
    shown = printable(HOSTILE)
    assert not set(CONTROLS) & set(shown)
    assert shown.startswith("\\x1b]0;title\\x07 \\x9b2J \\u202e \\u2066 \\x00 \\u2028 \\ud800 done\\rgone")


def test_errors_are_safe_to_print() -> None:
    for text in (message_of(ValueError(HOSTILE)), user_message(ModelError(HOSTILE))):
        assert "done" in text
        assert not set(CONTROLS) & set(text)


@pytest.mark.parametrize("kind", ["plain", "live"])
def test_messages_of_a_run_are_safe_to_print(kind: str) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=False)
    progress: Progress = PlainProgress(stream) if kind == "plain" else LiveProgress(console, "run")
    progress.message(HOSTILE)
    assert "done" in stream.getvalue()
    assert not set(CONTROLS) & set(stream.getvalue())


def test_completions_on_a_terminal_are_escaped_and_those_in_a_file_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlpipe.commands import policies, sample_texts

    sampled = SimpleNamespace(to_text=lambda: "red \x1b[31m", to_json=lambda: "{}")
    monkeypatch.setattr(sample_texts, "sample_texts", lambda prompts, request: [sampled])
    monkeypatch.setattr(sample_texts, "sampling_dtype", lambda model, asked: ("float32", None))
    from rlpipe.cli import parse_arguments

    for is_terminal, shown in ((True, "red \\x1b[31m\n"), (False, "red \x1b[31m\n")):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr("sys.stdout", stream)
        policies.run_generate(parse_arguments(["generate", "--model", "m", "hello"]))
        assert stream.getvalue() == shown
