"""The loss and metrics of labelled steps, against loops over solutions."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from rlpipe.algorithms.preferences import NUM_SOLUTIONS, StepInputs, solution_means, step_loss


def first_error(labels: list[int]) -> int | None:
    return labels.index(0) if 0 in labels else None


@pytest.mark.parametrize("seed", range(50))
def test_first_errors_are_found_solution_by_solution(seed: int) -> None:
    torch.manual_seed(seed)
    lengths = torch.randint(1, 5, (int(torch.randint(1, 9, ())),)).tolist()
    labels = [torch.randint(0, 2, (length,)) for length in lengths]
    logits = [torch.randn(length, 2, dtype=torch.float64) for length in lengths]
    ids = torch.cat([torch.full((length,), index) for index, length in enumerate(lengths)])
    inputs = StepInputs(logits=torch.cat(logits), labels=torch.cat(labels), solution_ids=ids, num_steps=sum(lengths))
    output = step_loss(inputs)
    found = [first_error(own.argmax(1).tolist()) for own in logits]
    known = [first_error(own.tolist()) for own in labels]
    values = solution_means(output.metrics.values())
    expected = sum(one == other for one, other in zip(found, known, strict=True)) / len(lengths)
    assert values["rewards/first_errors"] == pytest.approx(expected)
    assert NUM_SOLUTIONS not in values
    assert float(output.loss) == pytest.approx(float(cross_entropy(inputs.logits, inputs.labels)))


def test_a_micro_batch_without_steps_counts_nothing() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    inputs = StepInputs(logits=torch.zeros(0, 2), labels=nothing, solution_ids=nothing, num_steps=4)
    output = step_loss(inputs)
    assert (float(output.loss), float(output.metrics.totals[NUM_SOLUTIONS])) == (0.0, 0.0)
