"""The data types that the parts of a run exchange; their arrays are numpy's, which Ray reads without a copy.

Shapes: T tokens of one rollout, P tokens of its prompt, N packed tokens of a micro batch, S sequences in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.schema.rollout_config import SamplingConfig

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
HalfArray = NDArray[np.float16]
BoolArray = NDArray[np.bool_]
ByteArray = NDArray[np.uint8]

NO_VERSION = -1
"""Policy version of tokens that no policy sampled (prompts, tool results)."""
NO_TURN = -1
"""Turn of tokens that the policy did not sample."""
NO_GROUP = -1
"""Group id of a sequence that only pads a micro batch."""

ALIGNMENT, DIVERSITY = "alignment", "diversity"
"""Names of EBFT's two rewards; the second is a mean over a rollout's pairs with its siblings."""

ChatMessages = list[dict[str, Any]]


@dataclass(kw_only=True, slots=True, frozen=True)
class PlacedImage:
    """Image within a token sequence."""

    start: int
    """Index of the first of the tokens that stand for the image."""
    num_tokens: int
    content: bytes
    """Bytes of the encoded image (PNG, JPEG and so on)."""

    def moved(self, distance: int) -> PlacedImage:
        """Return the image moved by ``distance`` tokens."""
        return replace(self, start=self.start + distance)


Images = tuple[PlacedImage, ...]
"""Images of one sequence, in their order."""


class RolloutStatus(StrEnum):
    """Outcome of sampling a rollout."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(kw_only=True, slots=True, frozen=True)
class GroundTruth:
    """Ground truth of a row: the tokens that follow its prompt."""

    token_ids: IntArray  # [T], from the assistant's first token on
    is_assistant: BoolArray  # [T]

    def turns(self) -> list[tuple[int, int]]:
        """Return the half-open token range of each turn of the assistant."""
        edges = np.flatnonzero(np.diff(np.r_[False, self.is_assistant, False])).tolist()
        return list(zip(edges[::2], edges[1::2], strict=True))


@dataclass(kw_only=True, slots=True, frozen=True)
class Prompt:
    """Rendered row of the prompt source."""

    prompt_id: int
    """Row number in the source, from 0; the same in every epoch."""
    epoch: int
    token_ids: IntArray  # [P]
    prompt: str | ChatMessages
    """Text or chat messages that reward functions receive in ``prompts``."""
    task: Mapping[str, Any]
    """Other columns of the row."""
    max_tokens: int | None = None
    """Limit on the completion's tokens, in addition to the run's; None: the run's limit only."""
    turns: Sequence[IntArray] = ()
    """Tokens between the policy's turns: those after its first turn, its second turn, and so on."""
    truth: GroundTruth | None = None
    """Ground truth completion, if a reward or loss compares with it."""
    images: Images = ()
    folded_ids: IntArray | None = None  # [F]
    """Tokens with a single placeholder for each image, as vLLM takes them; None without images."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    def followed_by(self, token_ids: IntArray) -> Prompt:
        """Return the prompt of a later turn, whose ``token_ids`` ``[T]`` begin with this prompt's tokens."""
        folded = self.folded_ids
        if folded is not None:
            folded = np.concatenate([folded, token_ids[len(self.token_ids) :]])
        return replace(self, token_ids=token_ids, folded_ids=folded, turns=())

    def with_truth(self) -> tuple[IntArray, BoolArray]:
        """Return the tokens of the prompt and its ground truth, and a mask of those that the assistant wrote."""
        assert self.truth is not None, "prompts without ground truth are skipped"
        before = np.zeros(len(self.token_ids), np.bool_)
        return (
            np.concatenate([self.token_ids, self.truth.token_ids]),
            np.concatenate([before, self.truth.is_assistant]),
        )

    def limit(self, max_tokens: int) -> int:
        """Return the limit on this prompt's completion in a run with the limit ``max_tokens``."""
        return max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens)


@dataclass(kw_only=True, slots=True, frozen=True)
class EpisodeTrace:
    """Messages, rewards and further sequences of a rollout that has several turns."""

    messages: ChatMessages
    """The conversation after what the policy saw first."""
    reward: float | None
    """The environment's reward; None if only reward functions score the episode."""
    turn_rewards: Sequence[float]
    """Rewards of the policy's turns, in the order in which they were sampled."""
    end: str
    """Reason of its end, such as ``done`` or ``max_turns``."""
    branches: Sequence[Rollout] = ()
    """Further sequences, in which the conversation was rendered anew or went on in another way."""


