"""The typed objects that flow between the parts of a run; plain numpy, so that Ray reads them without a copy.

Shapes: T tokens of one rollout, P tokens of its prompt, N packed tokens of a micro batch, S sequences in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.schema.rollout_config import SamplingConfig

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]

NO_VERSION = -1
"""The policy version of tokens that no policy drew (prompts, tool results)."""
NO_GROUP = -1
"""The group of a sequence that only fills a micro batch."""

ALIGNMENT, DIVERSITY = "alignment", "diversity"
"""EBFT's two rewards, of which the second is a mean over a rollout's pairs with its siblings."""

ChatMessages = list[dict[str, Any]]


@dataclass(kw_only=True, slots=True, frozen=True)
class PlacedImage:
    """An image within a token sequence."""

    place: int
    """The first of the tokens that stand for it."""
    num_tokens: int
    content: bytes
    """Encoded, as in a file: PNG, JPEG and so on."""

    def moved(self, distance: int) -> PlacedImage:
        """Where its sequence begins ``distance`` tokens later."""
        return replace(self, place=self.place + distance)


Images = tuple[PlacedImage, ...]
"""By their places."""


class RolloutStatus(StrEnum):
    """How the sampling of a rollout ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(kw_only=True, slots=True, frozen=True)
class Truth:
    """What follows the prompt in a row that has a ground truth."""

    token_ids: IntArray  # [T], from the assistant's first token on
    is_assistant: BoolArray  # [T]

    def turns(self) -> list[tuple[int, int]]:
        """The first token of each turn of the assistant, and the one behind it."""
        edges = np.flatnonzero(np.diff(np.r_[False, self.is_assistant, False])).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """One rendered row of the prompt source."""

    prompt_id: int
    """Row number in the source, from 0; stays the same in every epoch."""
    epoch: int
    token_ids: IntArray  # [P]
    prompt: str | ChatMessages
    """What reward functions receive as ``prompts``: the text, or the chat messages."""
    task: Mapping[str, Any]
    """The row's other columns."""
    max_tokens: int | None = None
    """The longest completion of this prompt; None: the run's limit alone."""
    turns: Sequence[IntArray] = ()
    """What comes behind the policy's first turn, its second one, and so on, each up to where the policy goes on."""
    truth: Truth | None = None
    """What the policy should have written, where rewards compare with it."""
    images: Images = ()
    folded_ids: IntArray | None = None  # [F]
    """The tokens with a single placeholder for each image, as vLLM takes them; None without images."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    def followed_by(self, token_ids: IntArray) -> Prompt:
        """The prompt of a later turn, for which ``token_ids`` ``[T]`` begin with those of this one."""
        folded = self.folded_ids
        if folded is not None:
            folded = np.concatenate([folded, token_ids[len(self.token_ids) :]])
        return replace(self, token_ids=token_ids, folded_ids=folded, turns=())

    def with_truth(self) -> tuple[IntArray, BoolArray]:
        """The tokens of the prompt and the ground truth behind it, and which of them the policy should have written."""
        assert self.truth is not None, "prompts without ground truth are skipped"
        before = np.zeros(len(self.token_ids), np.bool_)
        return (
            np.concatenate([self.token_ids, self.truth.token_ids]),
            np.concatenate([before, self.truth.is_assistant]),
        )

    def limit(self, max_tokens: int) -> int:
        """The longest completion of this prompt in a run with the limit ``max_tokens``."""
        return max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens)


@dataclass(kw_only=True, slots=True)
class Rollout:
    """One token sequence, of which ``loss_mask`` marks the tokens that the policy drew.

    The arrays have equal length T. ``logprobs`` are those of the sampling policy, 0 where unmasked;
    ``policy_versions`` is ``NO_VERSION`` where unmasked. Raises ``ValueError`` if these do not fit together.
    """

    group_id: int
    sample_index: int
    prompt_id: int
    task: Mapping[str, Any]
    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T]
    logprobs: FloatArray  # [T]
    policy_versions: IntArray  # [T]
    advantages: FloatArray | None = None  # [T]
    ref_logprobs: FloatArray | None = None  # [T]
    rewards: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None
    status: RolloutStatus = RolloutStatus.COMPLETED
    finish_reason: str = "stop"
    images: Images = ()

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_versions", "advantages", "ref_logprobs"):
            array = getattr(self, name)
            if array is not None and len(array) != length:
                raise ValueError(f"rollout {self.name}: {name} has {len(array)} entries for {length} tokens")
        if length and self.loss_mask[0]:
            raise ValueError(f"rollout {self.name}: its first token has no predecessor and can't be trained")

    @property
    def name(self) -> str:
        return f"{self.group_id}/{self.sample_index}"

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def completion_ids(self) -> IntArray:
        """All tokens after the prompt: from the first drawn one to the end."""
        drawn = np.flatnonzero(self.loss_mask)
        return self.token_ids[drawn[0] :] if len(drawn) else self.token_ids[:0]

    @property
    def oldest_version(self) -> int:
        """The version that drew its oldest token, or ``NO_VERSION`` if none was drawn."""
        drawn = self.policy_versions[self.loss_mask]
        return int(drawn.min()) if len(drawn) else NO_VERSION

    @property
    def newest_version(self) -> int:
        """The version that drew its newest token, or ``NO_VERSION`` if none was drawn."""
        return int(self.policy_versions[self.loss_mask].max(initial=NO_VERSION))


@dataclass(kw_only=True, slots=True)
class RolloutGroup:
    """The sibling rollouts of one prompt."""

    group_id: int
    prompt: Prompt
    rollouts: list[Rollout]
    failure: str | None = None
    """Why the group can't be trained, or None."""
    generate_s: float = 0.0
    """Seconds from the engine's receipt of the request to its last token."""
    score_s: float = 0.0
    engine: str = ""
    """Which one sampled it."""
    logged: dict[str, float] = field(default_factory=dict)
    """What reward functions gave to ``log_metric``, each the mean over the group."""

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    @property
    def num_tokens(self) -> int:
        return sum(len(rollout.token_ids) for rollout in self.rollouts)

    @property
    def num_loss_tokens(self) -> int:
        return sum(rollout.num_loss_tokens for rollout in self.rollouts)

    @property
    def oldest_version(self) -> int:
        versions = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in versions if version != NO_VERSION), default=NO_VERSION)


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Sequences packed one after the other without padding; one forward pass.

    Entry t of ``logprobs``, ``advantages`` and so on belongs to token t, which the hidden state at t-1 predicts;
    the first token of every sequence is therefore never in ``loss_mask``.
    """

    token_ids: NDArray[np.int64]  # [N]
    position_ids: NDArray[np.int64]  # [N], restarts at 0 with every sequence
    sequence_starts: IntArray  # [S + 1], from 0 to N
    loss_mask: BoolArray  # [N]
    logprobs: FloatArray  # [N]
    advantages: FloatArray  # [N]
    policy_versions: IntArray  # [N]
    group_ids: IntArray  # [S]
    ref_logprobs: FloatArray | None = None  # [N]
    images: Images = ()
    """Placed among the N tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_starts) - 1


