"""What the planner is told: ranks and links, and a model with its training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loco_fsdp.config import LoCoConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FRAMEWORKS = {
    "fsdp2": (
        *("fsdp-fp32", "fsdp-bf16", "fsdp-bf16-reshard", "fsdp-alltoall"),
        *("loco-flat", "loco-hierarchical"),
        *("loco-hierarchical-reshard", "loco-int8", "loco-differences"),
        *("hsdp-fp32", "hsdp-bf16", "hsdp-loco"),
    ),
    "ddp": ("ddp-fp32", "ddp-bf16", "ddp-loco"),
    "megatron": (
        *("megatron-bf16", "megatron-loco"),
        *("megatron-instances-bf16", "megatron-instances-loco"),
    ),
}
WAYS = tuple(way for ways in FRAMEWORKS.values() for way in ways)


@dataclass(frozen=True)
class Cluster:
    """Ranks and links.

    Raises:
        ValueError: a value that cannot be. The message names it and what is allowed.
    """

    num_nodes: int
    """Nodes."""

    ranks_per_node: int
    """Ranks (GPUs) of a node."""

    inter_bandwidth: float
    """Bits/s that a node sends to others, over all its network cards, in each direction."""

    intra_bandwidth: float = 2.4e12
    """Bits/s that a rank sends to others of its node, in each direction."""

    codec_rate: float = 500e9
    """Bytes/s of float32 gradient that a rank encodes and decodes, one after the other; of 16-bit
    gradients, twice their own bytes."""

    codec_latency_s: float = 0.0
    """Seconds of encoding and decoding a unit beside its elements."""

    latency_s: float = 0.0
    """Seconds of a message between nodes beside its bytes."""

    wait_s: float = 0.0
    """Seconds that a rank waits for the others in each collective: all come to it from work of
    their own."""

    stock_factor: float = 1.0
    """Bytes of the stock reduce-scatter over those of a ring: 1 with NCCL, 2 with gloo, which
    all-reduces instead."""

    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Measured collectives, by `rate_key`: seconds beside the bytes, below 0 where the first bytes
    pass faster than the rest, and bytes/s of the whole tensor."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            _check_count(name, getattr(self, name))
        for name in ("inter_bandwidth", "intra_bandwidth", "codec_rate", "stock_factor"):
            _check_number(name, getattr(self, name), positive=True)
        for name in ("latency_s", "codec_latency_s", "wait_s"):
            _check_number(name, getattr(self, name), positive=False)


@dataclass(frozen=True)
class Job:
    """A model and its training step.

    Raises:
        ValueError: a value that cannot be. The message names it and what is allowed.
    """

    num_parameters: int
    """Parameters of the model."""

    compute_s: float
    """Seconds of a step without communication: what one rank computes, in all its microbatches."""

    param_dtype: str = "bfloat16"
    """What parameters are gathered in."""

    reduce_dtype: str = "float32"
    """What LoCo reduces inside of a node with FSDP2; DDP has float32, Megatron-LM bfloat16."""

    loco: LoCoConfig = field(default_factory=LoCoConfig)
    """Bits, block size and error dtype."""

    num_units: int = 1
    """FSDP units, or buckets, of one size, each with collectives of its own."""

    microbatches: int = 1
    """Of a step. FSDP gathers parameters in each; gradients are accumulated and reduced once."""

    overlap: float = 1.0
    """Part of the computation, 0 to 1, that communication can run beside."""

    framework: str = "fsdp2"
    """What trains it, a key of `FRAMEWORKS`, whose ways are compared."""

    memory_bytes: float = math.inf
    """Bytes of a rank for parameters, gradients, optimizer and errors."""

    def __post_init__(self) -> None:
        for name in ("num_parameters", "num_units", "microbatches"):
            _check_count(name, getattr(self, name))
        _check_number("compute_s", self.compute_s, positive=False)
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: it must be one of {', '.join(DTYPE_BYTES)}"
                )
        if self.framework not in FRAMEWORKS:
            raise ValueError(
                f"framework={self.framework!r}: it must be one of {', '.join(FRAMEWORKS)}"
            )
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap!r}: it must be from 0 to 1")
        if not self.memory_bytes > 0:
            raise ValueError(f"memory_bytes={self.memory_bytes!r}: it must be above 0")


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: it must be an integer of 1 or more")


def _check_number(name: str, value: float, *, positive: bool) -> None:
    if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
        raise ValueError(f"{name}={value!r}: it must be a number {'above' if positive else '>='} 0")
