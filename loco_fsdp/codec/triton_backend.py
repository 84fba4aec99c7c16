"""The codec on GPUs: launches of the kernels in `loco_kernels`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import VECTOR_ELEMENTS, BlockTable
from loco_fsdp.codec.spikes import DECAY
from loco_kernels import drop_spike as drop_spike_kernels
from loco_kernels.compensate_quantize_pack import compensate_quantize_pack
from loco_kernels.unpack_dequantize_reduce import unpack_dequantize_reduce
from loco_kernels.unpack_reduce_requantize import unpack_reduce_requantize


def encode(
    gradient: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
) -> None:
    """`eager.encode` in one launch."""
    compensate_quantize_pack(
        gradient,
        wire,
        rows=table.rows,
        beta=beta,
        **_blocks(table),
        **_rows_of_wire(table, gradient),
        **_state(stats, error),
    )


def decode(wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0) -> None:
    """`eager.decode` in one launch."""
    unpack_dequantize_reduce(
        wire, output, factor=factor, **_blocks(table), **_rows_of_wire(table, output)
    )


def decode_encode(
    received: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
    factor: float = 1.0,
) -> None:
    """`eager.decode_encode` in one launch."""
    unpack_reduce_requantize(
        received,
        wire,
        rows=table.rows,
        beta=beta,
        factor=factor,
        **_blocks(table),
        **_state(stats, error),
    )


def drop_spike(
    squares: Tensor, usual: Tensor, error_scale: Tensor, rows: Tensor, limit: float
) -> None:
    """`spikes.drop_spike` in two small launches."""
    drop_spike_kernels.drop_spike(squares, usual, error_scale, rows, limit=limit, decay=DECAY)


def _blocks(table: BlockTable) -> dict[str, Any]:
    return {
        "starts": table.starts,
        "lengths": table.lengths,
        "scales_offset": table.wire.scales_offset,
        "bits": table.wire.bits,
        "block_size": table.wire.block_size,
    }


def _rows_of_wire(table: BlockTable, elements: Tensor) -> dict[str, Any]:
    """Where blocks are on the wire, and whether `elements` move in vectors."""
    begins_aligned = elements.data_ptr() % (VECTOR_ELEMENTS * elements.itemsize) == 0
    return {
        "row_starts": table.row_starts,
        "wire_blocks": table.wire.num_blocks,
        "aligned": table.aligned and begins_aligned,
    }


def _state(stats: EncodeStats, error: ErrorState | None) -> dict[str, Any]:
    return {
        "squares": stats.squares,
        "nonfinite": stats.nonfinite,
        "payload": None if error is None else error.payload,
        "error_scale": None if error is None else error.scale,
    }
