"""The location of a run's ledger, and read access to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rlpipe.errors import DataError, LedgerError
from rlpipe.replay.ledger.database import NAME
from rlpipe.replay.ledger.run_ledger import Ledger

WANTED = "give the output folder of a run of reinforcement learning, one of its checkpoints, or a .sqlite file"


def ledger_path(output: Path, name: str, folder: str | None) -> Path:
    """Return the ledger's path on the replay actor's machine, for the run ``name``; ``folder`` is ``ledger.folder``."""
    return (output if folder is None else Path(folder) / name).absolute() / NAME


def find_ledger(run: Path) -> Path:
    """Return the ledger of a run's folder or a checkpoint, or the file itself; raise ``DataError`` if there is none."""
    if run.is_file():
        return run
    if not run.is_dir():
        raise DataError(f"{run} does not exist: {WANTED}")
    config = _read_config(run / "config.yaml")
    folder = config.get("ledger", {}).get("folder")
    path = ledger_path(run, str(config.get("name")), folder)
    if path.is_file():
        return path
    if config.get("algorithm", {}).get("kind") == "sft":
        raise DataError(f"{run} is a run of supervised fine-tuning, which keeps no ledger: {WANTED}")
    if folder is not None:
        raise DataError(
            f"the ledger {path} (ledger.folder) is not on this machine: look at it where the replay actor runs, or "
            f"give a checkpoint in {run / 'checkpoints'}, which has a copy"
        )
    raise DataError(f"{run} has no {NAME}: {WANTED}")


def _read_config(path: Path) -> dict[str, Any]:
    """Return the resolved config of a run, or an empty dict if there is none, as in a checkpoint."""
    if not path.is_file():
        return {}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise DataError(f"{path} holds no options: it is not the config.yaml of a run")
    return {str(key): value for key, value in tree.items()}


@contextmanager
def reading(path: Path) -> Iterator[Ledger]:
    """Yield the ledger in one state, whatever is written meanwhile; raise ``DataError`` if it can't be read."""
    try:
        with closing(Ledger(path, read_only=True)) as ledger, ledger.snapshot():
            yield ledger
    except LedgerError as error:
        raise DataError(str(error)) from error
