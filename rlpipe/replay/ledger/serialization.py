"""The serialization of a group as two columns of the ledger: a JSON record, and compressed safetensors."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from rlpipe.types import PlacedImage, Prompt, Rollout, RolloutGroup, RolloutStatus, Truth

COMPRESSION = 1
"""zlib's fastest level; higher levels take three times as long to save a tenth of the size."""
TOKEN_ARRAYS = ("token_ids", "loss_mask", "logprobs", "policy_versions")


def pack_arrays(group: RolloutGroup) -> bytes:
    """Return the packed arrays of a group: the concatenated rollouts, and the prompt's tokens, truth and images."""
    arrays: dict[str, NDArray[Any]] = {"prompt": group.prompt.token_ids}
    arrays["lengths"] = np.array([len(rollout.token_ids) for rollout in group], np.int32)
    for name in TOKEN_ARRAYS if len(group) else ():
        arrays[name] = np.concatenate([getattr(rollout, name) for rollout in group])
    if group.prompt.truth is not None:
        arrays |= {"truth": group.prompt.truth.token_ids, "truth_mask": group.prompt.truth.is_assistant}
    for index, image in enumerate(group.prompt.images):
        arrays[f"image_{index}"] = np.frombuffer(image.content, np.uint8)
    if group.prompt.images:
        places = [(image.place, image.num_tokens) for image in group.prompt.images]
        arrays["image_places"] = np.array(places, np.int32)  # [I, 2]
    return zlib.compress(save(arrays), COMPRESSION)


def pack_record(group: RolloutGroup) -> str:
    """Return the JSON record: all but the arrays and the row's columns, which the prompt source still has."""
    record = {
        "prompt_id": group.prompt.prompt_id,
        "epoch": group.prompt.epoch,
        "prompt": group.prompt.prompt,
        "generate_s": group.generate_s,
        "score_s": group.score_s,
        "engine": group.engine,
        "logged": group.logged,
        "rollouts": [
            {
                "sample_index": rollout.sample_index,
                "status": rollout.status.value,
                "finish_reason": rollout.finish_reason,
                "rewards": rollout.rewards,
                "reward": rollout.reward,
                "advantage": None if rollout.advantages is None else float(rollout.advantages[-1]),
            }
            for rollout in group
        ],
    }
    return json.dumps(record, ensure_ascii=False, default=str)


def unpack_group(group_id: int, record_text: str, packed: bytes, task: Mapping[str, Any] | None = None) -> RolloutGroup:
    """Return the group as it was stored; ``task`` holds the row's columns if they are needed again."""
    record, arrays = json.loads(record_text), load(zlib.decompress(packed))
    prompt = Prompt(
        prompt_id=record["prompt_id"],
        epoch=record["epoch"],
        token_ids=arrays["prompt"],
        prompt=record["prompt"],
        task=task or {},
        truth=Truth(token_ids=arrays["truth"], is_assistant=arrays["truth_mask"]) if "truth" in arrays else None,
        images=tuple(
            PlacedImage(place=place, num_tokens=num_tokens, content=arrays[f"image_{index}"].tobytes())
            for index, (place, num_tokens) in enumerate(arrays.get("image_places", np.zeros(0)).tolist())
        ),
    )
    ends = np.cumsum(arrays["lengths"])
    parts = {name: np.split(arrays[name], ends[:-1]) for name in TOKEN_ARRAYS if len(ends)}
    rollouts = []
    for index, entry in enumerate(record["rollouts"]):
        advantage = entry["advantage"]
        length = int(arrays["lengths"][index])
        rollouts.append(
            Rollout(
                group_id=group_id,
                sample_index=entry["sample_index"],
                prompt_id=prompt.prompt_id,
                task=prompt.task,
                rewards=entry["rewards"],
                reward=entry["reward"],
                status=RolloutStatus(entry["status"]),
                finish_reason=entry["finish_reason"],
                advantages=None if advantage is None else np.full(length, advantage, np.float32),
                images=prompt.images,
                **{name: parts[name][index] for name in TOKEN_ARRAYS},
            )
        )
    return RolloutGroup(
        group_id=group_id,
        prompt=prompt,
        rollouts=rollouts,
        generate_s=record["generate_s"],
        score_s=record["score_s"],
        engine=record["engine"],
        logged=record["logged"],
    )
