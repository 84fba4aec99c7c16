"""`torch.distributed.fsdp.FullyShardedDataParallel` (FSDP1), by communication hooks.

Read in torch 2.9, 2.13 and 2.14. What is private here, and why:

- `FullyShardedDataParallel._comm_hook`: `register_comm_hook` gives all units the same hook, which
  sees tensors alone and could not tell whose they are. Set one by one, hooks can also be taken away
  again.
- `._handle.flat_param` with `._fqns`, `._numels_with_padding` and `._is_padding_mask`: where each
  parameter is in the flat gradient.
- `._handle._reduce_dtype`, `._gradient_predivide_factor`, `._gradient_postdivide_factor`: how FSDP1
  reduces where there is no hook.

The flat gradient always holds all parameters of a unit, and shards cut it without regard to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.candidate import Attachment, Parts, Plan, refuse_weight_bits
from loco_fsdp.reduction.all_reduce import LoCoAllReduce, all_reduce_in_full_precision
from loco_fsdp.reduction.collectives import reduce_scatters
from loco_fsdp.reduction.groups import Route
from loco_fsdp.reduction.reduce_scatter import LoCoReduceScatter
from loco_fsdp.reduction.spans import Spans, own_part

_SHARDED = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)


class FSDP1Unit:
    """One `FullyShardedDataParallel` and the parameters that it flattens.

    Attributes:
        fsdp: the module.
        spans: where parameters are in its flat gradient, or with `replicate_group` in this rank's
            shard of it.
    """

    def __init__(self, name: str, fsdp: Any, replicate_group: dist.ProcessGroup | None) -> None:
        self.fsdp = fsdp
        flat_param = fsdp._handle.flat_param
        self.name = name or "(root)"
        prefix = f"{name}." if name else ""
        self.parameter_names = tuple(_clean(prefix + fqn) for fqn in flat_param._fqns)
        group: dist.ProcessGroup = fsdp.process_group
        starts = accumulate(flat_param._numels_with_padding, initial=0)
        places = [
            (start, numel)
            for start, numel, is_padding in zip(
                starts, flat_param._numels_with_padding, flat_param._is_padding_mask, strict=False
            )
            if not is_padding
        ]
        self.numel = sum(numel for _, numel in places)
        padded = -(-sum(flat_param._numels_with_padding) // group.size()) * group.size()
        self.spans = Spans(
            tuple(start for start, _ in places), tuple(numel for _, numel in places), padded
        )
        if replicate_group is not None:
            self.spans = own_part(self.spans, group.size(), group.rank())
        self.shard_numels = self.spans.numels
        self.active = tuple(i for i, numel in enumerate(self.shard_numels) if numel)
        self.device: torch.device = fsdp.compute_device
        self.process_groups: list[dist.ProcessGroup] = [group]
        self.world_size: int = group.size()
        self.remarks: list[str] = []

    @property
    def label(self) -> str:
        """As messages call it."""
        return f"FSDP1 unit {self.name!r}"

    @property
    def reduce_dtype(self) -> torch.dtype:
        """That of gradients when the hook is called."""
        dtype: torch.dtype = self.fsdp._handle._reduce_dtype
        return dtype

    @property
    def lost_reason(self) -> str | None:
        """FSDP1 refuses a second hook."""
        return None

    def __eq__(self, other: object) -> bool:
        """Whether both are of one module."""
        return isinstance(other, FSDP1Unit) and self.fsdp is other.fsdp

    __hash__ = None  # type: ignore[assignment]


def _clean(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


def fsdp1_units(
    module: nn.Module, replicate_group: dist.ProcessGroup | None = None
) -> Iterator[FSDP1Unit]:
    """The FSDP1 units with parameters in `module`, in the order of `named_modules`."""
    for name, submodule in module.named_modules():
        if isinstance(submodule, FullyShardedDataParallel) and submodule._handle is not None:
            yield FSDP1Unit(_clean(name), submodule, replicate_group)


def _reduce_in_full_precision(fsdp: Any, gradient: Tensor, output: Tensor) -> None:
    """As FSDP1 without a hook."""
    if fsdp._gradient_predivide_factor > 1:
        gradient.div_(fsdp._gradient_predivide_factor)
    reduce_scatters([output], [gradient], fsdp.process_group)
    if fsdp._gradient_postdivide_factor > 1:
        output.div_(fsdp._gradient_postdivide_factor)


class FSDP1ReduceScatter:
    """The communication hook of one unit: its reduce-scatter."""

    gatherer = None  # the framework alone gathers parameters

    def __init__(self, unit: FSDP1Unit, reducer: LoCoReduceScatter) -> None:
        self.reducer = reducer
        self._unit = unit

    def install(self) -> None:
        """Make FSDP1 call this object."""
        self._unit.fsdp._comm_hook = self

    def remove(self) -> None:
        """Take the hook away."""
        self._unit.fsdp._comm_hook = None
        self.reducer.retire()

    def forget_deferred(self) -> None:
        """No gradient waits here."""

    def __call__(self, state: None, gradient: Tensor, output: Tensor) -> None:
        """Average `gradient` `[ranks * shard]` over ranks into `output` `[shard]`."""
        fsdp = self._unit.fsdp
        self.reducer.before_reduction()
        self.reducer.reduce(
            output,
            gradient,
            fsdp.process_group,
            lambda: 1 / self._unit.world_size,
            lambda: _reduce_in_full_precision(fsdp, gradient, output),
        )


class ReplicaHook:
    """The communication hook of a unit whose model is sharded inside of each replica alone.

    It is there for as long as the model, whatever is attached and detached: without it replicas
    would drift apart.

    Attributes:
        group: the replicas, a rank of each.
        reducer: what reduces over them in low bits; None: full precision.
    """

    def __init__(self, fsdp: Any, group: dist.ProcessGroup) -> None:
        self.group = group
        self.reducer: LoCoAllReduce | None = None
        self._fsdp = fsdp
        fsdp._comm_hook = self
        _broadcast(fsdp, group)

    def __call__(self, state: None, gradient: Tensor, output: Tensor) -> None:
        """Average over the replica's ranks in full precision, then over replicas."""
        _reduce_in_full_precision(self._fsdp, gradient, output)
        factor = 1 / self.group.size()
        if self.reducer is None:
            all_reduce_in_full_precision(output, self.group, factor)
            return
        self.reducer.before_reduction()
        self.reducer.reduce(output, factor)


