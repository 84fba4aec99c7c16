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
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from loco_fsdp.codec.layout import BlockLayout, BlockTable

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


def to_blocks(flat: Tensor, layout: BlockLayout) -> Tensor:
    """`[peers, shard_numel]` to `[peers, num_blocks, block_size]`; short blocks end in zeros."""
    parts = [
        F.pad(part, (0, -part.shape[-1] % layout.block_size))
        for part in torch.split(flat, list(layout.numels), dim=-1)
    ]
    return rearrange(
        torch.cat(parts, dim=-1),
        "peer (block element) -> peer block element",
        element=layout.block_size,
    )


def from_blocks(blocks: Tensor, layout: BlockLayout) -> Tensor:
    """The inverse of `to_blocks`: `[peers, num_blocks, block_size]` to `[peers, shard_numel]`."""
    parts = torch.split(blocks, list(layout.blocks_per_part), dim=1)
    return torch.cat(
        [
            rearrange(part, "peer block element -> peer (block element)")[:, :numel]
            for part, numel in zip(parts, layout.numels, strict=True)
        ],
        dim=-1,
    )


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
        codes = torch.where(x < 0, -1.0, 0.0)
    return torch.where(sent.unsqueeze(-1), codes, 0.0).to(torch.int8)


def dequantize_blocks(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """`scale * level(codes)` in float32; a scale of NaN makes its whole block NaN."""
    level = codes.to(torch.float32)
    if bits == 2:
        small, large = LEVELS_2BIT
        magnitude = torch.where((level == 1) | (level == -2), large, small)
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
    wire: `[peers, bytes_per_shard]` uint8, written but for its padding
    error: the rows that `table` names are updated; None: no error feedback
    """
    layout, bits = table.layout, table.layout.bits
    h = to_blocks(gradient.to(torch.float32), layout)
    old = None
    if error is not None:
        payload = _indexable(error.payload)[:, table.rows].view(error.payload.dtype)
        old = load_error(ErrorState(payload, error.scale[:, table.rows]))
        h = h + old
    scale = block_scales(h, table.lengths, bits)
    codes = quantize_blocks(h, scale, bits)
    _write_wire(wire, pack(codes, bits), scale, layout)

    finite = ~scale.isnan().unsqueeze(-1)
    inside = torch.arange(layout.block_size, device=h.device) < table.lengths.unsqueeze(-1)
    h = torch.where(finite, h, 0.0)
    residual = torch.where(finite & inside, h - dequantize_blocks(codes, scale, bits), 0.0)
    stats.squares[..., 0] = h.square().sum(-1)
    stats.squares[..., 1] = residual.square().sum(-1)
    stats.nonfinite.add_((~finite).sum())
    if error is not None and old is not None:
        new = torch.where(finite, beta * old + (1 - beta) * residual, 0.0)
        stored = store_error(new, error.payload.dtype)
        _indexable(error.payload)[:, table.rows] = _indexable(stored.payload)
        error.scale[:, table.rows] = stored.scale


def decode(wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0) -> None:
    """Sum what all peers sent, in float32 and in the order of their ranks, times `factor`.

    wire: `[peers, bytes_per_shard]` uint8
    output: `[shard_numel]` float32, bfloat16 or float16, written
    """
    layout = table.layout
    packed, scale = _read_wire(wire, layout)
    total = torch.zeros(layout.num_blocks, layout.block_size, device=wire.device)
    for peer in range(wire.shape[0]):
        total += dequantize_blocks(unpack(packed[peer], layout.bits), scale[peer], layout.bits)
    output.copy_(from_blocks(total.unsqueeze(0), layout)[0] * factor)


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

    received: `[peers, bytes_per_shard]` uint8
    wire: `[1, bytes_per_shard]` uint8, written but for its padding
    error: of the sum, `[1, rows, block_size]`
    """
    total = torch.empty(1, table.layout.shard_numel, device=wire.device)
    decode(received, total[0], table, factor)
    encode(total, wire, table, stats, error, beta)


def _indexable(payload: Tensor) -> Tensor:
    """The payload, or its bytes where torch cannot index the dtype (float8 on CPU in torch 2.9)."""
    return payload.view(torch.uint8) if payload.dtype is torch.float8_e4m3fn else payload


def _write_wire(wire: Tensor, packed: Tensor, scale: Tensor, layout: BlockLayout) -> None:
    codes, scales = layout.on_wire(0, layout.num_blocks)
    wire[:, codes] = rearrange(packed, "peer block byte -> peer (block byte)")
    wire[:, scales] = scale.contiguous().view(torch.uint8)


def _read_wire(wire: Tensor, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    codes, scales = layout.on_wire(0, layout.num_blocks)
    packed = rearrange(
        wire[:, codes], "peer (block byte) -> peer block byte", byte=layout.bytes_per_block
    )
    return packed, wire[:, scales].contiguous().view(torch.float32)
