"""Writes the learner's state with torch's distributed checkpoint, and reads it back on any number of ranks.

Every tensor has a name of its own, so that parts written by some ranks can be read by others:
``policy.<parameter>``, ``optimizer.<parameter>.<moment>``, ``reference.<parameter>``, ``random.<device>.<rank>``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rlpipe.errors import ConfigError
from rlpipe.learner.step import Learner


def state_bytes(learner: Learner) -> int:
    """What all ranks write together, without the few bytes of the random states."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (_weights(learner) | _moments(learner)).values())


def write_state(learner: Learner, folder: Path) -> None:
    """All ranks must call it. Raises ``OSError`` if it can't be written."""
    alone = learner.policy.sharding.num_ranks == 1
    tensors = _weights(learner) | _moments(learner) | _random_states(learner)
    try:
        with _single_process_is_meant():
            dcp.save(tensors, checkpoint_id=folder, no_dist=alone)
    except CheckpointException as error:
        causes = "; ".join(str(cause) for cause, _ in error.failures.values())
        raise OSError(f"{folder} can't be written: {causes}") from error


def read_state(learner: Learner, folder: Path) -> None:
    """All ranks must call it. Raises ``ConfigError`` if the checkpoint trains other parameters than the learner."""
    alone = learner.policy.sharding.num_ranks == 1
    metadata = dcp.FileSystemReader(folder).read_metadata()
    weights = _weights(learner)
    _check_names(weights, metadata, folder)
    moments = _empty_moments(learner, metadata)
    random = {name: state for name, state in _random_states(learner).items() if name in metadata.state_dict_metadata}
    tensors: dict[str, Any] = weights | {f"optimizer.{n}.{k}": t for n, s in moments.items() for k, t in s.items()}
    with _single_process_is_meant():
        dcp.load(tensors | random, checkpoint_id=folder, no_dist=alone)
    parameters = learner.policy.trainable_parameters()
    learner.optimizer.state.clear()
    for name, state in moments.items():
        learner.optimizer.state[parameters[name]] = state
    _set_random_states(random)


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """Without torch's warning at every checkpoint of a single rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _weights(learner: Learner) -> dict[str, Tensor]:
    """What is trained, and the reference where it moves; the tensors themselves, to be read into."""
    trained = {f"policy.{name}": tensor.detach() for name, tensor in learner.policy.trainable_parameters().items()}
    reference = {} if learner.reference is None else learner.reference.state()
    return trained | {f"reference.{name}": tensor.detach() for name, tensor in reference.items()}


def _moments(learner: Learner) -> dict[str, Tensor]:
    state = learner.optimizer.state
    return {
        f"optimizer.{name}.{key}": value
        for name, parameter in learner.policy.trainable_parameters().items()
        for key, value in state[parameter].items()
        if parameter in state
    }


def _empty_moments(learner: Learner, metadata: Metadata) -> dict[str, dict[str, Tensor]]:
    """Room for the optimizer's state as the checkpoint has it, spread over the ranks as the parameters are."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in learner.policy.trainable_parameters().items():
        prefix = f"optimizer.{name}."
        state = {
            key.removeprefix(prefix): _room(parameter, entry)
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        if state:
            found[name] = state
    return found


def _room(parameter: Tensor, entry: TensorStorageMetadata) -> Tensor:
    dtype = entry.properties.dtype
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    return torch.zeros(entry.size, dtype=dtype)


def _check_names(weights: dict[str, Tensor], metadata: Metadata, folder: Path) -> None:
    stored = {name for name in metadata.state_dict_metadata if name.startswith(("policy.", "reference."))}
    different = sorted(stored ^ weights.keys())
    if different:
        raise ConfigError(
            f"{folder} trains other parameters than this config ({len(different)} differ, such as {different[0]}): "
            "set model.adapter as it was, or resume=never"
        )


def _random_states(learner: Learner) -> dict[str, Tensor]:
    rank = learner.policy.sharding.rank
    states = {f"random.cpu.{rank}": torch.get_rng_state()}
    if learner.policy.device.type == "cuda":
        states[f"random.cuda.{rank}"] = torch.cuda.get_rng_state(learner.policy.device)
    return states


def _set_random_states(states: dict[str, Tensor]) -> None:
    for name, state in states.items():
        if name.startswith("random.cpu."):
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state)
