"""Memory to send from and to receive into, shared by all FSDP units of a model."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Buffers by name, as large as the largest unit needs.

    Units are reduced one after the other on one stream, so that they can share them. A second
    stream (a second FSDP root has its own, and so has an all-reduce) gets buffers of its own:
    memory is made, used and freed on the stream that is current in `get`.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def get(
        self,
        name: str,
        shape: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype = torch.uint8,
    ) -> Tensor:
        """The buffer of that name, with undefined contents, valid until it is asked for again."""
        stream = 0 if device.type == "cpu" else torch.accelerator.current_stream(device).stream_id
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        buffer = self._buffers.get((name, stream))
        if buffer is None or buffer.numel() < num_bytes:
            with torch.inference_mode(False):  # or only evaluations could write to it
                buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            self._buffers[name, stream] = buffer
        return buffer[:num_bytes].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def free(self) -> None:
        """Free all buffers."""
        self._buffers.clear()
