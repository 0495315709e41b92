"""The learner's state, written with torch's distributed checkpoint and readable on any number of ranks.

Every tensor has a unique name, so that shards written by some ranks can be read by others:
``policy.<parameter>``, ``optimizer.<parameter>.<moment>``, ``reference.<parameter>``, ``random.<device>.<rank>``.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from rlpipe.errors import ConfigError, ModelError
from rlpipe.learner.policy import Policy
from rlpipe.learner.step import Learner
from rlpipe.weights.dcp import read_tensors, stored_shapes, weight_key, write_tensors

POLICY, REFERENCE = weight_key(""), "reference."
FLOAT32_BYTES = 4
NUM_MOMENTS = 2
"""Moments per parameter that AdamW keeps."""


def state_bytes(learner: Learner) -> int:
    """Return the bytes that all ranks together write once moments exist; small tensors are not counted."""
    copies = 1 + NUM_MOMENTS + bool(_moving(learner))
    return FLOAT32_BYTES * copies * learner.policy.num_trained


def write_state(learner: Learner, folder: Path) -> None:
    """Write the learner's state; all ranks must call it.

    Raises ``OSError`` if it can't be written.
    """
    sharding = learner.policy.sharding
    reference = {f"{REFERENCE}{name}": tensor for name, tensor in sharding.state(_moving(learner)).items()}
    tensors = learner.updates.state() | reference | _random_states(learner)
    write_tensors(folder, tensors, num_ranks=sharding.num_ranks)


def read_state(learner: Learner, folder: Path) -> None:
    """Load the learner's state; all ranks must call it.

    Raises ``ConfigError`` if the checkpoint's trained parameters are not those of the learner.
    """
    stored, moving = stored_shapes(folder), _moving(learner)
    expected = {weight_key(name) for name in learner.policy.trainable_parameters()}
    _check_names(stored, expected | {f"{REFERENCE}{name}" for name in moving}, folder)
    learner.updates.load_state(stored, partial(read_tensors, folder))
    learner.policy.sharding.load_state(moving, partial(read_tensors, folder, prefix=REFERENCE))
    random = {name: state for name, state in _random_states(learner).items() if name in stored}
    read_tensors(folder, random)
    _set_random_states(random)


def read_policy(policy: Policy, folder: Path) -> None:
    """Load only the trained parameters, for a policy that is not trained further.

    Raises ``ModelError`` if the checkpoint's trained parameters are not those of the policy.
    """
    parameters = policy.trainable_parameters()
    shapes = {weight_key(name): policy.sharding.shape(parameter) for name, parameter in parameters.items()}
    stored = {name: shape for name, shape in stored_shapes(folder).items() if name.startswith(POLICY)}
    if stored != shapes:
        different = sorted(name for name in stored | shapes if stored.get(name) != shapes.get(name))
        raise ModelError(
            f"{folder} trains other parameters than {policy.config.path} has ({len(different)} differ, such as "
            f"{different[0]}): give the model that was trained"
        )
    policy.sharding.load_state(parameters, partial(read_tensors, folder, prefix=POLICY))


def _moving(learner: Learner) -> dict[str, nn.Parameter]:
    """Return the parameters of a reference that is updated in training, by name; empty if there is none."""
    return {} if learner.reference is None else learner.reference.moving()


def _check_names(stored: Collection[str], expected: Collection[str], folder: Path) -> None:
    different = sorted({name for name in stored if name.startswith((POLICY, REFERENCE))} ^ set(expected))
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
