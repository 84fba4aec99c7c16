"""The arithmetic of the codec in eager PyTorch: the definition that every backend has to match.

One rank holds a gradient `g` and an error `e`. Over a block of elements, all in float32:

    h = g + e                                    compensate
    scale, codes = quantize(h)                   d = scale * level(codes) is what the owner gets
    e <- beta * e + (1 - beta) * (h - d)         moving average of what could not be sent

8 and 4 bits: `scale = max|h| / m`, `codes = clamp(round_half_even(h / scale), -m, m)`, `level(c) =
c` with `m = 2**(bits - 1) - 1`. 2 bits: `scale` is the root mean square of the block and the
levels are the four-level Lloyd-Max quantizer of a Gaussian (Max, "Quantizing for minimum
distortion", 1960, table I). 1 bit: `scale` is the mean magnitude and the level is the sign.

A block whose scale would be smaller than the smallest normal float32 is sent as zero, and all of it
stays in the error. A block that holds a non-finite value, or whose largest level would overflow, is
sent with scale NaN, so that whoever receives it sees it, and its error becomes 0: state is always
finite.

The error is stored block-scaled: a payload in `error_dtype` times a power of two per block, so that
gradients scaled by a power of two give the same codes (arXiv 2407.04480 stores plain 8 bit).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from loco_fsdp.codec.eager_weights import decode_rows, encode_difference
from loco_fsdp.codec.layout import BlockTable
from loco_fsdp.codec.spikes import drop_spike

__all__ = [
    "decode",
    "decode_encode",
    "decode_rows",
    "drop_spike",
    "encode",
    "encode_difference",
]

SMALLEST_NORMAL = 2.0**-126

# Four-level Lloyd-Max quantizer of a unit Gaussian.
LEVELS_2BIT = (0.4528, 1.510)
THRESHOLD_2BIT = 0.9816

# The largest payload of a block lies in [2**top, 2**(top + 1)): high in the range of the dtype, so
# that small elements beside it keep their digits, and below its largest value, so none overflows.
ERROR_TOP_EXPONENT = {
    torch.float32: 0,
    torch.bfloat16: 0,
    torch.float16: 14,
    torch.int8: 6,
    torch.float8_e4m3fn: 7,
}


class ErrorState(NamedTuple):
    """The stored error: `payload * scale[..., None]`.

    payload: `[peers, rows, block_size]` in the error dtype
    scale: `[peers, rows]` float32, powers of two
    """

    payload: Tensor
    scale: Tensor


class EncodeStats(NamedTuple):
    """What `encode` leaves behind for monitoring, on the device, read only when asked.

    squares: `[peers, num_blocks, 2]` float32, sums of squares of `h` and of `h - d`, written
    nonfinite: `[1]` int64, counts the non-finite blocks
    """

    squares: Tensor
    nonfinite: Tensor


def inside_blocks(table: BlockTable) -> Tensor:
    """Whether the block reaches so far, `[num_blocks, block_size]` bool."""
    return _elements(table) < table.lengths.unsqueeze(-1)


def to_blocks(flat: Tensor, table: BlockTable) -> Tensor:
    """`[peers, shard_numel]` to `[peers, num_blocks, block_size]`; short blocks end in zeros."""
    inside = inside_blocks(table)
    index = torch.where(inside, table.starts.unsqueeze(-1) + _elements(table), 0)
    return torch.where(inside, flat[:, index], 0)


def from_blocks(blocks: Tensor, table: BlockTable, around: Tensor | None = None) -> Tensor:
    """The inverse of `to_blocks`: `[peers, num_blocks, block_size]` to `[peers, shard_numel]`.

    around: `[peers, shard_numel]`, whose values elements in no block take; None: any
    """
    beyond = table.shard_numel  # one place for all that is in no shard
    index = torch.where(inside_blocks(table), table.starts.unsqueeze(-1) + _elements(table), beyond)
    flat = blocks.new_empty(blocks.shape[0], beyond + 1)
    if around is not None:
        flat[:, :beyond] = around
    flat[:, index] = blocks
    return flat[:, :beyond]


def _elements(table: BlockTable) -> Tensor:
    return torch.arange(table.wire.block_size, device=table.starts.device)


def _exponent(x: Tensor) -> Tensor:
    """floor(log2(x)) of float32 x >= 0 from its bits; -127 for zero and subnormals."""
    return (x.view(torch.int32) >> 23) - 127


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as float32, for int32 exponents in -126..127."""
    return ((exponent + 127) << 23).view(torch.float32)


