"""What is counted while training."""

from __future__ import annotations

from dataclasses import dataclass


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
