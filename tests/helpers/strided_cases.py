"""Small rows of EBFT's strided pass, of all kinds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from rlpipe.algorithms.strided import StridedRow, plan_strided_row
from rlpipe.configs.schema.algorithm_config import StridedConfig
from rlpipe.kernels.strided_mask import StridedMask
from rlpipe.learner.strided_objective import make_mask


@dataclass(kw_only=True, frozen=True)
class Case:
    lengths: tuple[int, ...]
    blocks: StridedConfig
    num_samples: int = 1
    prompts: tuple[int, ...] | None = None

    def plan(self) -> StridedRow:
        return plan_strided_row(self.lengths, self.blocks, num_samples=self.num_samples, prompt_lengths=self.prompts)


def blocks(stride: int, context: int, num_tokens: int, prefix: int = 0) -> StridedConfig:
    return StridedConfig(
        stride=stride, context_length=context, generate_tokens=num_tokens, min_completion_prefix=prefix
    )


CASES = {
    "one block": Case(lengths=(16,), blocks=blocks(8, 8, 8)),
    "the defaults": Case(lengths=(41,), blocks=blocks(8, 8, 8), num_samples=4),
    "overlapping blocks": Case(lengths=(20,), blocks=blocks(1, 2, 5), num_samples=2),
    "gaps between blocks": Case(lengths=(30,), blocks=blocks(7, 3, 2), num_samples=3),
    "one column": Case(lengths=(48,), blocks=blocks(30, 3, 30)),
    "blocks of one token": Case(lengths=(9,), blocks=blocks(2, 1, 1)),
    "documents": Case(lengths=(13, 6, 24), blocks=blocks(3, 4, 3), num_samples=2),
    "one document too short": Case(lengths=(12, 4, 11), blocks=blocks(4, 4, 4), num_samples=2),
    "prompts": Case(lengths=(20, 15), blocks=blocks(3, 2, 3, prefix=2), num_samples=2, prompts=(7, 0)),
}
ALL = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def mask_of(case: Case, device: str = "cpu") -> StridedMask:
    return make_mask(case.plan(), torch.device(device))
