"""The tokenizer of a viewed run: from its ``tokenizer.json`` if that is on this machine, without transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpipe.common import run_files
from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import ModelError

TOKENIZER_FILE = "tokenizer.json"


class FastTokenizer:
    """A ``tokenizer.json`` with the two methods that splitting a text into its tokens needs."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of the tokens that were added to the vocabulary, by their texts."""
        return {token.content: number for number, token in self._tokenizer.get_added_tokens_decoder().items()}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return str(self._tokenizer.decode([*ids], skip_special_tokens=False))


def open_tokenizer(model: ModelConfig, run: Path, *, trusted: bool) -> Any:
    """Return the tokenizer of a run's model; raise ``ModelError`` if it can't be loaded.

    A tokenizer's own code is executed only if it is ``trusted``, and the run's config allows it.
    """
    folders = [Path(model.tokenizer or model.path).expanduser(), run / run_files.POLICY]
    runs_custom_code = model.trust_remote_code and trusted
    with reading_files("its tokens can't be decoded", "fix the run's config or the tokenizer", error=ModelError):
        from rlpipe.data.render.processor import check_ids, load_tokenizer

        for folder in folders:
            if (folder / TOKENIZER_FILE).is_file() and not runs_custom_code:
                check_ids(folder)
                return FastTokenizer(folder / TOKENIZER_FILE)
        return load_tokenizer(replace(model, trust_remote_code=runs_custom_code))
