"""What reductions give by the definition: each piece of a parameter quantized by itself.

`quantize` on one piece is the eager codec, which has tests of its own; here are only the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loco_fsdp import quantize


def sent(piece: Tensor, bits: int, block_size: int) -> Tensor:
    """What arrives of a piece without an error, float32 `[numel]`."""
    return quantize(piece.flatten(), bits=bits, block_size=block_size).dequantize()


def all_reduced(pieces: Sequence[Tensor], factor: float, bits: int, block_size: int) -> Tensor:
    """One piece of a gradient of each replica, in their order, summed and scaled."""
    total = torch.zeros_like(pieces[0], dtype=torch.float32).flatten()
    for piece in pieces:
        total = total + sent(piece, bits, block_size)
    total = total * factor
    return total if len(pieces) == 2 else sent(total, bits, block_size)


def all_reduced_over_nodes(
    gradients: Sequence[Tensor], local: int, bits: int, block_size: int, factor: float
) -> Tensor:
    """A parameter's gradient of each rank, over nodes of `local` ranks, summed and scaled."""
    numel = gradients[0].numel()
    part = -(-numel // local)
    padded = [torch.nn.functional.pad(g.flatten(), (0, part * local - numel)) for g in gradients]
    nodes = [
        torch.stack(padded[first : first + local]).sum(0)
        for first in range(0, len(gradients), local)
    ]
    parts = [
        all_reduced([node[i * part : (i + 1) * part] for node in nodes], factor, bits, block_size)
        for i in range(local)
    ]
    return torch.cat(parts)[:numel]