def _broadcast(fsdp: Any, group: dist.ProcessGroup) -> None:
    """Let replicas start equal, as those of the first."""
    source = dist.get_process_group_ranks(group)[0]
    for tensor in (fsdp._handle.flat_param, *fsdp.module.buffers()):
        dist.broadcast(tensor.detach(), src=source, group=group)


class FSDP1Replicas:
    """LoCo's part in the all-reduce over replicas of one unit."""

    gatherer = None  # the framework alone gathers parameters

    def __init__(self, unit: FSDP1Unit, group: dist.ProcessGroup, reducer: LoCoAllReduce) -> None:
        self.reducer = reducer
        self._unit = unit
        self._group = group

    def install(self) -> None:
        """Make the hook call the reducer."""
        hook = self._unit.fsdp._comm_hook or ReplicaHook(self._unit.fsdp, self._group)
        hook.reducer = self.reducer

    def remove(self) -> None:
        """Leave replicas to reduce in full precision."""
        self._unit.fsdp._comm_hook.reducer = None
        self.reducer.retire()

    def forget_deferred(self) -> None:
        """No gradient waits here."""


class FSDP1Candidate:
    """One unit of FSDP1 that nothing is attached to yet."""

    def __init__(self, unit: FSDP1Unit, replicate_group: dist.ProcessGroup | None) -> None:
        self.unit = unit
        self.module: nn.Module = unit.fsdp
        self._replicate_group = replicate_group

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The group that FSDP1 shards over, and the replicas."""
        replicas = [] if self._replicate_group is None else [self._replicate_group]
        return [*self.unit.process_groups, *replicas]

    @property
    def peers(self) -> int:
        """Replicas, if there are any, else ranks of the shard group."""
        return self.groups[-1].size()

    def check(self) -> None:
        """Raise a ValueError if the strategy has no hook, or something else is there already."""
        fsdp = self.unit.fsdp
        if fsdp.sharding_strategy == ShardingStrategy.NO_SHARD:
            raise ValueError(f"{self.unit.label} is not sharded: use DistributedDataParallel")
        if fsdp.sharding_strategy not in _SHARDED:
            raise ValueError(
                f"{self.unit.label} has {fsdp.sharding_strategy}, whose gradients FSDP1 shows to "
                "no hook: use ShardingStrategy.FULL_SHARD with process_group= the ranks of a node, "
                "and attach(..., replicate_group= the ranks at the same place in all nodes)"
            )
        hook = fsdp._comm_hook
        if isinstance(hook, FSDP1ReduceScatter) or getattr(hook, "reducer", None) is not None:
            raise ValueError(
                f"{self.unit.label} has LoCo attached already: call detach() on that LoCo first"
            )
        if isinstance(hook, ReplicaHook) and hook.group is not self._replicate_group:
            raise ValueError(f"{self.unit.label} has replicas: attach with their replicate_group")
        if hook is not None and not isinstance(hook, ReplicaHook):
            raise ValueError(
                f"{self.unit.label} has the communication hook {hook} already: do not register it"
            )

    def check_config(self, config: LoCoConfig) -> None:
        """Raise a ValueError if a topology is asked for over replicas, or bits of parameters."""
        refuse_weight_bits(config, "FSDP1")
        if self._replicate_group is not None and config.topology != "auto":
            raise ValueError(
                f'topology={config.topology!r}: with replicate_group it must be "auto", which '
                "reduces in low bits over replicas"
            )

    def bypass_reason(self) -> str | None:
        """Nothing."""
        return None

    def attachment(self, plan: Plan, parts: Parts) -> Attachment:
        """Its reduce-scatter, or the all-reduce over its replicas."""
        if self._replicate_group is not None:
            all_reduce = LoCoAllReduce(
                self.unit,
                plan.config,
                plan.bypass_reason,
                group=self._replicate_group,
                backend=plan.backend,
                node_size=plan.node_size,
                workspace=parts.workspace,
                notices=parts.notices,
            )
            return FSDP1Replicas(self.unit, self._replicate_group, all_reduce)
        route = Route(None, None)
        if plan.bypass_reason is None:
            route = parts.groups.acquire(self.unit.process_groups[0], plan.config)
        reduce_scatter = LoCoReduceScatter(
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
        return FSDP1ReduceScatter(self.unit, reduce_scatter)
