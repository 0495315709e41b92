"""Sources of models: local paths, and repositories on the Hugging Face hub, asked for without long retries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from rlpipe.common.imports import reading_files
from rlpipe.errors import InputError, ModelError

TIMEOUT_S = 10.0
MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.py", "adapter_model.bin"]
"""Files of a model in transformers' format or of an adapter, without the weights in other formats beside them."""


def absolute_source(source: str) -> str:
    """Return the absolute path of a local file or folder; any other source is a repository, and stays as it is."""
    path = os.path.expanduser(source)  # which leaves the home of an unknown user, unlike Path's
    return str(Path(path).absolute()) if Path(path).exists() else source


def hub_has(
    repository: str,
    *,
    kind: Literal["model", "dataset"],
    option: str,
    error: type[InputError],
    revision: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> bool:
    """Return True if the hub has the repository, False if the hub can't be reached or ``HF_HUB_OFFLINE`` is set.

    Raises ``error``, naming the config's ``option``, if the name is not a hub id, or if the hub has no such repository
    or revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import httpx

    try:
        HfApi().repo_info(repository, repo_type=kind, revision=revision, timeout=timeout_s)
    except HFValidationError:
        raise error(f"{option}: there is no folder {repository!r}, and it is not a hub id") from None
    except RevisionNotFoundError:
        raise error(f"{option}: the hub's {kind} {repository!r} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise error(
            f"{option}: {repository!r} is neither a folder here nor a {kind} on the hub (for a private one, "
            "log in with `hf auth login`)"
        ) from None
    except (httpx.HTTPError, OSError):
        return False
    return True


def model_snapshot(repository: str, *, revision: str | None = None, only_cached: bool = False) -> str:
    """Return the folder in the hub's cache with a model's files, which are fetched if needed; as the hub, ``OSError``.

    With ``only_cached``, nothing is fetched, and files may be missing, which the loaders name.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import IncompleteSnapshotError

    try:
        return snapshot_download(
            repository,
            revision=revision,
            local_files_only=only_cached,
            allow_patterns=MODEL_FILES,
            ignore_patterns=["*/*", "consolidated*"],
        )
    except IncompleteSnapshotError as found:
        if not only_cached:
            raise
        return found.snapshot_path


def find_source(path: str, option: str, *, revision: str | None = None) -> str:
    """Return a model's or adapter's folder: ``path``, or its copy in the cache; or its hub id if the hub has it.

    Raises ``ModelError``, naming the ``option``, if there is none: the loaders would retry for a minute.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return str(folder)
    if hub_has(path, kind="model", option=option, error=ModelError, revision=revision):
        return path
    try:
        return model_snapshot(path, revision=revision, only_cached=True)
    except OSError:
        reason = "there is no such folder, the hub can't be reached, and its cache holds no copy"
        raise ModelError(f"{option}={path}: {reason}") from None


def local_model(path: str, option: str, *, revision: str | None = None) -> Path:
    """Return the folder of a model or an adapter as ``find_source`` does, fetched from the hub if needed.

    Raises ``ModelError``, naming the ``option``, if there is none, or if the hub does not give it.
    """
    folder = Path(find_source(path, option, revision=revision))
    if folder.is_dir():
        return folder
    fix = "log in with `hf auth login` if it is private or gated, or give a folder"
    with reading_files(f"{option}={path} can't be fetched from the hub", fix, error=ModelError):
        return Path(model_snapshot(path, revision=revision))
