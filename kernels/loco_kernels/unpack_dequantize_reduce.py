"""Unpack and dequantize what all peers sent, and sum it in float32 in the order of their ranks.

One launch: reads the wire and writes the reduced shard. One row of the wire, `uint8 [num_bytes]`:

    codes   num_blocks * block_size * bits / 8 bytes, then padding to a multiple of 16
    scales  num_blocks float32,                       then padding to a multiple of 16

It holds all blocks of one peer. Where `row_starts` is given it holds those from `row_starts[row]`
to `row_starts[row + 1]`, which no other row does, and nothing is summed.

Inside a block codes are planar: with `k = 8 // bits` planes of `block_size // k` elements, byte i
holds element i in its lowest bits, then i + block_size // k, and so on (two's complement). A scale
of NaN makes its whole block NaN. The sum starts from 0 and is the same bits in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loco_kernels.blocks import element_of, locate_blocks, round_to, sum_peers
from loco_kernels.checks import GRADIENT_DTYPES, check_blocks, check_row_starts, check_tensor
from loco_kernels.launch import (
    check_wire,
    device_of,
    launch_options,
    tile,
)


@triton.jit(do_not_specialize=["wire_stride", "peers", "num_blocks", "factor"])
def _unpack_dequantize_reduce_kernel(
    wire_ptr,
    scales_ptr,  # the wire as float32, from its first scale on
    output_ptr,
    starts_ptr,
    lengths_ptr,
    row_starts_ptr,
    wire_stride,
    peers,
    num_blocks,
    factor,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGNED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    _, number, exists, start, length = locate_blocks(
        starts_ptr, lengths_ptr, row_starts_ptr, num_blocks, ROWS, ALIGNED, SPLIT
    )
    # Without SPLIT this is 0: there is one program for each tile.
    first_row = tl.program_id(1).to(tl.int64)
    total = sum_peers(
        wire_ptr,
        scales_ptr,
        wire_stride,
        first_row,
        peers,
        number,
        exists,
        BITS,
        BLOCK,
        ROWS,
        CHUNKS,
    )
    for c in tl.static_range(CHUNKS):
        element = element_of(c, BITS, BLOCK, CHUNKS)
        output = round_to(total[c] * factor, output_ptr.dtype.element_ty)
        tl.store(output_ptr + start[:, None] + element, output, mask=element < length[:, None])


def unpack_dequantize_reduce(
    wire: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    row_starts: Tensor | None = None,
    *,
    wire_blocks: int,
    scales_offset: int,
    bits: int,
    block_size: int,
    factor: float = 1.0,
    aligned: bool = False,
) -> None:
    """Launch the kernel on the device of `wire` and its current stream.

    Args:
        wire: `[wire_rows, num_bytes]` uint8, one row for each peer.
        output: `[shard_numel]` float32, bfloat16 or float16, written.
        starts: `[num_blocks]` int64, like `lengths`: first element and number of elements of each
            block.
        row_starts: `[wire_rows + 1]` int64, which blocks each row of the wire holds, where it is
            not one of a peer.
        wire_blocks: blocks that a row of the wire has room for, no fewer than any row holds.
        scales_offset: byte at which the scales of a row start, a multiple of 16.
        factor: of the sum.
        aligned: the number of elements of every parameter's part is a multiple of 8.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape or device, or a number is out of range.
        RuntimeError: the wire is on the CPU and Triton is not interpreted.
    """
    check_blocks(bits, block_size)
    num_blocks = starts.shape[0]
    scales = check_wire("wire", wire, wire.device, wire_blocks, scales_offset)
    check_row_starts(row_starts, wire.shape[0], wire.device)
    check_tensor("output", output, wire.device, GRADIENT_DTYPES, -1)
    check_tensor("starts", starts, wire.device, (torch.int64,), num_blocks)
    check_tensor("lengths", lengths, wire.device, (torch.int64,), num_blocks)
    shape = tile(bits, block_size, output.dtype)
    split = row_starts is not None
    grid = (triton.cdiv(wire_blocks, shape.rows), wire.shape[0] if split else 1)
    if 0 in grid:
        return
    with device_of(wire):
        _unpack_dequantize_reduce_kernel[grid](
            wire_ptr=wire,
            scales_ptr=scales,
            output_ptr=output,
            starts_ptr=starts,
            lengths_ptr=lengths,
            row_starts_ptr=row_starts,
            wire_stride=wire.shape[1],
            peers=1 if split else wire.shape[0],
            num_blocks=num_blocks,
            factor=factor,
            BITS=bits,
            BLOCK=block_size,
            ROWS=shape.rows,
            CHUNKS=shape.chunks,
            ALIGNED=aligned,
            SPLIT=split,
            **launch_options(bits, aligned),
        )
