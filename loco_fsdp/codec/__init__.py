"""The codec: blocks and wire, the arithmetic, and the backends that run it."""

from loco_fsdp.codec.backends import choose_backend, get_backend
from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import BlockLayout, BlockTable, WireLayout
from loco_fsdp.codec.ops import (
    decode,
    decode_encode,
    decode_rows,
    drop_spike,
    encode,
    encode_difference,
)
from loco_fsdp.codec.quantized_tensor import GRADIENT_DTYPES, QuantizedTensor, quantize
from loco_fsdp.codec.spikes import make_usual

__all__ = [
    "GRADIENT_DTYPES",
    "BlockLayout",
    "BlockTable",
    "EncodeStats",
    "ErrorState",
    "QuantizedTensor",
    "WireLayout",
    "choose_backend",
    "decode",
    "decode_encode",
    "decode_rows",
    "drop_spike",
    "encode",
    "encode_difference",
    "get_backend",
    "make_usual",
    "quantize",
]
