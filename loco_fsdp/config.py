"""What a user chooses: one frozen dataclass, checked once, when it is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

ErrorDtype = Literal["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]
Topology = Literal["auto", "flat", "hierarchical"]
Backend = Literal["auto", "triton", "compiled", "eager"]

_CHOICES: dict[str, tuple[int | str, ...]] = {
    "bits": (8, 4, 2, 1),
    "block_size": (32, 64, 128, 256, 512, 1024),
    "error_dtype": ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn"),
    "topology": ("auto", "flat", "hierarchical"),
    "backend": ("auto", "triton", "compiled", "eager"),
}


@dataclass(frozen=True)
class LoCoConfig:
    """How the gradients of a unit are compressed.

    Raises:
        ValueError: a field holds a value it does not allow. The message names the field, the
            value and what is allowed. A value of the wrong type is such a value.
    """

    bits: int = 4
    """Bits of a code on the wire: 8, 4, 2 or 1."""

    block_size: int = 256
    """Elements that share one scale: a power of two, 32 to 1024."""

    beta: float = 0.9
    """Weight of the old error in its moving average, 0 <= beta < 1; 0 is classic error feedback."""

    error_feedback: bool = True
    """False: plain quantization, which keeps no state."""

    error_dtype: ErrorDtype = "float16"
    """What the error is stored in, times a power of two per block."""

    reset_interval: int | None = 1024
    """Compressed reductions of a unit between two resets of its error; None: never."""

    warmup_steps: int = 0
    """Reductions of a unit that are sent in full precision first."""

    topology: Topology = "auto"
    """Who sends what to whom: see docs/topologies.md."""

    node_size: int | None = None
    """Ranks per node; None: from the environment variable LOCAL_WORLD_SIZE."""

    intra_node_bits: int | None = None
    """Bits of the first hop of "hierarchical": 8, or None for the reduce dtype."""

    weight_bits: int | None = None
    """Bits of parameters on their way to other nodes, with FSDP2: 8 in every gather, or 4 for what
    has changed since the last step; None: as FSDP2 gathers them. See docs/parameters.md."""

    min_numel: int = 0
    """Units with fewer elements are reduced by the framework, in full precision."""

    backend: Backend = "auto"
    """What runs the codec; "auto" picks by device."""

    check_ranks: bool = False
    """Compare, before each reduction, what all ranks are about to send: slow, for finding out why
    gradients are wrong or a run hangs."""

    guard: float | None = None
    """Limit of a unit's relative error, above which the unit goes on in the next width (2, 4, 8
    bits, full precision); None: never. Looked at every 16 reductions, over these."""

    spike_limit: float | None = 10.0
    """A reduction whose gradient + error on this rank is so many times larger than usual is a
    spike: it is sent, but leaves no error, which would be sent in dozens of later steps. Usual is
    the mean norm of the unit's last 100 reductions or so, weighted by itself. None: never."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            # A bool equals 0 or 1, and 4.0 equals 4: neither is what the field means.
            if type(value) is not type(allowed[0]) or value not in allowed:
                self._refuse(name, f"one of {', '.join(map(repr, allowed))}")
        if self.intra_node_bits is not None and (
            type(self.intra_node_bits) is not int or self.intra_node_bits != 8
        ):
            self._refuse("intra_node_bits", "8 or None")
        if self.weight_bits is not None and (
            type(self.weight_bits) is not int or self.weight_bits not in (8, 4)
        ):
            self._refuse("weight_bits", "8, 4 or None")
        if type(self.beta) not in (float, int) or not 0 <= self.beta < 1:
            self._refuse("beta", "a number with 0 <= beta < 1")
        if self.guard is not None and (
            type(self.guard) not in (float, int) or not 0 < self.guard < math.inf
        ):
            self._refuse("guard", "a number > 0 or None")
        if self.spike_limit is not None and (
            type(self.spike_limit) not in (float, int) or not 1 < self.spike_limit < math.inf
        ):
            self._refuse("spike_limit", "a number > 1 or None")
        for name in ("error_feedback", "check_ranks"):
            if type(getattr(self, name)) is not bool:
                self._refuse(name, "True or False")
        self._check_integer("reset_interval", minimum=1, optional=True)
        self._check_integer("node_size", minimum=1, optional=True)
        self._check_integer("warmup_steps", minimum=0)
        self._check_integer("min_numel", minimum=0)

    def _check_integer(self, name: str, *, minimum: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if optional and value is None:
            return
        if type(value) is not int or value < minimum:
            self._refuse(name, f"an integer >= {minimum}" + (" or None" if optional else ""))

    def _refuse(self, name: str, allowed: str) -> None:
        raise ValueError(f"LoCoConfig.{name}={getattr(self, name)!r}: it must be {allowed}")

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dict of plain Python values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoCoConfig:
        """The inverse of `to_dict`; fields that are left out take their default.

        Raises:
            ValueError: a key is no field, or a field holds a value it does not allow.
        """
        fields = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(values) - set(fields)):
            raise ValueError(
                f"LoCoConfig has no field {', '.join(map(repr, unknown))}; "
                f"its fields are {', '.join(fields)}"
            )
        return cls(**values)
