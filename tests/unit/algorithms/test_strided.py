"""The strided pass: its positions and masks against plain loops, and its log-probs against every block run alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from strided_cases import ALL, Case, blocks, mask_of

from rlpipe.algorithms.strided import block_contexts, document_budget, plan_strided_row


@dataclass(kw_only=True, frozen=True)
class Token:
    """A token of the row, with its position and what it sees according to the spec."""

    document: int
    place: int
    """The position in the document, or the one that a sampled token would have there."""
    column: int = -1
    step: int = -1
    context: int = 0


def tokens_by_loops(case: Case) -> list[Token]:
    tokens = [Token(document=d, place=p) for d, length in enumerate(case.lengths) for p in range(length)]
    columns = []
    for document, length in enumerate(case.lengths):
        prompt = case.prompts[document] if case.prompts else 0
        context = case.blocks.context_length
        if prompt:
            context = max(prompt + case.blocks.min_completion_prefix, context)
        while context + case.blocks.generate_tokens <= length:
            columns += [(document, context)] * case.num_samples
            context += case.blocks.stride
    for step in range(case.blocks.generate_tokens):
        for column, (document, context) in enumerate(columns):
            tokens.append(Token(document=document, place=context + step, column=column, step=step, context=context))
    return tokens


def sees(query: Token, key: Token) -> bool:
    if query.document != key.document:
        return False
    if query.column < 0:
        return key.column < 0 and key.place <= query.place
    if key.column < 0:
        return key.place < query.context
    return key.column == query.column and key.step <= query.step


@pytest.mark.parametrize(("length", "stride", "context", "num_tokens"), [(41, 8, 8, 8), (30, 7, 3, 2), (16, 1, 8, 8)])
def test_a_document_has_as_many_blocks_as_the_formula_says(
    length: int, stride: int, context: int, num_tokens: int
) -> None:
    contexts = block_contexts(length, blocks(stride, context, num_tokens))
    assert len(contexts) == (length - num_tokens - context) // stride + 1
    assert contexts[0] == context
    assert contexts[-1] <= length - num_tokens


def test_a_document_that_is_too_short_has_no_block() -> None:
    assert len(block_contexts(15, blocks(8, 8, 8))) == 0
    assert len(block_contexts(40, blocks(8, 8, 8, prefix=4), 29)) == 0


def test_blocks_of_a_row_with_a_prompt_stand_inside_the_completion() -> None:
    assert block_contexts(30, blocks(4, 2, 4, prefix=3), 10).tolist() == [13, 17, 21, 25]
    assert block_contexts(30, blocks(4, 12, 4, prefix=1), 3)[0] == 12


@ALL
def test_position_ids_equal_the_loops(case: Case) -> None:
    row = case.plan()
    assert row.position_ids().tolist() == [token.place for token in tokens_by_loops(case)]
    assert row.num_tokens == len(tokens_by_loops(case))


@ALL
@pytest.mark.parametrize("window", [None, 4])
def test_masks_equal_the_loops(case: Case, window: int | None) -> None:
    tokens = tokens_by_loops(case)
    near = [[window is None or q.place - k.place < window for k in tokens] for q in tokens]
    expected = torch.tensor([[sees(q, k) for k in tokens] for q in tokens]) & torch.tensor(near)
    mask = mask_of(case)
    assert torch.equal(mask.dense(window=window), expected)
    whole = mask.blocks(window=window)
    places = torch.arange(len(tokens))
    assert torch.equal(whole.mask_mod(0, 0, places[:, None], places[None]), expected)


@ALL
def test_masks_of_a_step_are_the_rows_of_the_whole(case: Case) -> None:
    row, mask = case.plan(), mask_of(case)
    whole = mask.dense()
    for step in range(row.num_steps):
        place = row.step_slice(step)
        assert torch.equal(mask.dense(place), whole[place, : place.stop])
        queries, keys = torch.arange(row.num_columns), torch.arange(place.stop)
        part = mask.blocks(place)
        assert part.shape == (1, 1, row.num_columns, place.stop)
        assert torch.equal(part.mask_mod(0, 0, queries[:, None], keys[None]), whole[place, : place.stop])


@ALL
def test_every_token_is_predicted_by_the_one_before_it(case: Case) -> None:
    row, tokens = case.plan(), tokens_by_loops(case)
    generated = [token for token in tokens if token.column >= 0]
    assert row.predecessors().shape == (row.num_steps, row.num_columns)
    for token, place in zip(generated, row.predecessors().ravel(), strict=True):
        before = tokens[place]
        assert (before.document, before.place) == (token.document, token.place - 1)
        assert before.column == (-1 if token.step == 0 else token.column)


@ALL
def test_the_ground_truth_of_a_block_is_the_document_after_its_context(case: Case) -> None:
    row, tokens = case.plan(), tokens_by_loops(case)
    generated = [token for token in tokens if token.column >= 0]
    for token, place in zip(generated, row.truth_indices().ravel(), strict=True):
        assert tokens[place] == Token(document=token.document, place=token.place)


@pytest.mark.parametrize(("stride", "context"), [(64, 8), (8, 64), (4, 4)])
def test_no_rows_of_documents_that_fit_the_budget_are_too_long(stride: int, context: int) -> None:
    config, num_samples, most = blocks(stride, context, 8), 8, 4096
    budget = document_budget(most, config, num_samples)
    for length in (context + 8, context + 8 + stride, 200):
        row = plan_strided_row([length] * (budget // length), config, num_samples=num_samples)
        assert row.num_tokens <= most
