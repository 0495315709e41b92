"""Checkpoint state of chunks: weights, moments and step counts, by the names of the learner's checkpoints.

Tensors are this rank's parts of whole ones, and share the chunks' memory; torch's distributed checkpoint writes and
reads them in place, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial

from torch import Tensor

from rlpipe.offload.runtime.chunk_adam import MOMENTS, STEPS
from rlpipe.offload.runtime.flat_part import FlatPart
from rlpipe.offload.runtime.runtime import OffloadedModel
from rlpipe.weights.dcp import Read, moment_key, weight_key

Names = Mapping[tuple[int, str], str]
"""Names of the trained parameters in chunks, by the chunk's index and the name there."""


def chunk_state(offloaded: OffloadedModel, names: Names) -> dict[str, Tensor]:
    """Return the weights, and the moments and step counts of those that were updated; wait for running updates."""
    held: dict[str, Tensor] = {}
    for index, adam in offloaded.optimizer.adams.items():
        offloaded.optimizer.await_update(index)
        for local in adam.pieces:
            held |= _tensors(offloaded, index, local, names, moments=adam.is_updated(local))
    return held


def load_chunk_state(offloaded: OffloadedModel, names: Names, stored: Collection[str], read: Read) -> None:
    """Load the state that is ``stored`` under these names, which must include all weights.

    Weights without stored moments count as not updated yet. Gradients that were not applied are dropped. All ranks must
    call it.
    """
    offloaded.optimizer.flush()
    for index, adam in offloaded.optimizer.adams.items():
        offloaded.drop_chunk(index)
        adam.forget()
        own = [_tensors(offloaded, index, local, names, moments=True) for local in adam.pieces]
        read({name: tensor for tensors in own for name, tensor in tensors.items() if name in stored})
        adam.memory.spread()


def _tensors(offloaded: OffloadedModel, index: int, local: str, names: Names, *, moments: bool) -> dict[str, Tensor]:
    adam, name = offloaded.optimizer.adams[index], names[index, local]
    piece = adam.pieces[local]
    cut = partial(FlatPart, begin=piece.in_tensor.start, shape=piece.shape)
    held: dict[str, Tensor] = {weight_key(name): cut(adam.memory.part(local))}
    if moments:
        state = adam.state(local)
        held |= {moment_key(name, key): cut(state[key]) for key in MOMENTS}
        held[moment_key(name, STEPS)] = state[STEPS]
    return held
