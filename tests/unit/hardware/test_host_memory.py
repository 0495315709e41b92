"""Sums of tensors of different dtypes, block by block."""

import pytest
import torch

from rlpipe.hardware import host_memory
from rlpipe.hardware.host_memory import add_up

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("total_dtype", DTYPES)
@pytest.mark.parametrize("part_dtype", DTYPES)
def test_blocks_add_up_to_what_torch_adds(
    total_dtype: torch.dtype, part_dtype: torch.dtype, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "BLOCK", 7)
    total, part = torch.randn(45).to(total_dtype), torch.randn(45).to(part_dtype)
    expected = total.clone().copy_(part) if is_first else total.clone().add_(part)
    squared = add_up(total, part, is_first=is_first)
    assert total.dtype is total_dtype
    assert torch.equal(total, expected)
    torch.testing.assert_close(squared, expected.double().square().sum(), rtol=1e-6, atol=0)


def test_of_nothing_the_squares_are_0() -> None:
    assert add_up(torch.zeros(0), torch.zeros(0)) == 0


def test_what_differs_in_length_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        add_up(torch.zeros(2 * host_memory.BLOCK), torch.zeros(host_memory.BLOCK, dtype=torch.bfloat16))
