"""Checks of the arguments of kernels, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERROR_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.float8_e4m3fn,
)


def check_tensor(
    name: str, x: Tensor, device: torch.device, dtypes: tuple[torch.dtype, ...], *shape: int
) -> None:
    """Check dtype, device, shape (-1: any size), and that elements lie one after the other."""
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like the others, got {x.device}")
    fits = x.ndim == len(shape) and all(
        want in (-1, got) for want, got in zip(shape, x.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("*" if size == -1 else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")


def check_blocks(bits: int, block_size: int) -> None:
    if bits not in (8, 4, 2, 1):
        raise ValueError(f"bits must be 8, 4, 2 or 1, got {bits}")
    if not (32 <= block_size <= 1024 and block_size & (block_size - 1) == 0):
        raise ValueError(f"block_size must be a power of two in 32..1024, got {block_size}")


def check_row_starts(row_starts: Tensor | None, wire_rows: int, device: torch.device) -> None:
    """Check what says which blocks the rows of a wire hold, where they do not hold all."""
    if row_starts is not None:
        check_tensor("row_starts", row_starts, device, (torch.int64,), wire_rows + 1)


def check_encode(
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    *,
    peers: int,
    bits: int,
    block_size: int,
    squares: Tensor,
    nonfinite: Tensor,
    payload: Tensor | None,
    error_scale: Tensor | None,
    beta: float,
    device: torch.device,
) -> None:
    """Check what every kernel that encodes takes, but for the wire."""
    check_blocks(bits, block_size)
    num_blocks = starts.shape[0]
    for name, column in (("starts", starts), ("lengths", lengths), ("rows", rows)):
        check_tensor(name, column, device, (torch.int64,), num_blocks)
    check_tensor("squares", squares, device, (torch.float32,), peers, num_blocks, 2)
    check_tensor("nonfinite", nonfinite, device, (torch.int64,), 1)
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
    if (payload is None) != (error_scale is None):
        raise ValueError("payload and error_scale must be given together, got one of them")
    if payload is not None and error_scale is not None:
        check_tensor("payload", payload, device, ERROR_DTYPES, peers, -1, block_size)
        check_tensor("error_scale", error_scale, device, (torch.float32,), peers, payload.shape[1])


def check_drop_spike(
    squares: Tensor,
    usual: Tensor,
    error_scale: Tensor,
    rows: Tensor,
    limit: float,
    usual_numel: int,
    device: torch.device,
) -> None:
    """Check what every kernel that drops spikes takes."""
    check_tensor("squares", squares, device, (torch.float32,), -1, -1, 2)
    peers, num_blocks = squares.shape[:2]
    check_tensor("usual", usual, device, (torch.float64,), usual_numel)
    check_tensor("error_scale", error_scale, device, (torch.float32,), peers, -1)
    check_tensor("rows", rows, device, (torch.int64,), num_blocks)
    if not limit > 1:
        raise ValueError(f"limit must be greater than 1, got {limit}")


def check_decode_rows(
    wire: Tensor, output: Tensor, output_rows: Tensor, shard_numel: int, device: torch.device
) -> None:
    """Check what every kernel takes that decodes rows of a wire into rows of an output.

    Which rows they are is checked on the CPU alone: elsewhere this would wait for the device.
    """
    check_tensor("output", output, device, GRADIENT_DTYPES, -1, shard_numel)
    check_tensor("output_rows", output_rows, device, (torch.int64,), wire.shape[0])
    if device.type != "cpu":
        return
    chosen, num_rows = output_rows.tolist(), output.shape[0]
    if len(set(chosen)) < len(chosen) or not all(0 <= row < num_rows for row in chosen):
        raise ValueError(f"output_rows must be different and in 0..{num_rows - 1}, got {chosen}")
