"""What is counted and measured while training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass


@dataclass
class Counters:
    """Plain integers of one FSDP unit; bytes are those that this rank sent to others."""

    wire_bytes: int = 0
    inter_node_bytes: int = 0
    baseline_bytes: int = 0
    full_precision_bytes: int = 0
    reductions: int = 0
    bypassed_reductions: int = 0
    reductions_without_feedback: int = 0

    def add(self, wire_bytes: int, inter_node_bytes: int, baseline_bytes: int) -> None:
        """Count a compressed reduction."""
        self.reductions += 1
        self.wire_bytes += wire_bytes
        self.inter_node_bytes += inter_node_bytes
        self.baseline_bytes += baseline_bytes

    def add_full_precision(self, num_bytes: int, leaves_node: bool, *, is_whole: bool) -> None:
        """Count what goes around a ring in full precision.

        Args:
            num_bytes: that this rank sends to the next one.
            leaves_node: whether that is on another node.
            is_whole: it is all of the reduction, not a part of one that is counted elsewhere.
        """
        self.bypassed_reductions += is_whole
        self.wire_bytes += num_bytes
        self.full_precision_bytes += num_bytes
        self.inter_node_bytes += num_bytes if leaves_node else 0
        self.baseline_bytes += num_bytes

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def report(counters: Iterable[Counters], measured: Iterable[list[float]]) -> dict[str, float]:
    """`LoCo.stats` of the units that counted this.

    Args:
        counters: of the units.
        measured: of all their hops: the values of `hop.Measured`.
    """
    total = sum(counters, Counters())
    wanted, unsent, error, nonfinite_blocks, spikes = (
        math.fsum(column) for column in zip(*measured, strict=True)
    )
    return {
        **{name: float(value) for name, value in vars(total).items()},
        "compression_ratio": total.baseline_bytes / total.wire_bytes if total.wire_bytes else 1.0,
        "relative_error": math.sqrt(unsent / wanted) if wanted > 0 else 0.0,
        "error_norm": math.sqrt(error),
        "nonfinite_blocks": nonfinite_blocks,
        "spikes": spikes,
    }
