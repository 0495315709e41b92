"""GGUF files as models: each is converted once to a folder in transformers' format, which all parts of a run read."""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rlpipe.common.atomic_io import check_room, create_once, whole_folder
from rlpipe.common.imports import describe_error, reading_files
from rlpipe.errors import ModelError
from rlpipe.models.model_files import converted_folder, is_gguf

MAGIC = b"GGUF"
ORIGIN = "rlpipe_gguf.json"
"""The file in a converted folder that describes the GGUF file it was converted from."""
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def model_folder(path: str) -> str:
    """Return the folder of a GGUF file's converted model, converting it if needed; any other path unchanged.

    Raises ``ModelError`` if the file can't be converted.
    """
    if not is_gguf(path):
        return path
    target = converted_folder(path)
    create_once(target, lambda: convert(Path(path).expanduser(), target))
    return str(target)


def convert(file: Path, target: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to ``target``, with weights in float32.

    Every block of a quantized tensor is a scale times small integers, which float32 holds exactly. Raises
    ``ModelError`` if the file can't be read, or transformers can't dequantize it.
    """
    _check_file(file)
    with whole_folder(target) as folder:
        _convert(file, folder)


def describe_gguf(path: str) -> str | None:
    """Return a line that describes the converted model of a GGUF file; None for any other path."""
    if not is_gguf(path):
        return None
    folder = converted_folder(path)
    origin = json.loads((folder / ORIGIN).read_text())
    return (
        f"model.path={path}: {origin['architecture']} with {origin['num_parameters'] / 1e6:,.0f}M parameters in "
        f"{origin['types']}, trained and sampled with dequantized weights: {folder}"
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
        replacements: dict[str, Any] = {
            "GGUFReader": lambda path: reader,
            "get_tensor_name_map": cache(gguf.get_tensor_name_map),
        }
        num_elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    with unwritten():
        check_room(folder, torch.float32.itemsize * num_elements)
    source = {"gguf_file": file.name}
    with (
        damaged(),
        patch.multiple(gguf, **replacements),
        patch.object(modeling_gguf_pytorch_utils, "tqdm", partial(tqdm, disable=True)),
    ):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
        dequantized = GgufConfig(dequantize=True)
        model = load_complete(
            AutoModelForCausalLM, str(file.parent), **source, dtype=torch.float32, quantization_config=dequantized
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
