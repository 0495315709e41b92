"""Runs for the viewer: folders with a ledger, metrics, outcome and parts, written as a run writes them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlpipe.common.run_files import EVALUATIONS, LEDGER
from rlpipe.data.sources.row_source import Cursor
from rlpipe.replay.buffer import GroupTicket
from rlpipe.replay.ledger.run_ledger import Ledger, StepGroups
from rlpipe.replay.step_queue import StepReport
from rlpipe.tracking.jsonl import JsonlTracker, StepLog
from rlpipe.tracking.outcome import recorded_outcome
from rlpipe.tracking.part_states import PartState, write_parts
from rlpipe.types import NO_VERSION, EpisodeTrace, HalfArray, PlacedImage, Prompt, Rollout, RolloutGroup, RolloutStatus

ATTACK = (
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1><svg/onload=window.hacked=1>"
    "<a href=javascript:window.hacked=1>x</a>{{constructor.constructor('window.hacked=1')()}}<!--"
)
"""Text that would set ``window.hacked`` if a page took it for markup."""
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte."""
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def picture(colour: str = "red") -> bytes:
    file = BytesIO()
    Image.new("RGB", (8, 8), colour).save(file, "PNG")
    return file.getvalue()


def config_of(folder: Path, num_steps: int) -> dict[str, Any]:
    return {
        "name": folder.name,
        "output": str(folder),
        "model": {"path": str(folder / "policy"), "tokenizer": None, "revision": None, "trust_remote_code": False},
        "algorithm": {"kind": "rl", "num_steps": num_steps, "groups_per_step": 4, "group_size": 2},
    }


