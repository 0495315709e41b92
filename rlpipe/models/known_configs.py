"""What the files of frequent language models say, without transformers' auto classes.

These import torch and all that models are made of, which takes seconds in every process that reads a text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlpipe.hardware.dtype_speed import MAX_ROWS, Products, products
from rlpipe.models.gguf import converted_folder, is_gguf

TOKENIZER_CLASSES = {
    "llama": {"TokenizersBackend", "PreTrainedTokenizerFast"},
    "qwen2": {"Qwen2Tokenizer"},
    "qwen3": {"Qwen2Tokenizer", "TokenizersBackend", "PreTrainedTokenizerFast"},
}
"""Of models of text alone, by ``model_type``: the classes that ``AutoTokenizer`` takes as the files name them."""

DEFAULT_WIDTH = 1024


def read_known_config(folder: str | Path) -> dict[str, Any] | None:
    """The ``config.json`` of a frequent language model in a local folder; None for any other."""
    config = _read_json(Path(folder).expanduser() / "config.json")
    return config if config.get("model_type") in TOKENIZER_CLASSES and "auto_map" not in config else None


def read_widths(path: str | Path) -> tuple[int, int]:
    """Hidden and inner width of a language model's layers, by its config, or such as a small one has.

    A hub's model that is not in the cache yet is not fetched for this.
    """
    if is_gguf(path):
        path = converted_folder(path)
    config = _read_json(Path(path).expanduser() / "config.json")
    if not config and not Path(path).exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(path), "config.json") if str(path).count("/") == 1 else None
        config = _read_json(Path(cached)) if isinstance(cached, str) else {}
    config = {**config, **(config.get("text_config") or {})}
    hidden = _first_number(config, "hidden_size", "n_embd", "d_model") or DEFAULT_WIDTH
    return hidden, _first_number(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden


def _first_number(config: dict[str, Any], *names: str) -> int | None:
    return next((int(config[name]) for name in names if isinstance(config.get(name), int)), None)


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


def model_products(path: str, num_threads: int) -> Products:
    """Those of a model in a process of its own that reads whole sequences."""
    return products(rows=MAX_ROWS, widths=read_widths(path), num_threads=num_threads)
