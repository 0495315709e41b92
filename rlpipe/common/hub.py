"""A quick check whether a repository exists on the Hugging Face hub, without the long retries of its clients."""

from __future__ import annotations

from typing import Literal

from rlpipe.errors import InputError

TIMEOUT_S = 10.0


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
