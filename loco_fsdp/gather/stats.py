"""What is counted and measured of gathers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from loco_fsdp.gather.gatherer import GatherCounters, Gatherer


def report_gathers(gatherers: Sequence[Gatherer]) -> dict[str, float]:
    """The part of `LoCo.stats` about parameters. Waits for the device once."""
    total = sum((gatherer.counters for gatherer in gatherers), GatherCounters())
    unsent, wanted, stale = 0.0, 0.0, 0.0
    if gatherers:
        device = gatherers[0].unit.device
        rows = torch.stack([gatherer.measured().to(device) for gatherer in gatherers]).tolist()
        unsent, wanted, stale = (math.fsum(column) for column in zip(*rows, strict=True))
    return {
        "weight_wire_bytes": float(total.wire_bytes),
        "weight_inter_node_bytes": float(total.inter_node_bytes),
        "weight_relative_error": math.sqrt(unsent / wanted) if wanted > 0 else 0.0,
        "weight_refreshes": float(total.refreshes),
        "stale_gathers": stale,
    }
