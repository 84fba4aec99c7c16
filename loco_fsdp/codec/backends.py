"""Which code runs the codec: `triton` on CUDA and HIP, `compiled` on CPU, `eager` anywhere."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from typing import Protocol

import torch
from torch import Tensor

from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import BlockTable

logger = logging.getLogger("loco_fsdp")


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

    def drop_spike(
        self, squares: Tensor, usual: Tensor, error_scale: Tensor, rows: Tensor, limit: float
    ) -> None: ...

    def encode_difference(
        self,
        parameter: Tensor,
        replica: Tensor,
        wire: Tensor,
        table: BlockTable,
        stats: EncodeStats,
    ) -> None: ...

    def decode_rows(
        self, wire: Tensor, output: Tensor, table: BlockTable, output_rows: Tensor, add: bool
    ) -> None: ...


_MODULES = {
    "triton": "loco_fsdp.codec.triton_backend",
    "compiled": "loco_fsdp.codec.compiled",
    "eager": "loco_fsdp.codec.eager",
}


def get_backend(name: str) -> Backend:
    """The backend of that name, imported when it is first asked for."""
    backend: Backend = importlib.import_module(_MODULES[name])
    return backend


def choose_backend(name: str, device: torch.device) -> str:
    """The backend for gradients on `device`, where "auto" is what is fastest there.

    Where that is `eager`, the logger "loco_fsdp" warns once.

    Raises:
        ValueError: `name` cannot run there. The message names the remedy.
    """
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "auto":
        if device.type == "cpu":
            return "compiled"
        if device.type == "cuda" and has_triton:  # HIP, too
            return "triton"
        remedy = "install Triton" if device.type == "cuda" else "there are no kernels for it"
        _warn_once(
            f'loco-fsdp runs its codec on {device.type} in eager PyTorch (backend="eager"), many '
            f"times slower than by kernels: {remedy}"
        )
        return "eager"
    if name == "triton":
        _check_triton(device, has_triton)
    if name == "compiled" and device.type != "cpu":
        raise ValueError(
            f'backend="compiled" runs on the CPU, and this gradient is on {device}: use '
            'backend="auto"'
        )
    return name


def _check_triton(device: torch.device, has_triton: bool) -> None:
    if not has_triton:
        raise ValueError(
            'backend="triton" needs Triton, which is not installed: pip install triton, or use '
            'backend="auto"'
        )
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            'backend="triton" runs on a GPU, and this gradient is on the CPU: use '
            'backend="auto", or set TRITON_INTERPRET=1 for the interpreter of Triton'
        )
    if device.type not in ("cpu", "cuda"):
        raise ValueError(
            f'backend="triton" runs on GPUs of CUDA and HIP, and this gradient is on {device}: use '
            'backend="auto" or "eager"'
        )


@functools.cache
def _warn_once(message: str) -> None:
    """Units are many, and have one device."""
    logger.warning(message)
