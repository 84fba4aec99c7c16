"""The codec on CPUs: the arithmetic of `eager.py` in C++, compiled when it is first called.

One call reads and writes each element once, in as many threads as torch uses, allocates nothing,
and leaves the interpreter to other threads meanwhile. One build serves every width, dtype and size.

Without a C++ compiler the functions of `eager.py` run, after one warning.
"""

from __future__ import annotations

import ctypes
import functools
import warnings

import torch
from torch import Tensor

from loco_fsdp.codec import eager, spikes
from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import BlockTable
from loco_kernels.checks import (
    GRADIENT_DTYPES,
    check_blocks,
    check_decode_rows,
    check_drop_spike,
    check_encode,
    check_row_starts,
    check_tensor,
)
from loco_kernels.cpu_build import load_library

_CPU = torch.device("cpu")
# `Dtype` of cpu_dtypes.h.
_DTYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
}


class _Blocks(ctypes.Structure):
    """`Blocks` of cpu_codec.cpp."""

    _fields_ = (
        ("bits", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_blocks", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("scales_offset", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("row_starts", ctypes.c_void_p),
        ("wire_rows", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class _State(ctypes.Structure):
    """`State` of cpu_codec.cpp."""

    _fields_ = (
        ("squares", ctypes.c_void_p),
        ("nonfinite", ctypes.c_void_p),
        ("payload", ctypes.c_void_p),
        ("error_scale", ctypes.c_void_p),
        ("error_dtype", ctypes.c_int64),
        ("error_top_exponent", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("beta", ctypes.c_float),
        ("one_minus_beta", ctypes.c_float),
    )


@torch.no_grad()
def encode(
    gradient: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
) -> None:
    """See `eager.encode`.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a tensor has another shape, is not contiguous or not on the CPU.
    """
    library = _library()
    if library is None:
        return eager.encode(gradient, wire, table, stats, error, beta)
    peers, shard_numel = _peers(wire, table), table.shard_numel
    check_tensor("gradient", gradient, _CPU, GRADIENT_DTYPES, peers, shard_numel)
    library.loco_encode(
        *_encode_arguments(wire, table, peers, stats, error, beta),
        _pointer(gradient),
        ctypes.c_int64(_DTYPES[gradient.dtype]),
        ctypes.c_int64(shard_numel),
        ctypes.c_int64(peers),
        _pointer(wire),
    )


@torch.no_grad()
def decode(wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0) -> None:
    """See `eager.decode`; raises like `encode`."""
    library = _library()
    if library is None:
        return eager.decode(wire, output, table, factor)
    check_blocks(table.wire.bits, table.wire.block_size)
    _check_wire("wire", wire, table)
    check_tensor("output", output, _CPU, GRADIENT_DTYPES, table.shard_numel)
    library.loco_decode(
        ctypes.byref(_blocks(wire, table)),
        _pointer(wire),
        ctypes.c_int64(_peers(wire, table)),
        ctypes.c_float(factor),
        _pointer(output),
        ctypes.c_int64(_DTYPES[output.dtype]),
    )


@torch.no_grad()
def decode_encode(
    received: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
    factor: float = 1.0,
) -> None:
    """See `eager.decode_encode`; raises like `encode`."""
    library = _library()
    if library is None:
        return eager.decode_encode(received, wire, table, stats, error, beta, factor)
    _check_wire("received", received, table)
    library.loco_decode_encode(
        *_encode_arguments(wire, table, 1, stats, error, beta),
        _pointer(received),
        ctypes.c_int64(received.shape[0]),
        ctypes.c_float(factor),
        _pointer(wire),
    )


@torch.no_grad()
def drop_spike(
    squares: Tensor, usual: Tensor, error_scale: Tensor, rows: Tensor, limit: float
) -> None:
    """See `spikes.drop_spike`; raises like `encode`."""
    library = _library()
    if library is None:
        return spikes.drop_spike(squares, usual, error_scale, rows, limit)
    peers, num_blocks = squares.shape[:2]
    check_drop_spike(squares, usual, error_scale, rows, limit, spikes.USUAL_NUMEL, _CPU)
    library.loco_drop_spike(
        _pointer(squares),
        ctypes.c_int64(peers),
        ctypes.c_int64(num_blocks),
        _pointer(usual),
        _pointer(error_scale),
        ctypes.c_int64(error_scale.shape[1]),
        _pointer(rows),
        ctypes.c_double(limit),
        ctypes.c_double(spikes.DECAY),
    )


@torch.no_grad()
def encode_difference(
    parameter: Tensor, replica: Tensor, wire: Tensor, table: BlockTable, stats: EncodeStats
) -> None:
    """See `eager.encode_difference`; raises like `encode`."""
    library = _library()
    if library is None:
        return eager.encode_difference(parameter, replica, wire, table, stats)
    for name, x in (("parameter", parameter), ("replica", replica)):
        check_tensor(name, x, _CPU, GRADIENT_DTYPES, table.shard_numel)
    check_tensor("wire", wire, _CPU, (torch.uint8,), 1, table.wire.num_bytes)
    library.loco_encode_difference(
        *_encode_arguments(wire, table, 1, stats, None, 0.0),
        _pointer(parameter),
        ctypes.c_int64(_DTYPES[parameter.dtype]),
        _pointer(replica),
        ctypes.c_int64(_DTYPES[replica.dtype]),
        _pointer(wire),
    )


@torch.no_grad()
def decode_rows(
    wire: Tensor, output: Tensor, table: BlockTable, output_rows: Tensor, add: bool
) -> None:
    """See `eager.decode_rows`; raises like `encode`, and ValueError where `output_rows` are not
    different rows of the output."""
    library = _library()
    if library is None:
        return eager.decode_rows(wire, output, table, output_rows, add)
    check_blocks(table.wire.bits, table.wire.block_size)
    _check_wire("wire", wire, table)
    check_decode_rows(wire, output, output_rows, table.shard_numel, _CPU)
    library.loco_decode_rows(
        ctypes.byref(_blocks(wire, table)),
        _pointer(wire),
        ctypes.c_int64(wire.shape[0]),
        _pointer(output_rows),
        ctypes.c_bool(add),
        _pointer(output),
        ctypes.c_int64(_DTYPES[output.dtype]),
        ctypes.c_int64(table.shard_numel),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The compiled codec; None, after a warning, where it cannot be had."""
    try:
        return load_library()
    except RuntimeError as error:
        warnings.warn(
            f'loco-fsdp runs its codec as with backend="eager", many times slower: {error}',
            stacklevel=3,
        )
        return None


def _encode_arguments(
    wire: Tensor,
    table: BlockTable,
    peers: int,
    stats: EncodeStats,
    error: ErrorState | None,
    beta: float,
) -> tuple[object, object]:
    """What both functions that encode begin with, checked."""
    _check_wire("wire", wire, table)
    payload, error_scale = (None, None) if error is None else error
    check_encode(
        table.starts,
        table.lengths,
        table.rows,
        peers=peers,
        bits=table.wire.bits,
        block_size=table.wire.block_size,
        squares=stats.squares,
        nonfinite=stats.nonfinite,
        payload=payload,
        error_scale=error_scale,
        beta=beta,
        device=_CPU,
    )
    state = _State(
        squares=_pointer(stats.squares),
        nonfinite=_pointer(stats.nonfinite),
        beta=beta,
        one_minus_beta=1 - beta,
    )
    if error is not None:
        state.payload, state.error_scale = map(_pointer, error)
        state.error_dtype = _DTYPES[error.payload.dtype]
        state.error_top_exponent = eager.ERROR_TOP_EXPONENT[error.payload.dtype]
        state.num_rows = error.payload.shape[1]
    return ctypes.byref(_blocks(wire, table)), ctypes.byref(state)


def _peers(wire: Tensor, table: BlockTable) -> int:
    return wire.shape[0] if table.row_starts is None else 1


def _check_wire(name: str, wire: Tensor, table: BlockTable) -> None:
    check_tensor(name, wire, _CPU, (torch.uint8,), -1, table.wire.num_bytes)
    check_row_starts(table.row_starts, wire.shape[0], _CPU)


def _blocks(wire: Tensor, table: BlockTable) -> _Blocks:
    layout = table.wire
    return _Blocks(
        bits=layout.bits,
        block_size=layout.block_size,
        num_blocks=table.num_blocks,
        row_bytes=layout.num_bytes,
        scales_offset=layout.scales_offset,
        starts=_pointer(table.starts),
        lengths=_pointer(table.lengths),
        rows=_pointer(table.rows),
        row_starts=None if table.row_starts is None else _pointer(table.row_starts),
        wire_rows=wire.shape[0],
        threads=torch.get_num_threads(),
    )


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())
