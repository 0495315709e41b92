"""Tests that the search finds what an exhaustive search finds, and is quick on the largest models."""

from __future__ import annotations

import math
from dataclasses import asdict
from itertools import product

import numpy as np
import pytest
from covering import one_in

from rlpipe.hardware.device import Curve, Link
from rlpipe.offload.decision import Capacity, Knobs, Mode, Prediction
from rlpipe.offload.planner.cost import ChunkProfile, Profile, Rates, StageProfile, interleave, predict, why_impossible
from rlpipe.offload.planner.search import DoesNotFit, search

GB = 1e9


def test_the_hosts_update_hides_behind_the_first_forward_pass_alone() -> None:
    prediction = Prediction(
        device_bytes=0,
        host_bytes=0,
        forward_s=8.0,
        backward_s=1.0,
        device_adam_s=0.0,
        host_adam_s=5.0,
        num_micro_batches=4,
    )
    assert prediction.exposed_adam_s == 3.0
    assert prediction.seconds == 12.0


def test_each_swap_is_followed_by_checkpoints_and_the_last_by_all_that_are_left() -> None:
    swap, checkpoint = [Mode.SWAP], [Mode.CHECKPOINT]
    assert interleave(2, 5, 1) == swap + checkpoint + swap + 4 * checkpoint
    assert interleave(3, 1, 2) == swap + checkpoint + swap + swap
    assert interleave(0, 2, 1) == 2 * checkpoint


def random_profile(rng: np.random.Generator, *, num_blocks: int, num_chunks: int, trained: bool) -> Profile:
    """Return an embedding, blocks and a head; chunks may contain parts of several stages, like shared ones."""
    stages = []
    for index in range(num_blocks + 2):
        is_block = 0 < index <= num_blocks
        stages.append(
            StageProfile(
                is_block=is_block,
                forward_s=float(rng.uniform(0.1, 1)),
                backward_s=float(rng.uniform(0.2, 2)),
                saved_bytes=int(rng.integers(1, 30)),
                swapped_bytes=int(rng.integers(1, 35)),
                input_bytes=int(rng.integers(1, 5)),
                entering_bytes=int(rng.integers(1, 5)),
                forward_peak=int(rng.integers(0, 20)),
                backward_peak=int(rng.integers(0, 20)),
            )
        )
    edges = np.sort(rng.uniform(0, len(stages), num_chunks - 1)).tolist()
    chunks = []
    for first, last in zip([0.0, *edges], [*edges, float(len(stages))], strict=True):
        shares = {s: min(last, s + 1) - max(first, s) for s in range(len(stages)) if min(last, s + 1) > max(first, s)}
        size = int(rng.integers(5, 20))
        chunks.append(
            ChunkProfile(
                stages=shares,
                num_bytes=size,
                gathered_bytes=size * int(rng.integers(1, 3)),
                gather_bytes=int(rng.integers(0, 20)),
                scatter_bytes=int(rng.integers(0, 20)) if trained else 0,
                reduce_bytes=int(rng.integers(0, 20)) if trained else 0,
                slots=int(rng.choice([1, 1, 1, 3])),
                gradient_bytes=size if trained else 0,
                state_bytes=3 * size if trained else 0,
                staging_bytes=int(rng.integers(0, 200)) if trained else 0,
                adding_bytes=int(rng.integers(0, 200)) if trained else 0,
                update_bytes=int(rng.integers(0, 200)) if trained else 0,
                num_trained=size if trained else 0,
                adding=str(rng.choice(["bfloat16 to float32", "float32 to float32", "float16 to float32"])),
                state_dtype=str(rng.choice(["float32", "bfloat16"])),
                cast_bytes=int(rng.integers(0, 20)) if trained else 0,
            )
        )
    return Profile(
        stages=stages,
        chunks=chunks,
        slot_bytes=int(rng.integers(5, 40)),
        resident_bytes=int(rng.integers(0, 50)),
        shared_bytes=int(rng.integers(0, 10)),
        num_micro_batches=int(rng.integers(1, 4)),
    )


