"""Compensate a gradient by its error, quantize and pack it for all peers, and update the error.

One launch, one pass over memory: reads the gradient `[peers, shard_numel]` and the error, writes
the wire, the new error and the squares for monitoring. One row of the wire, `uint8 [num_bytes]`:

    codes   num_blocks * block_size * bits / 8 bytes, then padding to a multiple of 16
    scales  num_blocks float32,                       then padding to a multiple of 16

It holds all blocks of one peer; or, where `row_starts` is given and there is one peer, those from
`row_starts[row]` to `row_starts[row + 1]`.

Inside a block codes are planar: with `k = 8 // bits` planes of `block_size // k` elements, byte i
holds element i in its lowest bits, then i + block_size // k, and so on (two's complement). Blocks
are found by the table `starts`, `lengths`, `rows`: first element in the shard, number of elements,
row in the error. The padding of the wire is not written, and no byte of a row beyond its blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from loco_kernels.blocks import element_of, encode_blocks, locate_blocks, to_float32
from loco_kernels.checks import GRADIENT_DTYPES, check_row_starts, check_tensor
from loco_kernels.launch import (
    device_of,
    encode_arguments,
    launch_options,
    tile,
)


@triton.jit(
    do_not_specialize=[
        "shard_numel",
        "wire_stride",
        "num_rows",
        "num_blocks",
        "beta",
        "one_minus_beta",
    ]
)
def _compensate_quantize_pack_kernel(
    gradient_ptr,
    wire_ptr,
    scales_ptr,  # the wire as float32, from its first scale on
    starts_ptr,
    lengths_ptr,
    rows_ptr,
    row_starts_ptr,
    payload_ptr,
    error_scale_ptr,
    squares_ptr,
    nonfinite_ptr,
    shard_numel,
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
    ALIGNED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    wire_row = tl.program_id(1).to(tl.int64)
    peer = wire_row * 0 if SPLIT else wire_row
    shard = peer * shard_numel
    if ALIGNED:
        shard = tl.multiple_of(shard, 8)
    block, number, exists, start, length = locate_blocks(
        starts_ptr, lengths_ptr, row_starts_ptr, num_blocks, ROWS, ALIGNED, SPLIT
    )

    gradient = ()
    for c in tl.static_range(CHUNKS):
        element = element_of(c, BITS, BLOCK, CHUNKS)
        pointer = gradient_ptr + (shard + start)[:, None] + element
        inside = element < length[:, None]
        gradient = gradient + (to_float32(tl.load(pointer, mask=inside, other=0.0)),)

    encode_blocks(
        gradient,
        peer,
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


def compensate_quantize_pack(
    gradient: Tensor,
    wire: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    row_starts: Tensor | None = None,
    *,
    wire_blocks: int,
    scales_offset: int,
    bits: int,
    block_size: int,
    squares: Tensor,
    nonfinite: Tensor,
    payload: Tensor | None = None,
    error_scale: Tensor | None = None,
    beta: float = 0.0,
    aligned: bool = False,
) -> None:
    """Launch the kernel on the device of `gradient` and its current stream.

    Args:
        gradient: `[peers, shard_numel]` float32, bfloat16 or float16.
        wire: `[wire_rows, num_bytes]` uint8, one row for each peer; written but for its padding.
        starts: `[num_blocks]` int64, like `lengths` and `rows`.
        row_starts: `[wire_rows + 1]` int64, which blocks each row of the wire holds; there is one
            peer then. None: all blocks.
        wire_blocks: blocks that a row of the wire has room for, no fewer than any row holds.
        scales_offset: byte at which the scales of a row start, a multiple of 16.
        squares: `[peers, num_blocks, 2]` float32, sums of squares of what was to be sent and of
            what was not; written.
        nonfinite: `[1]` int64; the number of blocks that are not finite is added.
        payload: `[peers, num_rows, block_size]`, the stored error; None: no error feedback.
        error_scale: `[peers, num_rows]` float32, powers of two.
        beta: weight of the old error in the new one.
        aligned: the number of elements of every parameter's part is a multiple of 8.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape or device, or a number is out of range.
        RuntimeError: the gradient is on the CPU and Triton is not interpreted.
    """
    peers = wire.shape[0] if row_starts is None else 1
    check_tensor("gradient", gradient, gradient.device, GRADIENT_DTYPES, peers, -1)
    check_row_starts(row_starts, wire.shape[0], gradient.device)
    arguments = encode_arguments(
        wire,
        starts,
        lengths,
        rows,
        peers=peers,
        wire_blocks=wire_blocks,
        scales_offset=scales_offset,
        bits=bits,
        block_size=block_size,
        squares=squares,
        nonfinite=nonfinite,
        payload=payload,
        error_scale=error_scale,
        beta=beta,
        device=gradient.device,
    )
    shape = tile(bits, block_size, gradient.dtype, *(() if payload is None else (payload.dtype,)))
    grid = (triton.cdiv(wire_blocks, shape.rows), wire.shape[0])
    if 0 in grid:
        return
    with device_of(gradient):
        _compensate_quantize_pack_kernel[grid](
            gradient_ptr=gradient,
            row_starts_ptr=row_starts,
            shard_numel=gradient.shape[1],
            ROWS=shape.rows,
            CHUNKS=shape.chunks,
            ALIGNED=aligned,
            SPLIT=row_starts is not None,
            **launch_options(bits, aligned),
            **arguments,
        )
