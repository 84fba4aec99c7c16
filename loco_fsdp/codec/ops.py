"""The codec as operators of torch, `loco_fsdp::encode` and the like.

One operator each, whatever backend runs it, so that profilers and fake tensors see them. The
functions here take the types of `loco_fsdp.codec.eager`, whose docstrings say what they do, and
call the operators with plain tensors and numbers.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from loco_fsdp.codec.backends import get_backend
from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import BlockTable, WireLayout

_ENCODE_WRITES = ("wire", "squares", "nonfinite", "payload", "error_scale")


def encode(
    gradient: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
    *,
    backend: str,
) -> None:
    """`eager.encode`, run by `backend`."""
    payload, error_scale = error if error is not None else (None, None)
    torch.ops.loco_fsdp.encode(
        gradient, wire, *_flat(table), *stats, payload, error_scale, beta, backend
    )


def decode(
    wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0, *, backend: str
) -> None:
    """`eager.decode`, run by `backend`."""
    torch.ops.loco_fsdp.decode(wire, output, *_flat(table), factor, backend)


def decode_encode(
    received: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
    factor: float = 1.0,
    *,
    backend: str,
) -> None:
    """`eager.decode_encode`, run by `backend`."""
    payload, error_scale = error if error is not None else (None, None)
    torch.ops.loco_fsdp.decode_encode(
        received, wire, *_flat(table), *stats, payload, error_scale, beta, factor, backend
    )


def drop_spike(
    squares: Tensor, usual: Tensor, error_scale: Tensor, rows: Tensor, limit: float, *, backend: str
) -> None:
    """`spikes.drop_spike`, run by `backend`."""
    torch.ops.loco_fsdp.drop_spike(squares, usual, error_scale, rows, limit, backend)


def encode_difference(
    parameter: Tensor,
    replica: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    *,
    backend: str,
) -> None:
    """`eager.encode_difference`, run by `backend`.

    Raises:
        ValueError: `table` has `row_starts`.
    """
    _check_whole(table)
    torch.ops.loco_fsdp.encode_difference(parameter, replica, wire, *_flat(table), *stats, backend)


def decode_rows(
    wire: Tensor,
    output: Tensor,
    table: BlockTable,
    output_rows: Tensor,
    *,
    add: bool,
    backend: str,
) -> None:
    """`eager.decode_rows`, run by `backend`; raises like `encode_difference`."""
    _check_whole(table)
    torch.ops.loco_fsdp.decode_rows(wire, output, *_flat(table), output_rows, add, backend)


@torch.library.custom_op("loco_fsdp::encode", mutates_args=_ENCODE_WRITES)
def _encode(
    gradient: Tensor,
    wire: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    row_starts: Tensor | None,
    wire_blocks: int,
    bits: int,
    block_size: int,
    shard_numel: int,
    aligned: bool,
    squares: Tensor,
    nonfinite: Tensor,
    payload: Tensor | None,
    error_scale: Tensor | None,
    beta: float,
    backend: str,
) -> None:
    wire_layout = _wire_layout(wire_blocks, bits, block_size)
    table = BlockTable(wire_layout, shard_numel, aligned, starts, lengths, rows, row_starts)
    error = _error(payload, error_scale)
    stats = EncodeStats(squares, nonfinite)
    get_backend(backend).encode(gradient, wire, table, stats, error, beta)


@torch.library.custom_op("loco_fsdp::decode", mutates_args=("output",))
def _decode(
    wire: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    row_starts: Tensor | None,
    wire_blocks: int,
    bits: int,
    block_size: int,
    shard_numel: int,
    aligned: bool,
    factor: float,
    backend: str,
) -> None:
    wire_layout = _wire_layout(wire_blocks, bits, block_size)
    table = BlockTable(wire_layout, shard_numel, aligned, starts, lengths, rows, row_starts)
    get_backend(backend).decode(wire, output, table, factor)


@torch.library.custom_op("loco_fsdp::decode_encode", mutates_args=_ENCODE_WRITES)
def _decode_encode(
    received: Tensor,
    wire: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    row_starts: Tensor | None,
    wire_blocks: int,
    bits: int,
    block_size: int,
    shard_numel: int,
    aligned: bool,
    squares: Tensor,
    nonfinite: Tensor,
    payload: Tensor | None,
    error_scale: Tensor | None,
    beta: float,
    factor: float,
    backend: str,
) -> None:
    wire_layout = _wire_layout(wire_blocks, bits, block_size)
    table = BlockTable(wire_layout, shard_numel, aligned, starts, lengths, rows, row_starts)
    error = _error(payload, error_scale)
    stats = EncodeStats(squares, nonfinite)
    get_backend(backend).decode_encode(received, wire, table, stats, error, beta, factor)


@torch.library.custom_op("loco_fsdp::drop_spike", mutates_args=("usual", "error_scale"))
def _drop_spike(
    squares: Tensor, usual: Tensor, error_scale: Tensor, rows: Tensor, limit: float, backend: str
) -> None:
    get_backend(backend).drop_spike(squares, usual, error_scale, rows, limit)


@torch.library.custom_op(
    "loco_fsdp::encode_difference", mutates_args=("wire", "squares", "nonfinite")
)
def _encode_difference(
    parameter: Tensor,
    replica: Tensor,
    wire: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    row_starts: Tensor | None,
    wire_blocks: int,
    bits: int,
    block_size: int,
    shard_numel: int,
    aligned: bool,
    squares: Tensor,
    nonfinite: Tensor,
    backend: str,
) -> None:
    wire_layout = _wire_layout(wire_blocks, bits, block_size)
    table = BlockTable(wire_layout, shard_numel, aligned, starts, lengths, rows, row_starts)
    stats = EncodeStats(squares, nonfinite)
    get_backend(backend).encode_difference(parameter, replica, wire, table, stats)


@torch.library.custom_op("loco_fsdp::decode_rows", mutates_args=("output",))
def _decode_rows(
    wire: Tensor,
    output: Tensor,
    starts: Tensor,
    lengths: Tensor,
    rows: Tensor,
    row_starts: Tensor | None,
    wire_blocks: int,
    bits: int,
    block_size: int,
    shard_numel: int,
    aligned: bool,
    output_rows: Tensor,
    add: bool,
    backend: str,
) -> None:
    wire_layout = _wire_layout(wire_blocks, bits, block_size)
    table = BlockTable(wire_layout, shard_numel, aligned, starts, lengths, rows, row_starts)
    get_backend(backend).decode_rows(wire, output, table, output_rows, add)


@_encode.register_fake
@_decode.register_fake
@_decode_encode.register_fake
@_drop_spike.register_fake
@_encode_difference.register_fake
@_decode_rows.register_fake
def _returns_nothing(*args: object) -> None:
    pass


_wire_layout = lru_cache(maxsize=1024)(WireLayout)  # keeps what a layout has worked out


def _flat(
    table: BlockTable,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, int, int, int, int, bool]:
    """Tensors and a few numbers, however many parameters or blocks there are."""
    wire, shard_numel, aligned, starts, lengths, rows, row_starts = table
    sizes = (wire.num_blocks, wire.bits, wire.block_size, shard_numel, aligned)
    return (starts, lengths, rows, row_starts, *sizes)


def _check_whole(table: BlockTable) -> None:
    if table.row_starts is not None:
        raise ValueError(
            "each row of the wire must hold all blocks of the table, got row_starts for "
            f"{table.row_starts.shape[0] - 1} rows that share them out"
        )


def _error(payload: Tensor | None, scale: Tensor | None) -> ErrorState | None:
    return None if payload is None or scale is None else ErrorState(payload, scale)
