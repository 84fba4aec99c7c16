"""Forget the error of what was encoded last if it is a spike: far larger than usual.

Two small launches, whatever the size. In the first, programs add up the squares in NUM_PARTS parts.
In the second each program adds up the parts and decides, and on a spike sets the scales of its rows
to 0. `usual`, float64 `[6 + NUM_PARTS]`:

    0..2   sum of past norms, sum of their squares, number of spikes
    3..5   the same as it was before, which programs of the second launch read while one writes
    6..    the parts
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from loco_kernels.checks import check_drop_spike
from loco_kernels.launch import device_of

NUM_PARTS = 64
_SIZE = 1024  # elements of a tile


@triton.jit(do_not_specialize=["num_squares", "num_tiles"])
def _sum_squares_kernel(
    squares_ptr,
    usual_ptr,
    num_squares,
    num_tiles,  # of each part
    NUM_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    part = tl.program_id(0).to(tl.int64)
    if part == 0:
        state = tl.arange(0, 4)
        before = tl.load(usual_ptr + state, mask=state < 3, other=0.0)
        tl.store(usual_ptr + 3 + state, before, mask=state < 3)
    total = tl.zeros([SIZE], tl.float64)
    for tile in tl.range(0, num_tiles):
        index = (tl.cast(tile, tl.int64) * NUM_PARTS + part) * SIZE + tl.arange(0, SIZE)
        square = tl.load(squares_ptr + index * 2, mask=index < num_squares, other=0.0)
        total += square.to(tl.float64)
    tl.store(usual_ptr + 6 + part, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_blocks", "num_rows"])
def _drop_spike_kernel(
    usual_ptr,
    error_scale_ptr,
    rows_ptr,
    num_blocks,
    num_rows,
    LIMIT: tl.constexpr,
    DECAY: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    # A constant beside a float64 could be rounded to float32.
    limit = tl.full([], LIMIT, tl.float64)
    decay = tl.full([], DECAY, tl.float64)
    infinity = tl.full([], float("inf"), tl.float64)
    zero = tl.full([], 0.0, tl.float64)
    total = tl.load(usual_ptr + 3)
    total_of_squares = tl.load(usual_ptr + 4)
    norm = tl.sqrt(tl.sum(tl.load(usual_ptr + 6 + tl.arange(0, NUM_PARTS)), axis=0))
    highest = tl.where(total > 0, limit * (total_of_squares / total), infinity)
    spike = (norm > highest) | (norm == infinity)

    peer = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    block = tile * SIZE + tl.arange(0, SIZE)
    dropped = block < tl.where(spike, num_blocks, 0)
    row = peer * num_rows + tl.load(rows_ptr + block, mask=dropped, other=0)
    tl.store(error_scale_ptr + row, tl.zeros([SIZE], tl.float32), mask=dropped)

    if (tile == 0) & (peer == 0):
        usual_norm = tl.minimum(norm, highest)
        usual_norm = tl.where(usual_norm == infinity, zero, usual_norm)
        tl.store(usual_ptr, decay * total + usual_norm)
        tl.store(usual_ptr + 1, decay * total_of_squares + usual_norm * usual_norm)
        tl.store(usual_ptr + 2, tl.load(usual_ptr + 5) + spike.to(tl.float64))


def drop_spike(
    squares: Tensor,
    usual: Tensor,
    error_scale: Tensor,
    rows: Tensor,
    *,
    limit: float,
    decay: float,
) -> None:
    """Launch the kernels on the device of `squares` and its current stream.

    Args:
        squares: `[peers, num_blocks, 2]` float32; the first of each two are added up.
        usual: `[6 + NUM_PARTS]` float64, see the module; updated.
        error_scale: `[peers, num_rows]` float32; set to 0 where a spike was encoded.
        rows: `[num_blocks]` int64, those that were encoded.
        limit: a spike has a norm so many times the mean of past norms, weighted by themselves.
        decay: of the weight of past norms with every call.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape or device, or a number is out of range.
        RuntimeError: the tensors are on the CPU and Triton is not interpreted.
    """
    check_drop_spike(squares, usual, error_scale, rows, limit, 6 + NUM_PARTS, squares.device)
    peers, num_blocks = squares.shape[:2]
    num_squares = peers * num_blocks
    options = {"NUM_PARTS": NUM_PARTS, "SIZE": _SIZE, "num_warps": 4, "enable_fp_fusion": False}
    with device_of(squares):
        _sum_squares_kernel[(NUM_PARTS,)](
            squares_ptr=squares,
            usual_ptr=usual,
            num_squares=num_squares,
            num_tiles=triton.cdiv(num_squares, NUM_PARTS * _SIZE),
            **options,
        )
        # At least one program, which writes what is usual now.
        _drop_spike_kernel[(max(1, triton.cdiv(num_blocks, _SIZE)), max(1, peers))](
            usual_ptr=usual,
            error_scale_ptr=error_scale,
            rows_ptr=rows,
            num_blocks=num_blocks,
            num_rows=error_scale.shape[1],
            LIMIT=limit,
            DECAY=decay,
            **options,
        )
