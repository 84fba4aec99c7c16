"""Host side that the launchers share: shapes of tiles and checks of arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

ERROR_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.float8_e4m3fn,
)
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_THREADS = 128
_ELEMENTS_PER_THREAD = 32
_VECTOR_BYTES = 16
# Without a limit the compiler takes more. With these nothing is spilled, and a multiprocessor of
# 65,536 registers has room for four programs of the common variants, or for three of the others.
_MAX_REGISTERS = 120
_MAX_REGISTERS_OTHERS = 168


class Tile(NamedTuple):
    """What one program handles: `rows` blocks, each in `chunks` parts."""

    rows: int
    chunks: int


def tile(bits: int, block_size: int, *dtypes: torch.dtype) -> Tile:
    """The tile for which a thread moves whole vectors of tensors with these dtypes.

    A thread owns 32 elements of one block: few enough to stay in registers, and enough to share
    the work of a block among. A block never leaves its warp.
    """
    widest_bytes = 4 if bits == 1 else max((2, *(dtype.itemsize for dtype in dtypes)))
    return Tile(
        rows=_THREADS * _ELEMENTS_PER_THREAD // block_size,
        chunks=_ELEMENTS_PER_THREAD * widest_bytes // _VECTOR_BYTES,
    )


def launch_options(bits: int, aligned: bool) -> dict[str, object]:
    """Options of the compiler: no `a * b + c` in one rounding, which eager PyTorch does not do."""
    if torch.version.hip:
        return {"num_warps": _THREADS // 64, "enable_fp_fusion": False}
    registers = _MAX_REGISTERS if bits >= 4 and aligned else _MAX_REGISTERS_OTHERS
    return {"num_warps": _THREADS // 32, "enable_fp_fusion": False, "maxnreg": registers}


def device_of(x: Tensor) -> AbstractContextManager[object]:
    """Context in which kernels run on the device of `x`, which need not be the current one.

    Raises:
        RuntimeError: there is no kernel for that device.
    """
    if x.device.type == "cuda":
        return torch.cuda.device(x.device)
    if not triton.knobs.runtime.interpret:
        raise RuntimeError(
            f"Triton kernels need a GPU, and this tensor is on {x.device}: use "
            'backend="compiled", or set TRITON_INTERPRET=1 to run them in the interpreter'
        )
    return nullcontext()


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


def check_wire(
    name: str, wire: Tensor, device: torch.device, num_blocks: int, scales_offset: int
) -> Tensor:
    """Check a wire, and return it as float32 from its first scale on."""
    check_tensor(name, wire, device, (torch.uint8,), -1, -1)
    bytes_per_shard = wire.shape[1]
    if bytes_per_shard % 16 or scales_offset % 16:
        raise ValueError(
            f"{name} must have bytes_per_shard and scales_offset in multiples of 16, got "
            f"{bytes_per_shard} and {scales_offset}"
        )
    if not 0 <= scales_offset <= bytes_per_shard - 4 * num_blocks:
        raise ValueError(
            f"{name} has no room for {num_blocks} scales from byte {scales_offset} on: "
            f"bytes_per_shard is {bytes_per_shard}"
        )
    return wire.view(-1).view(torch.float32)[scales_offset // 4 :]


def encode_arguments(
    wire: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    *,
    scales_offset: int,
    bits: int,
    block_size: int,
    squares: Tensor,
    nonfinite: Tensor,
    payload: Tensor | None,
    error_scale: Tensor | None,
    beta: float,
    device: torch.device,
) -> dict[str, object]:
    """Check what `encode_blocks` needs, and return it by the names of the kernels' parameters."""
    check_blocks(bits, block_size)
    num_blocks = starts.shape[0]
    for name, column in (("starts", starts), ("lengths", lengths), ("rows", rows)):
        check_tensor(name, column, device, (torch.int64,), num_blocks)
    scales = check_wire("wire", wire, device, num_blocks, scales_offset)
    peers = wire.shape[0]
    check_tensor("squares", squares, device, (torch.float32,), peers, num_blocks, 2)
    check_tensor("nonfinite", nonfinite, device, (torch.int64,), 1)
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"beta must be in [0, 1), got {beta}")
    if (payload is None) != (error_scale is None):
        raise ValueError("payload and error_scale must be given together, got one of them")
    error = "none"
    num_rows = 0
    if payload is not None and error_scale is not None:
        check_tensor("payload", payload, device, ERROR_DTYPES, peers, -1, block_size)
        num_rows = payload.shape[1]
        check_tensor("error_scale", error_scale, device, (torch.float32,), peers, num_rows)
        error = str(payload.dtype).removeprefix("torch.").removesuffix("fn")
        if payload.dtype is torch.float8_e4m3fn:
            payload = payload.view(torch.uint8)
    return {
        "wire_ptr": wire,
        "scales_ptr": scales,
        "starts_ptr": starts,
        "lengths_ptr": lengths,
        "rows_ptr": rows,
        "payload_ptr": payload,
        "error_scale_ptr": error_scale,
        "squares_ptr": squares,
        "nonfinite_ptr": nonfinite,
        "wire_stride": wire.shape[1],
        "num_rows": num_rows,
        "num_blocks": num_blocks,
        "beta": beta,
        "one_minus_beta": 1.0 - beta,
        "BITS": bits,
        "BLOCK": block_size,
        "ERROR": error,
    }
