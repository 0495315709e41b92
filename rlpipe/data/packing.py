"""Packing of a step's rollouts without padding into micro batches that are balanced over the learner ranks.

Shapes: N packed tokens of a micro batch, S sequences in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heapreplace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.data.render.processor import Encoded
from rlpipe.errors import ConfigError
from rlpipe.types import NO_GROUP, NO_VERSION, FloatArray, MicroBatch, MiniBatch, Rollout, TrainBatch

EVEN_LENGTH = 16384
"""Sequence length at which attention costs as much as all else: 12 times the hidden size, here taken as 1,365."""

UNITS_PER_SHARE = 4
"""Siblings stay together in units of at most 1/4 of a micro batch's tokens, and of a rank's share of the cost.

Tokens that an episode's branches share count once in this.
"""


@dataclass(slots=True, frozen=True)
class _Unit:
    """Sibling sequences that stay together, so that a micro batch can process once what they share.

    The two completions of a pair always do, because their loss compares them.
    """

    members: list[int]  # indices in the mini batch
    num_tokens: int
    cost: float


def pack_step(
    rollouts: Sequence[Rollout],
    *,
    step: int,
    num_ranks: int,
    max_tokens: int,
    num_minibatches: int = 1,
    num_epochs: int = 1,
    seed: int = 0,
    skip_zero_advantage: bool = False,
) -> list[TrainBatch]:
    """Pack the rollouts of a step into one ``TrainBatch`` per rank; their ``advantages`` must be set.

    Every epoch splits all rollouts into ``num_minibatches`` mini batches of equal size (within one sequence), in an
    order that ``seed``, step and epoch determine; with fewer rollouts than that, each is a mini batch. A single mini
    batch and epoch keeps the order. Within a mini batch all ranks have the same number of micro batches of at most
    ``max_tokens`` tokens; missing ones are filled up with micro batches without loss tokens.

    The branches of an episode stay in one mini batch. The denominators of a mini batch are over all ranks. As in TRL,
    ``num_sequences`` also counts rollouts without loss tokens: they add nothing to the sum, but do count in the number
    that the mean over sequences (GRPO) and the constant (Dr.GRPO) divide by.

    Raises ``ConfigError``, a ``ValueError``, for a rollout of more than ``max_tokens`` tokens, and ``ValueError`` if
    there are no rollouts, if one is empty or lacks advantages, or if only some have ``ref_logprobs``.
    """
    _check(rollouts, step, max_tokens)
    ranks: list[list[MiniBatch]] = [[] for _ in range(num_ranks)]
    for share in _deal(rollouts, [seed, step], num_minibatches, num_epochs):
        for rank, batch in zip(ranks, _pack_minibatch(share, num_ranks, max_tokens, skip_zero_advantage), strict=True):
            rank.append(batch)
    return [TrainBatch(step=step, mini_batches=mini_batches) for mini_batches in ranks]


def pack_labelled(rollouts: Sequence[Rollout], *, max_tokens: int, **options: Any) -> list[TrainBatch]:
    """Pack completions that are good or bad, with the mismatched ones that KTO estimates the KL from.

    Pairs are taken apart, so that the two of one do not follow each other. The completions of a single row have no
    mismatched ones. Options and errors are those of ``pack_step``.
    """
    chosen = [replace(rollout, rejected=None) for rollout in rollouts]
    labelled = [*chosen, *(rollout.rejected for rollout in rollouts if rollout.rejected is not None)]
    batches = pack_step(labelled, max_tokens=max_tokens, **options)
    mismatched = _mismatch(labelled, max_tokens)
    if not mismatched:
        for mini_batch in (mini_batch for batch in batches for mini_batch in batch.mini_batches):
            mini_batch.mismatched = MiniBatch(micro_batches=[], num_loss_tokens=0, num_sequences=0)
        return batches
    mismatched_batches = pack_step(mismatched, max_tokens=max_tokens, **options)
    for batch, mismatched_batch in zip(batches, mismatched_batches, strict=True):
        for mini_batch, counterpart in zip(batch.mini_batches, mismatched_batch.mini_batches, strict=True):
            mini_batch.mismatched = counterpart
    return batches


def _with_neighbours(rollouts: Sequence[Rollout]) -> Iterator[tuple[Rollout, Rollout]]:
    """Yield each rollout with the nearest one of another row before it; the last rollouts count as before the first.

    Rollouts of a single row have none.
    """
    for index, rollout in enumerate(rollouts):
        before = (rollouts[index - distance] for distance in range(1, len(rollouts)))
        neighbour = next((candidate for candidate in before if candidate.group_id != rollout.group_id), None)
        if neighbour is not None:
            yield rollout, neighbour


def _mismatch(rollouts: Sequence[Rollout], max_tokens: int) -> list[Rollout]:
    """Return each prompt with the completion of another row, cut to ``max_tokens`` tokens, or at an image."""
    mismatched = []
    for rollout, neighbour in _with_neighbours(rollouts):
        end, start = int(np.argmax(rollout.loss_mask)), int(np.argmax(neighbour.loss_mask))
        stop = min((image.start for image in neighbour.images if image.start >= start), default=None)
        mask = np.concatenate([np.zeros(end, np.bool_), neighbour.loss_mask[start:stop]])[:max_tokens]
        token_ids = np.concatenate([rollout.token_ids[:end], neighbour.token_ids[start:stop]])[:max_tokens]
        mismatched.append(
            replace(
                rollout,
                token_ids=token_ids,
                loss_mask=mask,
                logprobs=np.zeros(len(mask), np.float32),
                policy_versions=np.full(len(mask), NO_VERSION, np.int32),
                advantages=mask.astype(np.float32),
                images=tuple(image for image in rollout.images if image.start < end),
            )
        )
    return mismatched


def pack_fullest(
    rollouts: Sequence[Rollout], *, num_ranks: int, max_tokens: int, num_minibatches: int = 1, num_epochs: int = 1
) -> tuple[int, MicroBatch]:
    """Return the largest number of micro batches per rank in any mini batch, and the costliest one of its rank 0.

    The rollouts are split and packed as in ``pack_step``.
    """
    _check(rollouts, 0, max_tokens)
    most, costliest = 0, None
    for dealt in _deal(rollouts, [0, 0], num_minibatches, num_epochs):
        share = _sequences(dealt)
        bins = _fill_ranks(share, num_ranks, max_tokens)
        if (count := max(map(len, bins))) > most:
            most, costliest = count, _join([share[index] for index in bins[0][0]])
    assert costliest is not None, "there are rollouts"
    return most, costliest


def _deal(
    rollouts: Sequence[Rollout], seed: Sequence[int], num_minibatches: int, num_epochs: int
) -> Iterator[list[Rollout]]:
    """Yield the mini batches of all epochs."""
    for epoch in range(num_epochs):
        order = np.arange(len(rollouts))
        if num_epochs > 1 or num_minibatches > 1:
            order = np.random.default_rng([*seed, epoch]).permutation(order)
        for share in np.array_split(order, min(num_minibatches, len(rollouts))):
            yield [rollouts[index] for index in share]


def _check(rollouts: Sequence[Rollout], step: int, max_tokens: int) -> None:
    if not rollouts:
        raise ValueError(f"step {step} has no rollouts to train on")
    with_reference = rollouts[0].ref_logprobs is not None
    for rollout in _sequences(rollouts):
        length = len(rollout.token_ids)
        if length > max_tokens:
            raise ConfigError(
                f"rollout {rollout.name} has {length} tokens; set learner.max_tokens_per_microbatch, now {max_tokens}, "
                f"to at least {length}"
            )
        if length == 0:
            raise ValueError(f"rollout {rollout.name} has no tokens")
        if rollout.advantages is None:
            raise ValueError(f"rollout {rollout.name} has no advantages")
        if (rollout.ref_logprobs is not None) != with_reference:
            raise ValueError(
                f"rollout {rollout.name}: some rollouts of step {step} have ref_logprobs and some have not"
            )
    for rollout in rollouts:
        if rollout.rejected is None:
            continue
        length = len(rollout.token_ids) + len(rollout.rejected.token_ids)
        if length > max_tokens:
            raise ConfigError(
                f"rollouts {rollout.name} and {rollout.rejected.name}, which are compared, have {length} tokens "
                f"together; set learner.max_tokens_per_microbatch, now {max_tokens}, to at least {length}"
            )


def _pack_minibatch(
    rollouts: list[Rollout], num_ranks: int, max_tokens: int, skip_zero_advantage: bool
) -> list[MiniBatch]:
    """Return each rank's part of a mini batch."""
    num_sequences, shares = len(rollouts), _shares(rollouts)
    num_chosen_tokens = sum(rollout.num_loss_tokens for rollout in rollouts if rollout.rejected is not None)
    rollouts = _sequences(rollouts)
    num_loss_tokens = sum(rollout.num_loss_tokens for rollout in rollouts)
    with_reference = rollouts[0].ref_logprobs is not None
    if skip_zero_advantage:
        rollouts = [rollout for rollout in rollouts if _has_gradient(rollout)]
    bins = _fill_ranks(rollouts, num_ranks, max_tokens)
    num_micro_batches = max(len(rank) for rank in bins)
    mini_batches = []
    for rank in bins:
        micro_batches = [_join([rollouts[index] for index in members], shares) for members in rank]
        micro_batches += [
            empty_micro_batch(with_reference=with_reference) for _ in range(num_micro_batches - len(rank))
        ]
        mini_batches.append(
            MiniBatch(
                micro_batches=micro_batches,
                num_loss_tokens=num_loss_tokens,
                num_sequences=num_sequences,
                num_chosen_tokens=num_chosen_tokens,
            )
        )
    return mini_batches


