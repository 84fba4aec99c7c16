"""What `attach` asks of every framework: its units, and to put a reduction into each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import nn

from loco_fsdp.config import LoCoConfig
from loco_fsdp.gather.gatherer import Gatherer
from loco_fsdp.reduction.groups import HopGroups
from loco_fsdp.reduction.notices import Notices
from loco_fsdp.reduction.reducer import Reducer
from loco_fsdp.reduction.unit import Unit
from loco_fsdp.reduction.workspace import Workspace


class Parts(NamedTuple):
    """What the reducers of one `LoCo` share."""

    workspace: Workspace
    notices: Notices
    groups: HopGroups


@dataclass(frozen=True)
class Plan:
    """How a unit is to be reduced.

    Attributes:
        config: how it is compressed.
        backend: what runs its codec.
        node_size: ranks of a node.
        bypass_reason: why it stays in full precision; None if it does not.
    """

    config: LoCoConfig
    backend: str
    node_size: int
    bypass_reason: str | None


class Attachment(Protocol):
    """A reduction in its place in a framework."""

    @property
    def reducer(self) -> Reducer:
        """What reduces."""

    @property
    def gatherer(self) -> Gatherer | None:
        """What gathers parameters in low bits; None where the framework does all of it."""

    def install(self) -> None:
        """Make the framework call the reducer."""

    def remove(self) -> None:
        """Put back what was there before, and retire the reducer."""

    def forget_deferred(self) -> None:
        """Give up gradients that wait for a reduction."""


class Candidate(Protocol):
    """A unit of a framework that nothing is attached to yet."""

    @property
    def unit(self) -> Unit:
        """The unit."""

    @property
    def module(self) -> nn.Module:
        """The module of it that `select` is called with."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups whose ranks all have to attach the same."""

    @property
    def peers(self) -> int:
        """Ranks that gradients would be exchanged between in low bits."""

    def check(self) -> None:
        """Raise a ValueError if nothing can be attached to it."""

    def check_config(self, config: LoCoConfig) -> None:
        """Raise a ValueError if it cannot be reduced as `config` says."""

    def bypass_reason(self) -> str | None:
        """Why the framework alone reduces it, for good; None if it need not."""

    def attachment(self, plan: Plan, parts: Parts) -> Attachment:
        """What reduces it as planned, not installed yet. A collective of `groups`."""


def refuse_weight_bits(config: LoCoConfig, framework: str) -> None:
    """Raise a ValueError if parameters are to be gathered in low bits by another than FSDP2."""
    if config.weight_bits is not None:
        raise ValueError(
            f"weight_bits={config.weight_bits}: parameters are gathered in low bits with FSDP2 "
            f"alone, and this is {framework}: it must be None"
        )
