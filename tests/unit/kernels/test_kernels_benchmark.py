"""The kernel benchmark at tiny sizes: its evaluation of measurements, and its detection of wrong results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import kernels, kernels_features, kernels_head, kernels_lora, kernels_report, kernels_rows
from benchmarks.kernels_turns import Comparison, Outcome, Side, measure_in_turns

CPU = torch.device("cpu")
HEAD = kernels_head.HeadCase(
    tokens=12,
    vocabulary=40,
    hidden=8,
    chunk_tokens=5,
    roof_chunk_tokens=5,
    dtype="float32",
    trained=True,
    entropy_gradient=True,
)
ROWS = kernels_rows.RowsCase(tokens=6, vocabulary=30, dtype="float32", entropy_gradient=True)


def side_of(seconds: float, roof_s: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"seconds": seconds, "forward_s": None, "roof_s": roof_s, "roof_forward_s": None, "note": "", **more}


@pytest.mark.slow
@pytest.mark.parametrize("variant", kernels_head.VARIANTS)
@pytest.mark.parametrize("name", ["rlpipe", "torch"])
def test_sides_of_the_head_agree_with_float64(name: str, variant: str) -> None:
    case = replace(HEAD, **kernels_head.VARIANTS[variant])
    found = measure_in_turns(kernels_head.compare(case, ["gemms", name], CPU), 2, CPU)
    assert found["gemms"]["roof_s"] == found["gemms"]["seconds"] == found[name]["roof_s"]
    errors = [found[name][key] for key in kernels_report.ERRORS]
    assert all(error < 1e-4 for error in errors if error is not None)
    assert (found[name]["weight_gradient_error"] is None) == (variant != "trained")
    assert found[name].keys() >= {"seconds", "forward_s", "extra_peak_mib", "note"}
    assert "extra_peak_mib" not in found["gemms"]


def test_a_wrong_gradient_shows() -> None:
    inputs = kernels_head.make_inputs(replace(HEAD, entropy_gradient=False), CPU)
    right = kernels_head.make_torch(inputs).both()
    errors_of = kernels_head.errors_against(inputs)
    assert errors_of(right)["gradient_error"] < 1e-5
    logprobs, entropy, grad_hidden, grad_weight = right
    wrong = errors_of((logprobs + 0.5, entropy, 0.9 * grad_hidden, 1.2 * grad_weight))
    assert wrong["logprob_error"] == pytest.approx(0.5, abs=1e-4)
    assert wrong["gradient_error"] == pytest.approx(0.1, abs=1e-4)
    assert wrong["weight_gradient_error"] == pytest.approx(0.2, abs=1e-4)


def test_bare_products_give_what_products_give() -> None:
    inputs = kernels_head.make_inputs(HEAD, CPU)
    _, _, grad_hidden, grad_weight = kernels_head.make_gemms(inputs).both()
    slope = (inputs.hidden[:5] @ inputs.weight.T) / HEAD.vocabulary  # a stand-in for the gradient of each chunk
    slopes = torch.cat([slope, slope, slope[:2]]).detach()
    torch.testing.assert_close(grad_hidden, slopes @ inputs.weight.detach())
    torch.testing.assert_close(grad_weight, slopes.T @ inputs.hidden.detach())


@pytest.mark.slow
def test_logits_rows_agree_with_float64_and_what_is_missing_has_a_reason() -> None:
    comparison = kernels_rows.compare(ROWS, ["copy", "torch", "liger"], CPU)
    found = measure_in_turns(comparison, 2, CPU)
    assert found["torch"]["gradient_error"] < 1e-5
    assert found["torch"]["entropy_error"] < 1e-5
    assert found["liger"].keys() == {"error"}
    assert kernels_report.over_roof(found["liger"]) is None


@pytest.mark.slow
def test_a_side_that_fails_leaves_the_others_their_turns() -> None:
    calls: list[str] = []

    def make(name: str) -> Side:
        def both() -> Outcome:
            calls.append(name)
            return (torch.zeros(1),)

        return Side(both=both)

    def fail() -> Side:
        raise ModuleNotFoundError("No module named 'missing'")

    makers = {"roof": lambda: make("roof"), "broken": fail, "ours": lambda: make("ours")}
    found = measure_in_turns(Comparison(makers=makers, roof="roof"), 3, CPU)
    assert found["broken"] == {"error": "ModuleNotFoundError: No module named 'missing'"}
    assert found["ours"]["seconds"] > 0
    assert {"roof", "ours"} == set(calls)


def test_a_lost_gpu_ends_the_process() -> None:
    def lose() -> Side:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure_in_turns(Comparison(makers={"roof": lose}, roof="roof"), 1, CPU)


@pytest.mark.parametrize("variant", kernels_lora.VARIANTS)
def test_lora_sides_compute_the_layer_and_its_gradients(variant: str) -> None:
    case = kernels_lora.LoraCase(
        tokens=6, inputs=64, outputs=8, rank=2, dtype="float32", **kernels_lora.VARIANTS[variant]
    )
    found: dict[str, Outcome] = {}
    comparison = kernels_lora.compare(case, ["gemms", "rlpipe", "peft"], CPU)
    for name, make in comparison.makers.items():
        torch.manual_seed(1)  # all implementations have the same weights
        found[name] = make().both()
        assert [tensor.shape for tensor in found[name] if tensor is not None] == [(6, 8), (6, 64), (2, 64), (8, 2)]
    for ours, theirs in zip(found["rlpipe"], found["peft"], strict=True):
        assert ours is not None
        assert theirs is not None
        assert (ours - theirs).norm() <= (0.02 if case.autocast else 1e-5) * theirs.norm()
    assert kernels_lora.product_flops(case) == 2 * (2 * 6 * 64 * 8) + 3 * 2 * 6 * 2 * (64 + 8)


def test_of_lora_the_compiled_layer_is_one_of_a_library() -> None:
    sides = {"gemms": side_of(1.0), "rlpipe": side_of(1.1), "peft": side_of(2.0), "compile": side_of(1.5)}
    assert kernels_report.figures_of("lora", sides)["best_library"] == "compile"
    assert kernels_report.figures_of("lora", sides)["over_best_library"] == pytest.approx(1.1 / 1.5)
    assert kernels_report.figures_of("head", sides)["best_library"] is None


def test_ratios_are_those_of_the_same_turns() -> None:
    sides = {
        "gemms": side_of(2.0, 2.0),
        "rlpipe": side_of(2.4, 2.0, extra_peak_mib=100.0),
        "trl": side_of(4.0, 4.0),  # slower, on a slower machine
        "liger": side_of(3.0, 2.0),
        "cce": {"error": "ModuleNotFoundError: no"},
    }
    found = kernels_report.figures_of("head", sides)
    assert found["best_library"] == "trl"
    assert found["best_library_seconds"] == 4.0
    assert found["over_roof"] == pytest.approx(1.2)
    assert found["roof_share"] == pytest.approx(1 / 1.2)
    assert found["over_best_library"] == pytest.approx(1.2)
    assert found["extra_peak_mb"] == pytest.approx(104.8576)


def test_the_share_of_the_copy_counts_what_must_be_read_and_written() -> None:
    assert kernels_report.roof_share("rows", side_of(3.0, 2.0)) == pytest.approx(1.0)
    assert kernels_report.roof_share("rows", side_of(6.0, 2.0)) == pytest.approx(0.5)
    assert ROWS.logit_bytes == 6 * 30 * 4


def test_the_headline_is_the_worst_case_and_has_no_seconds_without_a_gpu() -> None:
    cases = {
        "easy": {"rlpipe": side_of(1.1, extra_peak_mib=300.0), "trl": side_of(1.0)},
        "hard": {"rlpipe": side_of(1.5, extra_peak_mib=200.0), "trl": side_of(2.0)},
        "broken": {"rlpipe": {"error": "OutOfMemoryError"}},
    }
    found = kernels_report.headline("head", cases, on_gpu=True)
    assert (found["case"], found["seconds"], found["over_roof"]) == ("hard", 1.5, 1.5)
    assert found["over_best_library"] == pytest.approx(1.1)
    assert found["extra_peak_mb"] == pytest.approx(300 * 2**20 / 1e6)
    without = kernels_report.headline("head", cases, on_gpu=False)
    assert without["extra_peak_mb"] == found["extra_peak_mb"]
    assert {without[key] for key in ("seconds", "best_library", "roof_share", "over_roof")} == {None}


def test_the_last_line_names_each_kernel() -> None:
    machine = {"kind": "cpu", "hardware": "a processor"}
    features = {"one": {"network_s": 3.0, "pooling_s": 0.5, "rewards_s": 1.0, "share": 0.375, "rewards_share": 0.25}}
    groups = {
        "head": {"frozen": {"rlpipe": side_of(1.23456, extra_peak_mib=1.0)}},
        "features": features,
        "mask": {"error": "no"},
    }
    found = json.loads(json.dumps(kernels_report.summarize(machine, groups)))
    assert found["device"] == "cpu"
    assert found["seconds"].startswith("not comparable")
    assert found["linear_logprob"]["cases"]["frozen"]["seconds"] == 1.235
    assert found["feature_rewards"]["share"] == 0.375
    assert found["block_mask"]["error"] == "no"
    assert kernels_features.shares(features["one"]) == {"rewards_share": 0.25, "share": 0.375}


def test_of_several_processes_the_first_result_of_a_side_counts() -> None:
    first = {"a": {"gemms": side_of(1.0), "rlpipe": side_of(2.0)}}
    second = {"a": {"gemms": side_of(9.0), "trl": side_of(3.0)}, "b": {"trl": {"error": "no"}}}
    merged = kernels_report.merge([first, second], ["a", "b"], ["gemms", "rlpipe", "trl"])
    assert {name: found["seconds"] for name, found in merged["a"].items()} == {"gemms": 1.0, "rlpipe": 2.0, "trl": 3.0}
    assert merged["b"] == {"trl": {"error": "no"}}


def test_a_table_has_a_row_for_each_side_and_a_reason_for_what_failed() -> None:
    sides = {"gemms": side_of(1.0), "cce": {"error": "ModuleNotFoundError: no"}}
    lines = kernels_report.lines_of("frozen", sides)
    assert {line.count("|") for line in [*kernels_report.HEADER, *lines]} == {lines[0].count("|")}
    assert lines[1].endswith(" ModuleNotFoundError: no |")


def test_every_case_can_be_told_to_a_process() -> None:
    arguments = kernels.parse_arguments(["--tokens", "16", "--vocabulary", "32", "--hidden", "8", "16"])
    assert list(kernels.cases_of("head", arguments)) == [
        f"{name}-{hidden}" for hidden in (8, 16) for name in ("frozen", "frozen-entropy", "trained")
    ]
    for group in kernels_report.GROUPS:
        json.dumps(kernels.cases_of(group, arguments))
    blocks = kernels_features.FeatureCase(**kernels.cases_of("features", arguments)["blocks-4-sample"])
    assert blocks.num_sequences == 512 * 8 * 5 // blocks.tokens


def test_a_wrong_option_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        kernels.parse_arguments(["--turns", "0"])
    assert "--turns is 0, and must be at least 1" in capsys.readouterr().err
