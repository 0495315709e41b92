"""A quick measurement of this machine, and the lookup of a stored one."""

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch

from rlpipe.hardware.calibration import measure, measured_device, rate
from rlpipe.hardware.cgroup import host_memory_bytes
from rlpipe.hardware.device import ADDINGS, Device, Link
from rlpipe.hardware.device_profiles import load_stored, machines_folder, own_name, path_of, store, stored_names

pytestmark = pytest.mark.usefixtures("empty_cache")

CPU = torch.device("cpu")
SMALL = 0.01


@pytest.fixture(scope="module")
def measured() -> Iterator[Device]:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    yield measure(CPU, name=own_name("cpu"), scale=SMALL)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_every_rate_of_the_cpu_is_measured(measured: Device) -> None:
    assert (measured.kind, measured.link, measured.measured_at) == ("cpu", None, date.today().isoformat())
    assert measured.hardware
    assert measured.memory_bytes == measured.host_memory_bytes == host_memory_bytes()
    assert "float32" in measured.matmul_flops
    rates = [
        *measured.matmul_flops.values(),
        measured.memory_bandwidth,
        measured.host_to_device,
        measured.device_to_host,
        measured.both,
        *measured.host_adam.values(),
        *measured.host_adding.values(),
    ]
    assert all(1e6 < rate < 1e15 for rate in rates)
    assert measured.device_adam == measured.host_adam
    assert {*measured.host_adam} == {"float32", "bfloat16"}
    assert {*measured.host_adding} == {*ADDINGS}
    assert measured.host_bandwidth == measured.memory_bandwidth
    assert measured.exchange == Link.at_rate(measured.both)


def test_a_rate_counts_what_all_calls_do() -> None:
    calls: list[int] = []
    found = rate(1e9, lambda: calls.append(1), CPU, scale=0.001)
    assert len(calls) > 10  # several in each repetition
    assert 0 < found < math.inf


def test_a_measurement_comes_back_as_it_was_stored(measured: Device) -> None:
    store(measured)
    assert load_stored(measured.name) == measured
    assert measured_device(CPU) == measured


def test_a_machine_is_measured_once(caplog: pytest.LogCaptureFixture) -> None:
    first = measured_device(CPU, scale=SMALL)
    assert stored_names() == [own_name("cpu")]
    assert measured_device(CPU, scale=SMALL) == first
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"hardware": "another processor"}, {"kind": "cuda"}])
def test_another_devices_measurement_is_replaced(measured: Device, change: dict[str, str]) -> None:
    other = replace(measured, measured_at="2020-01-01", **change)  # type: ignore[arg-type]
    store(other)
    assert measured_device(CPU, scale=SMALL).measured_at == measured.measured_at
    assert load_stored(own_name("cpu")).hardware == measured.hardware


def test_a_damaged_measurement_is_taken_again(measured: Device, caplog: pytest.LogCaptureFixture) -> None:
    store(measured).write_text("{")
    assert measured_device(CPU, scale=SMALL).hardware == measured.hardware
    assert "is damaged" in caplog.text
    assert load_stored(own_name("cpu")).hardware == measured.hardware


def test_a_measurement_of_fewer_rates_is_taken_again(measured: Device, caplog: pytest.LogCaptureFixture) -> None:
    path = store(measured)
    content = json.loads(path.read_text())
    del content["host_adding"]
    path.write_text(json.dumps({**content, "link": 1e9, "host_adam": 1e9, "device_adam": 1e9}))
    assert measured_device(CPU, scale=SMALL).host_adding
    assert "the machine is measured again" in caplog.text
    assert load_stored(own_name("cpu")).host_adding


def test_the_share_of_the_memory_is_that_of_now(measured: Device) -> None:
    path = store(measured)
    path.write_text(json.dumps({**json.loads(path.read_text()), "host_memory_bytes": 10**9}))
    assert measured_device(CPU).host_memory_bytes == host_memory_bytes()


def test_a_run_continues_where_nothing_can_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert measured_device(CPU, scale=SMALL).kind == "cpu"
    assert "the measurement can't be stored" in caplog.text
    assert not path_of(own_name("cpu")).exists()
    assert not machines_folder().exists()
