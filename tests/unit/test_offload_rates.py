"""What one rank has of its machine's rates."""

import math

import pytest

from rlpipe.hardware.devices import find_device
from rlpipe.offload.rates import rates_of


def test_one_rank_gathers_nothing_and_several_share_the_hosts_memory() -> None:
    h100 = find_device("h100-80g")
    assert rates_of(h100).gather == math.inf
    assert rates_of(h100).host_adam == h100.host_adam
    four = rates_of(h100, num_ranks=4)
    assert four.gather == four.reduce == pytest.approx(0.8 * 450e9)
    assert four.host_adam == h100.host_adam / 4
    assert four.host_to_device == h100.host_to_device
    assert rates_of(h100, num_ranks=16).host_adam == h100.host_adam / 8  # on two machines
