"""Choice of the plan of chunked offload, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from rlpipe.common.formatting import duration, gib
from rlpipe.hardware.calibration import num_ranks, on_rank0
from rlpipe.offload.decision import Arrangement, Capacity, Decision, Knobs, Mode
from rlpipe.offload.layout import ChunkLayout
from rlpipe.offload.planner.cost import Profile, Rates, arrange, interleave, predict
from rlpipe.offload.planner.search import Choice, DoesNotFit, search
from rlpipe.offload.planner.trace import Trace
from rlpipe.offload.runtime.chunk import ChunkRanks, OneRank, Replicated, Sharded
from rlpipe.offload.units import Unit

AMORTISING_SEQUENCES = 4
"""Sequences per update below which fixed costs, such as transfers and the optimizer, are most of its time."""


def describe_small_update(num_sequences: int) -> str:
    return (
        f"an update of {num_sequences} sequences is too small to make up for the fixed costs of its transfers; "
        f"use {AMORTISING_SEQUENCES} or more"
    )


def given_decision(units: Sequence[Unit], layout: ChunkLayout, knobs: Knobs, *, num_parts: int) -> Decision:
    """Return the decision for ``knobs`` that are all given; modes are as in ``arrange``, but with swaps spread evenly.

    Raises ``ValueError`` if the model has fewer blocks.
    """
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    per_swap = -(-knobs.num_checkpointed // max(knobs.num_swapped, 1))
    early = interleave(knobs.num_swapped, knobs.num_checkpointed, per_swap) + [Mode.OFFLOAD] * knobs.num_offloaded
    if len(early) > len(blocks):
        raise ValueError(f"num_swapped, num_checkpointed and num_offloaded are {len(early)} of {len(blocks)} layers")
    modes = [Mode.KEEP] * len(units)
    for index, mode in zip(blocks, early, strict=False):
        modes[index] = mode
    return Decision(
        arrangement=Arrangement(num_persistent=knobs.num_persistent, num_slots=knobs.num_slots, modes=modes),
        knobs=knobs,
        prediction=None,
        num_parts=num_parts,
        num_chunks=len(layout.chunks),
        num_blocks=len(blocks),
    )


def decide(
    trace: Trace,
    profiles: Mapping[int, Profile],
    *,
    num_units: int,
    rates: Rates,
    capacity: Capacity,
    fixed: Mapping[str, int],
) -> Decision:
    """Return the fastest plan that fits, given ``profiles`` by the number of parts per chunk.

    Raises ``DoesNotFit``, and ``ValueError`` if no plan has the ``fixed`` knobs.
    """
    choices: dict[int, Choice] = {}
    failures: list[DoesNotFit] = []
    for num_parts, profile in profiles.items():
        try:
            choices[num_parts] = search(profile, rates, capacity, fixed)
        except DoesNotFit as failure:
            failures.append(failure)
    if not choices:
        raise failures[-1]
    num_parts, choice = min(choices.items(), key=lambda entry: entry[1].prediction.seconds)
    profile = profiles[num_parts]
    modes = [Mode.KEEP] * num_units
    for stage, mode in zip(trace.stages, arrange(profile, choice.knobs, rates), strict=True):
        if stage.unit is not None:
            modes[stage.unit] = mode
    return Decision(
        arrangement=Arrangement(
            num_persistent=choice.knobs.num_persistent, num_slots=choice.knobs.num_slots, modes=modes
        ),
        knobs=choice.knobs,
        prediction=choice.prediction,
        num_parts=num_parts,
        num_chunks=len(profile.chunks),
        num_blocks=len(profile.blocks),
        why_not_all=_why_not_all(profile, rates, capacity),
        why_shared=_why_shared({count: choices.get(count) for count in profiles if count != num_parts}),
    )


def _why_not_all(profile: Profile, rates: Rates, capacity: Capacity) -> str:
    all_persistent = Knobs(num_persistent=len(profile.chunks), num_slots=0, num_checkpointed=len(profile.blocks))
    needed, available = predict(profile, all_persistent, rates).device_bytes, capacity.device_bytes
    return f" (all would need {gib(needed)} of {gib(available)})" if needed > available else ""


def _why_shared(choices: Mapping[int, Choice | None]) -> str:
    """Describe ``choices``, the best ones for other numbers of parts; None if no plan fits."""
    described = [
        f"{'shared' if num_parts > 1 else 'replicated'}: "
        + ("does not fit" if choice is None else duration(choice.prediction.seconds))
        for num_parts, choice in choices.items()
    ]
    return f" ({'; '.join(described)})" if described else ""


def ranks_of(num_parts: int) -> ChunkRanks:
    """Return the default process group's ranks, with every chunk cut into ``num_parts``: one, or one per rank."""
    if num_ranks() == 1:
        return OneRank()
    return Replicated() if num_parts == 1 else Sharded()


def agree(free: Capacity, decide: Callable[[Capacity], Decision]) -> Decision:
    """Return what ``decide`` returns on the first rank for the least memory that any rank has free.

    All ranks must call it. What ``decide`` raises is raised on all of them, as in ``on_rank0``.
    """
    if num_ranks() > 1:
        all_free: list[Capacity] = [free] * num_ranks()
        dist.all_gather_object(all_free, free)
        free = Capacity(
            device_bytes=min(rank_free.device_bytes for rank_free in all_free),
            host_bytes=min(rank_free.host_bytes for rank_free in all_free),
        )
    return on_rank0(lambda: decide(free))
