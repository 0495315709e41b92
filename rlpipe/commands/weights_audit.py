"""The part of ``rlpipe audit`` that computes the weights that engines served, from base and adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlpipe.common import run_files
from rlpipe.errors import DataError
from rlpipe.learner.checkpoint_files import list_checkpoints, read_record
from rlpipe.learner.checkpoints import open_checkpoint
from rlpipe.learner.publish import publish_weights
from rlpipe.replay.ledger.audit import Finding
from rlpipe.types import WeightsKind

CLAIM = "engines served the weights in the checkpoints"


def check_weights(run: Path, digests: Mapping[str, Sequence[str]], *, trusted: bool) -> Finding:
    """Compute the digest of each checkpoint's weights, and compare it with the one that the engines confirmed.

    Args:
        run: the run's folder.
        digests: kind, digest and type of the weights at checkpoints, by step, as the ledger has them.
        trusted: whether code that comes with the model may run.

    Raises:
        DataError: the ledger knows the weights of none of the checkpoints.
        InputError: a checkpoint or the base model can't be read.
    """
    checkpoints = list_checkpoints(run / run_files.CHECKPOINTS)
    steps = {str(read_record(checkpoint)["step"]): checkpoint for checkpoint in checkpoints}
    audited = {step: checkpoint for step, checkpoint in steps.items() if step in digests}
    if not audited:
        raise DataError(f"{run} has no checkpoint whose weights were served: give a run's folder, without --weights")
    problems = []
    for step, checkpoint in audited.items():
        kind, served, *dtype = digests[step]
        policy = open_checkpoint(checkpoint, trusted=trusted)
        policy.served_dtype = dtype[0] if dtype else policy.served_dtype
        manifest = publish_weights(
            policy, version=int(step), bucket_bytes=2**28, emit=lambda _: None, kind=WeightsKind(kind)
        )
        assert manifest is not None, "there is one rank"
        if manifest.digest != served:
            problems.append(f"step {step}: the checkpoint's weights have {manifest.digest}, engines served {served}")
    return Finding(claim=CLAIM, num_contradictions=len(problems), contradictions=problems)
