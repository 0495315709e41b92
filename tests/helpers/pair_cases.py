"""Rows of pairs, and a tokenizer for them."""

import json
from pathlib import Path

from rlpipe.data.row import RowLocation
from rlpipe.models.tiny_model import make_tokenizer

PLACE = RowLocation(row=4, epoch=2, location="rows.jsonl, line 5")
TOKENIZER = make_tokenizer()
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "five"}
ROWS = [{"prompt": f"{number}?", "chosen": str(number), "rejected": "no" * (1 + number % 5)} for number in range(24)]


def write_rows(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)
