"""Sum what all peers sent, and send the sum on: the middle of a low-bit all-reduce.

One launch: reads the wire received, `[peers, num_bytes]`, sums it in float32 in the order of
the ranks, compensates the sum by an error of its own, quantizes and packs it into a second wire,
`[1, num_bytes]`, and updates that error. The sum itself is never in memory. Both wires are
laid out alike; `uint8 [num_bytes]`:

    codes   num_blocks * block_size * bits / 8 bytes, then padding to a multiple of 16
    scales  num_blocks float32,                       then padding to a multiple of 16

Inside a block codes are planar: with `k = 8 // bits` planes of `block_size // k` elements, byte i
holds element i in its lowest bits, then i + block_size // k, and so on (two's complement).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from loco_kernels.blocks import element_of, encode_blocks, locate_blocks, sum_peers
from loco_kernels.launch import (
    check_wire,
    device_of,
    encode_arguments,
    launch_options,
    tile,
)


@triton.jit(
    do_not_specialize=[
        "received_stride",
        "peers",
        "factor",
        "wire_stride",
        "num_rows",
        "num_blocks",
        "beta",
        "one_minus_beta",
    ]
)
def _unpack_reduce_requantize_kernel(
    received_ptr,
    received_scales_ptr,  # the wires as float32, from their first scale on
    wire_ptr,
    scales_ptr,
    starts_ptr,
    lengths_ptr,
    rows_ptr,
    payload_ptr,
    error_scale_ptr,
    squares_ptr,
    nonfinite_ptr,
    received_stride,
    peers,
    factor,
    wire_stride,
    num_rows,
    num_blocks,
    beta,
    one_minus_beta,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ERROR: tl.constexpr,
):
    block, number, exists, _, length = locate_blocks(
        starts_ptr, lengths_ptr, None, num_blocks, ROWS, False, False
    )
    wire_row = tl.program_id(1).to(tl.int64)  # 0
    total = sum_peers(
        received_ptr,
        received_scales_ptr,
        received_stride,
        wire_row,
        peers,
        number,
        exists,
        BITS,
        BLOCK,
        ROWS,
        CHUNKS,
    )
    gradient = ()
    for c in tl.static_range(CHUNKS):
        # Codes of the padding may stand for anything.
        inside = element_of(c, BITS, BLOCK, CHUNKS) < length[:, None]
        gradient = gradient + (tl.where(inside, total[c] * factor, 0.0),)

    encode_blocks(
        gradient,
        wire_row,
        block,
        wire_row,
        number,
        exists,
        length,
        wire_ptr,
        scales_ptr,
        wire_stride,
        rows_ptr,
        payload_ptr,
        error_scale_ptr,
        num_rows,
        num_blocks,
        beta,
        one_minus_beta,
        squares_ptr,
        nonfinite_ptr,
        BITS,
        BLOCK,
        CHUNKS,
        ERROR,
    )


def unpack_reduce_requantize(
    received: Tensor,
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
    payload: Tensor | None = None,
    error_scale: Tensor | None = None,
    beta: float = 0.0,
    factor: float = 1.0,
) -> None:
    """Launch the kernel on the device of `received` and its current stream.

    Args:
        received: `[peers, num_bytes]` uint8.
        wire: `[1, num_bytes]` uint8, written but for its padding.
        starts: `[num_blocks]` int64, like `lengths` and `rows`.
        scales_offset: byte at which the scales start in both wires, a multiple of 16.
        squares: `[1, num_blocks, 2]` float32, sums of squares of what was to be sent and of what
            was not; written.
        nonfinite: `[1]` int64; the number of blocks that are not finite is added.
        payload: `[1, num_rows, block_size]`, the stored error of the sum; None: no error feedback.
        error_scale: `[1, num_rows]` float32, powers of two.
        beta: weight of the old error in the new one.
        factor: of the sum.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape or device, or a number is out of range.
        RuntimeError: the wire is on the CPU and Triton is not interpreted.
    """
    if wire.shape[0] != 1:
        raise ValueError(f"wire must have shape [1, num_bytes], got {list(wire.shape)}")
    arguments = encode_arguments(
        wire,
        starts,
        lengths,
        rows,
        peers=1,
        wire_blocks=starts.shape[0],
        scales_offset=scales_offset,
        bits=bits,
        block_size=block_size,
        squares=squares,
        nonfinite=nonfinite,
        payload=payload,
        error_scale=error_scale,
        beta=beta,
        device=received.device,
    )
    num_blocks = starts.shape[0]
    received_scales = check_wire("received", received, received.device, num_blocks, scales_offset)
    if num_blocks == 0:
        return
    shape = tile(bits, block_size, *(() if payload is None else (payload.dtype,)))
    with device_of(received):
        _unpack_reduce_requantize_kernel[(triton.cdiv(num_blocks, shape.rows), 1)](
            received_ptr=received,
            received_scales_ptr=received_scales,
            received_stride=received.shape[1],
            peers=received.shape[0],
            factor=factor,
            ROWS=shape.rows,
            CHUNKS=shape.chunks,
            **launch_options(bits, aligned=True),
            **arguments,
        )
