"""Episodes as the rollouts that are scored and trained, and their metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlpipe.episodes.session import Episode
from rlpipe.episodes.tools import ToolUse
from rlpipe.types import NO_TURN, NO_VERSION, EpisodeTrace, GroupRequest, Rollout, RolloutStatus


def episode_rollout(request: GroupRequest, index: int, episode: Episode, *, has_reward: bool) -> Rollout:
    """Return an episode as a rollout; an episode in which nothing was drawn has the tokens of its opening, if any."""
    rewards = episode.turn_rewards
    rollout = Rollout(
        group_id=request.group_id,
        sample_index=index,
        prompt_id=request.prompt.prompt_id,
        task=request.prompt.task,
        status=episode.status,
        finish_reason=episode.end,
        **_opening_arrays(episode),
    )
    sequences = [
        replace(
            rollout,
            token_ids=branch.token_ids,
            loss_mask=branch.loss_mask,
            logprobs=branch.logprobs,
            policy_versions=branch.policy_versions,
            turns=branch.turns,
        )
        for branch in episode.graph.branches()
    ]
    first, *others = sequences or [rollout]
    reward = 0.0 if episode.failure is not None else float(sum(rewards))
    trace = EpisodeTrace(
        messages=episode.messages,
        reward=reward if has_reward and episode.is_rewarded else None,
        turn_rewards=rewards,
        end=episode.end,
        branches=others,
    )
    return replace(first, episode=trace)


def _opening_arrays(episode: Episode) -> dict[str, Any]:
    token_ids = episode.graph.nodes[0].token_ids if episode.graph.nodes else np.zeros(1, np.int32)
    length = len(token_ids)
    return {
        "token_ids": token_ids,
        "loss_mask": np.zeros(length, np.bool_),
        "logprobs": np.zeros(length, np.float32),
        "policy_versions": np.full(length, NO_VERSION, np.int32),
        "turns": np.full(length, NO_TURN, np.int32),
    }


def episode_metrics(episodes: Sequence[Episode], uses: Sequence[Mapping[str, ToolUse]]) -> dict[str, float]:
    """Return means over a group's episodes: turns, tokens, sequences, ends, branches, seconds and tool calls."""
    metrics = {
        "episodes/turns": _mean([len(own.graph.turns) for own in episodes]),
        "episodes/branches": _mean([len(own.graph.branches()) for own in episodes]),
        "episodes/truncated": _mean([own.status is RolloutStatus.TRUNCATED for own in episodes]),
        "episodes/failed": _mean([own.failure is not None for own in episodes]),
    }
    nodes = [node for own in episodes for node in own.graph.nodes]
    metrics["tokens/sampled"] = sum(int(node.loss_mask.sum()) for node in nodes) / len(episodes)
    metrics["tokens/observed"] = sum(int((~node.loss_mask).sum()) for node in nodes) / len(episodes)
    for what in sorted({what for own in episodes for what in own.seconds}):
        metrics[f"time/{what}"] = _mean([own.seconds.get(what, 0.0) for own in episodes])
    reasons = Counter[str]()
    for own in episodes:
        reasons.update(own.branches_by_reason)
    metrics |= {f"episodes/branches/{reason}": count / len(episodes) for reason, count in sorted(reasons.items())}
    for name in sorted({name for use in uses for name in use}):
        own_uses = [use[name] for use in uses if name in use]
        metrics[f"tools/{name}/calls"] = _mean([use.calls for use in own_uses])
        metrics[f"tools/{name}/errors"] = _mean([use.errors for use in own_uses])
        metrics[f"tools/{name}/timeouts"] = _mean([use.timeouts for use in own_uses])
        metrics[f"tools/{name}/seconds"] = _mean([use.seconds for use in own_uses])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
