"""Sums of tensors of different types, block by block."""

import pytest
import torch

from rlpipe.hardware import adding
from rlpipe.hardware.adding import add_to

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("total_dtype", DTYPES)
@pytest.mark.parametrize("part_dtype", DTYPES)
def test_blocks_add_up_to_what_torch_adds(
    total_dtype: torch.dtype, part_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adding, "BLOCK", 7)
    total, part = torch.randn(45).to(total_dtype), torch.randn(45).to(part_dtype)
    expected = total.clone().add_(part)
    add_to(total, part)
    assert total.dtype is total_dtype
    assert torch.equal(total, expected)


def test_what_differs_in_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        add_to(torch.zeros(2 * adding.BLOCK), torch.zeros(adding.BLOCK, dtype=torch.bfloat16))
