"""A record saved beside an adapter: how its base model at training differed from the base model's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rlpipe.common.imports import describe_error
from rlpipe.errors import ModelError

FILE = "rlpipe.json"


@dataclass(kw_only=True, frozen=True, slots=True)
class TrainingRecord:
    base_precision: str = "full"
    """``full``, or ``nf4`` for a base that QLoRA quantised to NF4."""
    weight_scales: Mapping[str, float] = field(default_factory=dict)
    """Factors that parameters were multiplied with, by name (``model.normalize_weight_scales``)."""

    def write(self, adapter: Path) -> None:
        (adapter / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_record(adapter: Path) -> TrainingRecord:
    """Read an adapter's record; raise ``ModelError`` if it is broken.

    An adapter that rlpipe did not train has none, and counts as trained on the unchanged base model.
    """
    path = adapter / FILE
    try:
        return TrainingRecord(**json.loads(path.read_text())) if path.exists() else TrainingRecord()
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} is not what this version of rlpipe writes: {describe_error(error)}") from None
