"""Environments of verifiers, whose own server plays the episodes: it gets a task, and answers with the rollout.

The protocol is that of verifiers 0.4: messages of msgpack over ZeroMQ. While a rollout runs, the server sends what is
new in its traces, one trace for each agent that played, and at the end an answer without the traces.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlpipe.common.formatting import printable
from rlpipe.episodes.agents import KEY_HEADER, AgentFailed, EndpointAccess, Reward
from rlpipe.episodes.openai_protocol import MODEL
from rlpipe.errors import ConfigError
from rlpipe.scoring.nemo_gym import row_as_json

if TYPE_CHECKING:
    import zmq.asyncio

ADDRESS = re.compile(r"tcp://([\w.-]+|\[[\da-fA-F:]+\]):(\d{1,5})|ipc://.+")
MAX_PORT = 65_535
PACKAGES = {"zmq": "pyzmq", "msgpack": "msgpack"}
CONNECT_S = 20.0
"""Seconds until a server has to be reached."""
HEARTBEAT_S, SILENCE_S = 5.0, 30.0
"""Seconds between signs of life of both sides, and of silence after which the server counts as dead.

They come from ZeroMQ's own threads, so that an environment that computes for long is no dead one.
"""
LINGER_S = 1.0
"""Seconds in which the cancellation of a rollout may still be sent, once its connection is closed."""
MAX_MESSAGE_BYTES = 256 * 2**20
MAX_SOCKETS = 60_000
"""Sockets of a process, of which a rollout has three; ZeroMQ's own limit of 1,023 is below many a concurrency."""
MAX_SHOWN_CHARS = 500
KEY_VARIABLE = "RLPIPE_NO_KEY"
"""Variable in which the server looks for a key; it has none, as each episode's key is in a header."""


class VerifiersAgent:
    """The environment that a server of verifiers has at an address, as ``serve_env`` opens it.

    A rollout that fails there fails the episode. It is not repeated, as its turns were sampled already. A rollout whose
    episode ends is cancelled.
    """

    def __init__(self, address: str) -> None:
        match = ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2] or 1) <= MAX_PORT:
            raise ConfigError(
                f"environment.agent: {address!r:.200} is not the address of a server of verifiers, such as "
                "tcp://127.0.0.1:5000"
            )
        for module, package in PACKAGES.items():
            if find_spec(module) is None:
                raise ConfigError(
                    f"environment.agent: servers of verifiers need the package {package}: pip install "
                    "'rlpipe[verifiers]'"
                )
        self._address = address

    async def run(self, row: Mapping[str, Any], access: EndpointAccess) -> Reward:
        import msgpack

        rollout = ServedRollout(access.base_url)
        with ServerConnection(self._address) as server:
            name = await server.ask("run", run_message(row, access))
            try:
                while True:
                    kind, data = await server.receive(name)
                    try:
                        message = msgpack.unpackb(data, raw=False, strict_map_key=False)
                        if kind == b"reply":
                            return rollout.reward(message)
                        rollout.add(message)
                    except (AttributeError, KeyError, TypeError, ValueError) as error:
                        raise AgentFailed(f"its answer is not in the form of verifiers 0.4: {error!r:.200}") from error
            except asyncio.CancelledError:
                await server.ask("cancel", {"request_id": name.decode()})
                raise
            except AgentFailed as failure:
                raise AgentFailed(f"verifiers at {self._address}: {failure}") from failure


def run_message(row: Mapping[str, Any], access: EndpointAccess) -> dict[str, Any]:
    """Return a request to play a row's task, in which the policy is asked at the run's gateway with the episode's key.

    The key is a header of that endpoint, so that it does not reach other models that an environment asks. Sampling is
    the run's.
    """
    client = {
        "type": "eval",
        "base_url": access.base_url,
        "api_key_var": KEY_VARIABLE,
        "headers": {KEY_HEADER: access.api_key},
    }
    return {"task_data": row_as_json(row), "client": client, "model": MODEL, "sampling": {}}


