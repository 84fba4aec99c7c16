"""A few numbers by which a change of parameters shows, without a copy of them."""

from __future__ import annotations

import torch
from torch import Tensor

_COLUMNS = 1024
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(shard: Tensor) -> Tensor:
    """Numbers that change with the bits of any element, and with the order of elements.

    Sums of the elements' bits as integers: all alone, and weighted by the row and by the column of
    a table of 1,024 columns that they fill. Two changes in one pattern can make up for one another,
    which changes of a training do not.

    Args:
        shard: `[numel]`, contiguous.

    Returns:
        `[3]` int64 on its device; nothing is read from there.
    """
    bits = shard.view(_INTEGERS[shard.itemsize])
    whole = bits.numel() // _COLUMNS * _COLUMNS
    table = bits[:whole].view(-1, _COLUMNS)
    # Sums, not products, are taken of all elements: those need no wider copy of them.
    rows = torch.cat([table.sum(1, dtype=torch.int64), bits[whole:].to(torch.int64)])
    columns = table.sum(0, dtype=torch.int64)
    return torch.stack([rows.sum(), _weighted(rows), _weighted(columns)])


def _weighted(sums: Tensor) -> Tensor:
    return (sums * torch.arange(1, sums.numel() + 1, device=sums.device)).sum()