@dataclass(kw_only=True, slots=True)
class MiniBatch:
    """One optimizer update: this rank's micro batches, and the denominators of the update on **all** ranks.

    Every rank has the same number of micro batches; one without work carries an empty loss mask.
    """

    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    num_sequences: int
    truth: MiniBatch | None = None
    """Ground truths, whose likelihood is trained as well (``algorithm.ebft.ce_coef``)."""


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """What one learner rank receives for one step."""

    step: int
    mini_batches: list[MiniBatch]
    metrics: dict[str, float] = field(default_factory=dict)
    """What the replay buffer knows of the step (rewards, lengths, staleness); equal on all ranks."""
    resume: dict[str, Any] = field(default_factory=dict)
    """Where the prompts stood when the step was assembled; part of a checkpoint taken after the step."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupRequest:
    """Asks an engine for one group."""

    group_id: int
    prompt: Prompt
    group_size: int
    max_tokens: int
    temperature: float
    seed: int
    min_version: int = 0
    """The oldest policy version that may draw its tokens."""
    sampling: SamplingConfig | None = None
    """All but its temperature and length; None: the run's."""
    use_adapter: bool = True
    """False: the model beneath the adapter draws its tokens, which no version changes."""
    goes_first: bool = False
    """Before those that wait and do not."""

    @property
    def outstanding_tokens(self) -> int:
        """The most tokens that the request can still cost."""
        return len(self.prompt.token_ids) + self.group_size * self.max_tokens


class WeightsKind(StrEnum):
    LORA = "lora"
    FULL = "full"


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorOutline:
    """A tensor that is sent: all but its values."""

    name: str
    dtype: str
    """As torch calls it, without ``torch.``."""
    shape: tuple[int, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class Transfer:
    """Where the first learner rank and the engines' workers meet, for weights that go to them directly."""

    address: str
    port: int
    outlines: Sequence[TensorOutline]
    """What is sent, in this order."""
    buffer_bytes: int
    """Of each of the two buffers that NCCL sends from."""
    num_processes: int = 1
    """The learner's, rank 0, and all workers."""
    first_rank: int = 1
    """Of the engine's first worker."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsManifest:
    """Describes one published version; its tensors travel beside it as safetensors bytes, in buckets."""

    version: int
    kind: WeightsKind
    digest: str
    """What an engine that serves this version must answer (see ``rlpipe.rollout.digest``)."""
    num_buckets: int
    num_bytes: int
    adapter_config: Mapping[str, Any] | None = None
    """PEFT's adapter config, for LoRA."""
    transfer: Transfer | None = None
    """How the tensors come where they are in no buckets; the digest follows once they are sent."""


Buckets = Sequence[ByteArray]


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineHealth:
    """What an engine says of itself."""

    name: str
    version: int
    digest: str
    outstanding_groups: int
    num_tokens: int
    """Completion tokens drawn since it started."""
    busy_s: float
    """Seconds in which it had something to generate."""
