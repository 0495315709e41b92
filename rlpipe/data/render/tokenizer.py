"""Loading of a model's tokenizer, with its chat template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.common.hub import hub_has
from rlpipe.common.imports import describe_error, reading_files
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import ModelError
from rlpipe.models.gguf import model_folder
from rlpipe.models.known_configs import known_tokenizer_class

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAX_ID = 2**24
LONG_NUMBER = re.compile(rb"[:,\[\s]\d{8}")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, with the config's chat template and, for batches, a padding token.

    Raises ``ModelError`` if its folder or hub id does not exist or holds no tokenizer.
    """
    option = "model.path" if config.tokenizer is None else "model.tokenizer"
    path = config.path if config.tokenizer is None else config.tokenizer
    path = model_folder(path)
    folder = Path(path).expanduser()
    local = folder.exists() or not hub_has(
        path, kind="model", option=option, error=ModelError, revision=config.revision
    )
    fix = "give a folder with an undamaged one"
    if local and not folder.exists():
        fix = "there is no such folder, the hub can't be reached, and its cache holds no copy"
    with reading_files(f"{option}: the tokenizer of {path!r} can't be loaded", fix, error=ModelError):
        import transformers

        check_ids(folder)
        tokenizer_class = getattr(transformers, known_tokenizer_class(folder) or "AutoTokenizer")
        tokenizer: PreTrainedTokenizerBase = tokenizer_class.from_pretrained(
            str(folder) if folder.exists() else path,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            local_files_only=local,
        )
        if config.chat_template is not None:
            tokenizer.chat_template = _read_template(Path(config.chat_template).expanduser())
        elif not tokenizer.chat_template:
            tokenizer.chat_template = _processor_template(path if not folder.exists() else str(folder), config, local)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_ids(folder: Path) -> None:
    """Raise ``ValueError`` for a huge id in a tokenizer's files: tokenizers would list all ids up to it, or abort."""

    def checked(digits: str) -> int:
        if int(digits) > MAX_ID:
            raise ValueError(f"a tokenizer's file has the number {digits}")
        return int(digits)

    for file in (folder / name for name in ("tokenizer.json", "vocab.json", "added_tokens.json")):
        text = file.read_bytes() if file.is_file() else b""
        if LONG_NUMBER.search(text):
            json.loads(text, parse_int=checked)


def _processor_template(path: str, config: ModelConfig, local: bool) -> str | None:
    """Return the chat template that older models with images store only beside their processor, or None."""
    from transformers.utils import cached_file

    options = {"revision": config.revision, "local_files_only": local}
    file = cached_file(path, "chat_template.json", _raise_exceptions_for_missing_entries=False, **options)
    if file is None:
        return None
    template: str | None = json.loads(Path(file).read_text()).get("chat_template")
    return template


def _read_template(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"model.chat_template: {file.absolute()} can't be read ({describe_error(error)})") from None