def block_scales(h: Tensor, lengths: Tensor, bits: int) -> Tensor:
    """The scale of each block: 0 where nothing can be sent, NaN where the block is not finite.

    h: `[..., num_blocks, block_size]` float32, zero beyond each block's length
    lengths: `[num_blocks]`
    """
    absmax = h.abs().amax(-1)
    if bits >= 4:
        top = float(2 ** (bits - 1) - 1)
        scale = absmax / torch.full_like(absmax, top)  # by a number, CUDA would not divide exactly
    else:
        # Squares would leave the range of float32: bring the block near 1 by a power of two first.
        unit = _power_of_two(_exponent(absmax).clamp(-126, 127))
        x = h / unit.unsqueeze(-1)
        moment = (x.square() if bits == 2 else x.abs()).sum(-1) / lengths
        top = LEVELS_2BIT[1] if bits == 2 else 1.0
        scale = (moment.sqrt() if bits == 2 else moment) * unit
    scale = torch.where(scale < SMALLEST_NORMAL, 0.0, scale)
    return torch.where(absmax.isfinite() & (scale * top).isfinite(), scale, torch.nan)


def quantize_blocks(h: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes of `h`, int8 in two's complement of `bits`; 0 where the scale is 0 or NaN."""
    sent = scale > 0
    x = h / torch.where(sent, scale, 1.0).unsqueeze(-1)
    if bits >= 4:
        top = 2 ** (bits - 1) - 1
        codes = x.round().clamp(-top, top)
    elif bits == 2:
        large = (x.abs() > THRESHOLD_2BIT).to(x.dtype)
        codes = torch.where(x < 0, -1 - large, large)
    else:
        codes = -(x < 0).to(x.dtype)
    return torch.where(sent.unsqueeze(-1), codes, 0.0).to(torch.int8)


def dequantize_blocks(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """`scale * level(codes)` in float32; a scale of NaN makes its whole block NaN."""
    level = codes.to(torch.float32)
    if bits == 2:
        small, large = LEVELS_2BIT
        # Of two numbers `torch.where` makes a tensor of torch's default dtype.
        magnitude = torch.full_like(level, small).masked_fill_((level == 1) | (level == -2), large)
        level = torch.where(level < 0, -magnitude, magnitude)
    elif bits == 1:
        level = 1 + 2 * level
    return level * scale.unsqueeze(-1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """int8 codes `[..., block_size]` to planar bytes, uint8 `[..., block_size * bits // 8]`."""
    planes = rearrange(
        codes.view(torch.uint8), "... (plane byte) -> plane ... byte", plane=8 // bits
    )
    packed = torch.zeros_like(planes[0])
    for index, plane in enumerate(planes):
        packed |= (plane & (2**bits - 1)) << (index * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: int8 codes with their sign."""
    # Shifting a plane to the top of an int8 and back down extends its sign.
    planes = [
        (packed << (8 - bits - index * bits)).view(torch.int8) >> (8 - bits)
        for index in range(8 // bits)
    ]
    return torch.cat(planes, dim=-1)


def store_error(error: Tensor, dtype: torch.dtype) -> ErrorState:
    """Block-scaled form of an error `[peers, rows, block_size]` float32."""
    exponent = _exponent(error.abs().amax(-1)) - ERROR_TOP_EXPONENT[dtype]
    scale = _power_of_two(exponent.clamp(min=-126))
    payload = error / scale.unsqueeze(-1)
    if dtype is torch.int8:
        payload = payload.round().clamp(-127, 127)
    return ErrorState(payload.to(dtype), scale)


def load_error(state: ErrorState) -> Tensor:
    """The stored error in float32, `[peers, rows, block_size]`."""
    return state.payload.to(torch.float32) * state.scale.unsqueeze(-1)


def encode(
    gradient: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
) -> None:
    """Compensate, quantize and pack a gradient for all peers, and update its error in place.

    gradient: `[peers, shard_numel]` float32, bfloat16 or float16
    wire: `[peers, num_bytes]` uint8, written but for its padding; with `table.row_starts` it is
        `[wire_rows, num_bytes]`, there is one peer, and each block is written into its row
    error: the rows that `table` names are updated; None: no error feedback
    """
    encode_blocks(to_blocks(gradient.to(torch.float32), table), wire, table, stats, error, beta)


def decode(wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0) -> None:
    """Sum what all peers sent, in float32 and in the order of their ranks, times `factor`.

    wire: `[peers, num_bytes]` uint8; with `table.row_starts` it is `[wire_rows, num_bytes]`, and
        each block is what its row says
    output: `[shard_numel]` float32, bfloat16 or float16, written
    """
    output.copy_(from_blocks(_decode_blocks(wire, table, factor).unsqueeze(0), table)[0])


def decode_encode(
    received: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None = None,
    beta: float = 0.0,
    factor: float = 1.0,
) -> None:
    """`decode` in float32, then `encode` for one peer: the middle of a low-bit all-reduce.

    received: `[peers, num_bytes]` uint8
    wire: `[1, num_bytes]` uint8, written but for its padding
    table: without `row_starts`
    error: of the sum, `[1, rows, block_size]`
    """
    # Codes of the padding may stand for anything.
    total = torch.where(inside_blocks(table), _decode_blocks(received, table, factor), 0.0)
    encode_blocks(total.unsqueeze(0), wire, table, stats, error, beta)


def encode_blocks(
    h: Tensor,
    wire: Tensor,
    table: BlockTable,
    stats: EncodeStats,
    error: ErrorState | None,
    beta: float,
) -> None:
    """`encode` of a gradient in blocks, `[peers, num_blocks, block_size]` float32."""
    bits = table.wire.bits
    old = None
    if error is not None:
        payload = _indexable(error.payload)[:, table.rows].view(error.payload.dtype)
        old = load_error(ErrorState(payload, error.scale[:, table.rows]))
        h = h + old
    scale = block_scales(h, table.lengths, bits)
    codes = quantize_blocks(h, scale, bits)
    _write_wire(wire, pack(codes, bits), scale, table)

    finite = ~scale.isnan().unsqueeze(-1)
    sent = finite & inside_blocks(table)
    h = torch.where(finite, h, 0.0)
    residual = torch.where(sent, h - dequantize_blocks(codes, scale, bits), 0.0)
    stats.squares[..., 0] = h.square().sum(-1)
    stats.squares[..., 1] = residual.square().sum(-1)
    stats.nonfinite.add_((~finite).sum())
    if error is not None and old is not None:
        new = torch.where(finite, beta * old + (1 - beta) * residual, 0.0)
        stored = store_error(new, error.payload.dtype)
        _indexable(error.payload)[:, table.rows] = _indexable(stored.payload)
        error.scale[:, table.rows] = stored.scale


def _decode_blocks(wire: Tensor, table: BlockTable, factor: float) -> Tensor:
    """`decode` in blocks, `[num_blocks, block_size]` float32; anything beyond their lengths."""
    bits, block_size = table.wire.bits, table.wire.block_size
    total = torch.zeros(table.num_blocks, block_size, dtype=torch.float32, device=wire.device)
    for packed, scale in zip(*read_wire(wire, table), strict=True):
        total += dequantize_blocks(unpack(packed, bits), scale, bits)
    return total * factor


def _indexable(payload: Tensor) -> Tensor:
    """The payload, or its bytes where torch cannot index the dtype (float8 on CPU in torch 2.9)."""
    return payload.view(torch.uint8) if payload.dtype is torch.float8_e4m3fn else payload


def _write_wire(wire: Tensor, packed: Tensor, scale: Tensor, table: BlockTable) -> None:
    """Codes `[peers, num_blocks, bytes_per_block]` and scales `[peers, num_blocks]`."""
    scale = scale.contiguous().view(torch.uint8).view(*scale.shape, 4)
    for part, values in zip(_parts_of_wire(wire, table), (packed, scale), strict=True):
        if table.row_starts is None:
            part[:, : table.num_blocks] = values
        else:
            part[_place_in_rows(table)] = values[0]


def read_wire(wire: Tensor, table: BlockTable) -> tuple[Tensor, Tensor]:
    """The inverse of `_write_wire`."""
    packed, scale = _parts_of_wire(wire, table)
    if table.row_starts is None:
        packed, scale = packed[:, : table.num_blocks], scale[:, : table.num_blocks]
    else:
        place = _place_in_rows(table)
        packed, scale = packed[place].unsqueeze(0), scale[place].unsqueeze(0)
    return packed, scale.contiguous().view(torch.float32).squeeze(-1)


def _parts_of_wire(wire: Tensor, table: BlockTable) -> tuple[Tensor, Tensor]:
    """Codes and scales on the wire, uint8 `[wire_rows, blocks, bytes]`."""
    blocks, wire_rows = table.wire.num_blocks, wire.shape[0]
    codes, scales = table.wire.on_wire(0, blocks)
    return (
        wire[:, codes].view(wire_rows, blocks, table.wire.bytes_per_block),
        wire[:, scales].view(wire_rows, blocks, 4),
    )


def _place_in_rows(table: BlockTable) -> tuple[Tensor, Tensor]:
    """The row of the wire that each block is in, and its number there."""
    assert table.row_starts is not None
    number = torch.arange(table.num_blocks, device=table.starts.device)
    row = torch.searchsorted(table.row_starts, number, right=True) - 1
    return row, number - table.row_starts[row]