class ServedRollout:
    """A rollout as the server has told it so far: of each trace the latest that decides on the reward."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._traces: dict[str, dict[str, Any]] = {}

    def add(self, delta: Mapping[str, Any]) -> None:
        """Add what is new in one trace."""
        if delta.get("discard"):  # the server restarts the trace
            self._traces.pop(delta["trace"], None)
            return
        trace = self._traces.setdefault(delta["trace"], {"errors": []})
        trace["errors"] += delta.get("errors", [])
        trace.update(delta.get("set", {}))

    def reward(self, answer: Mapping[str, Any]) -> Reward:
        """Return the reward at the end: the mean of the agents that are trained; None if the environment gives none.

        Raises ``AgentFailed`` if the rollout has failed.
        """
        if not answer["success"]:
            raise AgentFailed(f"the rollout failed: {_shown(answer['error'])}")
        traces = [self._traces[summary["id"]] for summary in answer["traces"]]
        if not answer["head"]["ok"]:
            errors = [*answer["head"]["errors"], *(error for trace in traces for error in trace["errors"])]
            ends = [trace.get("stop_condition") for trace in traces]
            reason = f"{errors[-1]['type']}: {errors[-1]['message']}" if errors else f"it ended by {ends}"
            raise AgentFailed(f"the rollout failed: {_shown(reason)}")
        rewards = [_trace_reward(trace) for trace in traces if self._is_trained(trace["agent"])]
        available = [reward for reward in rewards if reward is not None]
        return sum(available) / len(available) if available else None

    def _is_trained(self, agent: Mapping[str, Any]) -> bool:
        asks_policy = (agent["config"]["client"] or {}).get("base_url") == self._base_url
        if asks_policy and not agent["trainable"]:
            raise AgentFailed(
                f"its agent {agent['name']!r:.100} is not to be trained, but asks the run's policy: give it a "
                "client of its own"
            )
        return bool(asks_policy)


def _trace_reward(trace: Mapping[str, Any]) -> float | None:
    """Return the weighted sum of a trace's rewards, or None if there are none."""
    for name, reward in trace["rewards"].items():
        if reward is None:
            raise AgentFailed(f"its reward {name!r:.100} was not computed ({trace['stop_condition']})")
    rewards = trace["rewards"].values()
    return sum(float(reward["score"] * reward["weight"]) for reward in rewards) if rewards else None


def _shown(text: object) -> str:
    """Return a server's message in one line, a long one without its middle: a traceback's error is at its end."""
    line = printable(" ".join(str(text or "it gives no reason").split()))
    half = MAX_SHOWN_CHARS // 2
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[:half]} ... {line[-half:]}"


class ServerConnection:
    """A connection of its own for one rollout, which is never opened again: the server would not know the rollout."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_open = False

    def __enter__(self) -> ServerConnection:
        import zmq
        import zmq.asyncio

        context = zmq.asyncio.Context.instance()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)  # has no effect after the first socket
        self._socket: zmq.asyncio.Socket = context.socket(zmq.DEALER)
        options = {
            zmq.RECONNECT_IVL: -1,
            zmq.LINGER: int(LINGER_S * 1000),
            zmq.HEARTBEAT_IVL: int(HEARTBEAT_S * 1000),
            zmq.HEARTBEAT_TIMEOUT: int(SILENCE_S * 1000),
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.IPV6: int("[" in self._address),
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket()
        self._events = zmq.asyncio.Poller()
        for socket in (self._socket, self._monitor):
            self._events.register(socket, zmq.POLLIN)
        self._socket.connect(self._address)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    async def ask(self, method: str, message: Mapping[str, Any]) -> bytes:
        """Send a request, and return the name that its answers have."""
        import msgpack

        name = uuid.uuid4().hex.encode()
        await self._socket.send_multipart([name, method.encode(), msgpack.packb(message, default=str)])
        return name

    async def receive(self, name: bytes) -> tuple[bytes, bytes]:
        """Return the kind and the data of the next answer to a request; raise ``AgentFailed`` if there will be none."""
        while True:
            limit_ms = None if self._is_open else CONNECT_S * 1000
            ready = await self._events.poll(limit_ms)
            if not ready:
                raise AgentFailed(f"it does not answer within {CONNECT_S:g} seconds")
            if ready[0][0] is self._monitor:
                await self._note_event()
                continue
            frames = await self._socket.recv_multipart()
            if len(frames) == 3 and frames[0] == name:
                return frames[1], frames[2]

    async def _note_event(self) -> None:
        import zmq
        from zmq.utils.monitor import parse_monitor_message

        event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_open = True
        if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
            raise AgentFailed("the connection broke" if self._is_open else "it can't be reached")
