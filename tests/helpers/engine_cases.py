"""Helpers for the tests of both engines: requests, adapters with nonzero B, and log-probs of a plain forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.rollout_config import RolloutConfig, SamplingConfig
from rlpipe.models.nf4 import to_nf4_and_back
from rlpipe.models.served_weights import ServedWeights
from rlpipe.rollout.engine import Engine
from rlpipe.types import ByteArray, GroupRequest, Prompt, Rollout, RolloutGroup, WeightsKind, WeightsManifest
from rlpipe.weights.buckets import encode, pack_weights, unpack

Published = tuple[WeightsManifest, list[ByteArray]]
OpenVllm = Callable[..., Engine]


def model_config(folder: Path, kind: str = "lora", **adapter: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32", adapter=AdapterConfig(kind=kind, r=4, **adapter))


def rollout_config(engine: str, **options: Any) -> RolloutConfig:
    sampling = SamplingConfig(**({"max_tokens": 24} | options.pop("sampling", {})))
    return RolloutConfig(engine=engine, sampling=sampling, num_threads=1, **options)


def request(group_id: int, *, prompt_ids: Sequence[int] | None = None, **options: Any) -> GroupRequest:
    token_ids = np.array(prompt_ids or [4, *range(30, 33 + group_id % 5), 5], np.int32)
    prompt = Prompt(prompt_id=group_id, epoch=0, token_ids=token_ids, prompt="x", task={"row": group_id})
    defaults: dict[str, Any] = {"group_size": 2, "max_tokens": 24, "temperature": 1.0, "seed": group_id}
    return GroupRequest(group_id=group_id, prompt=prompt, **(defaults | options))


def drain(engine: Engine) -> list[RolloutGroup]:
    groups = []
    while engine.has_work:
        groups += engine.step()
    return sorted(groups, key=lambda group: group.group_id)


def sample(engine: Engine, requests: Iterable[GroupRequest]) -> list[RolloutGroup]:
    engine.submit(list(requests))
    return drain(engine)


def tokens(groups: Iterable[RolloutGroup]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for group in groups for rollout in group]


def versions(groups: Iterable[RolloutGroup]) -> set[int]:
    return {int(v) for group in groups for rollout in group for v in rollout.policy_versions[rollout.loss_mask]}


def adapted(path: Path, seed: int = 0, *, nf4: bool = False, **config: Any) -> nn.Module:
    """Return the policy with a LoRA adapter that changes its distribution; ``nf4`` rounds its base to NF4 first."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if nf4:
        to_nf4_and_back(base)
    options: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"} | config
    policy = get_peft_model(base, LoraConfig(**options))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return policy.eval()


def retrained(path: Path, seed: int = 0) -> nn.Module:
    """Return the policy with all of its weights changed."""
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for parameter in policy.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return policy.eval()


def publish_adapter(policy: Any, version: int) -> Published:
    config = policy.peft_config["default"].to_dict()
    tensors = get_peft_model_state_dict(policy)
    return _publish(WeightsKind.LORA, version, tensors.items(), adapter_config=config)


def publish_merged(policy: Any, version: int, path: Path, dtype: str = "float32") -> Published:
    """Publish an adapter for engines that merge it into the base in ``path``."""
    served = ServedWeights(ModelConfig(path=str(path), dtype=dtype))
    return _publish(
        WeightsKind.MERGED,
        version,
        get_peft_model_state_dict(policy, save_embedding_layers=False).items(),
        adapter_config=policy.peft_config["default"].to_dict(),
        dtype=getattr(torch, dtype),
        merged_digest=lambda config, adapter: served.digest(config, adapter, torch.device("cpu")),
    )


def publish_full(policy: nn.Module, version: int) -> Published:
    return _publish(WeightsKind.FULL, version, policy.named_parameters())


def _publish(kind: WeightsKind, version: int, named_tensors: Any, **options: Any) -> Published:
    buckets: list[ByteArray] = []
    manifest = pack_weights(
        version=version, kind=kind, named_tensors=named_tensors, bucket_bytes=2**16, emit=buckets.append, **options
    )
    for bucket in buckets:
        bucket.flags.writeable = False
    return manifest, buckets


def corrupted(published: Published, name_part: str) -> Published:
    """Return the same version with one bit of one tensor flipped."""
    manifest, buckets = published
    damaged = []
    for bucket in buckets:
        tensors = {name: tensor.clone() for name, tensor in unpack(bucket).items()}
        hit = next((name for name in tensors if name_part in name), None)
        if hit is not None:
            tensors[hit].view(-1).view(torch.int32)[3] ^= 1
        damaged.append(encode(tensors))
    return manifest, damaged


def without(published: Published, name_part: str) -> Published:
    """Return the same version without the tensors whose names contain ``name_part``."""
    manifest, buckets = published
    kept = [{name: tensor for name, tensor in unpack(bucket).items() if name_part not in name} for bucket in buckets]
    return manifest, [encode(tensors) for tensors in kept]


def load(engine: Engine, published: Published) -> str:
    assert engine.prepare_load(published[0])
    return engine.load(*published)


@torch.no_grad()
def forward_logprobs(policy: nn.Module, rollout: Rollout, temperature: float) -> NDArray[np.float32]:
    """Return the log-probs of the sampled tokens from one forward pass over the whole sequence."""
    token_ids = torch.from_numpy(rollout.token_ids).long()
    logprobs = (policy(token_ids[None]).logits[0].float() / temperature).log_softmax(-1)
    return logprobs[:-1].gather(1, token_ids[1:, None])[:, 0].numpy()[rollout.loss_mask[1:]]


@torch.no_grad()
def mixed_logprobs(policies: Mapping[int, nn.Module], rollout: Rollout, temperature: float) -> NDArray[np.float32]:
    """Return the log-prob of each sampled token under its own version, on a KV cache that older versions filled."""
    token_ids = torch.from_numpy(rollout.token_ids).long()
    sampled = rollout.policy_versions[rollout.loss_mask].tolist()
    # A token is sampled from its predecessor's logits; the first token's version computes the prompt.
    computed_by = sampled[:1] * (len(token_ids) - len(sampled) - 1) + sampled
    cache, logits, start = DynamicCache(), [], 0
    for version, run in groupby(computed_by):
        end = start + len(list(run))
        logits.append(policies[version](token_ids[None, start:end], past_key_values=cache, use_cache=True).logits[0])
        start = end
    logprobs = (torch.cat(logits).float() / temperature).log_softmax(-1)
    return logprobs.gather(1, token_ids[1:, None])[:, 0].numpy()[rollout.loss_mask[1:]]


def largest_difference(policy: nn.Module, groups: Iterable[RolloutGroup], temperature: float) -> float:
    """Return the largest difference between the engine's log-probs and those of a forward pass."""
    differences = [
        np.abs(forward_logprobs(policy, rollout, temperature) - rollout.logprobs[rollout.loss_mask]).max()
        for group in groups
        for rollout in group
    ]
    return float(max(differences))
