"""Tests that rows are shown as the run renders them, with trained tokens marked, and without Ray or a model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_families import FAMILIES
from data_cases import conversation, refused, write_run
from hypothesis import given
from hypothesis import strategies as st

from rlpipe import cli
from rlpipe.data.row_view import split_row
from rlpipe.models.tiny_model import make_tokenizer

CHATML = FAMILIES["chatml"].tokenizer()


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["data", "preview", *arguments]) == 0
    return capsys.readouterr().out


def test_trained_tokens_stand_between_brackets_where_there_are_no_colours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, *write_run(tmp_path, [conversation("One\ntwo?", "Three.", "And?", "Four.")]))
    assert "loss mask: built in for ChatML" in text
    assert f"trained roles assistant, end markers turn; system {CHATML('<|im_start|>system')['input_ids']}"[:-1] in text
    assert f"row 0 ({tmp_path / 'rows.jsonl'}, line 1): " in text
    assert text.endswith(
        "<|im_start|>user⏎\nOne⏎\ntwo?<|im_end|>⏎\n<|im_start|>assistant⏎\n⟦Three.<|im_end|>⟧⏎\n"
        "<|im_start|>user⏎\nAnd?<|im_end|>⏎\n<|im_start|>assistant⏎\n⟦Four.<|im_end|>⟧⏎\n\n"
    )


def test_other_brackets_are_taken_where_a_row_has_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *write_run(tmp_path, [conversation("a⟦b", "c")]))
    assert "trained tokens are between ⟪ and ⟫" in text
    assert "a⟦b<|im_end|>" in text
    assert "⟪c<|im_end|>⟫" in text


def test_a_terminal_gets_colours_and_no_colour_brings_brackets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = write_run(tmp_path, [conversation("\x1b[31mone", "two")])
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    text = printed(capsys, *arguments)
    assert "\x1b[30;42mtwo\x1b[0m" in text
    assert "\x1b[36m<|im_start|>\x1b[0m" in text
    assert "\x1b[31m" not in text  # escape codes in the data are shown, not obeyed
    assert "␛[31mone" in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "⟦two<|im_end|>⟧" in printed(capsys, *arguments)


def test_skipped_rows_are_shown_with_position_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": []}, conversation("q", "a " * 2000), conversation("q", "a"), conversation("x", "y")]
    text = printed(capsys, *write_run(tmp_path, rows), "learner.max_tokens_per_microbatch=1100")
    assert "line 1): skipped, unrenderable: column 'messages' is an empty list\n" in text
    assert re.search(
        r"line 2\): skipped, too_long: \d+ tokens, more than learner.max_tokens_per_microbatch=1100\n", text
    )
    assert "⟦a<|im_end|>⟧" in text
    assert "⟦y<|im_end|>⟧" not in text  # only three rows are shown


def test_rows_are_shown_where_all_are_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, *write_run(tmp_path, [{"messages": []}] * 2))
    assert text.count("skipped, unrenderable: column 'messages' is an empty list\n") == 2


def test_held_out_rows_are_shown_as_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_run(tmp_path, [conversation(name, "a") for name in "pqr"], held_out={"size": 1})
    assert printed(capsys, *arguments).count("skipped, held_out: its prompt is held out for evaluation") == 1


def test_one_row_and_options_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_run(tmp_path, [conversation("q", "first"), conversation("q", "second")])
    text = printed(capsys, *arguments, "--row", "1", "data.train_on_eos=none")
    assert "⟦second⟧<|im_end|>" in text
    assert "first" not in text
    assert "--row 2: " in refused(capsys, "preview", *arguments, "--row", "2")


def test_windows_of_texts_say_that_they_are_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_run(tmp_path, [{"text": "word " * 500}], text_column="text")
    text = printed(capsys, *arguments, "learner.max_tokens_per_microbatch=40")
    assert "39 of 40 tokens trained, a window of a longer text" in text


def test_prompts_are_shown_as_the_policy_gets_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_run(tmp_path, [{"prompt": "Two and two?", "answer": "4"}])
    text = printed(capsys, *arguments, "algorithm=grpo")  # without any reward
    assert "prompts only: no token is trained" in text
    assert text.endswith("<|im_start|>user⏎\nTwo and two?<|im_end|>⏎\n<|im_start|>assistant⏎\n\n")
    assert "⟦" not in text


def test_the_page_holds_all_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "rows.html"
    arguments = write_run(tmp_path, [conversation("<script>alert('x')</script> & é", "<b>yes</b>")])
    assert printed(capsys, *arguments, "--html", str(page)) == f"written to {page}\n"
    html = page.read_text()
    assert "<script" not in html
    assert not re.search(r"https?:|src=|href=|url\(", html)
    assert "prefers-color-scheme: dark" in html
    shown = html[html.index("<pre>") : html.index("</pre>")]
    assert "<script>alert('x')</script> & é<|im_end|>" in unescape(re.sub(r"<[^>]*>", "", shown))
    trained = re.findall(r'<span class="trained(?: special)?" title="([\d ]+)">([^<]*)</span>', shown)
    assert unescape("".join(text for _, text in trained)) == "<b>yes</b><|im_end|>"
    ids = [int(number) for numbers, _ in trained for number in numbers.split()]
    assert ids == CHATML("<b>yes</b><|im_end|>", add_special_tokens=False)["input_ids"]
    assert ": can't be written (" in refused(
        capsys, "preview", *arguments, "--html", str(tmp_path / "no" / "rows.html")
    )


def test_a_config_file_needs_no_option_but_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = write_run(tmp_path, [conversation("q", "a")])
    assert printed(capsys, "--config", file) == printed(capsys, file)
    assert f"only one config file can be given, not {file} and other.yaml" in refused(
        capsys, "preview", file, "--config", "other.yaml"
    )
    assert f"only one config file can be given, not a.yaml and {file}" in refused(
        capsys, "preview", "--config", "a.yaml", "--config", file
    )
    arguments = cli.parse_arguments(["train", "a=b.yaml", "my.yaml", "~scoring.rewards.x.yaml"])
    assert arguments.config == "my.yaml"
    assert arguments.overrides == ["a=b.yaml", "~scoring.rewards.x.yaml"]


def test_a_model_that_is_not_there_yet_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is created by model.prepare when the run starts" in refused(
        capsys, "preview", "experiment=quickstart", f"output={tmp_path}", f"model.path={tmp_path / 'policy'}"
    )
    assert "there is no file" in refused(
        capsys, "preview", *write_run(tmp_path, [conversation("q", "a")]), f"data.path={tmp_path / 'nothing.jsonl'}"
    )


@given(st.text(max_size=30), st.text(alphabet="é€😀�a\n\t ", max_size=12), st.data())
def test_pieces_are_the_text_of_the_whole_row(first: str, second: str, data: st.DataObject) -> None:
    text = f"<|im_start|>{first}<|im_end|>{second}"
    for tokenizer in (CHATML, make_tokenizer()):
        ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
        trained = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), np.bool_)
        pieces = split_row(ids, trained, tokenizer)
        assert "".join(piece.text * piece.repeats for piece in pieces) == tokenizer.decode(ids)
        assert sum(len(piece.token_ids) * piece.repeats for piece in pieces) == len(ids)
        assert all(piece.is_trained for piece, on in zip(pieces, first_tokens(pieces, trained), strict=True) if on)


def first_tokens(pieces: Sequence[Any], trained: np.ndarray) -> list[bool]:
    starts = np.cumsum([0, *(len(piece.token_ids) * piece.repeats for piece in pieces)])[:-1]
    return [bool(trained[start]) for start in starts]


def test_tokens_that_split_a_character_are_one_piece() -> None:
    ids = np.array(CHATML("a😀b")["input_ids"], np.int32)
    assert len(ids) > 3
    assert [piece.text for piece in split_row(ids, np.zeros(len(ids), np.bool_), CHATML)] == ["a", "😀", "b"]


def test_a_run_of_placeholders_is_one_piece() -> None:
    text = "<|im_start|>" + "<|image_pad|>" * 256 + "<|im_end|>" + "<|image_pad|>" * 8 + "x" * 20
    ids = np.array(CHATML(text)["input_ids"], np.int32)
    pieces = split_row(ids, np.zeros(len(ids), np.bool_), CHATML)
    start, image, end = pieces[:3]
    assert [(piece.text, piece.repeats) for piece in (start, image, end)] == [
        ("<|im_start|>", 1),
        ("<|image_pad|>", 256),
        ("<|im_end|>", 1),
    ]
    assert [piece.repeats for piece in pieces[3:11]] == [1] * 8
    assert "".join(piece.text for piece in pieces[11:]) == "x" * 20


def test_pairs_are_shown_with_both_completions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "2+2?", "chosen": "4", "rejected": "five"}, {"prompt": "2+2?", "chosen": "4", "rejected": "4"}]
    arguments = [*write_run(tmp_path, rows), "algorithm=dpo"]
    assert cli.main(["data", "preview", *arguments]) == 0
    text = capsys.readouterr().out
    assert re.search(r"chosen with 2 of \d+ tokens trained, rejected with 5 of", text)
    assert text.index("chosen:\n") < text.index("⟦4") < text.index("rejected:\n") < text.index("⟦five")
    assert "skipped, unrenderable: chosen and rejected are the same" in text
    page = tmp_path / "rows.html"
    assert cli.main(["data", "preview", *arguments, "--html", str(page)]) == 0
    assert page.read_text().count('<div class="pair">') == 1
    capsys.readouterr()
    assert cli.main(["data", "stats", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], found["num_used"], found["num_trained_tokens"]) == (2, 1, 7)


def test_pairs_stand_side_by_side_in_a_wide_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = write_run(tmp_path, [{"prompt": "2+2?", "chosen": "4", "rejected": "five"}])
    for name, value in {"FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    wide = printed(capsys, *arguments, "algorithm=dpo").splitlines()
    assert any("⟦4<|im_end|>" in line and "⟦five<|im_end|>" in line for line in wide)
    assert {len(line) for line in wide if line.startswith("│")} == {100}
    monkeypatch.setenv("COLUMNS", "60")
    assert "│" not in printed(capsys, *arguments, "algorithm=dpo")


def test_labelled_completions_are_shown_with_their_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "2+2?", "completion": "five", "label": False}]
    assert cli.main(["data", "preview", *write_run(tmp_path, rows), "algorithm=kto"]) == 0
    assert "labelled bad, 5 of" in capsys.readouterr().out
