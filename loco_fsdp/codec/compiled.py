"""The codec on CPUs: the arithmetic of `eager.py`, compiled by torch.compile.

Blocks of one or more peers are copied into a small scratch as float32 rows, one compiled call
encodes or decodes all of them (`compiled_rows.py`), and the results are copied to where they
belong. So nothing the size of the gradient is allocated, and what is compiled knows neither the
dtypes of gradient and error, nor how many peers there are, nor where parameters end.

Without a C++ compiler the functions of `eager.py` run, after one warning.
"""

from __future__ import annotations

import functools
import math
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from loco_fsdp.codec import compiled_rows, eager
from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import BlockLayout, BlockTable

# Peers that one call of decode sums: its code is unrolled over them.
_MAX_PEERS = 8


class _Piece(NamedTuple):
    """Blocks of one part that follow each other, all whole or one short.

    first: row of the first block, counted from the first row of the chunk
    num_blocks: how many
    start: first element in the shard
    length: elements of each block
    """

    first: int
    num_blocks: int
    start: int
    length: int


class _Chunk(NamedTuple):
    """Blocks of a shard that follow each other and fit in the scratch.

    first: the first block
    num_blocks: how many
    pieces: where they are in the shard
    """

    first: int
    num_blocks: int
    pieces: tuple[_Piece, ...]

    @property
    def blocks(self) -> slice:
        """The blocks among those of the shard."""
        return slice(self.first, self.first + self.num_blocks)

    def on_wire(self, layout: BlockLayout) -> tuple[slice, slice]:
        """Their codes and their scales on the wire."""
        return layout.on_wire(self.blocks.start, self.blocks.stop)


class _Scratch(threading.local):
    """Float32 buffers of the calling thread by name; they only grow."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def get(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor with undefined contents, valid until the next one of that name."""
        numel = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel:
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.zeros(numel)
        return buffer[:numel].view(shape)

    def rows(self, name: str, rows: int, *shape: int) -> Tensor:
        """`[rows, *shape]`, at least two rows: one row alone would be compiled anew."""
        return self.get(name, max(rows, 2), *shape)


_scratch = _Scratch()


@torch.no_grad()
def encode(
    gradient: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
) -> None:
    """See `eager.encode`."""
    if not has_compiler():
        return eager.encode(gradient, wire, table, stats, error, beta)
    block_size = table.layout.block_size
    for chunk in _chunks(table.layout):
        for peers in _peer_ranges(gradient.shape[0], chunk, block_size):
            source = gradient[peers]
            rows = _view(source[0], chunk, block_size) if source.shape[0] == 1 else None
            if rows is None:
                num_rows = source.shape[0] * chunk.num_blocks
                rows = _scratch.rows("rows", num_rows, block_size)
                _gather(source, chunk, rows[:num_rows].view(source.shape[0], -1, block_size))
            _encode_chunk(rows, peers, chunk, wire, table, stats, error, beta)


@torch.no_grad()
def decode(wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0) -> None:
    """See `eager.decode`."""
    if not has_compiler():
        return eager.decode(wire, output, table, factor)
    block_size = table.layout.block_size
    for chunk in _chunks(table.layout):
        view = _view(output, chunk, block_size)
        rows = _scratch.rows("rows", chunk.num_blocks, block_size) if view is None else view
        _decode_chunk(wire, chunk, table.layout, factor, rows)
        if view is None:
            for first, num_blocks, start, length in chunk.pieces:
                target = output[start : start + num_blocks * length].view(num_blocks, length)
                target.copy_(rows[first : first + num_blocks, :length])


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
    """See `eager.decode_encode`."""
    if not has_compiler():
        return eager.decode_encode(received, wire, table, stats, error, beta, factor)
    for chunk in _chunks(table.layout):
        rows = _scratch.rows("rows", chunk.num_blocks, table.layout.block_size)
        _decode_chunk(received, chunk, table.layout, factor, rows)
        _clear_padding(chunk, rows.unsqueeze(0))
        _encode_chunk(rows, slice(0, 1), chunk, wire, table, stats, error, beta)


