"""Low-bit gradient communication for PyTorch FSDP2 by the LoCo method (arXiv 2407.04480)."""

from loco_fsdp.adaptor import LoCo, attach
from loco_fsdp.codec import QuantizedTensor, quantize
from loco_fsdp.config import LoCoConfig
from loco_fsdp.version import __version__
from loco_fsdp.wrap import LoCoFSDP

__all__ = [
    "LoCo",
    "LoCoConfig",
    "LoCoFSDP",
    "QuantizedTensor",
    "__version__",
    "attach",
    "quantize",
]