@dataclass(kw_only=True, slots=True)
class Rollout:
    """Token sequence in which ``loss_mask`` marks the tokens that the policy sampled.

    The arrays have equal length T. ``logprobs`` are those of the sampling policy, 0 where unmasked;
    ``policy_versions`` is ``NO_VERSION`` where unmasked. Raises ``ValueError`` if the lengths differ, or if the first
    token is marked.
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
    turns: IntArray | None = None  # [T]
    """Numbers of the turns that sampled the tokens, from 0, ``NO_TURN`` where unmasked; None without an episode."""
    episode: EpisodeTrace | None = None
    """The rest of an episode; None in a rollout of one turn, and in a further branch."""
    rejected: Rollout | None = None
    """The worse completion of a preference, of which this is the better one."""
    is_greedy: bool = False
    """True for the greedy completion of a prompt, which others are compared with and which is not trained."""
    first_index: int = 0
    """Place of its first loss token among those of the step."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        for name in ("loss_mask", "logprobs", "policy_versions", "advantages", "ref_logprobs", "turns"):
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
    def sequences(self) -> list[Rollout]:
        """The sequences to train: the rollout itself, and an episode's further branches or the rejected completion."""
        if self.rejected is not None:
            return [self, self.rejected]
        return [self] if self.episode is None else [self, *self.episode.branches]

    @property
    def completion_ids(self) -> IntArray:
        """Tokens after the prompt, from the first sampled one to the end."""
        sampled = np.flatnonzero(self.loss_mask)
        return self.token_ids[sampled[0] :] if len(sampled) else self.token_ids[:0]

    @property
    def oldest_version(self) -> int:
        """Oldest policy version that sampled one of its tokens, or ``NO_VERSION`` if none was sampled."""
        sampled = self.policy_versions[self.loss_mask]
        return int(sampled.min()) if len(sampled) else NO_VERSION

    @property
    def newest_version(self) -> int:
        """Newest policy version that sampled one of its tokens, or ``NO_VERSION`` if none was sampled."""
        return int(self.policy_versions[self.loss_mask].max(initial=NO_VERSION))

    @property
    def num_tokens_by_version(self) -> dict[int, int]:
        """Number of sampled tokens by the policy version that sampled them."""
        versions, counts = np.unique(self.policy_versions[self.loss_mask], return_counts=True)
        return dict(zip(versions.tolist(), counts.tolist(), strict=True))

    @property
    def mean_advantage(self) -> float | None:
        """Mean advantage of the loss tokens; most algorithms give all the same. None without one, or if not finite."""
        values = self.loss_advantages
        value = float(values.mean()) if len(values) else math.nan
        return value if math.isfinite(value) else None

    @property
    def loss_advantages(self) -> FloatArray:
        """Advantages of the loss tokens of all its sequences; empty before they are known."""
        advantages = [
            sequence.advantages[sequence.loss_mask] for sequence in self.sequences if sequence.advantages is not None
        ]
        return np.concatenate(advantages) if advantages else np.zeros(0, np.float32)


@dataclass(kw_only=True, slots=True)
class RolloutGroup:
    """Sibling rollouts of one prompt."""

    group_id: int
    prompt: Prompt
    rollouts: list[Rollout]
    failure: str | None = None
    """Reason why the group can't be trained, or None."""
    generate_s: float = 0.0
    """Seconds from the engine's receipt of the request to its last token."""
    score_s: float = 0.0
    engine: str = ""
    """Name of the engine that sampled the group."""
    logged: dict[str, float] = field(default_factory=dict)
    """Means over the group of the metrics that reward functions passed to ``log_metric``."""

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    @property
    def sampled(self) -> list[Rollout]:
        """The rollouts without the greedy one."""
        return [rollout for rollout in self.rollouts if not rollout.is_greedy]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def num_loss_tokens(self) -> int:
        return sum(sequence.num_loss_tokens for sequence in self.sequences)

    @property
    def sequences(self) -> list[Rollout]:
        """The sequences to train of all rollouts."""
        return [sequence for rollout in self.rollouts for sequence in rollout.sequences]

    @property
    def oldest_version(self) -> int:
        versions = [sequence.oldest_version for sequence in self.sequences]
        return min((version for version in versions if version != NO_VERSION), default=NO_VERSION)


