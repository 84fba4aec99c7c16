"""The codec on GPUs: one launch each of the kernels in `loco_kernels`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import BlockTable
from loco_kernels.compensate_quantize_pack import compensate_quantize_pack
from loco_kernels.unpack_dequantize_reduce import unpack_dequantize_reduce
from loco_kernels.unpack_reduce_requantize import unpack_reduce_requantize

_VECTOR_ELEMENTS = 8  # of 16 bits in a load of 16 bytes


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
        **_blocks(table, gradient),
        **_state(stats, error),
    )


def decode(wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0) -> None:
    """`eager.decode` in one launch."""
    unpack_dequantize_reduce(wire, output, factor=factor, **_blocks(table, output))


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
    blocks = _blocks(table, None)
    del blocks["aligned"]  # neither gradient nor output is in memory
    unpack_reduce_requantize(
        received,
        wire,
        rows=table.rows,
        beta=beta,
        factor=factor,
        **blocks,
        **_state(stats, error),
    )


def _blocks(table: BlockTable, elements: Tensor | None) -> dict[str, Any]:
    """Where blocks are, on the wire and in `elements`."""
    layout = table.layout
    aligned = all(numel % _VECTOR_ELEMENTS == 0 for numel in layout.numels)
    if elements is not None:
        aligned = aligned and elements.data_ptr() % (_VECTOR_ELEMENTS * elements.itemsize) == 0
    return {
        "starts": table.starts,
        "lengths": table.lengths,
        "scales_offset": layout.scales_offset,
        "bits": layout.bits,
        "block_size": layout.block_size,
        "aligned": aligned,
    }


def _state(stats: EncodeStats, error: ErrorState | None) -> dict[str, Any]:
    return {
        "squares": stats.squares,
        "nonfinite": stats.nonfinite,
        "payload": None if error is None else error.payload,
        "error_scale": None if error is None else error.scale,
    }
