"""Host side that the launchers share: shapes of tiles, options and arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from loco_kernels.checks import check_encode, check_tensor

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


def check_wire(
    name: str, wire: Tensor, device: torch.device, num_blocks: int, scales_offset: int
) -> Tensor:
    """Check a wire, and return it as float32 from its first scale on."""
    check_tensor(name, wire, device, (torch.uint8,), -1, -1)
    num_bytes = wire.shape[1]
    if num_bytes % 16 or scales_offset % 16:
        raise ValueError(
            f"{name} must have num_bytes and scales_offset in multiples of 16, got "
            f"{num_bytes} and {scales_offset}"
        )
    if not 0 <= scales_offset <= num_bytes - 4 * num_blocks:
        raise ValueError(
            f"{name} has no room for {num_blocks} scales from byte {scales_offset} on: "
            f"num_bytes is {num_bytes}"
        )
    return wire.view(-1).view(torch.float32)[scales_offset // 4 :]


def encode_arguments(
    wire: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    *,
    peers: int,
    wire_blocks: int,
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
    check_encode(
        starts,
        lengths,
        rows,
        peers=peers,
        bits=bits,
        block_size=block_size,
        squares=squares,
        nonfinite=nonfinite,
        payload=payload,
        error_scale=error_scale,
        beta=beta,
        device=device,
    )
    scales = check_wire("wire", wire, device, wire_blocks, scales_offset)
    error = "none"
    num_rows = 0
    if payload is not None:
        num_rows = payload.shape[1]
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
        "num_blocks": starts.shape[0],
        "beta": beta,
        "one_minus_beta": 1.0 - beta,
        "BITS": bits,
        "BLOCK": block_size,
        "ERROR": error,
    }
