"""What an update took against what was predicted, once buffers have grown and kernels are compiled."""

from __future__ import annotations

import psutil
import torch

from rlpipe.offload.planner.planner import Decision

COMPARED_UPDATE = 3


class Comparison:
    def __init__(self, decision: Decision, device: torch.device, *, resets_peak: bool = False) -> None:
        """``resets_peak`` begins the device's peak anew before the update, so that loading does not count; it is
        torch's, and there is one for all of the process."""
        self._decision, self._device, self._resets_peak = decision, device, resets_peak
        self._num_updates = 0

    def updated(self, seconds: float, num_micro_batches: int, host_bytes: int) -> str | None:
        """Told of every update, and of what the offloaded model holds on the host; one line after the third, where
        something was predicted."""
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
