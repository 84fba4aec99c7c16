"""A number that a device writes and the host reads later."""

from __future__ import annotations

import torch
from torch import Tensor


class HostFlag:
    """The last number written; 0 before.

    `read` waits for the device to have written it: a step later, that is no wait.
    """

    def __init__(self) -> None:
        self._host = torch.zeros(1)
        self._written: torch.Event | None = None

    def write(self, value: Tensor) -> None:
        """Keep `value`, `[1]` float32, on the current stream of its device."""
        if value.device.type == "cpu":
            self._host = value.clone()
            return
        self._host = torch.empty(1, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._written = torch.accelerator.current_stream(value.device).record_event()

    def read(self) -> float:
        """The number."""
        if self._written is not None:
            self._written.synchronize()
            self._written = None
        return float(self._host.item())
