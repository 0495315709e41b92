"""Tests that a model's files are taken from the hub or its cache, without those that no loader reads."""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import IncompleteSnapshotError

from rlpipe.common import hub
from rlpipe.common.hub import local_model, model_snapshot
from rlpipe.errors import ModelError


def test_only_the_files_of_the_model_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(repository: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        def is_fetched(file: str) -> bool:
            allowed = any(fnmatch(file, pattern) for pattern in allow_patterns)
            return allowed and not any(fnmatch(file, pattern) for pattern in ignore_patterns)

        needed = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "modeling_own.py"]
        others = ["original/params.json", "onnx/config.json", "pytorch_model.bin", "consolidated.safetensors", "a.gguf"]
        assert [file for file in needed + others if is_fetched(file)] == needed
        return repository

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert model_snapshot("org/model") == "org/model"


def test_a_partial_copy_in_the_cache_is_left_to_the_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any, **options: Any) -> str:
        raise IncompleteSnapshotError("README.md is missing", str(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert model_snapshot("org/model", only_cached=True) == str(tmp_path)
    with pytest.raises(IncompleteSnapshotError):
        model_snapshot("org/model")


@pytest.mark.parametrize(
    ("is_online", "message"), [(True, "can't be fetched .*: OSError: 403"), (False, "its cache holds no copy")]
)
def test_a_model_that_the_hub_does_not_give_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, is_online: bool, message: str
) -> None:
    def fetch(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        assert local_files_only != is_online
        raise OSError("403: cannot access gated repo")

    monkeypatch.setattr(hub, "hub_has", lambda *_, **__: is_online)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    with pytest.raises(ModelError, match=rf"^--base=org/model.*{message}"):
        local_model("org/model", "--base")
