"""A local cluster's workers: forked with their imports done, replaced likewise, and started without preloading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone"),
]


@pytest.mark.slow
def test_workers_are_forked_replaced_and_started_by_ray_where_nothing_is_preloaded() -> None:
    driver = Path(__file__).parents[1] / "helpers" / "preload_driver.py"
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(driver)], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["plain"]["forked"]
    assert not found["plain"]["torch"]
    assert found["learner"]["forked"]
    assert found["learner"]["torch"]
    assert found["replaced"]["forked"]
    assert found["replaced"]["torch"]
    assert found["replaced"]["pid"] != found["learner"]["pid"]
    assert not found["without"]["forked"]
