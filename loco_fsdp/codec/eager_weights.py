"""The arithmetic of low-bit parameters in eager PyTorch: their definition, as `eager.py` is that of
low-bit gradients.

A rank owns a shard of a parameter `p`, and all ranks hold the same replica `r` of it:

    scale, codes = quantize(p - r)               encode_difference
    r <- round(r + scale * level(codes))         decode_rows, of the shards of all ranks

in float32 but for the last rounding, half to even, to the dtype of the replica. There is no error
to keep: what could not be sent, and what rounding took, is in the next difference. Quantization is
that of `eager.py`; a block that is not finite is sent with scale NaN, which makes the replica NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Not its names, which are not there yet: `eager` imports this module.
from loco_fsdp.codec import eager
from loco_fsdp.codec.layout import BlockTable


@torch.no_grad()
def encode_difference(
    parameter: Tensor, replica: Tensor, wire: Tensor, table: BlockTable, stats: eager.EncodeStats
) -> None:
    """Quantize and pack `parameter - replica`, without error feedback.

    parameter: `[shard_numel]` float32, bfloat16 or float16
    replica: `[shard_numel]`, of any of these dtypes, too
    wire: `[1, num_bytes]` uint8, written but for its padding
    table: without `row_starts`; its blocks may cover a part of the shard only
    stats: its `squares` are `[1, num_blocks, 2]`, of the difference and of what was not sent of it
    """
    difference = parameter.to(torch.float32) - replica.to(torch.float32)
    eager.encode_blocks(eager.to_blocks(difference[None], table), wire, table, stats, None, 0.0)


@torch.no_grad()
def decode_rows(
    wire: Tensor, output: Tensor, table: BlockTable, output_rows: Tensor, add: bool
) -> None:
    """Decode each row of the wire into a row of the output of its own.

    wire: `[rows, num_bytes]` uint8
    output: `[num_rows, shard_numel]` float32, bfloat16 or float16, of no fewer rows than the wire;
        elements in no block are left as they are, and so are rows that are not in `output_rows`
    table: the blocks of one shard, without `row_starts`: every row of the wire holds all of them
    output_rows: `[rows]` int64, the row of the output for each row of the wire, all different
    add: to what the output holds, in float32 and rounded once, rather than to 0
    """
    packed, scale = eager.read_wire(wire, table)
    bits = table.wire.bits
    sent = eager.dequantize_blocks(eager.unpack(packed, bits), scale, bits)
    rows = output[output_rows]
    old = eager.to_blocks(rows.to(torch.float32), table) if add else torch.zeros_like(sent)
    output[output_rows] = eager.from_blocks((old + sent).to(output.dtype), table, around=rows)