@functools.cache
def has_compiler() -> bool:
    """Whether the C++ compiler that torch.compile calls is there; warns where it is not."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is not None:
        return True
    warnings.warn(
        f"there is no C++ compiler {name!r}: loco-fsdp runs its codec uncompiled, several times "
        'slower. Install g++, or set CXX to a compiler, or choose backend="eager"',
        stacklevel=3,
    )
    return False


@functools.lru_cache(1024)
def _chunks(layout: BlockLayout) -> tuple[_Chunk, ...]:
    """The blocks of a shard, a scratch full at a time."""
    pieces = []
    start = 0
    for numel in layout.numels:
        whole, tail = divmod(numel, layout.block_size)
        pieces += [(start, whole, layout.block_size)] if whole else []
        pieces += [(start + numel - tail, 1, tail)] if tail else []
        start += numel

    chunks = [_Chunk(0, 0, ())]
    for start, num_blocks, length in pieces:
        while num_blocks:
            first, used, others = chunks[-1]
            taken = min(num_blocks, compiled_rows.max_rows(layout.block_size) - used)
            if not taken:
                chunks.append(_Chunk(first + used, 0, ()))
                continue
            piece = _Piece(used, taken, start, length)
            chunks[-1] = _Chunk(first, used + taken, (*others, piece))
            start, num_blocks = start + taken * length, num_blocks - taken
    return tuple(chunk for chunk in chunks if chunk.num_blocks)


def _peer_ranges(peers: int, chunk: _Chunk, block_size: int) -> Iterator[slice]:
    """Peers whose rows are encoded by one call: several where shards are small."""
    together = compiled_rows.max_rows(block_size) // chunk.num_blocks
    for first in range(0, peers, together):
        yield slice(first, min(peers, first + together))


def _view(flat: Tensor, chunk: _Chunk, block_size: int) -> Tensor | None:
    """The chunk as rows of the shard itself, where they are float32 and whole."""
    _, num_blocks, start, length = chunk.pieces[0]
    whole = len(chunk.pieces) == 1 and length == block_size and num_blocks > 1
    if not whole or flat.dtype is not torch.float32:
        return None
    return flat[start : start + num_blocks * length].view(num_blocks, length)


def _gather(gradient: Tensor, chunk: _Chunk, rows: Tensor) -> None:
    """`[peers, shard_numel]` of any dtype to `[peers, num_blocks, block_size]` float32."""
    for first, num_blocks, start, length in chunk.pieces:
        source = gradient[:, start : start + num_blocks * length]
        target = rows[:, first : first + num_blocks, :length]
        target.copy_(source.view(-1, num_blocks, length))
    _clear_padding(chunk, rows)


def _clear_padding(chunk: _Chunk, rows: Tensor) -> None:
    """Zero the ends of short blocks in `[peers, num_blocks, block_size]`."""
    for first, num_blocks, _, length in chunk.pieces:
        if length < rows.shape[-1]:
            rows[:, first : first + num_blocks, length:].zero_()


def _encode_chunk(
    rows: Tensor,
    peers: slice,
    chunk: _Chunk,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None,
    beta: float,
) -> None:
    """Encode the chunk of `peers`, given as `rows` `[peers * num_blocks, block_size]` float32."""
    layout = table.layout
    shape = (peers.stop - peers.start, chunk.num_blocks)
    num_rows = math.prod(shape)
    packed = _scratch.rows("packed", num_rows, layout.bytes_per_block)
    lengths = _scratch.rows("lengths", num_rows)
    if layout.bits < 4:  # else they are not looked at
        lengths[:num_rows].view(shape).copy_(table.lengths[chunk.blocks])
    compute = compiled_rows.encoder(layout.bits, layout.block_size, error is not None)
    if error is None:
        constants = compiled_rows.constants(layout.bits, torch.float32, beta)
        scale, squares = compute(rows, packed, lengths, *constants)
    else:
        constants = compiled_rows.constants(layout.bits, error.payload.dtype, beta)
        old, new = (
            ErrorState(
                _scratch.rows(f"{name}_payload", num_rows, layout.block_size),
                _scratch.rows(f"{name}_scale", num_rows),
            )
            for name in ("old", "new")
        )
        index = _error_rows(table, chunk)
        _load_error(error, peers, index, _of_peers(old, shape))
        scale, squares, new_scale = compute(rows, packed, lengths, *constants, *old, new.payload)
        new.payload.div_(new_scale.unsqueeze(-1))
        new.scale.copy_(new_scale)
        _store_error(_of_peers(new, shape), error, peers, index)

    scale = scale[:num_rows].view(shape)
    codes, scales = chunk.on_wire(layout)
    wire[peers, codes].view(torch.int8).copy_(packed[:num_rows].view(shape[0], -1))
    wire[peers, scales] = scale.view(torch.uint8)
    stats.squares[peers, chunk.blocks] = squares[:num_rows].view(*shape, 2)
    stats.nonfinite.add_(scale.isnan().sum())


def _error_rows(table: BlockTable, chunk: _Chunk) -> slice | Tensor:
    """The rows of the chunk in the error buffer; a slice where they follow each other."""
    rows = table.rows[chunk.blocks]
    listed = rows.tolist()  # operations of torch would take longer
    following = range(listed[0], listed[0] + chunk.num_blocks)
    return slice(following.start, following.stop) if listed == list(following) else rows


def _of_peers(rows: ErrorState, shape: tuple[int, int]) -> ErrorState:
    """The first rows as `[peers, num_blocks, block_size]` and `[peers, num_blocks]`."""
    num_rows = math.prod(shape)
    return ErrorState(rows.payload[:num_rows].view(*shape, -1), rows.scale[:num_rows].view(shape))


def _load_error(error: ErrorState, peers: slice, index: slice | Tensor, rows: ErrorState) -> None:
    payload = error.payload[peers]
    if isinstance(index, slice):
        rows.payload.copy_(payload[:, index])
    else:
        rows.payload.copy_(eager._indexable(payload)[:, index].view(payload.dtype))
    rows.scale.copy_(error.scale[peers, index])


def _store_error(rows: ErrorState, error: ErrorState, peers: slice, index: slice | Tensor) -> None:
    payload = error.payload[peers]
    if payload.dtype is torch.int8:
        rows.payload.round_().clamp_(-127, 127)
    if isinstance(index, slice):
        payload[:, index].copy_(rows.payload)
    else:
        eager._indexable(payload)[:, index] = eager._indexable(rows.payload.to(payload.dtype))
    error.scale[peers, index] = rows.scale


def _decode_chunk(
    wire: Tensor, chunk: _Chunk, layout: BlockLayout, factor: float, rows: Tensor
) -> None:
    """Sum the chunk over all peers into `rows` `[num_blocks, block_size]` float32."""
    codes, scales = chunk.on_wire(layout)
    for first in range(0, wire.shape[0], _MAX_PEERS):
        sent = wire[first : first + _MAX_PEERS]
        peers = sent.shape[0]
        packed = _scratch.get("packed", peers, rows.shape[0], layout.bytes_per_block)
        scale = _scratch.get("scale", peers, rows.shape[0])
        bytes_ = sent[:, codes].view(torch.int8)
        packed[:, : chunk.num_blocks].copy_(bytes_.view(peers, chunk.num_blocks, -1))
        scale[:, : chunk.num_blocks].view(torch.uint8).copy_(sent[:, scales])
        add = compiled_rows.decoder(layout.bits, layout.block_size, peers, first == 0)
        add(packed, scale, rows, compiled_rows.units(layout.bits))
    if factor != 1:
        rows.mul_(factor)
