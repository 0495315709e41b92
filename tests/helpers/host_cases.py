"""Three hosts of a Ray cluster on one machine: network and process namespaces, each with a cable to a switch."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

SCRIPTS = Path(sys.executable).parent
NAMES = ("head", "second", "third")
COMMANDS = ("ip", "unshare", "nsenter", "setpriv")
RAY_FOLDER = Path("/tmp/ray")
RUNNING = "Ray runtime started"
START_S = 180.0
"""Seconds that Ray may take to start on a host while other tests use the cores."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host made of network, PID and mount namespaces; its processes end with their init process."""

    name: str
    namespace: str
    switch: str
    port: str
    """The switch's end of the cable."""
    address: str
    environment: Mapping[str, str]
    folder: Path
    """The folder mounted as ``/tmp/ray`` on the host, with Ray's output in ``ray.log``."""
    inits: list[subprocess.Popen[str]] = field(default_factory=list)
    """The outside processes that wait for the host's init; only the last one is current."""

    def boot(self) -> None:
        """Start a new init process, which only waits and reaps orphans."""
        setup = f'mount --bind "$0" {RAY_FOLDER} && echo ready && while :; do sleep 1; done'
        command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", setup, str(self.folder)]
        init = subprocess.Popen(
            # The host ends with the tests, even if they are killed.
            ["setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", self.namespace, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.inits.append(init)
        assert init.stdout is not None
        if (line := init.stdout.readline()) != "ready\n":
            raise OSError(f"a namespace of processes can't be made: {line.strip()}")

    def start(self, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """Run a command on the host, with its output in ``log``."""
        (first,) = psutil.Process(self.inits[-1].pid).children()
        enter = ["nsenter", f"--target={first.pid}", "--net", "--pid", "--mount", f"--wd={os.getcwd()}", "--"]
        with log.open("w") as file:
            return subprocess.Popen([*enter, *command], env=dict(self.environment), stdout=file, stderr=file)

    def pids(self, title: str) -> list[int]:
        """Return the outside PIDs of the host's processes whose command line begins with ``title``."""
        listed = run_ip("netns", "pids", self.namespace).split()
        return [pid for pid in map(int, listed) if command_line(pid).startswith(title)]

    def kill(self) -> None:
        """Kill all of the host's processes at once."""
        init = self.inits[-1]
        with suppress(psutil.Error):
            for first in psutil.Process(init.pid).children():
                first.kill()
        init.wait(30)

    def pull_cable(self) -> None:
        """Cut the host off from the network in both directions, so that it looks powered off to the others."""
        run_ip("-n", self.switch, "link", "set", self.port, "down")

    def plug_in(self) -> None:
        run_ip("-n", self.switch, "link", "set", self.port, "up")


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """A cluster of three hosts, the first of which is Ray's head."""

    head: Host
    second: Host
    third: Host
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def all(self) -> tuple[Host, ...]:
        return (self.head, self.second, self.third)

    @property
    def ray_address(self) -> str:
        return f"{self.head.address}:6379"

    def start_ray(self, resources: str) -> None:
        """Boot all hosts, and start Ray on each with the custom ``resources``, given as JSON."""
        for host in self.all:
            host.boot()
            role = ["--head"] if host is self.head else [f"--address={self.ray_address}"]
            command = ["ray", "start", *role, f"--node-ip-address={host.address}", f"--resources={resources}"]
            command += ["--block", "--num-cpus=4", "--disable-usage-stats"]
            log = host.folder / "ray.log"
            process = host.start(*command, log=log)
            self.processes.append(process)
            wait_until(lambda log=log: RUNNING in log.read_text(), process, log, START_S)

    def end(self) -> None:
        """Kill everything that runs on the hosts, so that Ray can be started again."""
        for host in self.all:
            if host.inits:
                host.kill()
        for process in self.processes:
            process.wait()
        self.processes.clear()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> float:
    """Wait until the condition holds, and return the seconds that it took.

    Fail if ``process``, whose output is in ``log``, ends before.
    """
    started = time.monotonic()
    while not condition():
        assert process.poll() is None, f"the process ended with code {process.returncode}: {log.read_text()}"
        assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} seconds: {log.read_text()}"
        time.sleep(0.05)
    return time.monotonic() - started


def command_line(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def run_ip(*arguments: str) -> str:
    """Return the output of ``ip``; raise ``OSError`` or ``CalledProcessError`` if it fails."""
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)
    return done.stdout


def why_not() -> str:
    """Return the reason why no hosts can be made here, or an empty string."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if missing := [command for command in COMMANDS if shutil.which(command) is None]:
        return f"not installed: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    return ""


@contextmanager
def three_hosts() -> Iterator[Hosts]:
    """Yield hosts without Ray, and remove their processes and networks on exit.

    Skip the test, with the reason, if namespaces can't be made.
    """
    if reason := why_not():
        pytest.skip(f"no hosts in network namespaces: {reason}")
    RAY_FOLDER.mkdir(exist_ok=True)
    prefix, token = f"rlpipe-{os.getpid()}", secrets.token_hex(32)
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS",)}
    environment |= {"PATH": f"{SCRIPTS}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    environment["GLOO_SOCKET_IFNAME"] = "eth0"  # by default gloo uses the hostname's address, which all hosts share
    with ExitStack() as stack:
        try:
            switch = stack.enter_context(namespace(f"{prefix}-switch"))
            run_ip("-n", switch, "link", "add", "switch", "type", "bridge")
            run_ip("-n", switch, "link", "set", "switch", "up")
            made = [
                stack.enter_context(connected_host(name, number, prefix, switch, environment))
                for number, name in enumerate(NAMES, 1)
            ]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no hosts in network namespaces: {error.stderr.strip()} (ip {' '.join(error.cmd[1:])})")
        hosts = Hosts(head=made[0], second=made[1], third=made[2])
        stack.callback(hosts.end)
        yield hosts


@contextmanager
def namespace(name: str) -> Iterator[str]:
    run_ip("netns", "add", name)
    try:
        run_ip("-n", name, "link", "set", "lo", "up")
        yield name
    finally:
        run_ip("netns", "delete", name)


@contextmanager
def connected_host(name: str, number: int, prefix: str, switch: str, environment: Mapping[str, str]) -> Iterator[Host]:
    """Yield a namespace whose only network is a cable to the switch."""
    port, address = f"port{number}", f"10.77.0.{number}"
    with (
        namespace(f"{prefix}-{name}") as own,
        tempfile.TemporaryDirectory(prefix="rlpipe-host-", ignore_cleanup_errors=True) as folder,
    ):
        run_ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", own)
        run_ip("-n", switch, "link", "set", port, "master", "switch")
        run_ip("-n", switch, "link", "set", port, "up")
        run_ip("-n", own, "address", "add", f"{address}/24", "dev", "eth0")
        run_ip("-n", own, "link", "set", "eth0", "up")
        run_ip("-n", own, "route", "add", "default", "dev", "eth0")  # Ray finds the host's address with it
        yield Host(
            name=name,
            namespace=own,
            switch=switch,
            port=port,
            address=address,
            environment=environment,
            folder=Path(folder),
        )
