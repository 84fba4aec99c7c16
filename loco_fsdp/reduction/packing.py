"""A flat gradient in as many equal rows as a node has ranks, parameter by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowPacking:
    """Where the elements of parameters are in rows.

    Row r holds the r-th part of each parameter, one after the other: what is in it depends on which
    parameters there are, and on nothing else of the flat gradient. Last parts are padded.

    Attributes:
        starts: first element of each parameter in the flat gradient.
        numels: its number of elements.
        num_rows: rows.
    """

    starts: Sequence[int]
    numels: Sequence[int]
    num_rows: int

    @property
    def part_numels(self) -> list[int]:
        """Elements of each parameter in a row, padding included."""
        return [-(-numel // self.num_rows) for numel in self.numels]

    def pack(self, gradient: Tensor, rows: Tensor) -> None:
        """Fill `rows` `[num_rows, sum(part_numels)]` from `gradient`."""
        if sum(self.part_numels) * self.num_rows != sum(self.numels):
            rows.zero_()
        flat, packed = self._views(gradient, rows)
        torch._foreach_copy_(packed, flat)

    def unpack(self, rows: Tensor, gradient: Tensor) -> None:
        """The opposite of `pack`; what belongs to no parameter is left alone."""
        flat, packed = self._views(gradient, rows)
        torch._foreach_copy_(flat, packed)

    def _views(self, gradient: Tensor, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The same elements in both: whole parts, and the one that is shorter."""
        flat, packed = [], []
        columns = accumulate(self.part_numels, initial=0)
        for start, numel, part, column in zip(
            self.starts, self.numels, self.part_numels, columns, strict=False
        ):
            if numel == 0:
                continue
            whole, rest = divmod(numel, part)
            if whole:
                flat.append(gradient[start : start + whole * part].view(whole, part))
                packed.append(rows[:whole, column : column + part])
            if rest:
                flat.append(gradient[start + whole * part : start + numel])
                packed.append(rows[whole, column : column + rest])
        return flat, packed
