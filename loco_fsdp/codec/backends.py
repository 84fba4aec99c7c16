"""Which code runs the codec: `triton` on GPUs, `compiled` on CPU, `eager` anywhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Protocol

import torch
from torch import Tensor

from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import BlockTable


class Backend(Protocol):
    """A module with the functions of `loco_fsdp.codec.eager`, and with their results."""

    def encode(
        self,
        gradient: Tensor,
        wire: Tensor,
        table: BlockTable,
        stats: EncodeStats,
        error: ErrorState | None = None,
        beta: float = 0.0,
    ) -> None: ...

    def decode(
        self, wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0
    ) -> None: ...

    def decode_encode(
        self,
        received: Tensor,
        wire: Tensor,
        table: BlockTable,
        stats: EncodeStats,
        error: ErrorState | None = None,
        beta: float = 0.0,
        factor: float = 1.0,
    ) -> None: ...


_MODULES = {
    "triton": "loco_fsdp.codec.triton_backend",
    "compiled": "loco_fsdp.codec.compiled",
    "eager": "loco_fsdp.codec.eager",
}


# What "auto" picks; "triton" on other devices, or "eager" where Triton is not installed.
AUTO = {"cpu": "compiled"}


def get_backend(name: str) -> Backend:
    """The backend of that name, imported when it is first asked for."""
    backend: Backend = importlib.import_module(_MODULES[name])
    return backend


def choose_backend(name: str, device: torch.device) -> str:
    """The backend for gradients on `device`, where "auto" is what is fastest there.

    Raises:
        ValueError: `name` cannot run there. The message names the remedy.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "auto":
        return AUTO.get(device.type, "triton" if has_triton else "eager")
    if name == "triton" and not has_triton:
        raise ValueError(
            'backend="triton" needs Triton, which is not installed: pip install triton, or use '
            'backend="auto"'
        )
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            'backend="triton" runs on a GPU, and this gradient is on the CPU: use '
            'backend="auto", or set TRITON_INTERPRET=1 for the interpreter of Triton'
        )
    if name == "compiled" and device.type != "cpu":
        raise ValueError(
            f'backend="compiled" runs on the CPU, and this gradient is on {device}: use '
            'backend="auto"'
        )
    return name
