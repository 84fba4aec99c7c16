"""Bytes to send and to receive, shared by all FSDP units of a model."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Send and receive buffers, as large as the largest unit needs.

    Units are reduced one after the other on one stream, so that they can share them. A second
    stream (a second FSDP root has its own) gets buffers of its own: memory is made, used and freed
    on the stream that is current in `buffers`.
    """

    def __init__(self) -> None:
        self._by_stream: dict[int, tuple[Tensor, Tensor]] = {}

    def buffers(self, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """A send and a receive buffer, uint8 `shape`, valid until the next call on this stream."""
        stream = 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
        num_bytes = shape[0] * shape[1]
        pair = self._by_stream.get(stream)
        if pair is None or pair[0].numel() < num_bytes:
            pair = (
                torch.zeros(num_bytes, dtype=torch.uint8, device=device),
                torch.zeros(num_bytes, dtype=torch.uint8, device=device),
            )
            self._by_stream[stream] = pair
        return pair[0][:num_bytes].view(shape), pair[1][:num_bytes].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(send.nbytes + receive.nbytes for send, receive in self._by_stream.values())
