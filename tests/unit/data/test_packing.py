"""Tests that every rollout is trained once an epoch, within the budget, with equal denominators on all ranks."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.data.packing import pack_step, sequence_cost, split_padded, with_blank
from rlpipe.data.render.processor import Encoded
from rlpipe.errors import ConfigError
from rlpipe.replay.assemble import number_tokens
from rlpipe.types import MicroBatch, PlacedImage, Rollout, TrainBatch


def rollout(index: int, length: int, *, group: int | None = None, num_loss: int | None = None) -> Rollout:
    """Return a rollout whose tokens and log-probs identify it: token t, from 1 on, of rollout i is 1000 i + t."""
    num_loss = length - 1 if num_loss is None else min(num_loss, length - 1)
    tokens = np.arange(length, dtype=np.int32) + 1000 * index + 1
    mask = np.arange(length) >= length - num_loss
    return Rollout(
        group_id=index if group is None else group,
        sample_index=index,
        prompt_id=0,
        task={},
        token_ids=tokens,
        loss_mask=mask,
        logprobs=np.where(mask, -tokens, 0).astype(np.float32),
        policy_versions=np.where(mask, index, -1).astype(np.int32),
        advantages=np.full(length, index, np.float32),
    )


def micro_batches(batches: Sequence[TrainBatch], minibatch: int) -> list[MicroBatch]:
    return [micro for batch in batches for micro in batch.mini_batches[minibatch].micro_batches]


def sequences(micro: MicroBatch) -> list[tuple[int, ...]]:
    """Return the token ids of each sequence, without placeholders."""
    starts = micro.sequence_starts
    pieces = [micro.token_ids[start:end] for start, end in pairwise(starts)]
    return [tuple(piece.tolist()) for piece in pieces if piece[0] != 0]


steps = st.fixed_dictionaries(
    {
        "lengths": st.lists(
            st.tuples(st.integers(1, 40), st.integers(0, 40), st.integers(0, 5)), min_size=1, max_size=25
        ),
        "num_ranks": st.integers(1, 5),
        "num_minibatches": st.integers(1, 4),
        "num_epochs": st.integers(1, 3),
        "max_tokens": st.integers(40, 120),
        "seed": st.integers(0, 5),
    }
)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_packing_keeps_its_promises(case: dict) -> None:
    lengths = case.pop("lengths")
    rollouts = [
        rollout(i, length, num_loss=num_loss, group=group) for i, (length, num_loss, group) in enumerate(lengths)
    ]
    batches = pack_step(rollouts, step=7, **case)
    assert len(batches) == case["num_ranks"]
    assert all(batch.step == 7 for batch in batches)
    per_epoch = min(case["num_minibatches"], len(rollouts))
    expected = Counter(tuple(r.token_ids.tolist()) for r in rollouts)
    for epoch in range(case["num_epochs"]):
        seen: Counter[tuple[int, ...]] = Counter()
        for minibatch in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            seen += check_minibatch(batches, minibatch, case["max_tokens"])
        assert seen == expected
    assert all(len(batch.mini_batches) == per_epoch * case["num_epochs"] for batch in batches)


def check_minibatch(batches: Sequence[TrainBatch], minibatch: int, max_tokens: int) -> Counter[tuple[int, ...]]:
    parts = [batch.mini_batches[minibatch] for batch in batches]
    micros = micro_batches(batches, minibatch)
    found = Counter(sequence for micro in micros for sequence in sequences(micro))
    assert len({len(part.micro_batches) for part in parts}) == 1
    assert {part.num_sequences for part in parts} == {found.total()}
    assert {part.num_loss_tokens for part in parts} == {sum(int(micro.loss_mask.sum()) for micro in micros)}
    for micro in micros:
        assert 0 < micro.num_tokens <= max_tokens
        assert micro.sequence_starts[0] == 0
        assert micro.sequence_starts[-1] == micro.num_tokens
        assert np.array_equal(micro.position_ids == 0, np.isin(np.arange(micro.num_tokens), micro.sequence_starts))
        assert not micro.loss_mask[micro.sequence_starts[:-1]].any()
        assert np.array_equal(micro.logprobs, np.where(micro.loss_mask, -micro.token_ids, 0))
        index = np.maximum(micro.token_ids - 1, 0) // 1000
        assert np.array_equal(micro.policy_versions, np.where(micro.loss_mask, index, -1))
        assert np.array_equal(micro.advantages, index)
    return found


def test_one_minibatch_keeps_the_order() -> None:
    batch = pack_step([rollout(i, 5 + i % 3) for i in range(8)], step=0, num_ranks=1, max_tokens=1000)[0]
    (micro,) = batch.mini_batches[0].micro_batches
    assert [sequence[0] // 1000 for sequence in sequences(micro)] == list(range(8))


def test_epochs_and_seeds_shuffle_differently_and_repeat() -> None:
    rollouts = [rollout(i, 4) for i in range(12)]

    def members(seed: int) -> list[frozenset[int]]:
        batches = pack_step(rollouts, step=0, num_ranks=1, max_tokens=99, num_minibatches=3, num_epochs=2, seed=seed)
        parts = [micro_batches(batches, index) for index in range(6)]
        return [frozenset(s[0] // 1000 for micro in micros for s in sequences(micro)) for micros in parts]

    assert members(0) == members(0) != members(1)
    assert members(0)[:3] != members(0)[3:]


def test_minibatches_have_equal_sizes() -> None:
    batch = pack_step([rollout(i, 4) for i in range(10)], step=0, num_ranks=1, max_tokens=99, num_minibatches=4)[0]
    assert [part.num_sequences for part in batch.mini_batches] == [3, 3, 2, 2]


def test_siblings_of_a_prompt_share_a_micro_batch() -> None:
    rollouts = [rollout(i, 10, group=i // 4) for i in range(32)]
    batches = pack_step(rollouts, step=0, num_ranks=2, max_tokens=160)
    homes: dict[int, set[int]] = {}
    for number, micro in enumerate(micro_batches(batches, 0)):
        for sequence in sequences(micro):
            homes.setdefault(sequence[0] // 4000, set()).add(number)
    assert all(len(home) == 1 for home in homes.values())


def test_ranks_get_like_costs() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 256).astype(int).clip(8, 8000)
    batches = pack_step(
        [rollout(i, int(n), group=i // 8) for i, n in enumerate(lengths)], step=0, num_ranks=8, max_tokens=8192
    )
    costs = [
        sum(sequence_cost(len(s)) for micro in batch.mini_batches[0].micro_batches for s in sequences(micro))
        for batch in batches
    ]
    assert max(costs) / np.mean(costs) < 1.05


def test_best_fit_wastes_little() -> None:
    lengths = np.random.default_rng(0).integers(50, 500, 400)
    rollouts = [rollout(i, int(n)) for i, n in enumerate(lengths)]
    batch = pack_step(rollouts, step=0, num_ranks=1, max_tokens=1000)[0]
    assert len(batch.mini_batches[0].micro_batches) <= np.ceil(lengths.sum() / 1000) + 1


def test_the_costliest_micro_batch_comes_first() -> None:
    batch = pack_step([rollout(i, n) for i, n in enumerate([60, 55, 45])], step=0, num_ranks=1, max_tokens=100)[0]
    assert [micro.num_tokens for micro in batch.mini_batches[0].micro_batches] == [100, 60]


def test_a_rank_without_work_gets_empty_micro_batches() -> None:
    batches = pack_step([rollout(0, 5)], step=0, num_ranks=3, max_tokens=10)
    micros = micro_batches(batches, 0)
    assert [bool(micro.loss_mask.any()) for micro in micros].count(True) == 1
    assert [micro.num_tokens for micro in micros if not micro.loss_mask.any()] == [2, 2]
    assert {batch.mini_batches[0].num_sequences for batch in batches} == {1}


def test_reference_logprobs_travel_along() -> None:
    rollouts = [rollout(i, 5) for i in range(3)]
    for entry in rollouts:
        entry.ref_logprobs = entry.logprobs * 2
    micros = micro_batches(pack_step(rollouts, step=0, num_ranks=2, max_tokens=5), 0)
    for micro in micros:
        assert micro.ref_logprobs is not None
        assert np.array_equal(micro.ref_logprobs, micro.logprobs * 2)


def test_too_long_rollout_names_itself_and_the_option() -> None:
    with pytest.raises(ConfigError, match=r"rollout 3/3 has 11 tokens; set learner.max_tokens_per_microbatch, now 10"):
        pack_step([rollout(3, 11)], step=0, num_ranks=1, max_tokens=10)


def test_unfit_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="step 4 has no rollouts"):
        pack_step([], step=4, num_ranks=1, max_tokens=10)
    bare = rollout(0, 4)
    bare.advantages = None
    with pytest.raises(ValueError, match="rollout 0/0 has no advantages"):
        pack_step([bare], step=0, num_ranks=1, max_tokens=10)
    mixed = [rollout(0, 4), rollout(1, 4)]
    mixed[1].ref_logprobs = mixed[1].logprobs
    with pytest.raises(ValueError, match="rollout 1/1: some rollouts of step 0 have ref_logprobs"):
        pack_step(mixed, step=0, num_ranks=1, max_tokens=10)
    with pytest.raises(ValueError, match="has no tokens"):
        pack_step([rollout(0, 0, num_loss=0)], step=0, num_ranks=1, max_tokens=10)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=25), st.integers(40, 120))
def test_sequences_that_are_filled_up_keep_to_the_budget(lengths: list[int], max_tokens: int) -> None:
    rollouts = [rollout(index, length) for index, length in enumerate(lengths)]
    (micro,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=sum(lengths))[0].mini_batches[0].micro_batches
    parts = split_padded(micro, max_tokens)
    assert all(len(part.group_ids) * np.diff(part.sequence_starts).max() <= max_tokens for part in parts)
    assert sorted(found for part in parts for found in sequences(part)) == sorted(sequences(micro))
    for part in parts:
        assert list(part.group_ids) == sorted(part.group_ids)
        assert [found[0] for found in sequences(part)] == [1000 * group + 1 for group in part.group_ids]
        assert np.array_equal(part.logprobs, np.where(part.loss_mask, -part.token_ids, 0))
        assert np.array_equal(part.position_ids == 0, np.isin(np.arange(part.num_tokens), part.sequence_starts[:-1]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(1, 3), st.integers(1, 3))
def test_loss_tokens_are_numbered_over_the_whole_step(lengths: list[int], num_ranks: int, num_minibatches: int) -> None:
    rollouts = [rollout(index, length) for index, length in enumerate(lengths)]
    numbered = [token for one in rollouts for token in one.token_ids[one.loss_mask].tolist()]
    number_tokens(rollouts)
    batches = pack_step(rollouts, step=0, num_ranks=num_ranks, max_tokens=60, num_minibatches=num_minibatches)
    whole = [micro for batch in batches for mini in batch.mini_batches for micro in mini.micro_batches]
    found = {}
    for micro in (part for one in whole for part in split_padded(one, 50)):
        for place, start, end in zip(
            micro.first_indices, micro.sequence_starts[:-1], micro.sequence_starts[1:], strict=True
        ):
            own = slice(start, end)
            found |= dict(enumerate(micro.token_ids[own][micro.loss_mask[own]].tolist(), int(place)))
    assert [found[place] for place in range(len(numbered))] == numbered
    assert len(found) == len(numbered)


def test_a_pair_that_padding_takes_over_the_budget_is_named() -> None:
    pairs = [rollout(index, length) for index, length in enumerate([20, 20, 40, 10])]
    (micro,) = pack_step(pairs, step=0, num_ranks=1, max_tokens=90)[0].mini_batches[0].micro_batches
    assert [np.diff(part.sequence_starts).tolist() for part in split_padded(micro, 80, 2)] == [[40, 10], [20, 20]]
    with pytest.raises(ConfigError, match=r"the pair of row 2 has 80 tokens, padding .* now 79, to at least 80"):
        split_padded(micro, 79, 2)


def test_images_stay_with_their_sequences() -> None:
    """Check images when packed, when split again, and with the blank image that other ranks' images require."""
    rollouts = [rollout(index, length) for index, length in enumerate([9, 5, 7, 4])]
    for index, places in ((0, [2, 5]), (2, [1]), (3, [2])):
        rollouts[index].images = tuple(
            PlacedImage(start=place, num_tokens=2, content=bytes([index, place])) for place in places
        )

    def assert_in_place(micro: MicroBatch) -> None:
        for image in micro.images:
            index, place = image.content
            assert micro.token_ids[image.start] == 1000 * index + place + 1

    (batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=64)
    (micro,) = batch.mini_batches[0].micro_batches
    parts = split_padded(micro, 10)
    for one in (micro, *parts):
        assert_in_place(one)
    assert Counter(image.content for image in micro.images) == Counter(i.content for part in parts for i in part.images)
    (batch,) = pack_step([rollout(1, 5)], step=0, num_ranks=1, max_tokens=64)
    blank = Encoded(
        token_ids=np.array([7, 8, 9], np.int32), images=(PlacedImage(start=1, num_tokens=2, content=b"blank"),)
    )
    filled = with_blank(batch.mini_batches[0].micro_batches[0], blank)
    assert filled.token_ids.tolist() == [1001, 1002, 1003, 1004, 1005, 7, 8, 9]
    assert filled.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert filled.sequence_starts.tolist() == [0, 5, 8]
    assert (filled.loss_mask.sum(), filled.images[0].start) == (4, 6)
    assert filled.first_indices.tolist() == [0, 0]
