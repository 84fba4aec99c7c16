"""Quantize and pack what a parameter differs from its replica by.

One launch, one pass over memory: reads the parameter and the replica, `[shard_numel]` both, writes
the wire, `[1, num_bytes]`, and the squares for monitoring. Both are widened to float32, then
subtracted. There is no error: what is not sent is in the next difference. The wire, `uint8`:

    codes   num_blocks * block_size * bits / 8 bytes, then padding to a multiple of 16
    scales  num_blocks float32,                       then padding to a multiple of 16

Inside a block codes are planar: with `k = 8 // bits` planes of `block_size // k` elements, byte i
holds element i in its lowest bits, then i + block_size // k, and so on (two's complement). Blocks
are found by the table `starts`, `lengths`: first element in the shard, number of elements. They
need not cover the shard. The padding of the wire is not written.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from loco_kernels.blocks import element_of, encode_blocks, locate_blocks, to_float32
from loco_kernels.checks import GRADIENT_DTYPES, check_tensor
from loco_kernels.launch import (
    device_of,
    encode_arguments,
    launch_options,
    tile,
)


@triton.jit(
    do_not_specialize=[
        "wire_stride",
        "num_rows",
        "num_blocks",
        "beta",
        "one_minus_beta",
    ]
)
def _subtract_quantize_pack_kernel(
    parameter_ptr,
    replica_ptr,
    wire_ptr,
    scales_ptr,  # the wire as float32, from its first scale on
    starts_ptr,
    lengths_ptr,
    rows_ptr,
    payload_ptr,
    error_scale_ptr,
    squares_ptr,
    nonfinite_ptr,
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
):
    wire_row = tl.program_id(1).to(tl.int64)  # 0: there is one row, and one peer
    block, number, exists, start, length = locate_blocks(
        starts_ptr, lengths_ptr, None, num_blocks, ROWS, ALIGNED, False
    )

    difference = ()
    for c in tl.static_range(CHUNKS):
        element = start[:, None] + element_of(c, BITS, BLOCK, CHUNKS)
        inside = element_of(c, BITS, BLOCK, CHUNKS) < length[:, None]
        parameter = tl.load(parameter_ptr + element, mask=inside, other=0.0)
        replica = tl.load(replica_ptr + element, mask=inside, other=0.0)
        difference = difference + (to_float32(parameter) - to_float32(replica),)

    encode_blocks(
        difference,
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


def subtract_quantize_pack(
    parameter: Tensor,
    replica: Tensor,
    wire: Tensor,
    starts: Tensor,
    lengths: Tensor,
    *,
    scales_offset: int,
    bits: int,
    block_size: int,
    shard_numel: int,
    squares: Tensor,
    nonfinite: Tensor,
    aligned: bool = False,
) -> None:
    """Launch the kernel on the device of `parameter` and its current stream.

    Args:
        parameter: `[shard_numel]` float32, bfloat16 or float16.
        replica: `[shard_numel]`, of any of these dtypes, too.
        wire: `[1, num_bytes]` uint8, written but for its padding.
        starts: `[num_blocks]` int64, like `lengths`: first element and number of elements of each
            block.
        scales_offset: byte at which the scales start, a multiple of 16.
        squares: `[1, num_blocks, 2]` float32, sums of squares of the difference and of what was
            not sent of it; written.
        nonfinite: `[1]` int64; the number of blocks that are not finite is added.
        aligned: every block starts at, and every parameter's part has, a multiple of 8 elements,
            and so do both tensors begin in memory.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape or device, or a number is out of range.
        RuntimeError: the parameter is on the CPU and Triton is not interpreted.
    """
    device = parameter.device
    check_tensor("parameter", parameter, device, GRADIENT_DTYPES, shard_numel)
    check_tensor("replica", replica, device, GRADIENT_DTYPES, shard_numel)
    if wire.shape[0] != 1:
        raise ValueError(f"wire must have shape [1, num_bytes], got {list(wire.shape)}")
    num_blocks = starts.shape[0]
    arguments = encode_arguments(
        wire,
        starts,
        lengths,
        rows=starts,  # of an error: there is none, so these are not read
        peers=1,
        wire_blocks=num_blocks,
        scales_offset=scales_offset,
        bits=bits,
        block_size=block_size,
        squares=squares,
        nonfinite=nonfinite,
        payload=None,
        error_scale=None,
        beta=0.0,
        device=device,
    )
    if num_blocks == 0:
        return
    shape = tile(bits, block_size, parameter.dtype, replica.dtype)
    with device_of(parameter):
        _subtract_quantize_pack_kernel[(triton.cdiv(num_blocks, shape.rows), 1)](
            parameter_ptr=parameter,
            replica_ptr=replica,
            ROWS=shape.rows,
            CHUNKS=shape.chunks,
            ALIGNED=aligned,
            **launch_options(bits, aligned),
            **arguments,
        )
