"""Writes and reads checkpoints of the learner, and saves the trained policy.

Every tensor has a unique name, so that shards written by some ranks can be read by others:
``policy.<parameter>``, ``optimizer.<parameter>.<moment>``, ``reference.<parameter>``, ``random.<device>.<rank>``,
and ``critic.<tensor>``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from rlpipe.common.atomic_io import begin_folder, check_room, whole_folder, writing_path
from rlpipe.common.hub import absolute_source
from rlpipe.common.imports import reading_files
from rlpipe.configs.options import find_out_of_range, model_of
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import rescales_weights
from rlpipe.data.pairs import padding_id
from rlpipe.data.render.processor import export_processor, load_tokenizer
from rlpipe.errors import ConfigError, ModelError, RunError
from rlpipe.learner.checkpoint_files import (
    Checkpoint,
    changed_file,
    complete_checkpoint,
    not_complete,
    prune,
    read_extra,
    read_record,
    remove_rest,
)
from rlpipe.learner.policy import Policy, empty_policy, load_policy
from rlpipe.learner.publish import named_weights, whole_weights
from rlpipe.learner.step import Learner
from rlpipe.learner.strategies.sharding import Reduce, Sharding
from rlpipe.learner.workload import LM_HEAD, REWARD_HEADS, Workload
from rlpipe.models.adapter import WEIGHTS_FILE, TrainingRecord
from rlpipe.models.loading import COMPLETE
from rlpipe.weights.dcp import MOMENTS, StoredTensors, weight_key, write_tensors

POLICY, REFERENCE = weight_key(""), "reference."


def state_bytes(learner: Learner) -> int:
    """Return the bytes that all ranks together write once moments exist; small tensors are not counted."""
    copies = 1 + len(MOMENTS) + bool(_moving(learner))
    return torch.float32.itemsize * copies * learner.policy.num_trained


def write_state(learner: Learner, folder: Path) -> dict[str, str]:
    """Write the learner's state and return, on rank 0, the digests of the files; all ranks must call it.

    Raises ``OSError`` if it can't be written.
    """
    sharding = learner.policy.sharding
    reference = {f"{REFERENCE}{name}": tensor for name, tensor in sharding.state(_moving(learner)).items()}
    critic = {} if learner.critic is None or sharding.rank else learner.critic.state()  # all ranks have the same
    tensors = learner.updates.state() | reference | critic | _random_states(learner)
    return write_tensors(folder, tensors, num_ranks=sharding.num_ranks)


def read_state(learner: Learner, folder: Path) -> None:
    """Load the learner's state; all ranks must call it.

    Raises ``ConfigError`` if the checkpoint's trained parameters are not those of the learner, or if it is damaged.
    """
    tensors, moving = StoredTensors(folder), _moving(learner)
    stored = tensors.shapes
    shape = learner.policy.sharding.shape
    expected = {weight_key(name): shape(parameter) for name, parameter in learner.policy.trainable_parameters().items()}
    if not any(name.startswith(REFERENCE) for name in stored):
        moving = {}  # the reference was fixed until now: it starts as model.path
    expected |= {f"{REFERENCE}{name}": shape(parameter) for name, parameter in moving.items()}
    _check_parameters(stored, expected, folder)
    learner.updates.load_state(stored, tensors.read)
    learner.policy.sharding.load_state(moving, partial(tensors.read, prefix=REFERENCE))
    if learner.critic is not None and learner.critic.state().keys() <= stored.keys():
        tensors.read(learner.critic.state())
    random = {name: state for name, state in _random_states(learner).items() if name in stored}
    tensors.read(random)
    _set_random_states(random)


def read_policy(policy: Policy, folder: Path) -> None:
    """Load only the trained parameters, for a policy that is not trained further.

    Raises ``ModelError`` if the checkpoint's trained parameters are not those of the policy, or not finite.
    """
    parameters = policy.trainable_parameters()
    shapes = {weight_key(name): policy.sharding.shape(parameter) for name, parameter in parameters.items()}
    tensors = StoredTensors(folder)
    stored = {name: shape for name, shape in tensors.shapes.items() if name.startswith(POLICY)}
    if stored != shapes:
        different = sorted(name for name in stored | shapes if stored.get(name) != shapes.get(name))
        raise ModelError(
            f"{folder} has other trained parameters than {policy.config.path} ({len(different)} differ, such as "
            f"{different[0]}): use the model that was trained"
        )
    policy.sharding.load_state(parameters, partial(tensors.read, prefix=POLICY))
    for name, parameter in parameters.items():
        if not policy.sharding.local(parameter).isfinite().all():
            raise ModelError(f"{folder}: {name} has values that are not finite; use an earlier checkpoint")


def _moving(learner: Learner) -> dict[str, nn.Parameter]:
    """Return the parameters of a reference that is updated in training, by name; empty if there is none."""
    return {} if learner.reference is None else learner.reference.moving()


def _check_parameters(stored: Mapping[str, torch.Size], expected: Mapping[str, torch.Size], folder: Path) -> None:
    names = {name for name in stored if name.startswith((POLICY, REFERENCE))} | expected.keys()
    different = sorted(name for name in names if stored.get(name) != expected.get(name))
    if different and all(name.startswith(REFERENCE) for name in different):
        raise ConfigError(
            f"{folder} has a reference that training has moved, and this config none: set "
            "algorithm.reference.sync_steps to its earlier value, or resume=never"
        )
    if different:
        raise ConfigError(
            f"{folder} has other trained parameters than this config ({len(different)} differ, such as "
            f"{different[0]}): set model.adapter to its earlier value, or resume=never"
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


def export_policy(policy: Policy, folder: Path) -> None:
    """Write the adapter or the whole model, and the tokenizer, in the format of ``from_pretrained`` and vLLM.

    A reward model is always written whole, for the class of sequence classification, which scorers load.

    All ranks must call it; rank 0 writes, and raises ``RunError`` if it can't.
    """
    writes = policy.sharding.rank == 0
    # An adapter is small and stays in float32; a whole model is written in its compute dtype.
    dtype = torch.float32 if policy.exports_adapter else policy.module.compute_dtype
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_weights(policy) if policy.exports_adapter else whole_weights(policy):
        if writes:
            tensors[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
    if writes:
        with reading_files(f"{policy.config.path} can't be exported", COMPLETE, error=ModelError):
            _write_atomically(policy, tensors, folder)
    policy.sharding.barrier()


def export_checkpoint(checkpoint: Path, folder: Path, *, base: str | None = None, trusted: bool = False) -> None:
    """Export the policy of a checkpoint, on the CPU; ``base`` replaces the run's ``model.path``.

    Raises ``InputError`` if ``folder`` exists, or as ``open_checkpoint`` does.
    """
    if folder.exists():
        raise ModelError(f"{folder} exists: choose another folder for the policy, or delete it")
    export_policy(open_checkpoint(checkpoint, base=base, trusted=trusted), folder)


def open_checkpoint(checkpoint: Path, *, base: str | None = None, trusted: bool = False) -> Policy:
    """Read the policy of a checkpoint on the CPU; ``base`` replaces the run's ``model.path``.

    Raises ``InputError`` if the checkpoint is damaged or does not fit the base, or if its config wants a model's own
    code executed and is not ``trusted``.
    """
    with reading_files(
        f"{checkpoint} has no usable config of a model", "give another step_... folder", error=ConfigError
    ):
        extra = read_extra(checkpoint, contents=True).extra
        model, kind = model_of(extra["model"]), extra.get("config", {}).get("algorithm", {}).get("kind")
        for problem in find_out_of_range(model, "model."):
            raise ValueError(problem)
    if model.trust_remote_code and not trusted:
        raise ModelError(
            f"the config in {checkpoint} has the model's own code executed (model.trust_remote_code); add "
            "--trust-remote-code if you trust it"
        )
    model = replace(model, attention="eager")  # every class has eager, and nothing is run
    if base not in (None, model.path):
        model = replace(model, path=absolute_source(base), revision=None)
    head = kind if kind in REWARD_HEADS else LM_HEAD
    if model.adapter.kind == "none" or rescales_weights(model) or head != LM_HEAD:
        policy = load_policy(model, LearnerConfig(), torch.device("cpu"), workload=Workload(head=head))
    else:  # an adapter needs no base weights
        policy = empty_policy(model)
    read_policy(policy, checkpoint)
    return policy


def _write_atomically(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    try:
        with whole_folder(folder) as temporary:
            _write(policy, tensors, temporary)
            if policy.has_vision:
                export_processor(policy.config, temporary)
            load_tokenizer(policy.config).save_pretrained(temporary)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the policy can't be written to {folder}: {error}; the same command writes it once there is space"
        ) from error


def _write(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    if policy.exports_adapter:
        assert isinstance(policy.model, PeftModel)
        base: dict[str, Any] = {"base_model_name_or_path": policy.config.path, "revision": policy.config.revision}
        adapter = replace(policy.model.peft_config["default"], inference_mode=True, **base)
        adapter.save_pretrained(str(folder))
        record = TrainingRecord(
            base_precision="nf4" if policy.config.adapter.kind == "qlora" else "full",
            weight_scales={drift.name: drift.factor for drift in policy.module.drifts if drift.factor != 1},
        )
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, folder / WEIGHTS_FILE, metadata=record.metadata)
        record.write(folder)
        return
    model = policy.module.causal_model
    generation = getattr(model, "generation_config", None)  # a reward model has none
    if policy.module.classifier is None:  # save_pretrained would refuse those of some published models
        model.generation_config = GenerationConfig()
    model.save_pretrained(folder, state_dict=tensors, save_original_format=False)
    if generation is not None:
        generation.to_json_file(folder / GENERATION_CONFIG_NAME)
        model.generation_config = generation
    # transformers records the dtype of the parameters it sees, which is that of training.
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": policy.config.dtype}
    if policy.module.classifier is not None:  # which reads the last token that is not padding
        padding = padding_id(load_tokenizer(policy.config))
        for part in (config, config.get("text_config", {})):
            part["pad_token_id"] = padding
    path.write_text(json.dumps(config, indent=2) + "\n")


Add = Callable[[Path], Mapping[str, Any]]


class CheckpointStore:
    """Checkpoints in a folder that all ranks can access; every rank must make the same ``save`` and ``load`` calls."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, learner: Learner, *, step: int, extra: Mapping[str, Any], add: Add | None = None) -> Path:
        """Write the checkpoint ``step_<step>`` and remove all but the newest ``keep``; ``extra`` must be JSON values.

        ``add`` is called on rank 0 with the folder being written; what it returns is added to ``extra``. Raises
        ``OSError`` if the checkpoint can't be written; the earlier checkpoints then remain complete.
        """
        sharding = learner.policy.sharding
        target = self._folder / f"step_{step:06d}"
        temporary = writing_path(target)
        counts = {"num_bad_steps": learner.num_bad_steps, "bad_steps_in_row": learner.bad_steps_in_row}
        weights = {"entropy_bonus": learner.entropy_bonus.state(), "kl_coefficient": learner.kl_coefficient.state()}

        def complete() -> None:
            all_extra = {**extra, **(add(temporary) if add is not None else {})}
            complete_checkpoint(temporary, target, {"step": step, **counts, **weights, "extra": all_extra}, digests)

        def begin() -> None:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_rest(self._folder)
            check_room(self._folder, state_bytes(learner))
            begin_folder(target)

        _on_first_rank(sharding, begin)
        try:
            digests = write_state(learner, temporary)
            _on_first_rank(sharding, complete)
        except OSError:
            if sharding.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        if sharding.rank == 0:
            prune(self._folder, self._keep)
        return target

    def load(self, path: Path, learner: Learner) -> Checkpoint:
        """Restore the learner's state; raise ``ConfigError`` if the checkpoint is damaged or does not fit it."""
        record, sharding = read_record(path), learner.policy.sharding
        problem = changed_file(path, record, rank=sharding.rank, num_ranks=sharding.num_ranks)
        if sharding.reduce(torch.tensor(float(problem is not None)), Reduce.MAX):
            raise ConfigError(not_complete(path, problem or "a file has changed since it was written"))
        read_state(learner, path)
        learner.num_steps_done = record["step"]
        learner.num_bad_steps = record["num_bad_steps"]
        learner.bad_steps_in_row = record["bad_steps_in_row"]
        learner.entropy_bonus.restore(record.get("entropy_bonus", {}))
        learner.kl_coefficient.restore(record.get("kl_coefficient"))
        return Checkpoint(record["step"], record["extra"])


def _on_first_rank(sharding: Sharding, action: Callable[[], Any]) -> None:
    """Run ``action`` on rank 0 while the other ranks wait; an ``OSError`` there is raised on all ranks."""
    failure: OSError | None = None
    if sharding.rank == 0:
        try:
            action()
        except OSError as error:
            failure = error
    if sharding.reduce(torch.tensor(float(failure is not None)), Reduce.MAX):
        raise failure or OSError("rank 0 can't write the checkpoint")
