"""Runs of SFT on a few rows, for commands that look at them."""

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
    """A row whose messages are the user's and the assistant's in turn."""
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


def write_run(
    folder: Path, rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase = CHATML, **data: Any
) -> list[str]:
    """The arguments that name a run of SFT on the rows, of which there is no model."""
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
    """The one line that wrong input to ``rlpipe data`` leaves on standard error."""
    try:
        code = cli.main(["data", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    streams = capsys.readouterr()
    assert (code, streams.err.count("\n")) == (2, 1)
    return streams.err
