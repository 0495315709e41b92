"""The measurement behind ``dtype: auto`` on a CPU: the speed of a model's matrix products, timed once and stored."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from rlpipe.actors.node_dtypes import node_types
from rlpipe.configs.compose import load_config
from rlpipe.doctor.run_checks import this_device
from rlpipe.hardware import calibration, dtype_speed, dtypes
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import DEVICES, own_name
from rlpipe.hardware.dtype_speed import Products, cpu_types, forget_rates, kept_rates, products, time_products
from rlpipe.models.model_files import read_widths
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.plan.dtype_work import engine_products, learner_products, planned_dtype

pytestmark = pytest.mark.usefixtures("empty_cache")

MADE = products(rows=16, widths=(32, 64), num_threads=1)
SLOWER, TIE, FASTER = (
    {"float32": 200e9, "bfloat16": 150e9},
    {"float32": 200e9, "bfloat16": 200e9},
    {"float32": 200e9, "bfloat16": 300e9},
)


class Machine:
    """A CPU whose products have the given rates whenever they are timed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rates: Mapping[str, float]) -> None:
        self.rates = rates
        self.times_timed = 0
        monkeypatch.setattr(dtype_speed, "time_products", self._time)

    def _time(self, layer: Products, dtype: str) -> dict[str, float]:
        self.times_timed += 1
        return {name: self.rates[name] for name in ("float32", dtype)}


@pytest.mark.parametrize(("rates", "expected"), [(SLOWER, "float32"), (TIE, "float32"), (FASTER, "bfloat16")])
def test_the_faster_type_is_taken_and_kept(
    monkeypatch: pytest.MonkeyPatch, rates: Mapping[str, float], expected: str
) -> None:
    machine = Machine(monkeypatch, rates)
    assert cpu_types(MADE).auto == expected
    machine.rates = SLOWER if expected == "bfloat16" else FASTER
    assert cpu_types(MADE).auto == expected, "a restarted part finds what was kept"
    assert machine.times_timed == 1
    (types,) = node_types("auto", MADE)
    assert types.rates == rates


def test_a_doctor_without_a_profile_plans_in_the_type_that_the_run_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config(["experiment=quickstart", f"model.path={make_tiny_policy(tmp_path / 'policy')}"])
    for rates, expected in ((SLOWER, "float32"), (FASTER, "bfloat16")):
        Machine(monkeypatch, rates)
        forget_rates()
        assert planned_dtype(config, this_device(config)) == expected


def test_a_slow_first_pass_does_not_make_the_products_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[str, int]] = set()

    def seconds(run: str, rows: int) -> float:
        is_first = (run, rows) not in seen
        seen.add((run, rows))
        return 0.1 if is_first else 1e-6 * rows

    monkeypatch.setattr(dtype_speed, "_seconds", seconds)
    assert dtype_speed._affordable_rows(MADE, {"float32": "wide", "bfloat16": "narrow"}) == MADE.rows  # type: ignore[dict-item]


def test_other_products_are_timed_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, FASTER)
    cpu_types(MADE)
    machine.rates = SLOWER
    for other in (replace(MADE, rows=64), replace(MADE, num_threads=2), replace(MADE, backward=True)):
        assert cpu_types(other).auto == "float32"
    assert cpu_types(MADE).auto == "bfloat16"


def test_what_another_processor_kept_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, FASTER)
    cpu_types(MADE)
    monkeypatch.setattr(dtype_speed, "cpu_name", lambda: "Another CPU")
    assert kept_rates(MADE, "bfloat16") is None
    machine.rates = SLOWER
    assert cpu_types(MADE).auto == "float32"
    monkeypatch.undo()


