"""GGUF files as models, and the configs of common language models, read without transformers' auto classes.

A GGUF file is converted once to a folder in transformers' format, which every part of a run reads. The auto classes
import torch and the model code, which takes seconds in every process that only tokenizes text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import xxhash

from rlpipe.common.atomic_io import check_room, create_once, user_cache, whole_folder
from rlpipe.common.imports import describe_error, reading_files
from rlpipe.errors import ModelError
from rlpipe.hardware.dtype_speed import MAX_ROWS, Products, products

SUFFIX = ".gguf"
MAGIC = b"GGUF"
ORIGIN = "rlpipe_gguf.json"
"""The file in a converted folder that describes the GGUF file it was converted from."""
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
FLOAT32_BYTES = 4
TOKENIZER_CLASSES = {
    "llama": {"TokenizersBackend", "PreTrainedTokenizerFast"},
    "qwen2": {"Qwen2Tokenizer"},
    "qwen3": {"Qwen2Tokenizer", "TokenizersBackend", "PreTrainedTokenizerFast"},
}
"""Tokenizer classes that ``AutoTokenizer`` takes as named in the files, by the ``model_type`` of text-only models."""

DEFAULT_WIDTH, MAX_WIDTH = 1024, 2**20


def is_gguf(path: str | Path) -> bool:
    return str(path).endswith(SUFFIX)


def converted_folder(file: str | Path) -> Path:
    """Return the folder of the converted model of a GGUF file; a file that has changed gets another folder."""
    path = Path(file).expanduser().absolute()
    try:
        found = path.stat()
    except OSError:
        return user_cache() / "gguf" / path.stem
    digest = xxhash.xxh3_64_hexdigest(f"{path} {found.st_size} {found.st_mtime_ns}".encode())
    return user_cache() / "gguf" / f"{path.stem}-{digest[:12]}"


def model_folder(path: str) -> str:
    """Return the folder of a GGUF file's converted model, converting it if needed; any other path unchanged.

    Raises ``ModelError`` if the file can't be converted.
    """
    if not is_gguf(path):
        return path
    target = converted_folder(path)
    if not target.exists():
        convert(Path(path).expanduser(), target)
    return str(target)


def convert(file: Path, target: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to ``target``, with weights in float32.

    Every block of a quantized tensor is a scale times small integers, which float32 holds exactly. If another process
    is converting to the same folder, wait for it. Raises ``ModelError`` if the file can't be read, or transformers
    can't dequantize it.
    """
    _check_file(file)

    def create() -> None:
        with whole_folder(target) as folder:
            _convert(file, folder)

    create_once(target, create)


def describe_gguf(path: str) -> str | None:
    """Return a line that describes the converted model of a GGUF file; None for any other path."""
    if not is_gguf(path):
        return None
    folder = converted_folder(path)
    made = json.loads((folder / ORIGIN).read_text())
    return (
        f"model.path={path}: {made['architecture']} with {made['num_parameters'] / 1e6:,.0f}M parameters in "
        f"{made['types']}, trained and sampled with dequantized weights: {folder}"
    )


def _check_file(file: Path) -> None:
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(MAGIC))
    except OSError as error:
        raise ModelError(f"model.path={file}: the file can't be read ({describe_error(error)})") from None
    if magic != MAGIC:
        raise ModelError(f"model.path={file}: this is not a GGUF file (it does not begin with {MAGIC.decode()!r})")
    if _PART.search(file.name):
        raise ModelError(
            f"model.path={file}: a model in several files can't be read; join them with llama-gguf-split --merge"
        )


def _convert(file: Path, folder: Path) -> None:
    try:
        import gguf
    except ImportError:
        raise ModelError(f"model.path={file} needs the package gguf: pip install 'rlpipe[gguf]'") from None
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils
    from transformers.utils.logging import disable_progress_bar

    from rlpipe.models.loading import load_complete

    disable_progress_bar()
    damaged = partial(
        reading_files, f"model.path={file}: transformers can't dequantize it", "give another", error=ModelError
    )
    unwritten = partial(reading_files, f"model.path={file}: the model can't be written", "make room", error=ModelError)
    with damaged():
        reader = gguf.GGUFReader(file)
        # transformers would read the file three times and build the name table for every module: half a minute.
        once: dict[str, Any] = {
            "GGUFReader": lambda path: reader,
            "get_tensor_name_map": cache(gguf.get_tensor_name_map),
        }
        num_elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    with unwritten():
        check_room(folder, FLOAT32_BYTES * num_elements)
    given = {"gguf_file": file.name}
    with (
        damaged(),
        patch.multiple(gguf, **once),
        patch.object(modeling_gguf_pytorch_utils, "tqdm", partial(tqdm, disable=True)),
    ):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
        dequantized = GgufConfig(dequantize=True)
        model = load_complete(
            AutoModelForCausalLM, str(file.parent), **given, dtype=torch.float32, quantization_config=dequantized
        )
    with unwritten():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
    origin = {
        "source": str(file.absolute()),
        "architecture": model.config.model_type,
        "num_parameters": model.num_parameters(),
        "types": ", ".join(name for name, _ in types.most_common()),
    }
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")


def read_known_config(folder: str | Path) -> dict[str, Any] | None:
    """Read the ``config.json`` of a common language model in a local folder; return None for any other model."""
    config = _read_json(Path(folder).expanduser() / "config.json")
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


def _text_config(path: str | Path) -> dict[str, Any]:
    """Return a model's config, with the options of its language model; an empty one if it can't be found."""
    if is_gguf(path):
        path = converted_folder(path)
    config = _read_json(Path(path).expanduser() / "config.json")
    if not config and not Path(path).exists():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(path), "config.json") if str(path).count("/") == 1 else None
        config = _read_json(Path(cached)) if isinstance(cached, str) else {}
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, dict) else {})}


def _first_number(config: dict[str, Any], *names: str) -> int | None:
    numbers = (config.get(name) for name in names)
    return next((number for number in numbers if isinstance(number, int) and 0 < number <= MAX_WIDTH), None)


def known_tokenizer_class(folder: Path) -> str | None:
    """Return the name of the class that ``AutoTokenizer`` would choose; None if the files don't determine it."""
    config, own = read_known_config(folder), _read_json(folder / "tokenizer_config.json")
    if config is None or "auto_map" in own:
        return None
    named = str(own.get("tokenizer_class"))
    name = named if named == "PreTrainedTokenizerFast" else named.removesuffix("Fast")
    if name not in TOKENIZER_CLASSES[config["model_type"]]:
        return None
    return "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name


def _read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file; return an empty one if that fails, which code that needs the file reports."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def model_products(path: str, num_threads: int) -> Products:
    """Return the ``Products`` of a model in a process of its own that reads whole sequences."""
    return products(rows=MAX_ROWS, widths=read_widths(path), num_threads=num_threads)
