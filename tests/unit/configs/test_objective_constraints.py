"""Tests that options of the policy gradient which contradict each other are refused with the fix."""

from __future__ import annotations

import pytest

from rlpipe import load_config
from rlpipe.errors import ConfigError

RUN = ["model.path=m", "data.path=d.jsonl"]
GEOMETRIC = "algorithm.correction.rejection=geometric"
UNCAPPED = "algorithm.correction.rejection_cap=null"
ADAPTIVE = "algorithm.loss.entropy_target=1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.loss.entropy_step=0.1"], "algorithm.loss.entropy_step: the weight is constant without a target"),
        (["algorithm.loss.entropy_coef_max=2"], "algorithm.loss.entropy_coef_max: the weight is constant without"),
        ([ADAPTIVE, "algorithm.loss.entropy_coef_min=2"], "entropy_coef_min: 2 is above entropy_coef_max=1; set"),
        ([ADAPTIVE, "algorithm.loss.entropy_coef=2"], "entropy_coef: 2 is above entropy_coef_max=1; set it lower"),
        (["algorithm.correction.rejection_cap=3"], "algorithm.correction.rejection_cap: nothing is rejected; set"),
        ([GEOMETRIC, "algorithm.correction.rejection_cap=1"], "rejection_cap: 1 keeps only ratios of exactly 1"),
        (["algorithm.correction.rejection_cap=null"], "algorithm.correction.rejection_cap: nothing is rejected; set"),
        ([GEOMETRIC, UNCAPPED], "algorithm.correction.rejection: geometric drops nothing without bounds; set"),
        (
            [GEOMETRIC, UNCAPPED, "algorithm.correction.rejection_floor=0"],
            "algorithm.correction.rejection: geometric drops nothing without bounds; set",
        ),
        (["algorithm.correction.cap=0.5"], "algorithm.correction.cap: 0.5"),
    ],
)
def test_options_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*RUN, *overrides], need_files=False)
    assert message in str(caught.value)


def test_options_that_fit_are_accepted() -> None:
    load_config([*RUN, GEOMETRIC, "algorithm.correction.mode=none"], need_files=False)
    load_config([*RUN, ADAPTIVE, "algorithm.loss.entropy_coef_min=0.1"], need_files=False)
    load_config([*RUN, GEOMETRIC, UNCAPPED, "algorithm.correction.rejection_floor=0.5"], need_files=False)


@pytest.mark.parametrize("floor", ["null", "0", "0.5"])
@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_a_correction_may_have_no_upper_bound(mode: str, floor: str) -> None:
    options = [f"algorithm.correction.{option}" for option in (f"mode={mode}", "cap=null", f"floor={floor}")]
    correction = load_config([*RUN, *options], need_files=False).algorithm.correction
    assert (correction.mode, correction.cap) == (mode, None)
    assert correction.floor == (None if floor == "null" else float(floor))