def random_rates(rng: np.random.Generator) -> Rates:
    one_way = rng.uniform(5, 60, 2)
    return Rates(
        host_to_device=one_way[0],
        device_to_host=one_way[1],
        both=float(one_way.min() * rng.uniform(0.5, 1)),
        device_adam={"float32": float(rng.uniform(50, 500)), "bfloat16": float(rng.uniform(50, 500))},
        host_adam={"float32": float(rng.uniform(5, 50)), "bfloat16": float(rng.uniform(5, 50))},
        host_adding={name: float(rng.uniform(5, 30)) for name in ("float32 to float32", "bfloat16 to float32")},
        device_bandwidth=float(rng.uniform(100, 500)),
        host_bandwidth=float(rng.uniform(10, 100)),
        link=Link(all_gather=random_curve(rng), reduce_scatter=random_curve(rng), all_reduce=random_curve(rng)),
    )


def random_curve(rng: np.random.Generator) -> Curve:
    """Return a curve of a single rate, or one measured at sizes around those of the chunks."""
    if rng.integers(2):
        return Curve.at_rate(float(rng.uniform(5, 60)))
    sizes = np.sort(rng.uniform(1, 25, 4)).tolist()
    return Curve(num_bytes=tuple(sizes), seconds=tuple(rng.uniform(0.02, 2, 4).tolist()))


def all_ways(profile: Profile, rates: Rates, capacity: Capacity) -> list[tuple[Knobs, Prediction]]:
    """Return every way that is possible and fits."""
    chunks, blocks = range(len(profile.chunks) + 1), range(len(profile.blocks) + 1)
    slots = range(sum(chunk.slots for chunk in profile.chunks) + 1)
    found = []
    for numbers in product(chunks, slots, blocks, blocks, blocks):
        names = ("num_persistent", "num_slots", "num_swapped", "num_checkpointed", "num_offloaded")
        knobs = Knobs(**dict(zip(names, numbers, strict=True)))
        if why_impossible(profile, knobs, rates) is None:
            prediction = predict(profile, knobs, rates)
            if prediction.fits(capacity):
                found.append((knobs, prediction))
    return found


@pytest.mark.parametrize("seed", one_in(4, range(40)))
def test_the_search_finds_the_best_of_all_ways(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile = random_profile(
        rng, num_blocks=int(rng.integers(1, 5)), num_chunks=int(rng.integers(1, 6)), trained=bool(seed % 2)
    )
    rates = random_rates(rng)
    capacity = Capacity(device_bytes=int(rng.integers(60, 500)), host_bytes=int(rng.integers(100, 600)))
    ways = all_ways(profile, rates, capacity)
    if not ways:
        with pytest.raises(DoesNotFit):
            search(profile, rates, capacity)
        return
    fastest = min(prediction.seconds for _, prediction in ways)
    choice = search(profile, rates, capacity)
    assert choice.prediction.seconds == pytest.approx(fastest, rel=1e-9)
    assert choice.prediction.fits(capacity)


@pytest.mark.parametrize("seed", one_in(3, range(10)))
def test_a_way_is_found_where_there_is_just_what_it_takes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, rates = random_profile(rng, num_blocks=3, num_chunks=4, trained=True), random_rates(rng)
    ways = all_ways(profile, rates, Capacity(device_bytes=2000, host_bytes=2000))
    for index in rng.choice(len(ways), 20):
        knobs, prediction = ways[index]
        device, host, fixed = math.ceil(prediction.device_bytes), prediction.host_bytes, asdict(knobs)
        assert search(profile, rates, Capacity(device_bytes=device, host_bytes=host), fixed).knobs == knobs
        for less in (
            Capacity(device_bytes=device - 1, host_bytes=host),
            Capacity(device_bytes=device, host_bytes=host - 1),
        ):
            with pytest.raises(DoesNotFit):
                search(profile, rates, less, fixed)


@pytest.mark.parametrize("seed", range(10))
def test_fixed_knobs_stay_and_the_others_are_searched(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profile, rates = random_profile(rng, num_blocks=3, num_chunks=4, trained=True), random_rates(rng)
    capacity = Capacity(device_bytes=600, host_bytes=800)
    ways = all_ways(profile, rates, capacity)
    knobs, _ = ways[int(rng.integers(len(ways)))]
    for names in (["num_slots"], ["num_persistent", "num_swapped"], ["num_checkpointed", "num_offloaded"]):
        fixed = {name: getattr(knobs, name) for name in names}
        matching = [p for k, p in ways if all(getattr(k, name) == value for name, value in fixed.items())]
        choice = search(profile, rates, capacity, fixed)
        assert {name: getattr(choice.knobs, name) for name in names} == fixed
        assert choice.prediction.seconds == pytest.approx(min(p.seconds for p in matching), rel=1e-9)
