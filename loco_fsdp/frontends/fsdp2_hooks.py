"""Replicas of a model that FSDP2 shards inside of each alone: who keeps their gradients equal."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.frontends.fsdp2 import AllReduceHook, FSDPUnit
from loco_fsdp.reduction.deferred import DeferredGradients
from loco_fsdp.reduction.precision import without_autocast

logger = logging.getLogger("loco_fsdp")


class Compressor(Protocol):
    """What reduces over replicas in another way than in full precision."""

    def before_reduction(self) -> None:
        """A reduction is about to be."""

    def all_reduce(self, gradient: Tensor, active: tuple[int, ...] | None, factor: float) -> None:
        """Sum `gradient` `[shard]` over replicas, times `factor`, in place."""


class ReplicaAllReduce:
    """The all-reduce hook of one FSDP unit, which stands in for that of native HSDP.

    FSDP2 calls this object with the shard's gradient `[shard]`, reduced over the shard group, on
    its all-reduce stream. Like native HSDP it averages over replicas, or sums where the user has
    set a divide factor; keeps gradients while `set_requires_all_reduce(False)` holds; and then
    calls the all-reduce hook of the user, which sees what native HSDP would show it.

    It is there for as long as the model, whatever is attached and detached: without it replicas
    would drift apart.

    Attributes:
        group: the replicas, a rank of each.
        compressor: what reduces; None: full precision.
        user_hook: what the user has given to `set_all_reduce_hook`.
    """

    def __init__(self, unit: FSDPUnit, group: dist.ProcessGroup) -> None:
        self.group = group
        self.compressor: Compressor | None = None
        self.user_hook: AllReduceHook | None = None
        self._unit = unit
        self._deferred = DeferredGradients()
        self._empty_before: list[int] = []
        unit.all_reduce_hook = self
        unit.watch(self)

    def owed(self) -> set[int]:
        """Parameters whose earlier gradients wait for the all-reduce that is about to be."""
        return self._deferred.parameters if self._unit.all_reduce_grads else set()

    def before_reduction(self) -> None:
        """Make sure that FSDP2 calls this object, and let it call what the user has set instead."""
        hook = self._unit.all_reduce_hook
        if hook is not self:
            self._unit.all_reduce_hook = self
            self.user_hook = hook
            if self.group.rank() == 0:
                logger.info(
                    "FSDP unit %r: the all-reduce hook %r is called after the all-reduce over "
                    "replicas, as by native HSDP",
                    self._unit.name,
                    hook,
                )
        if not self._unit.all_reduce_grads:
            self._empty_before = self._unit.without_gradient()
        if self.compressor is not None:
            self.compressor.before_reduction()

    def after_reduction(self) -> None:
        """Take away the zeros that FSDP2 has made gradients of, while the true ones wait."""
        if not self._unit.all_reduce_grads:
            self._unit.clear_gradients(self._empty_before)
        self._unit.forget_active()

    def forget_iteration(self) -> None:
        """Give the gradients that wait up, as native HSDP does its own."""
        self._deferred.forget()

    @without_autocast
    def __call__(self, reduce_output: Tensor) -> None:
        """Average `reduce_output` `[shard]` over replicas, in place.

        Raises:
            RuntimeError: gradients of an accumulation cannot be told apart by parameter.
        """
        if reduce_output.device.type != "cpu":
            # Made on the reduce-scatter stream; FSDP2 may free it before this stream is done.
            reduce_output.record_stream(torch.accelerator.current_stream(reduce_output.device))
        if not self._unit.all_reduce_grads:
            self._deferred.put_by(reduce_output, *self._told_apart(reduce_output))
            reduce_output.zero_()
            return
        if self._deferred.parameters:
            self._deferred.take(reduce_output, *self._told_apart(reduce_output))
        factor = 1 / self.group.size() if self._unit.gradient_divide_factor is None else 1.0
        if self.compressor is None:
            all_reduce(reduce_output, self.group, factor)
        else:
            self.compressor.all_reduce(reduce_output, self._unit.active, factor)
        if self.user_hook is not None:
            self.user_hook(reduce_output)

    def _told_apart(self, gradient: Tensor) -> tuple[tuple[int, ...], list[int]]:
        active = self._unit.active or ()
        numels = [self._unit.shard_numels[index] for index in active]
        if sum(numels) != gradient.numel():
            raise RuntimeError(
                f"FSDP unit {self._unit.name!r}: gradients that wait for an all-reduce cannot be "
                "told apart by parameter, because something has taken the place of FSDP2's "
                "post_backward. Leave it alone, or do not use set_requires_all_reduce(False)"
            )
        return active, numels


def replicas_of(unit: FSDPUnit) -> ReplicaAllReduce | None:
    """What keeps the replicas of this unit equal; None where FSDP2 itself does, or nobody."""
    watcher = unit.watcher
    return watcher if isinstance(watcher, ReplicaAllReduce) else None


def all_reduce(gradient: Tensor, group: dist.ProcessGroup, factor: float) -> None:
    """Sum `gradient` over `group` in its own dtype, times `factor`, in place.

    In float16, whose largest number is 65,504, part of the division comes first, as in FSDP2: by
    about the square root of what is to be divided by.
    """
    before = 1.0
    if gradient.dtype == torch.float16:
        while before * before * factor < 1:
            before *= 2
        gradient /= before
    dist.all_reduce(gradient, group=group)
    gradient *= factor * before
