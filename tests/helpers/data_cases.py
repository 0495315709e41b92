"""SFT runs on a few rows, for the commands that inspect rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from chat_families import FAMILIES
from transformers import PreTrainedTokenizerBase

from rlpipe import cli

CHATML = FAMILIES["chatml"].tokenizer()


def conversation(*texts: str) -> dict[str, Any]:
    """Return a row whose messages alternate between user and assistant."""
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def write_run(
    folder: Path, rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase = CHATML, **data: Any
) -> list[str]:
    """Write an SFT run on the rows, whose model does not exist, and return the arguments that name it."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tokenizer.save_pretrained(folder / "tokenizer")
    run = {
        "defaults": [{"data": "jsonl"}, {"algorithm": "sft"}],
        "model": {"path": "org/policy", "tokenizer": str(folder / "tokenizer")},
        "data": {"path": str(folder / "rows.jsonl"), **data},
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    return [str(folder / "run.yaml")]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that ``rlpipe data`` writes to standard error on wrong input."""
    try:
        code = cli.main(["data", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    streams = capsys.readouterr()
    assert (code, streams.err.count("\n")) == (2, 1)
    return streams.err
