"""Tests that the files of common models give the tokenizer of transformers' auto class, without using that class."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.models.model_files import DEFAULT_WIDTH, known_tokenizer_class, read_known_config, read_widths
from rlpipe.models.tiny import make_tiny_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden_size=64, num_layers=1)


def changed(policy: Path, folder: Path, model_type: str, tokenizer_class: str | None, **more: object) -> Path:
    for file in policy.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((policy / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    own = json.loads((policy / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    return folder


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "phi3"])
@pytest.mark.parametrize(
    "tokenizer_class", ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"]
)
def test_the_class_is_that_of_transformers(policy: Path, tmp_path: Path, model_type: str, tokenizer_class: str) -> None:
    folder = changed(policy, tmp_path, model_type, tokenizer_class)
    chosen = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    loaded = load_tokenizer(ModelConfig(path=str(folder)))
    assert type(loaded) is type(chosen)
    assert loaded("27+45=").input_ids == chosen("27+45=").input_ids
    assert loaded.chat_template == chosen.chat_template


def test_files_in_doubt_are_left_to_transformers(policy: Path, tmp_path: Path) -> None:
    assert known_tokenizer_class(policy) == "PreTrainedTokenizerFast"
    code = {"auto_map": {"AutoTokenizer": [None, "own.Tokenizer"]}}
    assert known_tokenizer_class(changed(policy, tmp_path, "qwen3", "TokenizersBackend", **code)) is None
    assert known_tokenizer_class(changed(policy, tmp_path, "qwen3", None)) is None
    assert known_tokenizer_class(tmp_path / "missing") is None
    (tmp_path / "config.json").write_text("no json")
    assert read_known_config(tmp_path) is None


@pytest.mark.parametrize(
    "text", ['{"model_type": [], "hidden_size": 1000000000}', '{"text_config": [1], "hidden_size": -1}', "[" * 100_000]
)
def test_a_damaged_config_has_the_widths_of_a_small_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_known_config(tmp_path) is None
    assert read_widths(tmp_path) == (DEFAULT_WIDTH, 4 * DEFAULT_WIDTH)
