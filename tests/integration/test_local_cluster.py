"""The local cluster that a run starts is out of reach for other machines."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.ray

LISTENING = """
import json, os, time
import psutil, ray
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.run.cluster import connect

connect(ClusterConfig(num_cpus=1), [])
visible = ray.get(ray.remote(lambda: os.environ.get("CUDA_VISIBLE_DEVICES")).remote())
assert visible == "", f"a process that asked for no GPU may use {visible}"

def addresses():
    processes = psutil.Process().children(recursive=True)
    return {entry.laddr.ip for one in processes for entry in one.net_connections() if entry.status == "LISTEN"}

deadline = time.monotonic() + 60
while ray.nodes()[0]["MetricsExportPort"] <= 0 and time.monotonic() < deadline:  # its agent starts last
    time.sleep(0.2)
print(json.dumps(sorted(addresses())))
"""


def test_it_listens_at_loopback_addresses_alone() -> None:
    done = subprocess.run([sys.executable, "-c", LISTENING], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    addresses = [ipaddress.ip_address(text) for text in json.loads(done.stdout.splitlines()[-1])]
    assert addresses
    for address in addresses:
        assert (getattr(address, "ipv4_mapped", None) or address).is_loopback, addresses
