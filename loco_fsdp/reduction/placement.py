"""Where the blocks of a reduce-scatter are: in the gradient, in the errors and on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from loco_fsdp.codec import BlockLayout, BlockTable
from loco_fsdp.config import LoCoConfig
from loco_fsdp.reduction.hop import Hop
from loco_fsdp.reduction.spans import Piece


class Placement(NamedTuple):
    """The blocks of some shards of a flat gradient, as one hop sends them.

    peers: rows that the gradient is seen as, `[peers, numel / peers]`
    sent: blocks of such a row; a row of the wire goes to each shard's rank
    received: blocks of the shards that this rank gets, in their order
    padded: whether these have elements that belong to no parameter
    feedback: whether errors are added
    """

    peers: int
    sent: BlockTable
    received: Sequence[BlockTable]
    padded: bool
    feedback: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tables; those of received shards are views."""
        return self.sent.nbytes


def place_parts(
    hop: Hop,
    config: LoCoConfig,
    parts: dict[int, int] | None,
    shard_numel: int,
    num_shards: int,
    device: torch.device,
) -> Placement:
    """Blocks of shards that all hold the same elements of the same parameters.

    One table serves all of them, and each parameter's error has a row for each shard.

    Args:
        hop: what sends them; its error gets rows for parameters that have none.
        config: of the unit.
        parts: elements of each parameter in a shard, one after the other; None where nobody knows
            whose they are: they are one part, without feedback.
        shard_numel: elements of a shard.
        num_shards: how many are sent.
        device: where the gradient is.
    """
    numels = (shard_numel,) if parts is None else tuple(parts.values())
    layout = BlockLayout(numels, hop.bits, config.block_size)
    if parts is None or not config.error_feedback:
        table = layout.place(device)
        return Placement(num_shards, table, [table] * num_shards, padded=False, feedback=False)
    hop.error.add(dict(zip(parts, layout.blocks_per_part, strict=True)), device)
    table = layout.place(device, hop.error.rows_of(tuple(parts)))
    return Placement(num_shards, table, [table] * num_shards, padded=False, feedback=True)


def place_pieces(
    hop: Hop,
    config: LoCoConfig,
    cut: Sequence[Sequence[Piece]],
    shard_numel: int,
    own: Sequence[int],
    device: torch.device,
) -> Placement:
    """Blocks of shards that cut a flat gradient without regard to parameters, piece by piece.

    A block straddles neither two parameters nor two shards. The shards are one row of the
    gradient, whose blocks are shared out over rows of the wire.

    Args:
        hop: what sends them; its error gets rows for parameters that have none.
        config: of the unit.
        cut: pieces of each shard, as `Spans.cut` gives them.
        shard_numel: elements of a shard.
        own: places among the shards of what this rank gets.
        device: where the gradient is.
    """
    starts = [
        place * shard_numel + piece.start for place, pieces in enumerate(cut) for piece in pieces
    ]
    pieces = [piece for pieces in cut for piece in pieces]
    layout = BlockLayout(tuple(piece.numel for piece in pieces), hop.bits, config.block_size)
    rows = None
    if config.error_feedback:
        blocks: dict[int, int] = {}
        for piece, num_blocks in zip(pieces, layout.blocks_per_part, strict=True):
            blocks[piece.parameter] = blocks.get(piece.parameter, 0) + num_blocks
        hop.error.add(blocks, device)
        rows = hop.error.rows_of(tuple(blocks))
    first_blocks = list(accumulate(layout.blocks_per_part, initial=0))
    row_starts = [first_blocks[count] for count in accumulate(map(len, cut), initial=0)]
    sent = layout.place(device, rows, tuple(starts), len(cut) * shard_numel).in_rows(
        torch.tensor(row_starts)
    )
    return Placement(
        peers=1,
        sent=sent,
        received=[
            sent.shard(row_starts[place], row_starts[place + 1], place * shard_numel, shard_numel)
            for place in own
        ],
        padded=any(sum(piece.numel for piece in cut[place]) < shard_numel for place in own),
        feedback=config.error_feedback,
    )