@dataclass(kw_only=True, slots=True)
class MicroBatch:
    """Sequences of one forward pass, packed one after the other without padding.

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
    first_indices: NDArray[np.int64]  # [S], as in rollouts
    ref_logprobs: FloatArray | None = None  # [N]
    shares: FloatArray | None = None  # [N]
    """Share of a token's sequence in the loss tokens of its episode; None: every sequence is a whole episode."""
    images: Images = ()
    """Images of all sequences, placed within the N tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_starts) - 1


@dataclass(kw_only=True, slots=True)
class MiniBatch:
    """One rank's micro batches of an optimizer update, and the denominators of the update on **all** ranks.

    Every rank has the same number of micro batches; a micro batch that only pads has an empty loss mask.
    """

    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    num_sequences: int
    """Number of rollouts; the branches of an episode count as one, and so does a pair."""
    num_chosen_tokens: int = 0
    """Loss tokens of the chosen completions of pairs."""
    mismatched: MiniBatch | None = None
    """Prompts with the completions of other rows, from which KTO estimates the KL."""
    truth: MiniBatch | None = None
    """Ground truths whose likelihood is trained as well (``algorithm.ebft.ce_coef``)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRewards:
    """Rewards of a step's groups, from which the learner computes advantages; lists have one entry for each group.

    The loss tokens of the step are numbered in the order of groups, rollouts and their sequences.
    """

    rewards: Sequence[FloatArray]  # [G], NaN for rollouts that no reward function scored
    num_tokens: Sequence[IntArray]  # [G], loss tokens
    pairwise: Sequence[FloatArray] | None = None
    """Part of each reward that is a mean over pairs ``[G]``, of EBFT; None without one."""
    baselines: Sequence[float] = ()
    """Reward of the greedy completion, NaN if it has none; empty if the groups have no greedy completion."""


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """Batch that one learner rank receives for one step."""

    step: int
    mini_batches: list[MiniBatch]
    rewards: StepRewards | None = None
    """Rewards of all ranks' rollouts, if the learner computes the advantages."""
    group_ranges: Mapping[int, range] = field(default_factory=dict)
    """Indices of each group's loss tokens among all of the step, in the order of ``StepRewards``."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the replay buffer knows (rewards, lengths, staleness); equal on all ranks."""
    resume: dict[str, Any] = field(default_factory=dict)
    """Place of the prompt source when the step was assembled; stored in a checkpoint after the step."""


MAX_SEED = 2**31
"""Seeds of requests are below it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupRequest:
    """Request to an engine for one group."""

    group_id: int
    prompt: Prompt
    group_size: int
    max_tokens: int
    temperature: float
    seed: int
    min_version: int = 0
    """Oldest policy version that may sample its tokens."""
    sampling: SamplingConfig | None = None
    """Sampling options other than temperature and length; None: the run's."""
    use_adapter: bool = True
    """False: sample from the base model without the adapter, which is the same in every version."""
    has_priority: bool = False
    """True: start before waiting requests that do not have this set."""
    with_greedy: bool = False
    """True: sample one more completion at temperature 0, as the group's last rollout."""

    @property
    def outstanding_tokens(self) -> int:
        """Upper bound of the tokens that the request costs."""
        return len(self.prompt.token_ids) + (self.group_size + self.with_greedy) * self.max_tokens


class WeightsKind(StrEnum):
    """The contents of a version, and the way in which engines serve them."""

    LORA = "lora"
    """An adapter, which is served on top of the base."""
    MERGED = "merged"
    """An adapter, which engines merge into the base's weights; its digest is that of the weights that result."""
    FULL = "full"
    """A whole model."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorSpec:
    """Name, type and shape of a tensor that is sent."""

    name: str
    dtype: str
    """Name of the torch dtype, without ``torch.``."""
    shape: tuple[int, ...]


@dataclass(kw_only=True, slots=True, frozen=True)
class Transfer:
    """Process group of the first learner rank and the engines' workers, for sending weights directly."""

    address: str
    port: int
    specs: Sequence[TensorSpec]
    """Tensors that are sent, in this order."""
    buffer_bytes: int
    """Size of each of the two buffers that NCCL sends from."""
    num_processes: int = 1
    """Number of processes: the learner's, which has rank 0, and all workers."""
    first_rank: int = 1
    """Rank of the engine's first worker."""


@dataclass(kw_only=True, slots=True, frozen=True)
class WeightsManifest:
    """Description of one published version; its tensors are sent separately, as buckets of safetensors bytes."""

    version: int
    kind: WeightsKind
    digest: str
    """Digest that an engine with this version must report (see ``rlpipe.weights.buckets``)."""
    num_buckets: int
    num_bytes: int
    adapter_config: Mapping[str, Any] | None = None
    """PEFT's adapter config; None for a whole model."""
    transfer: Transfer | None = None
    """Process group over which tensors are sent instead of in buckets; the digest then follows once they are sent."""


Buckets = Sequence[ByteArray]
ServedRecord = tuple[str, str, str]
"""Kind, digest and type of the weights of a version that engines served."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineHealth:
    """State that an engine reports of itself."""

    name: str
    version: int
    digest: str
    outstanding_groups: int
    num_tokens: int
    """Completion tokens sampled since it started."""
    busy_s: float
    """Seconds in which it had something to generate."""
