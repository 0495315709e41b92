"""Export of the trained policy to a folder that PEFT, transformers and vLLM can load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlpipe.common.atomic_io import whole_folder
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import mends_weights
from rlpipe.configs.tree import model_of
from rlpipe.data.render.processor import export_processor
from rlpipe.data.render.tokenizer import load_tokenizer
from rlpipe.errors import ModelError, RunError
from rlpipe.learner.checkpoint.checkpoint_files import read_extra
from rlpipe.learner.checkpoint.learner_state import read_policy
from rlpipe.learner.policy import Policy, load_policy, outline_policy
from rlpipe.learner.publish import named_weights
from rlpipe.models.adapter_metadata import TrainingRecord

ADAPTER_FILE = "adapter_model.safetensors"


def export_policy(policy: Policy, folder: Path) -> None:
    """Write the adapter or the whole model, and the tokenizer, in the format of ``from_pretrained`` and vLLM.

    All ranks must call it; rank 0 writes, and raises ``RunError`` if it can't.
    """
    writes = policy.sharding.rank == 0
    # An adapter is small and stays in float32; a whole model is written in its compute dtype.
    dtype = torch.float32 if isinstance(policy.model, PeftModel) else policy.scorer.compute_dtype
    tensors: dict[str, Tensor] = {}
    for name, tensor in named_weights(policy):
        if writes:
            tensors[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
    if writes:
        try:
            with whole_folder(folder) as temporary:
                _write(policy, tensors, temporary)
                if policy.has_vision:
                    export_processor(policy.config, temporary)
                load_tokenizer(policy.config).save_pretrained(temporary)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"the policy can't be written to {folder}: {error}; the same command writes it once there is room"
            ) from error
    policy.sharding.barrier()


def export_checkpoint(checkpoint: Path, folder: Path, *, base: str | None = None) -> None:
    """Export the policy of a checkpoint, on the CPU; ``base`` replaces the run's ``model.path``.

    Raises ``InputError`` if the checkpoint is incomplete or does not fit the base, or if ``folder`` exists.
    """
    if folder.exists():
        raise ModelError(f"{folder} exists: choose another folder for the policy, or delete it")
    model = model_of(read_extra(checkpoint).extra["model"])
    model = replace(model, path=base or model.path, attention="eager")  # every class has eager, and nothing is run
    if model.adapter.kind == "none" or mends_weights(model):
        policy = load_policy(model, LearnerConfig(), torch.device("cpu"))
    else:  # an adapter needs no base weights
        policy = outline_policy(model)
    read_policy(policy, checkpoint)
    export_policy(policy, folder)


def _write(policy: Policy, tensors: dict[str, Tensor], folder: Path) -> None:
    if isinstance(policy.model, PeftModel):
        adapter = replace(policy.model.peft_config["default"], inference_mode=True)
        adapter.save_pretrained(str(folder))
        record = TrainingRecord(
            base_precision="nf4" if policy.config.adapter.kind == "qlora" else "full",
            weight_scales={drift.name: drift.factor for drift in policy.scorer.drifts if drift.factor != 1},
        )
        record.write(folder)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / ADAPTER_FILE)
        return
    model = policy.scorer.causal_model
    model.save_pretrained(folder, state_dict=tensors, save_original_format=False)
    # transformers records the dtype of the parameters it sees, which is that of training.
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": policy.config.dtype}
    path.write_text(json.dumps(config, indent=2) + "\n")
