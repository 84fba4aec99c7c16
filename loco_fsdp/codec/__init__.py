"""The codec: which backend encodes and decodes the gradient of an FSDP unit."""

from loco_fsdp.codec.eager import EncodeStats, ErrorState, decode, encode
from loco_fsdp.codec.layout import BlockLayout, BlockTable
from loco_fsdp.codec.quantized_tensor import GRADIENT_DTYPES, QuantizedTensor, quantize

__all__ = [
    "GRADIENT_DTYPES",
    "BlockLayout",
    "BlockTable",
    "EncodeStats",
    "ErrorState",
    "QuantizedTensor",
    "decode",
    "encode",
    "quantize",
]
