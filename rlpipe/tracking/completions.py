"""Log of the completions of a few groups of every step, for reading what the policy writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe.scoring.rewards import Tokenizer, decode_completions
from rlpipe.tracking.jsonl import StepLog
from rlpipe.types import Rollout, RolloutGroup


class CompletionsLog:
    """File with the rollouts of each step's first ``num_groups`` groups, one JSON object per rollout.

    Opening it removes ``first_step`` and later steps, as for the metrics.
    """

    def __init__(self, path: Path, *, num_groups: int, tokenizer: Tokenizer, first_step: int) -> None:
        self._num_groups = num_groups
        self._tokenizer = tokenizer
        self._log = StepLog(path, first_step) if num_groups else None

    def log(self, step: int, groups: Sequence[RolloutGroup]) -> None:
        if self._log is None:
            return
        for group in groups[: self._num_groups]:
            texts = decode_completions(self._tokenizer, group)
            rows = [_describe(group, rollout, text) for rollout, text in zip(group, texts, strict=True)]
            self._log.append(step, rows)

    def describe(self, group: RolloutGroup) -> str:
        """Return the group's first rollout as a line that is safe to print, whatever the model wrote."""
        rollout, text = group.rollouts[0], decode_completions(self._tokenizer, group)[0]
        reward = "" if rollout.reward is None else f"  (reward {rollout.reward:.3g})"
        return f"sample: {printable(_last_text(group.prompt.prompt))} -> {printable(text)}{reward}"


def _last_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt, or the content of a conversation's last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")


def printable(text: str, longest: int = 80) -> str:
    """Return the beginning of a text, with unprintable characters and line breaks as escapes."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:longest])
    return shown[:longest] + ("…" if len(shown) > longest or len(text) > longest else "")


def _describe(group: RolloutGroup, rollout: Rollout, text: str) -> dict[str, Any]:
    return {
        "group_id": rollout.group_id,
        "sample_index": rollout.sample_index,
        "prompt_id": rollout.prompt_id,
        "prompt": group.prompt.prompt,
        "completion": text,
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "advantage": _advantage(rollout),
        "policy_version": rollout.oldest_version,
        "num_tokens": len(rollout.completion_ids),
        "status": rollout.status.value,
        "finish_reason": rollout.finish_reason,
    }


def _advantage(rollout: Rollout) -> float | None:
    """Return the mean advantage over the loss tokens, which is the rollout's own if all tokens share it."""
    if rollout.advantages is None or not rollout.num_loss_tokens:
        return None
    return float(rollout.advantages[rollout.loss_mask].mean())
