"""The table of devices, and stored measurements."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Curve, Link
from rlpipe.hardware.device_profiles import (
    DEVICES,
    find_device,
    load_stored,
    machines_folder,
    own_name,
    store,
    stored_names,
)

pytestmark = pytest.mark.usefixtures("empty_cache")


CURVE = Curve(num_bytes=(2.0**15, 2.0**19, 2.0**26), seconds=(1e-5, 2e-5, 4e-4))
LINK = Link(all_gather=CURVE, reduce_scatter=CURVE, all_reduce=Curve(num_bytes=(2.0**16,), seconds=(3e-5,)))
CONTENT = asdict(LINK)


def measured(name: str):
    return replace(DEVICES["h100-80g"], name=name, measured_at="2026-11-22", host_to_device=51e9, link=LINK)


def test_rates_of_the_table_are_shares_of_the_data_sheets() -> None:
    h100 = find_device("h100-80g")
    assert h100.flops("bfloat16") == pytest.approx(0.55 * 989e12)
    assert h100.memory_bandwidth == pytest.approx(0.8 * 3.35e12)
    adam = {"float32": 7 * 4, "bfloat16": 7 * 2}  # bytes per element
    assert h100.device_adam == pytest.approx({name: 0.8 * 3.35e12 / size for name, size in adam.items()})
    assert h100.host_adam == pytest.approx({name: 150e9 / size for name, size in adam.items()})
    assert h100.host_adding["bfloat16 to float32"] == pytest.approx(150e9 / 10)
    assert h100.host_adding["float32 to bfloat16"] == pytest.approx(150e9 / 8)
    assert h100.exchange.all_reduce.time(0.8 * 450e9) == pytest.approx(1)
    assert (h100.host_to_device, h100.device_to_host) == (55e9, 50e9)
    assert h100.source == "assumed from data sheets"


def test_the_table_holds_what_its_names_say() -> None:
    for name, device in DEVICES.items():
        assert device.name == name
        gigabytes = int(name.rsplit("-", 1)[1].removesuffix("g"))
        assert 0.9 * gigabytes < device.memory_bytes / 2**30 < gigabytes
        assert device.both <= device.device_to_host <= device.host_to_device < device.memory_bandwidth
        assert device.flops("float32") < device.flops("bfloat16")


def test_unknown_devices_are_answered_with_the_names() -> None:
    with pytest.raises(ConfigError, match=r"there is no h100; it is one of b200-180g, .* did you mean h100-80g\?"):
        find_device("h100")
    with pytest.raises(ConfigError, match=r"there is no \.\./h100-80g"):
        find_device("../h100-80g")


def test_a_dtype_without_a_rate_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype=float8: device h100-80g has no rate for it"):
        find_device("h100-80g").flops("float8")


def test_a_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="device x: both is 0, and must be above 0 and finite"):
        replace(DEVICES["h100-80g"], name="x", both=0)
    with pytest.raises(ConfigError, match=r"device x: link\.all_gather is inf"):
        replace(DEVICES["h100-80g"], name="x", link=Link.at_rate(math.inf))
    with pytest.raises(ConfigError, match=r"device x: host_adam\.float32 is 0"):
        replace(DEVICES["h100-80g"], name="x", host_adam={"float32": 0, "bfloat16": 1})
    with pytest.raises(ConfigError, match="device x: memory_bandwidth is nan"):
        replace(DEVICES["h100-80g"], name="x", memory_bandwidth=math.nan)
    with pytest.raises(ConfigError, match=r"device x: matmul_flops\.float16 is inf"):
        replace(DEVICES["h100-80g"], name="x", matmul_flops={"float32": 1e12, "float16": math.inf})


def test_without_a_link_ranks_exchange_through_the_host() -> None:
    desktop = find_device("rtx4090-24g")
    assert desktop.link is None
    assert desktop.exchange == Link.at_rate(desktop.both)


def test_measurements_come_back_as_they_were_stored() -> None:
    assert stored_names() == []
    path = store(measured("node-7"))
    assert path == machines_folder() / "node-7.json"
    assert find_device("node-7") == measured("node-7")
    assert find_device("node-7").source == "measured 2026-11-22"
    with pytest.raises(ConfigError, match="rtx3090-24g, node-7"):
        find_device("nod")


def test_no_name_and_this_are_this_machines_measurement() -> None:
    for name in (None, "this"):
        with pytest.raises(
            ConfigError, match="measure it with rlpipe plan --calibrate, or set --device to one of b200"
        ):
            find_device(name)
    processor = replace(measured(own_name("cpu")), kind="cpu", link=None, hardware="Processor X")
    store(processor)
    assert find_device(None) == find_device("this") == processor
    store(measured(own_name("cuda")))
    assert find_device(None) == find_device("this") == measured(own_name("cuda"))
    assert find_device(own_name("cpu")) == processor


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"both": None}, "both is None"),
        ({"hardware": 3}, "hardware is 3"),
        ({"link": "fast"}, "link is 'fast'"),
        ({"link": 3.6e11}, "link is 360000000000.0"),  # one rate for all sizes
        ({"link": {**CONTENT, "broadcast": 1}}, "broadcast is unknown"),
        ({"link": {"all_gather": CONTENT["all_gather"]}}, "all_reduce is missing"),
        ({"link": {**CONTENT, "all_reduce": 3}}, "link.all_reduce is 3"),
        ({"link": {**CONTENT, "all_reduce": {"num_bytes": [1]}}}, "seconds is missing"),
        ({"link": {**CONTENT, "all_reduce": {"num_bytes": [1], "seconds": ["x"]}}}, "link.all_reduce.seconds is ['x']"),
        ({"link": {**CONTENT, "all_reduce": {"num_bytes": [1, 2], "seconds": [1]}}}, "a curve of 2 sizes has 1 times"),
        ({"host_adam": 5e9}, "host_adam is 5000000000.0"),
        ({"host_adam": {"float32": 1.0}}, "host_adam is {'float32': 1.0}"),
        ({"memory_bytes": True}, "memory_bytes is True"),
        ({"matmul_flops": {"bfloat16": "x"}}, "matmul_flops is"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"speed": 3}, "speed is unknown"),
    ],
)
def test_a_damaged_file_is_named(change: dict[str, object], message: str) -> None:
    path = store(measured("node"))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"node\.json is damaged") as caught:
        load_stored("node")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_file_that_holds_no_device_is_damaged(text: str) -> None:
    store(measured("node")).write_text(text)
    with pytest.raises(
        ConfigError, match=r"is damaged .* remove it, and measure that machine again with rlpipe plan --c"
    ):
        find_device("node")


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="file is not a folder; set XDG_CACHE_HOME"):
        store(measured("node"))
