"""Times of collectives between and beyond the measured sizes."""

import math

import pytest

from rlpipe.hardware.device import Curve, Link

CURVE = Curve(num_bytes=(1000.0, 2000.0, 10_000.0), seconds=(1.0, 1.5, 4.0))


def test_times_lie_on_lines_between_those_that_were_measured() -> None:
    assert [CURVE.time(size) for size in (1000, 1500, 2000, 6000, 10_000)] == pytest.approx([1, 1.25, 1.5, 2.75, 4])


def test_less_takes_as_long_as_the_start_and_more_is_as_fast() -> None:
    assert CURVE.time(1) == CURVE.time(1000) == 1
    assert CURVE.time(30_000) == pytest.approx(12)
    assert CURVE.time(0) == 0
    assert CURVE.rate(30_000) == CURVE.rate(10_000) == 2500


def test_one_rate_is_that_of_all_sizes() -> None:
    link = Link.at_rate(50e9)
    for curve in (link.all_gather, link.reduce_scatter, link.all_reduce):
        assert [curve.time(size) for size in (0, 0.5, 1, 1e3, 50e9)] == pytest.approx([0, 1e-11, 2e-11, 2e-8, 1])
    assert Curve.at_rate(math.inf).time(1e12) == 0
    assert Curve.at_rate(math.inf).rate(1e12) == math.inf


@pytest.mark.parametrize(
    ("num_bytes", "seconds", "message"),
    [
        ((), (), "a curve of 0 sizes has 0 times"),
        ((1.0, 2.0), (1.0,), "a curve of 2 sizes has 1 times"),
        ((2.0, 2.0), (1.0, 1.0), "and must be 0 or more and increasing"),
        ((0.0,), (1.0,), "and must be 0 or more and increasing"),
        ((-1.0, 2.0), (1.0, 1.0), "and must be 0 or more and increasing"),
        ((1.0, math.inf), (1.0, 1.0), "and must be 0 or more and increasing"),
        ((1.0,), (-1.0,), "the times of a curve"),
        ((1.0,), (math.nan,), "the times of a curve"),
        ((1.0,), (math.inf,), "the times of a curve"),
    ],
)
def test_what_is_no_curve_is_refused(num_bytes: tuple[float, ...], seconds: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(num_bytes=num_bytes, seconds=seconds)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan])
def test_a_rate_of_nothing_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        Curve.at_rate(rate)