@pytest.mark.parametrize("switch", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"])
def test_a_machine_whose_instructions_are_switched_off_is_another(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    machine = Machine(monkeypatch, FASTER)
    assert cpu_types(MADE).auto == "bfloat16"
    machine.rates = SLOWER
    with monkeypatch.context() as switched:
        switched.setenv(switch, "avx2")
        types = cpu_types(MADE)
        assert types.auto == "float32"
        assert f"with {switch}=AVX2" in types.describe("bfloat16")
    assert cpu_types(MADE).auto == "bfloat16"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": {"b": 2}}'])
def test_a_damaged_file_is_written_anew(monkeypatch: pytest.MonkeyPatch, empty_cache: Path, content: str) -> None:
    file = empty_cache / "rlpipe" / "machines" / "products" / f"{own_name('cpu')}.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    machine = Machine(monkeypatch, FASTER)
    assert cpu_types(MADE).auto == cpu_types(MADE).auto == "bfloat16"
    assert machine.times_timed == 1
    assert json.loads(file.read_text())


def test_where_nothing_can_be_kept_it_is_timed_each_time(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    (empty_cache / "rlpipe").write_text("a file")
    machine = Machine(monkeypatch, FASTER)
    assert cpu_types(MADE).auto == cpu_types(MADE).auto == "bfloat16"
    assert machine.times_timed == 2


def test_calibrating_the_machine_times_products_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, FASTER)
    cpu_types(MADE)
    monkeypatch.setattr(calibration, "measure", lambda device, *, name: this_machine(SLOWER))
    monkeypatch.setattr(calibration, "store", lambda device: None)
    calibration.calibrate(calibration.torch.device("cpu"))
    machine.rates = SLOWER
    assert cpu_types(MADE).auto == "float32"


def this_machine(rates: Mapping[str, float]) -> Device:
    """Return this machine's profile, with the given rates of large products."""
    return replace(
        DEVICES["h100-80g"], kind="cpu", name=own_name("cpu"), hardware=dtypes.cpu_name(), matmul_flops=rates
    )


def test_a_plan_for_this_machine_agrees_with_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["experiment=quickstart", "model.path=x", "model.prepare=null"], need_files=False)
    Machine(monkeypatch, FASTER)
    assert planned_dtype(config, this_machine(SLOWER)) == "bfloat16"
    elsewhere = replace(this_machine(SLOWER), name="another-cpu")
    assert planned_dtype(config, elsewhere) == "float32"
    barely = replace(elsewhere, matmul_flops={"float32": 100e9, "bfloat16": 120e9})
    assert planned_dtype(config, barely) == "float32"


def test_engines_and_learner_make_the_products_of_their_rows_and_threads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 576, "intermediate_size": 1536}))
    config = load_config(
        [
            "experiment=quickstart",
            f"model.path={tmp_path}",
            "algorithm.groups_per_step=4",
            "replay.max_staleness=1",
            "rollout.num_threads=2",
        ]
    )
    assert engine_products(config) == products(rows=64, widths=(576, 1536), num_threads=2)
    assert learner_products(config) == products(rows=8192, widths=(576, 1536), num_threads=1, backward=True)
    on_gpus = load_config(["experiment=quickstart", "rollout.num_gpus=1", "learner=single_gpu"], need_files=False)
    assert engine_products(on_gpus) is learner_products(on_gpus) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 64, "intermediate_size": 96}, (64, 96)),
        ({"text_config": {"hidden_size": 64, "intermediate_size": 96}, "hidden_size": 1}, (64, 96)),
        ({"n_embd": 768, "n_inner": None}, (768, 3072)),
        ({}, (1024, 4096)),
    ],
)
def test_widths_are_read_from_a_models_config(
    tmp_path: Path, config: dict[str, object], expected: tuple[int, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_widths(tmp_path) == expected
    assert read_widths("nobody/ever-heard-of-it") == (1024, 4096)


@pytest.mark.parametrize("backward", [False, True])
def test_real_products_have_rates(backward: bool) -> None:
    rates = time_products(replace(MADE, backward=backward), "bfloat16")
    assert sorted(rates) == ["bfloat16", "float32"]
    assert all(rate > 0 for rate in rates.values())
