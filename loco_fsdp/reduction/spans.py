"""Where parameters are in a flat gradient, and the pieces that shards cut them into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """What one shard holds of one parameter: `start` is in the shard."""

    parameter: int
    start: int
    numel: int


@dataclass(frozen=True)
class Spans:
    """Where each parameter of a unit is in its flat gradient, whichever of them are active.

    Equal shards cut it without regard to parameters. Between parameters, and after the last one,
    there may be padding.

    Attributes:
        starts: first element of each parameter; not decreasing.
        numels: its number of elements, which may be 0.
        numel: elements of the flat gradient.
    """

    starts: tuple[int, ...]
    numels: tuple[int, ...]
    numel: int

    def cut(self, num_shards: int, shards: Sequence[int]) -> list[list[Piece]]:
        """The pieces in each of these shards, in the order of their elements.

        Args:
            num_shards: how many equal shards there are.
            shards: which of them.
        """
        size = self.numel // num_shards
        return [self._between(shard * size, (shard + 1) * size) for shard in shards]

    def _between(self, first: int, last: int) -> list[Piece]:
        pieces = []
        for parameter, (start, numel) in enumerate(zip(self.starts, self.numels, strict=True)):
            inner_first, inner_last = max(start, first), min(start + numel, last)
            if inner_first < inner_last:
                pieces.append(Piece(parameter, inner_first - first, inner_last - inner_first))
        return pieces


def own_part(spans: Spans, num_shards: int, shard: int) -> Spans:
    """Where parameters are in one shard of a flat gradient; those that are not in it have none."""
    (pieces,) = spans.cut(num_shards, [shard])
    starts, numels = [0] * len(spans.numels), [0] * len(spans.numels)
    for piece in pieces:
        starts[piece.parameter], numels[piece.parameter] = piece.start, piece.numel
    return Spans(tuple(starts), tuple(numels), spans.numel // num_shards)
