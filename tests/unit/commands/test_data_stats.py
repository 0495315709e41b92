"""Tests that ``rlpipe data stats`` reports figures of the rows as the run renders and packs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import conversation, refused, write_run

from rlpipe import cli
from rlpipe.models.tiny_model import make_tokenizer

TOKENIZER = make_tokenizer()


def stats(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["data", "stats", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_lengths_and_trained_tokens_are_those_of_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [conversation("q" * length, "a" * (length % 7 + 1), "and?", "yes") for length in range(1, 41)]
    arguments = write_run(tmp_path, rows, TOKENIZER)
    found = stats(capsys, *arguments)
    # One token per character, and two around each turn; the end tokens of answers are trained.
    lengths = np.array([length + (length % 7 + 1) + 7 + 8 for length in range(1, 41)])
    trained = sum(length % 7 + 1 + 3 + 2 for length in range(1, 41))
    assert (found["num_rows"], found["num_used"], found["num_repeated"], found["skipped"]) == (40, 40, 0, {})
    assert (found["tokens"]["min"], found["tokens"]["max"]) == (lengths.min(), lengths.max())
    assert found["tokens"]["total"] == lengths.sum()
    assert found["tokens"]["mean"] == pytest.approx(lengths.mean())
    assert found["tokens"]["median"] == np.median(lengths)
    assert found["tokens"]["p95"] == pytest.approx(np.percentile(lengths, 95))
    assert (found["num_trained_tokens"], found["num_trained_spans"]) == (trained, 80)
    assert (found["prompt_tokens"]["min"], found["prompt_tokens"]["max"]) == (4, 43)
    for low, high, count in found["tokens"]["histogram"]:
        assert count == np.sum((lengths >= low) & (lengths <= high))
    assert sum(count for _, _, count in found["tokens"]["histogram"]) == 40


def test_skipped_rows_are_counted_by_kind_with_the_first_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [conversation("q", "a"), *[{"messages": []}] * 5, conversation("q", "a" * 3000), conversation("q", "a")]
    arguments = write_run(tmp_path, rows, TOKENIZER)
    found = stats(capsys, *arguments, "learner.max_tokens_per_microbatch=1100")
    assert (found["num_rows"], found["num_used"], found["num_repeated"]) == (8, 2, 1)
    unusable, too_long = found["skipped"]["unrenderable"], found["skipped"]["too_long"]
    assert (unusable["count"], too_long["count"]) == (5, 1)
    assert [example["location"].partition(", ")[2] for example in unusable["examples"]] == [
        "line 2",
        "line 3",
        "line 4",
    ]
    assert too_long["examples"][0]["reason"].endswith("more than learner.max_tokens_per_microbatch=1100")
    assert stats(capsys, *arguments, "--num", "1")["num_rows"] == 1


def test_micro_batches_are_those_that_steps_pack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_run(tmp_path, [conversation("q" * 20, "a" * 76)] * 10, TOKENIZER)  # 100 tokens each
    options = ("learner.max_tokens_per_microbatch=1200", "algorithm.groups_per_step=5")
    assert stats(capsys, *arguments, *options)["micro_batches"] == {
        "count": 2,
        "max_tokens": 1200,
        "groups_per_step": 5,
    }
    options = ("learner.max_tokens_per_microbatch=300", "data.max_prompt_tokens=100", "algorithm.groups_per_step=10")
    assert stats(capsys, *arguments, *options)["micro_batches"]["count"] == 4


def test_pairs_of_kto_are_packed_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "q" * 20, "chosen": "a" * 76, "rejected": "b" * 76},
        {"prompt": "r", "completion": "a", "label": 1},
    ]
    arguments = write_run(tmp_path, rows, TOKENIZER)
    options = ("learner.max_tokens_per_microbatch=150", "data.max_prompt_tokens=100", "algorithm.groups_per_step=2")
    found = stats(capsys, *arguments, "algorithm=kto", *options)
    assert (found["num_used"], found["micro_batches"]["count"]) == (2, 2)


def test_windows_of_texts_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_run(
        tmp_path, [{"text": "x" * length} for length in (10, 100, 200)], TOKENIZER, text_column="text"
    )
    found = stats(capsys, *arguments, "learner.max_tokens_per_microbatch=50")
    assert (found["num_cut"], found["tokens"]["max"]) == (2, 50)


def test_prompts_have_lengths_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_run(tmp_path, [{"prompt": "abc"}, {"prompt": "abc"}, {"prompt": "abcde"}], TOKENIZER)
    found = stats(capsys, *arguments, "algorithm=grpo")
    assert (found["tokens"]["min"], found["tokens"]["max"], found["num_repeated"]) == (6, 8, 1)
    assert found["num_trained_tokens"] is found["micro_batches"] is None


def test_text_holds_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [conversation("q" * 20, "a" * 76)] * 3 + [{"messages": []}]
    arguments = write_run(tmp_path, rows, TOKENIZER)
    assert cli.main(["data", "stats", *arguments, "learner.max_tokens_per_microbatch=1100"]) == 0
    text = capsys.readouterr().out
    assert f"{tmp_path / 'rows.jsonl'}: 4 rows, 3 used\n" in text
    assert "300; min 100, median 100, mean 100.0, p95 100, max 100\n" in text
    assert f"100 - 100  {'█' * 40} 3\n" in text
    assert "231 tokens (77.0%) in 3 spans\n" in text
    assert "2 rows equal an earlier one" in text
    assert "1 unrenderable\n" in text
    assert "line 4: column 'messages' is an empty list\n" in text
    assert "1 of at most 1,100 tokens, 27% full" in text


UNUSABLE = [{"messages": []}, {"messages": [{"role": "user", "content": "q"}]}, {"messages": []}]


@pytest.mark.parametrize("options", [[], ["data.held_out.size=2"], ["algorithm=grpo", "data.prompt_column=messages"]])
def test_rows_of_which_none_can_be_used_are_counted_by_their_reasons(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rows = UNUSABLE if "algorithm=grpo" not in options else UNUSABLE[::2]
    arguments = write_run(tmp_path, rows, TOKENIZER)
    found = stats(capsys, *arguments, *options)
    assert (found["num_rows"], found["num_used"], found["tokens"]) == (len(rows), 0, None)
    assert found["skipped"]["unrenderable"]["count"] == len(rows)
    assert cli.main(["data", "stats", *arguments, *options]) == 0
    text = capsys.readouterr().out
    assert "rows, none of which a run can use\n" in text
    assert f"{tmp_path / 'rows.jsonl'}, line 1: " in text
    assert "is skipped" not in caplog.text
    assert "can't be held out" not in caplog.text


def test_a_skipped_row_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = write_run(tmp_path, [{"messages": []}, conversation("q", "a")], TOKENIZER, shuffle=False)
    for command in ("preview", "stats", "prepare"):
        options = [f"data.cache={tmp_path / 'cache'}"] if command == "prepare" else []
        assert cli.main(["data", command, *arguments, *options]) == 0
        assert capsys.readouterr().out.count("'messages' is an empty list") == (command != "prepare")
    assert "skipped" not in caplog.text


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = write_run(tmp_path, [{"other": 1}], TOKENIZER)
    assert "line 1: no columns 'prompt' and 'completion'" in refused(capsys, "stats", *arguments)
    assert "'0' is not an integer of at least 1" in refused(capsys, "stats", *arguments, "--num", "0")
