"""What is counted while training, and how it is added up when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from loco_fsdp.codec import EncodeStats


@dataclass
class Counters:
    """Plain integers of one FSDP unit; bytes are those that this rank sent to others."""

    wire_bytes: int = 0
    inter_node_bytes: int = 0
    baseline_bytes: int = 0
    reductions: int = 0
    bypassed_reductions: int = 0
    reductions_without_feedback: int = 0

    def add(self, wire_bytes: int, inter_node_bytes: int, baseline_bytes: int) -> None:
        """Count a compressed reduction."""
        self.reductions += 1
        self.wire_bytes += wire_bytes
        self.inter_node_bytes += inter_node_bytes
        self.baseline_bytes += baseline_bytes

    def add_bypassed(self, num_bytes: int, leaves_node: bool) -> None:
        """Count a reduction by stock FSDP2: a ring, whose next rank may be on another node."""
        self.bypassed_reductions += 1
        self.wire_bytes += num_bytes
        self.inter_node_bytes += num_bytes if leaves_node else 0
        self.baseline_bytes += num_bytes

    def __iadd__(self, other: Counters) -> Counters:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def relative_error(stats: Iterable[EncodeStats | None]) -> float:
    """Norm of what the last reductions could not send over the norm of what they wanted to send.

    Waits for the device.
    """
    sums = [s.squares.sum(dim=(0, 1), dtype=torch.float64).cpu() for s in stats if s is not None]
    if not sums:
        return 0.0
    wanted, unsent = torch.stack(sums).sum(0).tolist()
    return float((unsent / wanted) ** 0.5) if wanted > 0 else 0.0


def nonfinite_blocks(stats: Iterable[EncodeStats | None]) -> int:
    """Blocks that were sent as NaN so far. Waits for the device."""
    return sum(int(s.nonfinite.item()) for s in stats if s is not None)