@dataclass
class ViewerRun:
    """A run of ``num_steps`` steps of four groups; a prompt comes again every twelve groups."""

    folder: Path
    num_steps: int = 6
    planted: str = ""
    """Text that every prompt, completion, reward name, event and tool result gets."""
    ending: str = ""
    """Text at the end of every completion."""
    system_prompt: str = ""
    """First message of every prompt, if not empty."""
    history: bool = False
    """Whether prompts have a tool call, what it returned, and a reasoning before their last message."""
    episodes: bool = False
    images: bool = False
    two_versions: bool = False
    """Whether the next version samples the second half of each completion, of whose start two tokens aren't sampled."""
    reward_of: dict[int, float] = field(default_factory=dict)
    """Rewards of the first completions of groups, by id; of the others it is 1 in every third group, else 0."""
    step: int = 0
    admitted: list[RolloutGroup] = field(default_factory=list)
    """Groups of the next step, once they are admitted."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "policy").mkdir(exist_ok=True)
        TOKENIZER.save(str(self.folder / "policy" / "tokenizer.json"))
        config = config_of(self.folder, self.num_steps)
        (self.folder / "config.yaml").write_text(json.dumps(config))
        self.ledger = Ledger(self.folder / LEDGER)
        self.ledger.set(run_id=uuid4().hex, config=config)
        self._metrics = JsonlTracker(self.folder / "metrics.jsonl", 0)

    def train(self, num_steps: int) -> ViewerRun:
        """Write what a run leaves of this number of steps."""
        for _ in range(num_steps):
            groups = self.admitted or self.admit()
            self.admitted = []
            self.ledger.generated(groups)
            for group in groups:
                self._score(group)
            self.ledger.scored(groups)
            trained = groups[:3]
            self.ledger.discard({groups[3].group_id: f"no reward variance{self.planted}"})
            for group in trained:
                for rollout in group:
                    rollout.advantages = np.full(len(rollout.token_ids), (rollout.reward or 0) - 0.5, np.float32)
            self.ledger.assign(self.step, StepGroups(fresh=trained))
            metrics = self._measure(trained)
            differences = {group.group_id: self._differences(group) for group in trained}
            self.ledger.complete(StepReport(step=self.step, metrics=metrics, differences=differences))
            self.step += 1
            self._metrics.log(self.step, metrics)
        return self

    def _differences(self, group: RolloutGroup) -> HalfArray:
        """Return a number for every other loss token of each sequence, as if the learner had left out the rest."""
        found = []
        for place, sequence in enumerate(sequence for rollout in group for sequence in rollout.sequences):
            values = np.full(sequence.num_loss_tokens, 0.01 * (-1) ** place, np.float16)
            values[1::2] = np.nan
            found.append(values)
        return np.concatenate(found)

    def admit(self) -> list[RolloutGroup]:
        """Admit the groups of the next step, which are not sampled yet, and return them."""
        self.admitted = [self._group(self.step * 4 + place) for place in range(4)]
        self._admit(self.admitted)
        return self.admitted

    def evaluate(self, *, num_prompts: int = 3) -> ViewerRun:
        """Log the answers of the newest version to held-out prompts, of which it knows one more with each version."""
        rows = [
            {
                "group_id": -1 - place,
                "sample_index": 0,
                "prompt_id": place,
                "prompt": [{"role": "user", "content": f"Held out: {place} * 3?{self.planted}"}],
                "completion": f"{3 * place} says version {self.step}{self.planted}",
                "rewards": {"right": float(place < self.step)},
                "reward": float(place < self.step),
                "advantage": None,
                "policy_version": self.step,
                "num_tokens": 5,
                "status": "completed",
                "finish_reason": "stop",
            }
            for place in range(num_prompts)
        ]
        StepLog(self.folder / EVALUATIONS, self.step).append(self.step, rows)
        return self

    def end(self) -> ViewerRun:
        """Write a checkpoint, and close the ledger."""
        self.ledger.checkpointed(self.step)
        self.ledger.close()
        return self

    def record_parts(self) -> None:
        write_parts(
            self.folder,
            [
                PartState(kind="engine", name="rollout-0", state="healthy", version=self.step, queue=3, heard_s=0.5),
                PartState(kind="scorer", name="scorer-0", state="idle", queue=0),
                PartState(
                    kind="rank", name="rank 0", state="in a step", step=self.step, heard_s=2.0, note=self.planted
                ),
            ],
        )

    def _admit(self, groups: Sequence[RolloutGroup]) -> None:
        tickets = [
            GroupTicket(
                group_id=group.group_id,
                version=self.step,
                epoch=group.group_id // 12,
                position=group.group_id % 12,
                prompt_id=group.prompt.prompt_id,
                attempt=0,
            )
            for group in groups
        ]
        last = groups[-1].group_id + 1
        self.ledger.admit(tickets, Cursor(epoch=last // 12, position=last % 12))

    def _group(self, group_id: int) -> RolloutGroup:
        row = group_id % 12
        text = f"What is {row} + {row}?{self.planted}"
        ids = np.array(TOKENIZER.encode(text).ids, np.int32)
        images = (PlacedImage(start=1, num_tokens=2, content=picture()),) if self.images else ()
        messages: list[dict[str, Any]] = []
        if self.system_prompt:
            messages.append({"role": "system", "content": self.system_prompt})
        if self.history:
            messages += self._history()
        messages.append({"role": "user", "content": text})
        prompt = Prompt(
            prompt_id=row, epoch=group_id // 12, token_ids=ids, prompt=messages, task={}, images=images,
        )  # fmt: skip
        rollouts = [self._rollout(group_id, index, prompt) for index in range(2)]
        return RolloutGroup(
            group_id=group_id, prompt=prompt, rollouts=rollouts, engine="rollout-0", generate_s=0.5, score_s=0.1
        )

    def _rollout(self, group_id: int, index: int, prompt: Prompt) -> Rollout:
        said = 2 * prompt.prompt_id if index == 0 else "unknown"
        text = f"It is {said} ☃, says group {group_id}.{self.planted}{self.ending}"
        answer = np.array(TOKENIZER.encode(text).ids, np.int32)
        ids = np.concatenate([prompt.token_ids, answer])
        mask = np.arange(len(ids)) >= len(prompt.token_ids)
        versions = np.full(len(ids), self.step, np.int32)
        if self.two_versions:
            start = len(prompt.token_ids)
            mask[start + 3 : start + 5] = False  # the word "is"
            versions[start + len(answer) // 2 :] += 1
        is_cut = group_id % 4 == 1 and index == 1
        return Rollout(
            group_id=group_id,
            sample_index=index,
            prompt_id=prompt.prompt_id,
            task={},
            token_ids=ids,
            loss_mask=mask,
            logprobs=np.where(mask, -np.arange(len(ids)) % 7, 0).astype(np.float32),
            policy_versions=np.where(mask, versions, NO_VERSION).astype(np.int32),
            status=RolloutStatus.TRUNCATED if is_cut else RolloutStatus.COMPLETED,
            finish_reason="length" if is_cut else "stop",
            images=prompt.images,
            turns=np.where(mask, 0, -1).astype(np.int32) if self.episodes else None,
            episode=self._episode(text) if self.episodes else None,
        )

    def _episode(self, text: str) -> EpisodeTrace:
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "search", "arguments": f'{{"q": "{self.planted}"}}'},
        }
        messages = [
            {"role": "assistant", "content": "I look it up.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": f"found it{self.planted}"},
            {"role": "assistant", "content": text},
        ]
        return EpisodeTrace(messages=messages, reward=0.25, turn_rewards=[0.5, 1.0], end=f"done{self.planted}")

    def _history(self) -> list[dict[str, Any]]:
        call = {"id": "h1", "function": {"name": "lookup", "arguments": f'{{"word": "{self.planted}"}}'}}
        return [
            {"role": "assistant", "reasoning": f"a table may help{self.planted}", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "h1", "content": f"a table of sums{self.planted}"},
            {"role": "user", "name": f"Ada{self.planted}", "content": "Thank you."},
        ]

    def _score(self, group: RolloutGroup) -> None:
        for rollout in group:
            own = 1.0 if group.group_id % 3 == 0 else 0.0
            right = self.reward_of.get(group.group_id, own) if rollout.sample_index == 0 else 0.0
            rollout.rewards = {f"right{self.planted}": right, "short": -0.5 * rollout.sample_index}
            rollout.reward = right

    def _measure(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        rewards = [rollout.reward or 0.0 for group in groups for rollout in group]
        return {
            "reward": float(np.mean(rewards)),
            "rewards/right/mean": float(np.mean(rewards)),
            "rewards/short/mean": -0.25,
            "loss": 0.5 / (1 + self.step),
            "entropy": 2.0 - 0.1 * self.step,
            "kl": 0.001 * self.step,
            **({"eval/accuracy": 0.5, "eval/reward": 0.5} if self.step % 4 == 0 else {}),
            "completions/mean_length": 20.0 + self.step,
            "staleness/mean": 0.0,
            "tokens_per_second": 100.0,
            "time/step": 2.0,
            "time/train": 1.5,
            "time/wait": 0.5,
            "sampling/logp_difference/mean": 0.01,
            "num_tokens": 200.0,
        }


def finished_run(folder: Path, *, num_steps: int = 6, **options: Any) -> ViewerRun:
    """Write a run that has finished."""
    with recorded_outcome_of(folder):
        run = ViewerRun(folder, num_steps=num_steps, **options).train(num_steps)
        run.ledger.note("death", f"rollout-0{run.planted}", f"engine rollout-0 died: killed{run.planted}")
        run.ledger.note("health", "entropy_high", "warning (entropy_high): the policy becomes random")
        run.record_parts()
        run.end()
    return run


@contextmanager
def recorded_outcome_of(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with recorded_outcome(folder):
        yield


def write_going_on(folder: str, pause_s: str) -> None:
    """Write a run step by step until the process is ended, as a live run does."""
    with recorded_outcome_of(Path(folder)):
        run = ViewerRun(Path(folder), num_steps=100_000)
        while True:
            run.train(1)
            run.record_parts()
            if run.step % 2 == 0:
                run.ledger.note("death", "rollout-0", f"engine rollout-0 died after step {run.step}")
            print(run.step, flush=True)
            time.sleep(float(pause_s))


if __name__ == "__main__":
    write_going_on(*sys.argv[1:])
