"""What FSDP2 calls: the reduce-scatter of a unit, and the all-reduce over its replicas."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.candidate import Attachment, Parts, Plan
from loco_fsdp.frontends.fsdp2 import AllReduceHook, FSDPUnit, is_stock
from loco_fsdp.frontends.fsdp2_gather import FSDPAllGather, check_weight_bits, make_all_gather
from loco_fsdp.gather.gatherer import Gatherer
from loco_fsdp.reduction.all_reduce import LoCoAllReduce, all_reduce_in_full_precision
from loco_fsdp.reduction.deferred import DeferredGradients
from loco_fsdp.reduction.groups import Route
from loco_fsdp.reduction.precision import without_autocast
from loco_fsdp.reduction.reduce_scatter import LoCoReduceScatter

logger = logging.getLogger("loco_fsdp")


class FSDPReduceScatter:
    """The `ReduceScatter` of one FSDP unit.

    FSDP2 calls `allocate` for `input_tensor` `[world_size * shard]` on the compute stream and for
    `output_tensor` `[shard]` on the reduce-scatter stream, then this object on the latter.
    """

    def __init__(
        self, unit: FSDPUnit, reducer: LoCoReduceScatter, all_gather: FSDPAllGather | None
    ) -> None:
        self.reducer = reducer
        self.all_gather = all_gather
        self._unit = unit
        self._stock = unit.reduce_scatter

    def install(self) -> None:
        """Make FSDP2 call this object."""
        self._stock = self._unit.install(self)
        self._unit.watch(self)
        if self.all_gather is not None:
            self.all_gather.install()

    def remove(self) -> None:
        """Put back what was there before."""
        if self.all_gather is not None:
            self.all_gather.remove()
        self._unit.unwatch()
        self._unit.uninstall()
        self.reducer.retire()

    def forget_deferred(self) -> None:
        """No gradient waits here."""

    def owed(self) -> tuple[int, ...]:
        """Nobody: no gradient waits here."""
        return ()

    def before_reduction(self) -> None:
        """FSDP2 is about to pack gradients."""
        self.reducer.before_reduction()

    def after_reduction(self) -> None:
        """Count what FSDP2 has sent between replicas, where it reduces over them itself."""
        unit, group = self._unit, self._unit.replicate_group
        self._announce_step()
        if group is not None and unit.all_reduce_grads:
            numel = sum(unit.shard_numels[index] for index in unit.active or ())
            num_bytes = numel * unit.reduce_dtype.itemsize
            ring_bytes = 2 * num_bytes * (group.size() - 1) // group.size()
            self.reducer.counters.add_full_precision(
                ring_bytes, self.reducer.leaves_node(group), is_whole=unit.world_size == 1
            )
        unit.forget_active()

    @property
    def gatherer(self) -> Gatherer | None:
        """What gathers its parameters in low bits, if anything does."""
        return None if self.all_gather is None else self.all_gather.gatherer

    def _announce_step(self) -> None:
        """Parameters are going to change."""
        if self.gatherer is not None:
            self.gatherer.gradients_reduced(self._unit.active)

    def forget_iteration(self) -> None:
        """Nothing: what FSDP2 accumulates it forgets itself."""

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for the input or the output of a reduction, as stock FSDP2 makes it."""
        return self._stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` `[world_size * shard]` into `output_tensor` `[shard]`.

        Raises:
            ValueError: `op` is none of SUM, AVG and PREMUL_SUM, `async_op` is set, or the sizes do
                not fit the group.
            TypeError: the gradient has a dtype that the codec does not take.
            RuntimeError: with `check_ranks`, the ranks do not reduce the same.
        """

        if self._unit.active is None:  # nobody tells when this reduction is done
            self._announce_step()

        def factor() -> float:
            if async_op:
                raise ValueError(f"{self._unit.label}: async_op=True is not supported")
            return self._factor(op, group.size())

        def stock() -> dist.Work | None:
            return self._stock(output_tensor, input_tensor, group, op, async_op)

        return self.reducer.reduce(output_tensor, input_tensor, group, factor, stock)

    def _factor(self, op: Any, world_size: int) -> float:
        """What FSDP2 wants the sum to be multiplied by."""
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return 1 / world_size
        divisor = self._unit.gradient_divide_factor
        if op == dist.ReduceOp.PREMUL_SUM and divisor is not None:
            return 1 / divisor  # which it is made of, and does not tell
        raise ValueError(
            f"{self._unit.label}: loco-fsdp sums and averages, but it was asked for {op}"
        )


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
        reducer: what reduces in low bits; None: full precision.
        user_hook: what the user has given to `set_all_reduce_hook`.
    """

    def __init__(self, unit: FSDPUnit, group: dist.ProcessGroup) -> None:
        self.group = group
        self.reducer: LoCoAllReduce | None = None
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
                    "%s: the all-reduce hook %r is called after the all-reduce over "
                    "replicas, as by native HSDP",
                    self._unit.label,
                    hook,
                )
        if not self._unit.all_reduce_grads:
            self._empty_before = self._unit.without_gradient()
        if self.reducer is not None:
            self.reducer.before_reduction()

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
        if self.reducer is None:
            all_reduce_in_full_precision(reduce_output, self.group, factor)
        else:
            self.reducer.reduce(reduce_output, factor)
        if self.user_hook is not None:
            self.user_hook(reduce_output)

    def _told_apart(self, gradient: Tensor) -> tuple[tuple[int, ...], list[int]]:
        active = self._unit.active or ()
        numels = [self._unit.shard_numels[index] for index in active]
        if sum(numels) != gradient.numel():
            raise RuntimeError(
                f"{self._unit.label}: gradients that wait for an all-reduce cannot be "
                "told apart by parameter, because something has taken the place of FSDP2's "
                "post_backward. Leave it alone, or do not use set_requires_all_reduce(False)"
            )
        return active, numels


class FSDPReplicas:
    """LoCo's part in the all-reduce over replicas of one FSDP unit."""

    gatherer = None  # FSDP2 gathers parameters inside of a replica

    def __init__(self, hook: ReplicaAllReduce, reducer: LoCoAllReduce) -> None:
        self.reducer = reducer
        self._hook = hook

    def install(self) -> None:
        """Make the all-reduce hook call the reducer."""
        self._hook.reducer = self.reducer

    def remove(self) -> None:
        """Leave replicas to reduce in full precision."""
        self._hook.reducer = None
        self.reducer.retire()

    def forget_deferred(self) -> None:
        """Give up gradients that wait for an all-reduce."""
        self._hook.forget_iteration()


def replicas_of(unit: FSDPUnit) -> ReplicaAllReduce | None:
    """What keeps the replicas of this unit equal; None where FSDP2 itself does, or nobody."""
    watcher = unit.watcher
    return watcher if isinstance(watcher, ReplicaAllReduce) else None


class FSDPCandidate:
    """One FSDP unit that nothing is attached to yet."""

    def __init__(self, unit: FSDPUnit) -> None:
        self.unit = unit
        self._hook = replicas_of(unit)

    @property
    def module(self) -> nn.Module:
        """Its first module."""
        return cast(nn.Module, self.unit.modules[0])

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Its groups, and the replicas of a model of `LoCoFSDP`."""
        return [*self.unit.process_groups, *([self._hook.group] if self._hook else [])]

    @property
    def peers(self) -> int:
        """Replicas where `LoCoFSDP` keeps them equal, else ranks of the shard group."""
        return self.unit.world_size if self._hook is None else self._hook.group.size()

    def check(self) -> None:
        """Raise a ValueError if something is there already, or a part of the unit is not."""
        unit, hook = self.unit, self._hook
        if unit.outside:
            raise ValueError(
                f"{unit.label} has parameters outside of the module to attach to "
                f"({', '.join(unit.outside[:3])}): attach to one that holds all of the unit"
            )
        if isinstance(unit.watcher, FSDPReduceScatter) or (hook is not None and hook.reducer):
            raise ValueError(
                f"{unit.label} has LoCo attached already: call detach() on that LoCo first"
            )
        if not is_stock(unit.reduce_scatter):
            raise ValueError(
                f"{unit.label} has a reduce-scatter of its own, "
                f"{type(unit.reduce_scatter).__name__}, which LoCo would replace: do not set it"
            )

    def check_config(self, config: LoCoConfig) -> None:
        """Raise a ValueError if a topology is asked for over replicas."""
        if self._hook is not None and config.weight_bits is not None:
            raise ValueError(
                f"weight_bits={config.weight_bits}: on a 2-D mesh parameters are gathered inside "
                "of a replica, which FSDP2 does: it must be None"
            )
        check_weight_bits(self.unit, config)
        if self._hook is not None and config.topology != "auto":
            raise ValueError(
                f'topology={config.topology!r}: on a 2-D mesh it must be "auto", which reduces in '
                "low bits over replicas"
            )

    def bypass_reason(self) -> str | None:
        """That FSDP2 replicates it, and does not shard it."""
        if self.peers == 1 and self.unit.replicas > 1:
            return "not sharded: only the all-reduce of a LoCoFSDP model is compressed"
        return None

    def attachment(self, plan: Plan, parts: Parts) -> Attachment:
        """Its reduce-scatter, or over replicas of `LoCoFSDP` their all-reduce."""
        if self._hook is not None:
            return FSDPReplicas(
                self._hook,
                LoCoAllReduce(
                    self.unit,
                    plan.config,
                    plan.bypass_reason,
                    group=self._hook.group,
                    backend=plan.backend,
                    node_size=plan.node_size,
                    workspace=parts.workspace,
                    notices=parts.notices,
                ),
            )
        route = Route(None, None)
        if plan.bypass_reason is None:
            route = parts.groups.acquire(self.unit.process_groups[0], plan.config)
        reducer = LoCoReduceScatter(
            self.unit,
            plan.config,
            plan.bypass_reason,
            backend=plan.backend,
            groups=route.hops,
            topology_reason=route.reason,
            node_size=plan.node_size,
            workspace=parts.workspace,
            notices=parts.notices,
        )
        all_gather = make_all_gather(self.unit, plan, parts, reducer)
        return FSDPReduceScatter(self.unit, reducer, all_gather)
