"""One group in full, as values for JSON: its prompt, and each rollout with its tokens, rewards and episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpipe.data.render.messages import CALLS, REASONING_KEYS, content_text
from rlpipe.data.row_view import TextPiece, split_row
from rlpipe.replay.ledger.query import GroupRow, to_tree
from rlpipe.types import EpisodeTrace, FloatArray, Rollout, RolloutGroup

MAX_TOKENS = 2000
"""Tokens of a sequence that are sent at first."""
LEAST_LOGPROB = -1e4
"""Log-prob that stands for that of an impossible token, since JSON has no infinity."""
IMAGE_KINDS = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}
"""Types of images by their first bytes; others are sent as bytes without a type."""


def image_kind(content: bytes) -> str:
    return next((kind for start, kind in IMAGE_KINDS.items() if content.startswith(start)), "application/octet-stream")


def describe_group(
    row: GroupRow,
    group: RolloutGroup | None,
    tokenizer: Any,
    *,
    differences: FloatArray | None = None,
    most_tokens: int = MAX_TOKENS,
) -> dict[str, Any]:
    """Return a group; without a ``tokenizer``, its tokens are shown as numbers.

    ``differences`` are those of ``Ledger.differences``.
    """
    tree = {**to_tree(row), "messages": messages_of(row.prompt)}
    if group is None:
        return tree
    sequences = [sequence for rollout in group.sampled for sequence in rollout.sequences]
    if differences is None or len(differences) != sum(sequence.num_loss_tokens for sequence in sequences):
        sequences, differences = [], np.zeros(0, np.float32)
    ends = np.cumsum([sequence.num_loss_tokens for sequence in sequences], dtype=int)
    by_sequence = {
        id(sequence): values for sequence, values in zip(sequences, np.split(differences, ends[:-1]), strict=False)
    }
    return {
        **tree,
        "logged": group.logged,
        "num_images": len(group.prompt.images),
        "differences": _summary(differences),
        "rollouts": [_describe_rollout(rollout, tokenizer, by_sequence, most_tokens) for rollout in group],
    }


def _summary(differences: FloatArray) -> dict[str, float]:
    """Return mean and maximum of the absolute differences; empty without any."""
    sizes = np.abs(differences[np.isfinite(differences)])
    return {"mean": float(sizes.mean()), "max": float(sizes.max())} if len(sizes) else {}


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """Return a prompt as messages; a plain text is one without a role."""
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [{"role": "", "text": prompt}]
    return [_describe_message(message) for message in prompt]


def _describe_message(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), "")
    calls = [call for key in CALLS if message.get(key) for call in _listed(message[key])]
    return {
        "role": str(message.get("role", "")),
        "text": content_text(message.get("content")),
        **({"name": str(message["name"])} if message.get("name") else {}),
        **({"reasoning": str(reasoning)} if reasoning else {}),
        **({"calls": [*map(_describe_call, calls)]} if calls else {}),
        **({"call_id": str(message["tool_call_id"])} if message.get("tool_call_id") else {}),
    }


def _listed(calls: Any) -> list[Any]:
    return calls if isinstance(calls, list) else [calls]


def _describe_call(call: Any) -> dict[str, Any]:
    """Return the id, name and arguments of a tool call; a call in another form counts as arguments, whole."""
    named = call if isinstance(call, Mapping) else {}
    function = named if named.get("function") is None else named["function"]
    if not (isinstance(function, Mapping) and {"name", "arguments"} & function.keys()):
        function = {"arguments": call}
    remaining = {key: value for key, value in function.items() if key not in ("id", "type", "name", "function")}
    return {
        "id": str(named.get("id") or ""),
        "name": str(function.get("name") or ""),
        "arguments": remaining.get("arguments", remaining.get("parameters", remaining or None)),
    }


def _describe_rollout(
    rollout: Rollout, tokenizer: Any, differences: Mapping[int, FloatArray], most_tokens: int
) -> dict[str, Any]:
    return {
        "sample_index": rollout.sample_index,
        "status": rollout.status.value,
        "finish_reason": rollout.finish_reason,
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "advantage": rollout.mean_advantage,
        "is_greedy": rollout.is_greedy,
        "num_tokens": rollout.num_loss_tokens,
        "versions": rollout.num_tokens_by_version,
        "sequences": [
            _describe_sequence(sequence, tokenizer, differences.get(id(sequence)), most_tokens)
            for sequence in rollout.sequences
        ],
        **({} if rollout.episode is None else {"episode": _describe_episode(rollout.episode)}),
    }


def _describe_episode(episode: EpisodeTrace) -> dict[str, Any]:
    return {
        "messages": messages_of(episode.messages),
        "reward": episode.reward,
        "turn_rewards": [*episode.turn_rewards],
        "end": episode.end,
    }


def _describe_sequence(
    rollout: Rollout, tokenizer: Any, differences: FloatArray | None, most_tokens: int
) -> dict[str, Any]:
    """Return the pieces of a sequence from its first sampled token on, with the values of each piece's first token."""
    sampled = np.flatnonzero(rollout.loss_mask)
    first = int(sampled[0]) if len(sampled) else len(rollout.token_ids)
    last = min(first + most_tokens, len(rollout.token_ids))
    span = slice(first, last)
    if tokenizer is None:
        pieces = [(1, str(number)) for number in rollout.token_ids[span].tolist()]
    else:
        images = tuple(image.moved(-first) for image in rollout.images if first <= image.start < last)
        split = split_row(rollout.token_ids[span], rollout.loss_mask[span], tokenizer, images)
        pieces = [(_length(piece), _text(piece)) for piece in split]
    indices = first + np.cumsum([0, *(length for length, _ in pieces[:-1])], dtype=int)[: len(pieces)]
    by_token = np.full(len(rollout.token_ids), np.nan)
    by_token[sampled] = np.nan if differences is None else differences
    return {
        "pieces": [text for _, text in pieces],
        "logprobs": np.round(np.maximum(rollout.logprobs[indices].astype(float), LEAST_LOGPROB), 4).tolist(),
        "versions": rollout.policy_versions[indices].tolist(),
        "mask": rollout.loss_mask[indices].astype(int).tolist(),
        "differences": _rounded(by_token[indices]),
        "advantages": None if rollout.advantages is None else _rounded(rollout.advantages[indices]),
        "num_left": len(rollout.token_ids) - last,
    }


def _rounded(values: FloatArray) -> list[float | None]:
    return [float(f"{value:.3g}") if np.isfinite(value) else None for value in values.tolist()]


def _length(piece: TextPiece) -> int:
    """Return the number of a piece's tokens; of equal ones that are joined, a piece has one."""
    return len(piece.token_ids) if piece.image is not None else len(piece.token_ids) * piece.repeats


def _text(piece: TextPiece) -> str:
    return f"{piece.text} × {piece.repeats}" if piece.repeats > 1 and piece.image is None else piece.text


def describe_logged(row: GroupRow, logged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a group whose tokens are dropped, from the log of completions."""
    return {**to_tree(row), **describe_texts(logged)}


def describe_texts(logged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the prompt and the rollouts of a group in a log of texts."""
    rollouts: list[dict[str, Any]] = [
        {
            **{name: entry.get(name) for name in ("sample_index", "status", "finish_reason", "rewards", "reward")},
            "advantage": entry.get("advantage"),
            "is_greedy": bool(entry.get("is_greedy")),
            "num_tokens": entry.get("num_tokens"),
            "versions": {},
            "sequences": [],
            "text": str(entry.get("completion", "")),
        }
        for entry in logged
    ]
    return {"messages": messages_of(logged[0].get("prompt")), "rollouts": rollouts}
