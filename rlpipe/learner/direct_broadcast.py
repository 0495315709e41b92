"""Direct transfer of a whole model's weights from the learner's ranks to the engines."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.learner.policy import Policy
from rlpipe.learner.publish import outline_weights, served_weights
from rlpipe.types import Transfer
from rlpipe.weights.broadcast import GlooGroup, listen
from rlpipe.weights.buckets import add_checksum, digest_of_sums


class DirectSender:
    """One rank's sender: all ranks gather one tensor at a time, and rank 0 sends it to the engines."""

    def __init__(self, policy: Policy, config: WeightsConfig) -> None:
        self._policy, self._timeout_s, self._buffer_bytes = policy, config.timeout_s, config.bucket_bytes
        self._sums: dict[int, int] = {}
        self._store: dist.TCPStore | None = None
        self.outlines = outline_weights(policy)
        self.num_bytes = sum(math.prod(one.shape) * getattr(torch, one.dtype).itemsize for one in self.outlines)

    def open(self, address: str) -> Transfer:
        """Choose a port at ``address``, rank 0's own, and return the transfer that the engines' workers join there."""
        if self._policy.device.type == "cuda":
            with socket.socket() as listener:  # vLLM listens itself, on the port that it is given
                listener.bind((address, 0))
                port = listener.getsockname()[1]
        else:
            self._store = listen(address)
            port = self._store.port
        return Transfer(address=address, port=port, outlines=self.outlines, buffer_bytes=self._buffer_bytes)

    def send(self, transfer: Transfer | None) -> str:
        """Send the weights and return their digest; with None, only take part in gathering them.

        Raises ``TimeoutError`` if the transfer takes longer than ``weights.timeout_s``, and any error of the transfer;
        the process group can't be used after that.
        """
        self._sums.clear()
        sent: Future[None] = Future()

        def run() -> None:
            try:
                if self._policy.device.type == "cuda":
                    torch.cuda.set_device(self._policy.device)  # the current device is per thread
                self._send(transfer)
            except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                sent.set_exception(error)
            else:
                sent.set_result(None)

        # A hanging transfer can't be interrupted; as a daemon, its thread does not keep the process from exiting.
        threading.Thread(target=run, name="transfer", daemon=True).start()
        sent.result(self._timeout_s)
        return digest_of_sums(self._sums)

    def _send(self, transfer: Transfer | None) -> None:
        weights = self._cast_weights()
        if transfer is None:
            for _ in weights:
                pass
        elif self._policy.device.type == "cuda":
            from rlpipe.learner.nccl_broadcast import send_by_nccl

            send_by_nccl(transfer, weights)
        else:
            GlooGroup.join(transfer, 0, self._timeout_s, self._store).send(weights)

    def _cast_weights(self) -> Iterator[tuple[str, Tensor]]:
        dtype = self._policy.scorer.compute_dtype
        for name, tensor in served_weights(self._policy):
            cast = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
            if self._policy.sharding.rank == 0:
                add_checksum(self._sums, name, cast)
            yield name, cast
