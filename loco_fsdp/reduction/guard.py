"""The guard: raises the width of a unit whose relative error stays above a limit."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.reduction.collectives import all_gather
from loco_fsdp.reduction.hop import Hop

logger = logging.getLogger("loco_fsdp")

WIDTHS = (1, 2, 4, 8)
"""Bits of a code, in the order in which a guard goes through them; full precision comes after."""

INTERVAL = 16
"""Compressed reductions of a unit from one decision to the next."""


class Guard:
    """Decides for one FSDP unit, on all its ranks at once, every `INTERVAL` reductions.

    It compares with the limit the norm of what was not sent over the norm of gradient + error,
    both over all ranks and over the reductions since its last decision. Between two decisions it
    waits for nothing; a decision is a collective of two numbers, and waits for the device.

    Args:
        limit: of the relative error.
        unit_name: for the log.
        groups: whose ranks decide together, one after the other.
    """

    def __init__(self, limit: float, unit_name: str, groups: list[dist.ProcessGroup]) -> None:
        self._limit = limit
        self._unit_name = unit_name
        self._groups = groups
        self._sums: Tensor | None = None
        self._num_measured = 0

    def state(self) -> tuple[int, list[float]]:
        """What was measured since the last decision, for a checkpoint. Waits for the device."""
        return self._num_measured, [] if self._sums is None else self._sums.tolist()

    def load(self, num_measured: int, sums: list[float]) -> None:
        """Go on from `state`."""
        self._num_measured = num_measured
        self._sums = torch.tensor(sums, dtype=torch.float64) if sums else None

    def next_width(self, hops: list[Hop], bits: int) -> int | None:
        """The width of the next reduction, after one in `bits`; None: full precision."""
        sums = torch.stack([hop.last_squares() for hop in hops]).sum(dim=0)
        self._sums = sums if self._sums is None else self._sums.to(sums.device) + sums
        self._num_measured += 1
        if self._num_measured < INTERVAL:
            return bits
        wanted, unsent = _total(self._sums, self._groups).tolist()
        self._sums, self._num_measured = None, 0
        relative_error = (unsent / wanted) ** 0.5 if wanted > 0 else 0.0
        if not relative_error > self._limit:
            return bits
        wider = dict(zip(WIDTHS, (*WIDTHS[1:], None), strict=True))[bits]
        if all(group.rank() == 0 for group in self._groups):
            logger.warning(
                "%s: relative error %.3g over %d reductions is above guard=%g, %d bits become %s",
                self._unit_name,
                relative_error,
                INTERVAL,
                self._limit,
                bits,
                wider or "full precision",
            )
        return wider


def _total(sums: Tensor, groups: list[dist.ProcessGroup]) -> Tensor:
    """The sum over all ranks of these groups, bitwise the same on all of them."""
    for group in groups:
        gathered = sums.new_empty(group.size(), *sums.shape)
        all_gather(gathered.view(-1), sums, group)
        sums = gathered.sum(dim=0)
    return sums
