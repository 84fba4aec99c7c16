"""The codec on GPUs: launches of the kernels in `loco_kernels`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import VECTOR_ELEMENTS, BlockTable
from loco_fsdp.codec.spikes import DECAY
from loco_kernels import drop_spike as drop_spike_kernels
from loco_kernels.compensate_quantize_pack import compensate_quantize_pack
from loco_kernels.subtract_quantize_pack import subtract_quantize_pack
from loco_kernels.unpack_dequantize_reduce import unpack_dequantize_reduce
from loco_kernels.unpack_dequantize_rows import unpack_dequantize_rows
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


def encode_difference(
    parameter: Tensor, replica: Tensor, wire: Tensor, table: BlockTable, stats: EncodeStats
) -> None:
    """`eager.encode_difference` in one launch."""
    subtract_quantize_pack(
        parameter,
        replica,
        wire,
        shard_numel=table.shard_numel,
        squares=stats.squares,
        nonfinite=stats.nonfinite,
        aligned=table.aligned and _begins_aligned(parameter) and _begins_aligned(replica),
        **_blocks(table),
    )


def decode_rows(
    wire: Tensor, output: Tensor, table: BlockTable, output_rows: Tensor, add: bool
) -> None:
    """`eager.decode_rows` in one launch, whatever the number of rows."""
    rows_are_aligned = table.shard_numel % VECTOR_ELEMENTS == 0
    unpack_dequantize_rows(
        wire,
        output,
        output_rows=output_rows,
        shard_numel=table.shard_numel,
        add=add,
        aligned=table.aligned and rows_are_aligned and _begins_aligned(output),
        **_blocks(table),
    )


def _begins_aligned(elements: Tensor) -> bool:
    return elements.data_ptr() % (VECTOR_ELEMENTS * elements.itemsize) == 0


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
    return {
        "row_starts": table.row_starts,
        "wire_blocks": table.wire.num_blocks,
        "aligned": table.aligned and _begins_aligned(elements),
    }


def _state(stats: EncodeStats, error: ErrorState | None) -> dict[str, Any]:
    return {
        "squares": stats.squares,
        "nonfinite": stats.nonfinite,
        "payload": None if error is None else error.payload,
        "error_scale": None if error is None else error.scale,
    }
