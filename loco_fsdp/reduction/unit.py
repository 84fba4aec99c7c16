"""What a reduction has to know of the framework that calls it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from loco_fsdp.reduction.spans import Spans


class Unit(Protocol):
    """Parameters whose gradients a framework reduces together, as one flat gradient.

    Read-only here; frontends fill it in. Ranks of a group have the same units.
    """

    @property
    def name(self) -> str:
        """As users know it."""

    @property
    def label(self) -> str:
        """As messages call it: "FSDP unit 'layers.0'"."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of its parameters, in the order in which they are packed."""

    @property
    def shard_numels(self) -> tuple[int, ...]:
        """Elements of each parameter in one rank's part of the flat gradient.

        Where there are `spans`, `spans.numels`.
        """

    @property
    def spans(self) -> Spans | None:
        """Where parameters are in the flat gradient.

        None: it holds the active parameters alone, and each shard `shard_numels` of each of them,
        one after the other. Otherwise it always holds all of them, and shards cut it regardless.
        """

    @property
    def numel(self) -> int:
        """Elements of its parameters, over all ranks of its shard group."""

    @property
    def active(self) -> tuple[int, ...] | None:
        """Indices of the parameters in the gradient that is being reduced.

        None where that is not known: then nobody knows whose its elements are.
        """

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype that gradients are reduced in."""

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The groups that its gradients are reduced over; the first is that of its shards."""

    @property
    def world_size(self) -> int:
        """Ranks of the first group; 1 where there is none."""

    @property
    def lost_reason(self) -> str | None:
        """Why the framework does not call the reduction any more; None if it does."""

    @property
    def remarks(self) -> list[str]:
        """What else is not as well as the user may think."""
