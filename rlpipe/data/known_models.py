"""What the files of frequent language models say, without transformers' auto classes.

These import torch and all that models are made of, which takes seconds in every process that reads a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENIZER_CLASSES = {
    "llama": {"TokenizersBackend", "PreTrainedTokenizerFast"},
    "qwen2": {"Qwen2Tokenizer"},
    "qwen3": {"Qwen2Tokenizer", "TokenizersBackend", "PreTrainedTokenizerFast"},
}
"""Of models of text alone, by ``model_type``: the classes that ``AutoTokenizer`` takes as the files name them."""


def read_known_config(folder: str | Path) -> dict[str, Any] | None:
    """The ``config.json`` of a frequent language model in a local folder; None for any other."""
    config = _read_json(Path(folder).expanduser() / "config.json")
    return config if config.get("model_type") in TOKENIZER_CLASSES and "auto_map" not in config else None


def known_tokenizer_class(folder: Path) -> str | None:
    """The name in transformers of the class that ``AutoTokenizer`` would choose, where the files leave no doubt."""
    config, own = read_known_config(folder), _read_json(folder / "tokenizer_config.json")
    if config is None or "auto_map" in own:
        return None
    named = str(own.get("tokenizer_class"))
    name = named if named == "PreTrainedTokenizerFast" else named.removesuffix("Fast")
    if name not in TOKENIZER_CLASSES[config["model_type"]]:
        return None
    return "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is none, which is reported by whoever needs it."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
