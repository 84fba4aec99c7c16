"""Warnings about what LoCo cannot do as one would expect, each said once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch.distributed as dist

from loco_fsdp.reduction.unit import Unit

logger = logging.getLogger("loco_fsdp")

LATE = "sharded after attaching: detach() and attach the model again"


class Notices:
    """What was said about the units of one `LoCo`.

    A reason that holds for many units is said for the first of them. The first rank of the unit's
    groups says it: in a pipeline, whose stages have units of their own, that is not rank 0.

    Attributes:
        late_units: what finds units that nobody has attached to; asked at the first reduction.
    """

    def __init__(self) -> None:
        self.late_units: Callable[[], list[Unit]] | None = None
        self._said: set[str] = set()

    def say_late(self) -> None:
        """Warn of units that were sharded after attaching, when the first reduction comes."""
        if self.late_units is None:
            return
        late, self.late_units = self.late_units(), None
        for unit in late:
            self.say(unit.label, [f"not compressed: {LATE}"], unit.process_groups)

    def say(self, label: str, reasons: Iterable[str], groups: Iterable[dist.ProcessGroup]) -> None:
        """Warn of the reasons that were not said before."""
        for reason in reasons:
            if reason in self._said:
                continue
            self._said.add(reason)
            if all(group.rank() == 0 for group in groups):
                logger.warning(
                    "%s: %s (said once; LoCo.summary() shows all units)",
                    label,
                    reason,
                )