def _sequences(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [sequence for rollout in rollouts for sequence in rollout.sequences]


def _shares(rollouts: Sequence[Rollout]) -> dict[int, float]:
    """Return the share of each sequence in the loss tokens of its episode, by the sequence's id in memory.

    It is empty if no episode has several sequences.
    """
    shares: dict[int, float] = {}
    if any(rollout.episode is not None and rollout.episode.branches for rollout in rollouts):
        for rollout in rollouts:
            total = max(sum(sequence.num_loss_tokens for sequence in rollout.sequences), 1)
            shares |= {id(sequence): sequence.num_loss_tokens / total for sequence in rollout.sequences}
    return shares


def _fill_ranks(rollouts: list[Rollout], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Return, for every rank, the members of its micro batches, costliest micro batch first."""
    units = _make_units(rollouts, num_ranks, max_tokens)
    return [_fill_bins(share, max_tokens) for share in _share_out(units, num_ranks)]


def _has_gradient(rollout: Rollout) -> bool:
    return rollout.advantages is not None and bool(rollout.advantages[rollout.loss_mask].any())


def sequence_cost(num_tokens: int) -> float:
    """Return the compute of one sequence, linear layers plus attention, in units of one token of a short sequence."""
    return num_tokens + num_tokens**2 / EVEN_LENGTH


def _make_units(rollouts: list[Rollout], num_ranks: int, max_tokens: int) -> list[_Unit]:
    costs = [sequence_cost(len(rollout.token_ids)) for rollout in rollouts]
    max_cost = sum(costs) / num_ranks / UNITS_PER_SHARE if num_ranks > 1 else float("inf")
    units = []
    for group in _siblings(rollouts):
        members: list[int] = []
        num_tokens, num_distinct, cost = 0, 0, 0.0
        for indices, shared in group:
            length = sum(len(rollouts[index].token_ids) for index in indices)
            added_cost = sum(costs[index] for index in indices)
            if members and (
                num_distinct + length - shared > max_tokens // UNITS_PER_SHARE
                or num_tokens + length > max_tokens
                or cost + added_cost - shared > max_cost
            ):
                units.append(_Unit(members, num_tokens, cost))
                members, num_tokens, num_distinct, cost, shared = [], 0, 0, 0.0, 0
            members += indices
            num_tokens += length
            num_distinct += length - shared
            cost += added_cost - shared
        units.append(_Unit(members, num_tokens, cost))
    return units


def _siblings(rollouts: Sequence[Rollout]) -> Iterator[list[tuple[list[int], int]]]:
    """Yield each group's sequences, or pairs of them, with the tokens that they share with earlier branches."""
    rejected = {id(rollout.rejected) for rollout in rollouts if rollout.rejected is not None}
    siblings: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        siblings.setdefault(rollout.group_id, []).append(index)
    for group in siblings.values():
        entries: list[tuple[list[int], int]] = []
        for index, shared in zip(group, _shared_with_branches([rollouts[index] for index in group]), strict=True):
            if id(rollouts[index]) in rejected:
                # What it shares with the chosen one is not split off.
                entries[-1] = [*entries[-1][0], index], entries[-1][1]
            else:
                entries.append(([index], shared))
        yield entries


def _shared_with_branches(sequences: Sequence[Rollout]) -> Iterator[int]:
    """Yield the tokens that each sequence has in common with an earlier branch of its own episode."""
    for _, episode in groupby(sequences, key=lambda sequence: sequence.sample_index):
        branches, prefixes = list(episode), PrefixIndex()
        yield from (prefixes.add(branch.token_ids)[1] for branch in branches) if len(branches) > 1 else (0,)


def _share_out(units: list[_Unit], num_ranks: int) -> list[list[_Unit]]:
    """Assign each unit, costliest first, to the rank with the least cost so far (longest processing time first)."""
    shares: list[list[_Unit]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    heapify(loads)
    for unit in sorted(units, key=lambda unit: -unit.cost):
        load, rank = loads[0]
        shares[rank].append(unit)
        heapreplace(loads, (load + unit.cost, rank))
    return shares


def _fill_bins(units: list[_Unit], max_tokens: int) -> list[list[int]]:
    """Pack the units into micro batches, longest first, each into the fullest one that has room (best fit).

    Returns the members of each micro batch, in their order. The costliest micro batch comes first, so that the micro
    batches that ranks run at the same time have similar cost.
    """
    bins: list[list[_Unit]] = []
    free_tokens: list[int] = []
    for unit in sorted(units, key=lambda unit: -unit.num_tokens):
        fitting = [index for index, free in enumerate(free_tokens) if free >= unit.num_tokens]
        if fitting:
            best = min(fitting, key=free_tokens.__getitem__)
        else:
            best = len(bins)
            bins.append([])
            free_tokens.append(max_tokens)
        bins[best].append(unit)
        free_tokens[best] -= unit.num_tokens
    bins.sort(key=lambda units: -sum(unit.cost for unit in units))
    return [sorted(index for unit in units for index in unit.members) for units in bins]


def _join(rollouts: list[Rollout], shares: Mapping[int, float] | None = None) -> MicroBatch:
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    references = [rollout.ref_logprobs for rollout in rollouts if rollout.ref_logprobs is not None]
    advantages: list[FloatArray] = [rollout.advantages for rollout in rollouts if rollout.advantages is not None]
    return MicroBatch(
        token_ids=np.concatenate([rollout.token_ids for rollout in rollouts]).astype(np.int64),
        position_ids=np.concatenate([np.arange(length, dtype=np.int64) for length in lengths]),
        sequence_starts=np.cumsum([0, *lengths]).astype(np.int32),
        loss_mask=np.concatenate([rollout.loss_mask for rollout in rollouts]),
        logprobs=np.concatenate([rollout.logprobs for rollout in rollouts]),
        advantages=np.concatenate(advantages),
        policy_versions=np.concatenate([rollout.policy_versions for rollout in rollouts]),
        group_ids=np.array([rollout.group_id for rollout in rollouts], np.int32),
        first_indices=np.array([rollout.first_index for rollout in rollouts], np.int64),
        ref_logprobs=np.concatenate(references) if references else None,
        shares=np.repeat([shares[id(rollout)] for rollout in rollouts], lengths).astype(np.float32) if shares else None,
        images=tuple(
            image.moved(start)
            for rollout, start in zip(rollouts, np.cumsum([0, *lengths[:-1]]).tolist(), strict=True)
            for image in rollout.images
        ),
    )


def split_padded(micro_batch: MicroBatch, max_tokens: int, together: int = 1) -> list[MicroBatch]:
    """Split a micro batch into parts of at most ``max_tokens`` tokens each, padding included.

    Every sequence is padded to the longest of its part. Sequences of similar length share a part, in their old order;
    ``together`` consecutive ones, such as the two of a pair, always do. Raises ``ConfigError`` if these alone have too
    many tokens.
    """
    lengths = np.diff(micro_batch.sequence_starts)
    if len(lengths) % together:  # a micro batch without loss, which has a single sequence
        return [micro_batch]
    longest = lengths.reshape(-1, together).max(axis=1)
    if together > 1 and (needed := together * int(longest.max())) > max_tokens:
        raise ConfigError(
            f"the pair of row {micro_batch.group_ids[together * int(longest.argmax())]} has {needed} tokens, padding "
            f"included; set learner.max_tokens_per_microbatch, now {max_tokens}, to at least {needed}"
        )
    parts = padded_parts(longest.tolist(), max_tokens // together)
    return [micro_batch] if len(parts) == 1 else [_take(micro_batch, _members(part, together)) for part in parts]


def _members(units: Sequence[int], together: int) -> list[int]:
    return [unit * together + member for unit in sorted(units) for member in range(together)]


def padded_parts(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the sequences of each part of at most ``max_tokens`` tokens, padding included, longest first.

    Sequences of similar length share a part; a sequence of more than ``max_tokens`` tokens has a part of its own.
    """
    parts: list[list[int]] = []
    remaining = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not remaining:
            parts.append([])
            remaining = max(1, max_tokens // max(lengths[index], 1))
        parts[-1].append(index)
        remaining -= 1
    return parts


def _take(micro_batch: MicroBatch, sequences: Sequence[int]) -> MicroBatch:
    starts = micro_batch.sequence_starts
    indices = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in sequences])
    reference = micro_batch.ref_logprobs
    lengths = [int(starts[index + 1] - starts[index]) for index in sequences]
    offsets = np.cumsum([0, *lengths])
    return MicroBatch(
        token_ids=micro_batch.token_ids[indices],
        position_ids=micro_batch.position_ids[indices],
        sequence_starts=offsets.astype(np.int32),
        loss_mask=micro_batch.loss_mask[indices],
        logprobs=micro_batch.logprobs[indices],
        advantages=micro_batch.advantages[indices],
        policy_versions=micro_batch.policy_versions[indices],
        group_ids=micro_batch.group_ids[list(sequences)],
        first_indices=micro_batch.first_indices[list(sequences)],
        ref_logprobs=None if reference is None else reference[indices],
        shares=None if micro_batch.shares is None else micro_batch.shares[indices],
        images=tuple(
            image.moved(int(offset - starts[index]))
            for index, offset in zip(sequences, offsets[:-1], strict=True)
            for image in micro_batch.images
            if starts[index] <= image.start < starts[index + 1]
        ),
    )


def empty_micro_batch(*, with_reference: bool) -> MicroBatch:
    """Return a micro batch of two tokens without loss, for a rank that has fewer micro batches than others."""
    return MicroBatch(
        token_ids=np.zeros(2, np.int64),
        position_ids=np.arange(2, dtype=np.int64),
        sequence_starts=np.array([0, 2], np.int32),
        loss_mask=np.zeros(2, np.bool_),
        logprobs=np.zeros(2, np.float32),
        advantages=np.zeros(2, np.float32),
        policy_versions=np.full(2, NO_VERSION, np.int32),
        group_ids=np.array([NO_GROUP], np.int32),
        first_indices=np.zeros(1, np.int64),
        ref_logprobs=np.zeros(2, np.float32) if with_reference else None,
    )


def with_blank(micro_batch: MicroBatch, blank: Encoded) -> MicroBatch:
    """Return the micro batch with one more sequence, an image without loss."""
    length = len(blank.token_ids)
    none = np.zeros(length, np.float32)

    def added(values: NDArray[Any], new: Any) -> NDArray[Any]:
        return np.concatenate([values, np.asarray(new, values.dtype)])

    return replace(
        micro_batch,
        token_ids=added(micro_batch.token_ids, blank.token_ids),
        position_ids=added(micro_batch.position_ids, np.arange(length)),
        sequence_starts=added(micro_batch.sequence_starts, [micro_batch.num_tokens + length]),
        loss_mask=added(micro_batch.loss_mask, none),
        logprobs=added(micro_batch.logprobs, none),
        advantages=added(micro_batch.advantages, none),
        policy_versions=added(micro_batch.policy_versions, np.full(length, NO_VERSION)),
        group_ids=added(micro_batch.group_ids, [NO_GROUP]),
        first_indices=added(micro_batch.first_indices, [0]),
        ref_logprobs=None if micro_batch.ref_logprobs is None else added(micro_batch.ref_logprobs, none),
        shares=None if micro_batch.shares is None else added(micro_batch.shares, none),
        images=tuple(image.moved(micro_batch.num_tokens) for image in blank.images),
    )


@dataclass(slots=True)
class PrefixIndex:
    """The sequences that were added so far, in the order of their tokens.

    Of all sequences, those that are next to a new one in this order share the most with it.
    """

    _ordered: list[tuple[bytes, int]] = field(default_factory=list)
    _sequences: list[NDArray[np.integer]] = field(default_factory=list)

    def add(self, tokens: NDArray[np.integer]) -> tuple[int, int]:
        """Add a sequence ``[T]``; return the number of the one that shares most with it, and how many tokens.

        Sequences are numbered from 0 as they are added. If there is none before, both numbers are 0.
        """
        entry = (tokens.tobytes(), len(self._sequences))
        index = bisect_left(self._ordered, entry)
        best = (0, 0)
        for _, number in self._ordered[max(index - 1, 0) : index + 1]:
            shared = common_length(self._sequences[number], tokens)
            if shared > best[1]:
                best = (number, shared)
        self._ordered.insert(index, entry)
        self._sequences.append(tokens)
        return best


def common_length(first: NDArray[np.integer], second: NDArray[np.integer]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length
