"""The configs and tokenizers of common language models, read from their files without transformers' auto classes.

The auto classes import torch and the model code, which takes seconds in every process that only tokenizes text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import xxhash

from rlpipe.common.atomic_io import user_cache
from rlpipe.hardware.dtype_speed import MAX_ROWS, Products, products

SUFFIX = ".gguf"
TOKENIZER_CLASSES = {
    "llama": {"TokenizersBackend", "PreTrainedTokenizerFast"},
    "qwen2": {"Qwen2Tokenizer"},
    "qwen3": {"Qwen2Tokenizer", "TokenizersBackend", "PreTrainedTokenizerFast"},
}
"""Tokenizer classes that ``AutoTokenizer`` takes as named in the files, by the ``model_type`` of text-only models."""

QUANTIZATION_OPTIONS = ("quantization_config", "compression_config")
"""Options in a model's config that its weights were quantized with."""
WHOLE_QUANTIZED = (
    "its weights are quantized, and can't be trained, sent or saved as a whole: use the unquantized model, or train an "
    "adapter on it that is not merged"
)
"""Problem of a run that does so with a quantized model, and the fix."""
DEFAULT_WIDTH, MAX_WIDTH = 1024, 2**20


def is_gguf(path: str | Path) -> bool:
    return str(path).endswith(SUFFIX)


def converted_folder(file: str | Path) -> Path:
    """Return the folder of the converted model of a GGUF file; a file that has changed gets another folder."""
    path = Path(file).expanduser().absolute()
    try:
        status = path.stat()
    except OSError:
        return user_cache() / "gguf" / path.stem
    digest = xxhash.xxh3_64_hexdigest(f"{path} {status.st_size} {status.st_mtime_ns}".encode())
    return user_cache() / "gguf" / f"{path.stem}-{digest[:12]}"


def read_known_config(folder: str | Path) -> dict[str, Any] | None:
    """Read the ``config.json`` of a common language model in a local folder; return None for any other model."""
    config = read_json(Path(folder).expanduser() / "config.json")
    return config if str(config.get("model_type")) in TOKENIZER_CLASSES and "auto_map" not in config else None


def read_widths(path: str | Path) -> tuple[int, int]:
    """Return the hidden and MLP widths of a language model from its config; a small model's widths if unknown.

    A model on the hub that is not in the cache yet is not fetched for this.
    """
    config = _text_config(path)
    hidden = _first_number(config, "hidden_size", "n_embd", "d_model") or DEFAULT_WIDTH
    return hidden, _first_number(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden


def read_num_experts(path: str | Path) -> int:
    """Return the number of experts of a mixture of experts from its config; 1 for any other model, or if unknown.

    As with ``read_widths``, nothing is fetched for this.
    """
    return _first_number(_text_config(path), "num_local_experts", "num_experts", "n_routed_experts") or 1


def is_quantized_model(path: str | Path) -> bool:
    """Return whether a model's config says that its files hold quantized weights; False if it can't be found."""
    return any(_text_config(path).get(name) is not None for name in QUANTIZATION_OPTIONS)


def _text_config(path: str | Path) -> dict[str, Any]:
    """Return a model's config, with the options of its language model; an empty one if it can't be found."""
    if is_gguf(path):
        path = converted_folder(path)
    config = read_json(Path(path).expanduser() / "config.json")
    if not config and not Path(path).exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(path), "config.json") if str(path).count("/") == 1 else None
        config = read_json(Path(cached)) if isinstance(cached, str) else {}
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, dict) else {})}


def _first_number(config: dict[str, Any], *names: str) -> int | None:
    numbers = (config.get(name) for name in names)
    return next((number for number in numbers if isinstance(number, int) and 0 < number <= MAX_WIDTH), None)


def known_tokenizer_class(folder: Path) -> str | None:
    """Return the name of the class that ``AutoTokenizer`` would choose; None if the files don't determine it."""
    config, tokenizer_config = read_known_config(folder), read_json(folder / "tokenizer_config.json")
    if config is None or "auto_map" in tokenizer_config:
        return None
    named = str(tokenizer_config.get("tokenizer_class"))
    name = named if named == "PreTrainedTokenizerFast" else named.removesuffix("Fast")
    if name not in TOKENIZER_CLASSES[config["model_type"]]:
        return None
    return "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file; return an empty one if that fails, which code that needs the file reports."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def model_products(path: str, num_threads: int) -> Products:
    """Return the ``Products`` of a model in a process of its own that reads whole sequences."""
    return products(rows=MAX_ROWS, widths=read_widths(path), num_threads=num_threads)
