"""What `compiled.py` compiles: encoding and decoding of rows, one block each, in float32.

It is the arithmetic of `eager.py`, in the form that inductor turns into vector instructions: all
float32, codes and bytes included, because its conversions between 32-bit and 8-bit integers and
floats go element by element.

What has to be so for codes and scales to be the bits of `eager.py`:

- no contraction to fused multiply-add and no unsafe rewriting (`_OPTIONS`);
- the divisor of a scale is a tensor: inductor multiplies by the reciprocal of a constant;
- the sum over peers is unrolled in the order of ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from loco_fsdp.codec import eager

# Elements of all rows of one call: many enough that its cost (some 0.3 ms with all that is around
# it) shows little, few enough that they stay in the last level of cache.
MAX_NUMEL = 2**18

_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "cpp.enable_floating_point_contract_flag": "off",
    "cpp.enable_unsafe_math_opt_flag": False,
    # Compute twice what is cheap, instead of writing it to temporaries as large as the rows.
    "realize_reads_threshold": 1000,
    "realize_opcount_threshold": 1000,
}


def max_rows(block_size: int) -> int:
    """Rows of one call."""
    return MAX_NUMEL // block_size


@functools.cache
def encoder(bits: int, block_size: int, feedback: bool) -> Callable[..., tuple[Tensor, ...]]:
    """`_encode_rows`, compiled for one width and block size, with or without an error."""

    def encode_rows(*inputs: Tensor) -> tuple[Tensor, ...]:
        return _encode_rows(*inputs, bits=bits)

    rows = max_rows(block_size)
    matrix, vector = torch.zeros(rows, block_size), torch.ones(rows)
    packed = torch.zeros(rows, block_size * bits // 8)
    inputs = [matrix, packed, vector, *constants(bits, torch.float32, 0.0)]
    dims = [0, 0, 0, None, None, None]
    if feedback:
        inputs += [matrix.clone(), vector.clone(), matrix.clone()]
        dims += [0, 0, 0]
    return _compile(encode_rows, inputs, dims)


@functools.cache
def decoder(bits: int, block_size: int, peers: int, first: bool) -> Callable[..., None]:
    """`_decode_rows`, compiled for one width, block size and number of peers."""

    def decode_rows(*inputs: Tensor) -> None:
        _decode_rows(*inputs, bits=bits, first=first)

    rows = max_rows(block_size)
    packed = torch.zeros(peers, rows, block_size * bits // 8)
    inputs = [packed, torch.zeros(peers, rows), torch.zeros(rows, block_size), units(bits)]
    return _compile(decode_rows, inputs, [1, 1, 0, None])


@functools.lru_cache(64)
@torch.inference_mode(False)
def constants(bits: int, error_dtype: torch.dtype, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """`qmax`, `top_exponent` and `weights` of `_encode_rows`."""
    return (
        torch.tensor(float(2 ** (bits - 1) - 1)),
        torch.tensor(eager.ERROR_TOP_EXPONENT[error_dtype], dtype=torch.int32),
        torch.tensor([beta, 1 - beta]),
    )


@functools.cache
@torch.inference_mode(False)
def units(bits: int) -> Tensor:
    """`units` of `_decode_rows`."""
    return 2.0 ** -torch.arange(0, 8, bits)


def _compile(
    function: Callable[..., Any], inputs: list[Tensor], rows_dims: list[int | None]
) -> Callable[..., Any]:
    """Compile `function` now, for any number of rows: the size of `inputs` in `rows_dims`.

    The inputs have as many rows as a call may have: inductor decides by the sizes that it is shown
    which loops are worth threads.
    """
    # dynamo limits what it compiles by code object, which all variants would share.
    function = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        None,
        function.__closure__,
    )
    compiled = torch.compile(function, fullgraph=True, options=_OPTIONS)
    for tensor, rows_dim in zip(inputs, rows_dims, strict=True):
        for dim in range(tensor.ndim):
            # Else dynamo makes dynamic whatever differs between variants.
            mark = torch._dynamo.mark_dynamic if dim == rows_dim else torch._dynamo.mark_static
            mark(tensor, dim)
    with torch.no_grad():
        compiled(*inputs)
    return compiled


def _encode_rows(
    gradient: Tensor,
    packed: Tensor,
    lengths: Tensor,
    qmax: Tensor,
    top_exponent: Tensor,
    weights: Tensor,
    error: Tensor | None = None,
    error_scale: Tensor | None = None,
    new_error: Tensor | None = None,
    *,
    bits: int,
) -> tuple[Tensor, ...]:
    """`eager.encode` of rows that are zero beyond their lengths.

    Args:
        gradient: `[rows, block_size]`.
        packed: `[rows, bytes_per_block]`, written: the bytes as numbers -128..127.
        lengths: `[rows]`, elements of each block.
        qmax: the largest code, scalar.
        top_exponent: of the dtype in which the error is stored, int32 scalar.
        weights: beta and 1 - beta.
        error: `[rows, block_size]`, what is stored.
        error_scale: `[rows]`.
        new_error: `[rows, block_size]`, written: the new error before it is scaled. Not `error`,
            which several loops read: inductor of torch 2.9 may write it before the last has.
        bits: width.

    Returns:
        Scales `[rows]`; squares of `h` and of `h - d` `[rows, 2]`; and, with an error, the scales
        to store it with `[rows]`.
    """
    old = None if error is None or error_scale is None else error * error_scale.unsqueeze(-1)
    h = gradient if old is None else gradient + old
    scale = _block_scales(h, lengths, qmax, bits)
    finite = scale == scale
    # From here on a block that is not finite is a block of zeros.
    h = torch.where(finite.unsqueeze(-1), h, 0.0)
    codes, level = _quantize(h / torch.where(scale > 0, scale, torch.inf).unsqueeze(-1), bits)
    packed.copy_(_pack(codes, bits))
    residual = h - level * torch.where(finite, scale, 0.0).unsqueeze(-1)
    if bits < 4:  # these levels have no zero to stand for padding
        inside = torch.arange(h.shape[-1]) < lengths.unsqueeze(-1)
        residual = torch.where(inside, residual, 0.0)
    squares = torch.stack((h.square().sum(-1), residual.square().sum(-1)), dim=-1)
    if old is None or new_error is None:
        return scale, squares
    beta = torch.where(finite, weights[0], 0.0).unsqueeze(-1)
    new = beta * old + weights[1] * residual
    new_error.copy_(new)
    exponent = (new.abs().amax(-1).view(torch.int32) >> 23) - 127 - top_exponent
    return scale, squares, ((exponent.clamp(min=-126) + 127) << 23).view(torch.float32)


def _decode_rows(
    packed: Tensor, scale: Tensor, total: Tensor, units: Tensor, *, bits: int, first: bool
) -> None:
    """Add what some peers sent to `total`, or begin it.

    Args:
        packed: `[peers, rows, bytes_per_block]`, the bytes as numbers -128..127.
        scale: `[peers, rows]`.
        total: `[rows, block_size]`, updated.
        units: see `_unpack`.
        bits: width.
        first: `total` is undefined.
    """
    result = None if first else total.view(total.shape[0], 8 // bits, -1)
    for peer in range(packed.shape[0]):
        codes = _unpack(packed[peer], units, bits)
        value = eager.dequantize_blocks(codes, scale[peer].unsqueeze(-1), bits)
        result = value if result is None else result + value
    assert result is not None
    total.copy_(result.view(total.shape))


def _block_scales(h: Tensor, lengths: Tensor, qmax: Tensor, bits: int) -> Tensor:
    """`eager.block_scales`."""
    absmax = h.abs().amax(-1)
    if bits >= 4:
        top = qmax
        scale = absmax / qmax
    else:
        unit = eager._power_of_two(eager._exponent(absmax).clamp(-126, 127))
        # Inductor sums one element after the other, where eager PyTorch sums in a tree: float64
        # loses nothing that shows in float32.
        x = (h / unit.unsqueeze(-1)).to(torch.float64)
        moment = (x.square() if bits == 2 else x.abs()).sum(-1) / lengths
        top = torch.full_like(qmax, eager.LEVELS_2BIT[1] if bits == 2 else 1.0)
        scale = (moment.sqrt() if bits == 2 else moment).to(torch.float32) * unit
    scale = torch.where(scale < eager.SMALLEST_NORMAL, 0.0, scale)
    # False for NaN as well.
    return torch.where((absmax < torch.inf) & (scale * top < torch.inf), scale, torch.nan)


def _quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and levels of `h / scale`; where that is 0 because the scale is, so are the codes."""
    if bits >= 4:
        # The scale is a normal number, hence |x| < qmax + 0.5: there is nothing to clamp.
        codes = x.round()
        return codes, codes
    if bits == 1:
        codes = torch.where(x < 0, -1.0, 0.0)
        return codes, 1 + 2 * codes
    large = x.abs() > eager.THRESHOLD_2BIT
    codes = torch.where(large, 1.0, 0.0)
    level = torch.where(large, eager.LEVELS_2BIT[1], eager.LEVELS_2BIT[0])
    return torch.where(x < 0, -1 - codes, codes), torch.where(x < 0, -level, level)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """`eager.pack` in arithmetic; the result is the byte as an int8."""
    *low, high = codes.view(codes.shape[0], 8 // bits, -1).unbind(1)
    packed = high * 2.0 ** (8 - bits)
    for index, plane in enumerate(low):
        packed = packed + torch.where(plane < 0, plane + 2.0**bits, plane) * 2.0 ** (bits * index)
    return packed


def _unpack(packed: Tensor, units: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack`: `[rows, bytes]` to `[rows, planes, bytes]`.

    units: `[planes]`, `2.0 ** -(bits * plane)`
    """
    shifted = (packed.unsqueeze(1) * units.unsqueeze(-1)).floor()
    # Take away the planes above; the highest bit of what is left is a sign.
    return shifted - ((shifted + 2.0 ** (bits - 1)) * 2.0**-bits).floor() * 2.0**bits
