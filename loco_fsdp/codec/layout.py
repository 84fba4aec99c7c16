"""Blocks of a shard, and the bytes that they take on the wire.

A reduction moves, for each destination, one part ("shard") of every parameter of a unit, one
after the other. Each parameter's part is cut into blocks of `block_size` elements that share one
scale; the last block of a part may be shorter, so that no block straddles two parameters.

One row of the wire, `uint8 [num_bytes]`:

    codes   num_blocks * block_size * bits / 8 bytes, then padding to a multiple of 16
    scales  num_blocks float32,                       then padding to a multiple of 16

A row holds all blocks of a shard, one row for each peer, or, of a shard that several ranks share,
the blocks of one of them. A short block takes the bytes of a whole one, so that codes are found
without a table: it costs at most one block per parameter. Inside a block codes are packed planar:
with `k = 8 // bits` planes of `block_size // k` elements, byte i holds element i in its lowest
bits, then the elements `i + block_size // k`, `i + 2 * block_size // k`, ... (two's complement).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16
_SCALE_BYTES = 4
# Elements of 16 bits in a load of 16 bytes.
VECTOR_ELEMENTS = 8


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class WireLayout:
    """One row of the wire, with room for `num_blocks` blocks."""

    num_blocks: int
    bits: int
    block_size: int

    @cached_property
    def bytes_per_block(self) -> int:
        """Bytes of the packed codes of one block."""
        return self.block_size * self.bits // 8

    @cached_property
    def scales_offset(self) -> int:
        """Byte of the row at which its scales start."""
        return _round_up(self.num_blocks * self.bytes_per_block, _ALIGNMENT_BYTES)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the row."""
        return self.scales_offset + _round_up(self.num_blocks * _SCALE_BYTES, _ALIGNMENT_BYTES)

    def on_wire(self, first: int, last: int) -> tuple[slice, slice]:
        """Bytes of the codes and of the scales of blocks `first` to `last`, which is excluded."""
        scales = self.scales_offset
        return (
            slice(first * self.bytes_per_block, last * self.bytes_per_block),
            slice(scales + first * _SCALE_BYTES, scales + last * _SCALE_BYTES),
        )


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of one shard made of parts with `numels` elements."""

    numels: tuple[int, ...]
    bits: int
    block_size: int

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return sum(self.numels)

    @cached_property
    def blocks_per_part(self) -> tuple[int, ...]:
        """Blocks of each parameter's part."""
        return tuple(-(-numel // self.block_size) for numel in self.numels)

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of one shard."""
        return sum(self.blocks_per_part)

    @cached_property
    def wire(self) -> WireLayout:
        """A row of the wire that holds all blocks."""
        return WireLayout(self.num_blocks, self.bits, self.block_size)

    @property
    def bytes_per_shard(self) -> int:
        """Bytes of one shard on the wire."""
        return self.wire.num_bytes

    def place(
        self,
        device: torch.device,
        rows: Tensor | None = None,
        starts: tuple[int, ...] | None = None,
        shard_numel: int | None = None,
    ) -> BlockTable:
        """The blocks as a table on `device`.

        Args:
            rows: `[num_blocks]` int64, of their errors; None: 0, 1, 2, ...
            starts: first element of each part; None: they are one after the other.
            shard_numel: elements of the shard, which may hold more than the parts; None: it does
                not.
        """
        if starts is None:
            starts = tuple(accumulate(self.numels, initial=0))[:-1]
        numels, counts, firsts = (
            torch.tensor(sizes, dtype=torch.int64).to(device)
            for sizes in (self.numels, self.blocks_per_part, starts)
        )
        number = torch.arange(self.num_blocks, dtype=torch.int64, device=device)

        def of_block(of_part: Tensor) -> Tensor:
            # With the size given, no GPU is asked for it.
            return of_part.repeat_interleave(counts, output_size=self.num_blocks)

        in_part = (number - of_block(counts.cumsum(0) - counts)) * self.block_size
        return BlockTable(
            wire=self.wire,
            shard_numel=self.shard_numel if shard_numel is None else shard_numel,
            aligned=all(place % VECTOR_ELEMENTS == 0 for place in (*self.numels, *starts)),
            starts=of_block(firsts) + in_part,
            lengths=(of_block(numels) - in_part).clamp(max=self.block_size),
            rows=number if rows is None else rows.to(device),
        )


class BlockTable(NamedTuple):
    """Where each block of a shard is: among its elements, in the error buffer and on the wire.

    wire: a row of the wire, which may have room for more blocks than there are
    shard_numel: elements of the shard
    aligned: every part of the shard starts at and has a multiple of 8 elements
    starts: the block's first element in the shard, `[num_blocks]` int64
    lengths: its number of elements, `[num_blocks]` int64
    rows: its row in the error buffer, `[num_blocks]` int64
    row_starts: row r of the wire holds blocks `row_starts[r]` to `row_starts[r + 1]`, which is
        excluded, from the start of the row on, `[wire_rows + 1]` int64. None: every row holds all
        blocks, one row for each peer.
    """

    wire: WireLayout
    shard_numel: int
    aligned: bool
    starts: Tensor
    lengths: Tensor
    rows: Tensor
    row_starts: Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the table; a row of the wire may have room for fewer or more."""
        return self.starts.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        columns = (self.starts, self.lengths, self.rows, self.row_starts)
        return sum(column.nbytes for column in columns if column is not None)

    def take(self, order: Tensor) -> BlockTable:
        """These blocks in another order, `[num_blocks]` int64."""
        order = order.to(self.starts.device)
        return self._replace(
            starts=self.starts[order], lengths=self.lengths[order], rows=self.rows[order]
        )

    def in_rows(self, row_starts: Tensor) -> BlockTable:
        """These blocks shared out over rows of a wire, each as long as the fullest needs.

        Args:
            row_starts: `[wire_rows + 1]` int64 from 0 to `num_blocks`, not decreasing; on the CPU,
                or this waits for the device.
        """
        capacity = int(row_starts.diff().max())
        return self._replace(
            wire=WireLayout(capacity, self.wire.bits, self.wire.block_size),
            row_starts=row_starts.to(self.starts.device),
        )

    def shard(self, first: int, last: int, start: int, numel: int) -> BlockTable:
        """Blocks `first` to `last`, which is excluded, alone, for `decode`.

        Args:
            start: first element of the shard that they make up.
            numel: elements of it.
        """
        part = self.part(first, last, self.rows[first:last])
        return part._replace(
            starts=part.starts - start,
            shard_numel=numel,
            aligned=self.aligned and start % VECTOR_ELEMENTS == 0,
        )

    def part(self, first: int, last: int, rows: Tensor) -> BlockTable:
        """Blocks `first` to `last`, which is excluded, alone, for `decode_encode`.

        They lie at the start of a row of the same wire: with `in_rows`, of one such as all ranks
        that share these blocks out send.

        Args:
            rows: `[last - first]` int64, of their errors in a buffer of their own.
        """
        return self._replace(
            starts=self.starts[first:last],
            lengths=self.lengths[first:last],
            rows=rows.to(self.starts.device),
            row_starts=None,
        )
