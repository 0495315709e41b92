"""Comparison of an update with its prediction, once buffers have grown and kernels are compiled."""

from __future__ import annotations

import psutil
import torch

from rlpipe.offload.planner.planner import Decision

COMPARED_UPDATE = 3


class Comparison:
    def __init__(self, decision: Decision, device: torch.device, *, resets_peak: bool = False) -> None:
        """Prepare the comparison with ``decision``.

        ``resets_peak`` resets the device's peak memory before the compared update, so that loading does not count; it
        is torch's peak, of which the process has only one.
        """
        self._decision, self._device, self._resets_peak = decision, device, resets_peak
        self._num_updates = 0

    def updated(self, seconds: float, num_micro_batches: int, host_bytes: int) -> str | None:
        """Count an update; after the third, return the comparison in one line if there is a prediction, otherwise None.

        ``host_bytes`` are those that the offloaded model holds on the host.
        """
        self._num_updates += 1
        on_gpu = self._device.type == "cuda"
        if self._num_updates == COMPARED_UPDATE - 1 and self._resets_peak and on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        if self._num_updates != COMPARED_UPDATE or self._decision.prediction is None:
            return None
        return self._decision.compare(
            seconds,
            num_micro_batches,
            device_bytes=torch.cuda.max_memory_allocated(self._device) if on_gpu else None,
            host_bytes=host_bytes,
            process_bytes=psutil.Process().memory_info().rss,
        )
