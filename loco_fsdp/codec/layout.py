"""Blocks of a shard, and the bytes that they take on the wire.

A reduction moves, for each destination, one part ("shard") of every parameter of an FSDP unit, one
after the other. Each parameter's part is cut into blocks of `block_size` elements that share one
scale; the last block of a part may be shorter, so that no block straddles two parameters.

Wire of one shard, `uint8 [bytes_per_shard]`:

    codes   num_blocks * block_size * bits / 8 bytes, then padding to a multiple of 16
    scales  num_blocks float32,                       then padding to a multiple of 16

A short block takes the bytes of a whole one, so that codes are found without a table: it costs at
most one block per parameter. Inside a block codes are packed planar: with `k = 8 // bits` planes of
`block_size // k` elements, byte i holds element i in its lowest bits, then the elements
`i + block_size // k`, `i + 2 * block_size // k`, ... (two's complement).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 16
_SCALE_BYTES = 4


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of one shard made of parts with `numels` elements, and their place on the wire."""

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
    def bytes_per_block(self) -> int:
        """Bytes of the packed codes of one block."""
        return self.block_size * self.bits // 8

    @cached_property
    def scales_offset(self) -> int:
        """Byte at which the scales of a shard start on the wire."""
        return _round_up(self.num_blocks * self.bytes_per_block, _ALIGNMENT_BYTES)

    @cached_property
    def bytes_per_shard(self) -> int:
        """Bytes of one shard on the wire."""
        return self.scales_offset + _round_up(self.num_blocks * _SCALE_BYTES, _ALIGNMENT_BYTES)

    def on_wire(self, first: int, last: int) -> tuple[slice, slice]:
        """Bytes of the codes and of the scales of blocks `first` to `last`, which is excluded."""
        scales = self.scales_offset
        return (
            slice(first * self.bytes_per_block, last * self.bytes_per_block),
            slice(scales + first * _SCALE_BYTES, scales + last * _SCALE_BYTES),
        )

    def place(self, device: torch.device, rows: Sequence[int] | None = None) -> BlockTable:
        """The blocks as a table on `device`; `rows` of their errors, by default 0, 1, 2, ..."""
        starts = accumulate(self.numels, initial=0)
        blocks = [
            (start + first, min(self.block_size, numel - first))
            for start, numel in zip(starts, self.numels, strict=False)
            for first in range(0, numel, self.block_size)
        ]
        columns = (
            [start for start, _ in blocks],
            [length for _, length in blocks],
            range(self.num_blocks) if rows is None else rows,
        )
        return BlockTable(self, *(torch.tensor(c, dtype=torch.int64).to(device) for c in columns))


class BlockTable(NamedTuple):
    """Where each block of a shard is; the tensors are `[num_blocks]` int64.

    starts: the block's first element in the shard
    lengths: its number of elements
    rows: its row in the error buffer
    """

    layout: BlockLayout
    starts: Tensor
    lengths: Tensor
    rows: Tensor
