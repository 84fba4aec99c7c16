"""Unpack and dequantize each row of a wire into a row of the output of its own.

One launch: reads the wire, `[rows, num_bytes]`, and writes those rows of the output, or adds to
them in float32 and rounds once. One row of the wire, `uint8 [num_bytes]`:

    codes   num_blocks * block_size * bits / 8 bytes, then padding to a multiple of 16
    scales  num_blocks float32,                       then padding to a multiple of 16

Inside a block codes are planar: with `k = 8 // bits` planes of `block_size // k` elements, byte i
holds element i in its lowest bits, then i + block_size // k, and so on (two's complement). A scale
of NaN makes its whole block NaN. All rows hold the same blocks, found by the table `starts`,
`lengths`: first element in a row of the output, number of elements. Elements in no block are left
as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loco_kernels.blocks import element_of, levels_of, locate_blocks, round_to, to_float32
from loco_kernels.checks import check_blocks, check_decode_rows, check_tensor
from loco_kernels.launch import (
    check_wire,
    device_of,
    launch_options,
    tile,
)


@triton.jit(do_not_specialize=["wire_stride", "shard_numel", "num_blocks"])
def _unpack_dequantize_rows_kernel(
    wire_ptr,
    scales_ptr,  # the wire as float32, from its first scale on
    output_ptr,
    output_rows_ptr,
    starts_ptr,
    lengths_ptr,
    wire_stride,
    shard_numel,
    num_blocks,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    ADD: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    PLANES: tl.constexpr = 8 // BITS
    _, number, exists, start, length = locate_blocks(
        starts_ptr, lengths_ptr, None, num_blocks, ROWS, ALIGNED, False
    )
    row = tl.program_id(1).to(tl.int64)
    shard = tl.load(output_rows_ptr + row) * shard_numel
    if ALIGNED:
        shard = tl.multiple_of(shard, 8)
    output_pointer = output_ptr + (shard + start)[:, None]
    wire = tl.multiple_of(row * wire_stride, 16)
    code_pointer = wire_ptr + wire + number[:, None] * (BLOCK * BITS // 8)
    scale = tl.load(scales_ptr + wire // 4 + number, mask=exists, other=0.0)[:, None]

    # All loads before the first store, so that all are on their way at once.
    total = ()
    for c in tl.static_range(CHUNKS):
        element = element_of(c, BITS, BLOCK, CHUNKS)
        if ADD:
            inside = element < length[:, None]
            old = to_float32(tl.load(output_pointer + element, mask=inside, other=0.0))
        else:
            old = tl.zeros([ROWS, BLOCK // CHUNKS], tl.float32)
        if c % PLANES == 0:
            packed = tl.load(code_pointer + element, mask=exists[:, None], other=0).to(tl.int32)
        total = total + (old + levels_of(packed, c % PLANES, BITS) * scale,)
    for c in tl.static_range(CHUNKS):
        element = element_of(c, BITS, BLOCK, CHUNKS)
        new = round_to(total[c], output_ptr.dtype.element_ty)
        tl.store(output_pointer + element, new, mask=element < length[:, None])


def unpack_dequantize_rows(
    wire: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    output_rows: Tensor,
    *,
    scales_offset: int,
    bits: int,
    block_size: int,
    shard_numel: int,
    add: bool,
    aligned: bool = False,
) -> None:
    """Launch the kernel on the device of `wire` and its current stream.

    Args:
        wire: `[rows, num_bytes]` uint8.
        output: `[num_rows, shard_numel]` float32, bfloat16 or float16, written where there are
            blocks.
        starts: `[num_blocks]` int64, like `lengths`: first element and number of elements of each
            block in a row of the output.
        output_rows: `[rows]` int64, the row of the output for each row of the wire, all different;
            not checked on a GPU.
        scales_offset: byte at which the scales of a row start, a multiple of 16.
        add: to what the output holds, rather than to 0.
        aligned: every block starts at, and every parameter's part and the shard have, a multiple of
            8 elements, and so does the output begin in memory.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape or device, or a number is out of range.
        RuntimeError: the wire is on the CPU and Triton is not interpreted.
    """
    check_blocks(bits, block_size)
    num_blocks = starts.shape[0]
    scales = check_wire("wire", wire, wire.device, num_blocks, scales_offset)
    check_decode_rows(wire, output, output_rows, shard_numel, wire.device)
    check_tensor("starts", starts, wire.device, (torch.int64,), num_blocks)
    check_tensor("lengths", lengths, wire.device, (torch.int64,), num_blocks)
    shape = tile(bits, block_size, output.dtype)
    grid = (triton.cdiv(num_blocks, shape.rows), wire.shape[0])
    if 0 in grid:
        return
    with device_of(wire):
        _unpack_dequantize_rows_kernel[grid](
            wire_ptr=wire,
            scales_ptr=scales,
            output_ptr=output,
            output_rows_ptr=output_rows,
            starts_ptr=starts,
            lengths_ptr=lengths,
            wire_stride=wire.shape[1],
            shard_numel=shard_numel,
            num_blocks=num_blocks,
            BITS=bits,
            BLOCK=block_size,
            ROWS=shape.rows,
            CHUNKS=shape.chunks,
            ADD=add,
            ALIGNED=aligned,
            **launch_options(bits, aligned),
        )
