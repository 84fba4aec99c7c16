"""`quantize`: the codec on a single tensor, for looking at what compression does to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loco_fsdp.codec import eager
from loco_fsdp.codec.layout import BlockLayout
from loco_fsdp.config import LoCoConfig

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor as codes and scales. Made by `quantize`.

    codes: `[num_blocks, block_size * bits // 8]` uint8, packed planar
    scale: `[num_blocks]` float32; 0 for a block sent as zero, NaN for a non-finite block
    """

    codes: Tensor
    scale: Tensor
    shape: torch.Size
    bits: int
    block_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values that the codes stand for, computed in float32, as a tensor of `shape`."""
        values = eager.dequantize_blocks(eager.unpack(self.codes, self.bits), self.scale, self.bits)
        return values.flatten()[: self.shape.numel()].view(self.shape).to(dtype)


def quantize(x: Tensor, *, bits: int = 4, block_size: int = 256) -> QuantizedTensor:
    """Quantize a tensor in blocks of its elements in row-major order.

    Args:
        x: float32, bfloat16 or float16, any shape.
        bits: 8, 4, 2 or 1.
        block_size: elements that share a scale, a power of two from 32 to 1024.

    Raises:
        ValueError: `bits` or `block_size` is not allowed.
        TypeError: `x` has another dtype.
    """
    LoCoConfig(bits=bits, block_size=block_size)  # names what is wrong
    check_gradient_dtype("quantize", x.dtype)
    table = BlockLayout((x.numel(),), bits, block_size).place(x.device)
    h = eager.to_blocks(x.detach().reshape(1, -1).to(torch.float32), table)[0]
    scale = eager.block_scales(h, table.lengths, bits)
    codes = eager.pack(eager.quantize_blocks(h, scale, bits), bits)
    return QuantizedTensor(codes, scale, x.shape, bits, block_size)


def check_gradient_dtype(caller: str, dtype: torch.dtype) -> None:
    """Raise a TypeError that names `dtype` if the codec does not take gradients of it."""
    if dtype not in GRADIENT_DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in GRADIENT_DTYPES)
        raise TypeError(f"{caller} takes {allowed}, not {dtype}: convert it first")
