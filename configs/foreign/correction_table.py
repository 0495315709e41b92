"""Settings of the corrections for tokens that another policy than the learner's sampled, and of rejected sequences."""

from __future__ import annotations

from typing import Any

from rlpipe.configs.foreign.foreign_values import ForeignValues, is_on
from rlpipe.configs.foreign.setting_rules import OFF, Made, SettingRow, about, with_setting
from rlpipe.configs.schema.algorithm_config import CORRECTIONS
from rlpipe.configs.schema.option import MAX_WEIGHT

MODE, CAP, FLOOR = "algorithm.correction.mode", "algorithm.correction.cap", "algorithm.correction.floor"
REJECTION = "algorithm.correction.rejection"
NO_CORRECTION = f"{MODE} is one of none, {', '.join(CORRECTIONS)}"
VERL_REJECTION = "algorithm.rollout_correction.rollout_rs"
VERL_REJECTIONS = {
    "sequence": "sequence",
    "geometric": "geometric",
    "seq_sum_k1": "sequence",
    "seq_mean_k1": "geometric",
}


@about(MODE)
def trl_correction(values: ForeignValues, value: Any) -> Made:
    """Translate the mode of TRL's correction, which has no lower bound and only exists with vLLM."""
    if not is_on(values.get("use_vllm")):
        return "there is nothing to correct without vLLM there"
    if str(values.get("vllm_importance_sampling_correction")).lower() == "false":
        return {MODE: "none"}
    floor = values.get("vllm_importance_sampling_clip_min")
    cap = values.get("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
    if cap is None and not values.is_null("vllm_importance_sampling_clip_max"):
        cap = 3.0
    options = {MODE: value, CAP: cap, FLOOR: 0 if floor is None else floor}
    return options if value in CORRECTIONS else NO_CORRECTION


@about("algorithm.correction.bias_corrected_kl")
def trl_bias_correction(values: ForeignValues, value: Any) -> Made:
    """Translate whether TRL multiplies the KL by the policy's ratio, through which its gradient goes as well."""
    if not is_on(value) or not values.get("beta"):
        return OFF
    return (
        "there the KL is multiplied by the policy's ratio, with its gradient; "
        "algorithm.correction.bias_corrected_kl multiplies it by the correction's weight, without one"
    )


@about(MODE)
def verl_correction(values: ForeignValues, value: Any) -> Made:
    """Translate verl's truncated weights, which have no lower bound."""
    cap = values.get("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_is_threshold")
    modes = {"token": "token_truncate", "sequence": "sequence_truncate"}
    if str(value) in ("none", "False"):
        return {MODE: "none"}
    return {MODE: modes[value], CAP: 2.0 if cap is None else cap, FLOOR: 0} if str(value) in modes else NO_CORRECTION


@about(REJECTION)
def verl_rejection(values: ForeignValues, value: Any) -> Made:
    """Translate verl's rejection of sequences and its bounds, which the names with k1 have of 1 / w."""
    kind = str(value)
    if kind in ("None", "none", "False"):
        return OFF
    if kind not in VERL_REJECTIONS:
        return f"{REJECTION} is one of none, sequence, geometric"
    bounds = rejection_bounds(values, is_inverse=kind.endswith("k1"))
    if bounds is None:
        return f"set {REJECTION}, {REJECTION}_cap and {REJECTION}_floor, between which 1 is"
    return {REJECTION: VERL_REJECTIONS[kind], f"{REJECTION}_floor": bounds[0], f"{REJECTION}_cap": bounds[1]}


def rejection_bounds(values: ForeignValues, *, is_inverse: bool) -> tuple[float, float] | None:
    """Return the lower and the upper bound, which may be in one setting as in ``0.5_2.0``; None if 1 is not between."""
    lower = values.get(f"{VERL_REJECTION}_threshold_lower")
    thresholds = str(values.get(f"{VERL_REJECTION}_threshold")).split("_")
    try:
        cap = float(thresholds[-1])
        floor = float(thresholds[0]) if len(thresholds) == 2 else 1 / cap if lower is None else float(lower)
        floor, cap = (1 / cap, 1 / floor) if is_inverse else (floor, cap)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        return None
    return (floor, cap) if 0 <= floor <= 1 <= cap <= MAX_WEIGHT and floor < cap else None


@about(CAP)
def verl_ratio_cap(values: ForeignValues, value: Any) -> Made:
    """Translate the bound of the first versions of verl's correction, which is of each token."""
    is_set = isinstance(value, int | float) and value > 0
    return {MODE: "token_truncate", CAP: value, FLOOR: 0} if is_set else {MODE: "none"}


@about(MODE)
def openrlhf_correction(values: ForeignValues, value: Any) -> Made:
    """Translate the correction and its bounds, of which older versions have one."""
    if not is_on(value):
        return {MODE: "none"}
    kind = str(values.get("vllm_is_correction_type"))
    modes = {"None": "token_truncate", "tis": "token_truncate", "icepop": "token_mask"}
    if kind not in modes:
        return NO_CORRECTION
    bounds = values.get("vllm_is_truncated_threshold")
    floor, cap = bounds if isinstance(bounds, list) and len(bounds) == 2 else (0, bounds)
    if not isinstance(cap, int | float):
        return f"its bounds differ between versions: set {MODE}, {CAP} and {FLOOR}"
    return {MODE: "token_mask" if is_on(values.get("use_icepop")) else modes[kind], CAP: cap, FLOOR: floor}


CORRECTION_SETTINGS = (
    SettingRow(trl_correction, "vllm_importance_sampling_mode"),
    SettingRow(with_setting(trl_correction, "vllm_importance_sampling_mode"), "vllm_importance_sampling_*"),
    SettingRow(
        with_setting(trl_correction, "vllm_importance_sampling_mode", option=CAP), "vllm_importance_sampling_clip_max"
    ),
    SettingRow(verl_correction, verl="algorithm.rollout_correction.rollout_is algorithm.rollout_is"),
    SettingRow(
        with_setting(verl_correction, "algorithm.rollout_correction.rollout_is", "algorithm.rollout_is", option=CAP),
        verl="algorithm.rollout_correction.rollout_is_threshold algorithm.rollout_is_threshold",
    ),
    SettingRow(verl_rejection, verl=VERL_REJECTION),
    SettingRow(
        with_setting(verl_rejection, VERL_REJECTION),
        verl=f"{VERL_REJECTION}_threshold {VERL_REJECTION}_threshold_lower",
    ),
    SettingRow(verl_ratio_cap, verl="actor.tis_imp_ratio_cap"),
    SettingRow(
        openrlhf_correction,
        openrlhf="enable_vllm_is_correction=vllm_enable_is_correction=algo.advantage.is_correction_enable",
    ),
    SettingRow(
        with_setting(openrlhf_correction, "enable_vllm_is_correction"),
        openrlhf="vllm_is_truncated_threshold vllm_is_correction_type use_icepop",
    ),
    SettingRow("algorithm.correction.off_policy_threshold", "off_policy_mask_threshold"),
    SettingRow(trl_bias_correction, "use_bias_correction_kl"),
)
