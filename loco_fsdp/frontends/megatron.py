"""`megatron.core.distributed.DistributedDataParallel` of Megatron-LM, by its bucket groups.

Read in megatron-core 0.16.1 and 0.19.1. What is not public there, and why:

- `DistributedDataParallel.bucket_groups`, `.expert_parallel_bucket_groups`: what reduces gradients,
  a few buckets at a time, each a flat gradient in which shards cut parameters.
- `_ParamAndGradBucketGroup.start_grad_sync`: drains, checks for NaN, scales, chooses a stream and
  ends in one coalesced collective of one group: `data_parallel_group`,
  `intra_distributed_optimizer_instance_group` or, between several instances of the distributed
  optimizer, `inter_distributed_optimizer_instance_group`. While it runs, a stand-in has the place
  of that group, and everything else stays Megatron's.

The stand-in answers what `torch.distributed._coalescing_manager` calls at its end:
`allreduce_coalesced`, and `reduce_scatter_tensor_coalesced` or, from torch 2.13 on,
`reduce_scatter_single_coalesced`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.candidate import Attachment, Parts, Plan, refuse_weight_bits
from loco_fsdp.reduction.all_reduce import LoCoAllReduce
from loco_fsdp.reduction.collectives import reduce_scatters
from loco_fsdp.reduction.groups import Route
from loco_fsdp.reduction.reduce_scatter import LoCoReduceScatter
from loco_fsdp.reduction.spans import Spans, own_part

_DDP = "megatron.core.distributed.distributed_data_parallel"
_MEGATRON_FSDP = ("megatron.core.distributed.fsdp", "megatron_fsdp")

ALL_REDUCE = "data_parallel_group"
REDUCE_SCATTER = "intra_distributed_optimizer_instance_group"
INSTANCES = "inter_distributed_optimizer_instance_group"


def is_megatron(module: object) -> bool:
    """Whether this is Megatron's DistributedDataParallel.

    Raises:
        TypeError: it is Megatron-FSDP, which has a pipeline of its own.
    """
    if any(cls.__module__.startswith(_MEGATRON_FSDP) for cls in type(module).__mro__):
        raise TypeError(
            f"{type(module).__name__} is Megatron-FSDP, whose pipeline has no place for LoCo: use "
            "megatron.core.distributed.DistributedDataParallel, with use_distributed_optimizer"
        )
    ddp = sys.modules.get(_DDP)
    return ddp is not None and isinstance(module, ddp.DistributedDataParallel)


class MegatronUnit:
    """One bucket of gradients.

    Attributes:
        group: the ranks that LoCo reduces over.
        group_name: the attribute of its bucket group that holds them.
        place: of the bucket in its bucket group.
    """

    lost_reason = None

    def __init__(self, name: str, bucket_group: Any, place: int, names: dict[Tensor, str]) -> None:
        config, bucket = bucket_group.ddp_config, bucket_group.buckets[place]
        self.bucket_group = bucket_group
        self.place = place
        gradient: Tensor = bucket.grad_data
        first = gradient.storage_offset()
        found = sorted(
            (
                (parameter.main_grad.storage_offset() - first, parameter.numel(), parameter)
                for parameter in bucket.params_list
            ),
            key=lambda one: one[:2],
        )
        self.name = name
        self.parameter_names = tuple(names[parameter] for *_, parameter in found)
        self.numel = sum(numel for _, numel, _ in found)
        self.spans = Spans(
            tuple(start for start, *_ in found),
            tuple(numel for _, numel, _ in found),
            gradient.numel(),
        )
        self.group_name = ALL_REDUCE
        if config.use_distributed_optimizer:
            is_one = config.num_distributed_optimizer_instances == 1
            self.group_name = REDUCE_SCATTER if is_one else INSTANCES
        shards = REDUCE_SCATTER if self.group_name == INSTANCES else self.group_name
        shard_group: dist.ProcessGroup = getattr(bucket_group, shards)
        self.group: dist.ProcessGroup = getattr(bucket_group, self.group_name)
        if self.group_name == INSTANCES:
            self.spans = own_part(self.spans, shard_group.size(), shard_group.rank())
        self.shard_numels = self.spans.numels
        self.active = tuple(i for i, numel in enumerate(self.shard_numels) if numel)
        self.device = gradient.device
        self.reduce_dtype = gradient.dtype
        self.process_groups = [shard_group]
        self.world_size = shard_group.size()
        self.remarks: list[str] = []

    @property
    def label(self) -> str:
        """As messages call it."""
        return f"Megatron {self.name}"


def megatron_units(chunks: Sequence[Any]) -> Iterator[tuple[Any, MegatronUnit]]:
    """The buckets of a model, or of its chunks in an interleaved pipeline, with their chunk."""
    for number, ddp in enumerate(chunks):
        prefix = f"chunk {number} " if len(chunks) > 1 else ""
        start = f"{number}." if len(chunks) > 1 else ""
        names = {parameter: start + name for name, parameter in ddp.module.named_parameters()}
        for kind, bucket_groups in (
            ("", ddp.bucket_groups),
            ("expert ", ddp.expert_parallel_bucket_groups),
        ):
            index = 0
            for bucket_group in bucket_groups:
                for place in range(len(bucket_group.buckets)):
                    name = f"{prefix}{kind}bucket {index}"
                    yield ddp, MegatronUnit(name, bucket_group, place, names)
                    index += 1


class _Finished:
    """Work that the current stream waits for."""

    def __init__(self, event: torch.Event | None) -> None:
        self._event = event

    def wait(self, *_: Any) -> None:
        """Let the current stream wait until the reductions are done."""
        if self._event is not None:
            self._event.wait()


class _StandIn:
    """Has the place of a process group while gradients are reduced over it."""

    def __init__(self, group: dist.ProcessGroup, run: Callable[..., _Finished]) -> None:
        self._group = group
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any) -> _Finished:
        """All-reduce one gradient of each bucket, in place."""
        return self._run(tensors, tensors, options.reduceOp)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], options: Any
    ) -> _Finished:
        """Reduce-scatter one gradient of each bucket."""
        return self._run(outputs, inputs, options.reduceOp)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced


class _GradSync:
    """Stands in for `start_grad_sync` of one bucket group.

    Attributes:
        attachments: by the place of the bucket.
    """

    def __init__(self, bucket_group: Any, group_name: str) -> None:
        self.attachments: dict[int, MegatronAttachment] = {}
        self._bucket_group = bucket_group
        self._group_name = group_name
        self._original = bucket_group.start_grad_sync
        self._stream: torch.Stream | None = None
        bucket_group.start_grad_sync = self

    def stop(self) -> None:
        """Put back what was there."""
        if self._bucket_group.__dict__.get("start_grad_sync") is self:
            del self._bucket_group.start_grad_sync

    def __call__(self, force_all_reduce: bool | None = False) -> None:
        """Reduce, in low bits unless Megatron insists on its all-reduce."""
        if force_all_reduce or not self.attachments:
            self._original(force_all_reduce=force_all_reduce)
            return
        group = getattr(self._bucket_group, self._group_name)
        setattr(self._bucket_group, self._group_name, _StandIn(group, self._run))
        try:
            self._original(force_all_reduce=force_all_reduce)
        finally:
            setattr(self._bucket_group, self._group_name, group)

    def _run(self, outputs: list[Tensor], gradients: list[Tensor], op: Any) -> _Finished:
        config, device = self._bucket_group.ddp_config, gradients[0].device
        is_async = config.overlap_grad_reduce and config.num_distributed_optimizer_instances == 1
        if device.type == "cpu" or not is_async:
            self._reduce(outputs, gradients, op)
            return _Finished(None)
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            self._reduce(outputs, gradients, op)
            return _Finished(self._stream.record_event())

    def _reduce(self, outputs: list[Tensor], gradients: list[Tensor], op: Any) -> None:
        for place, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
            self.attachments[place].reduce(output, gradient, op)


class MegatronAttachment:
    """The reduction of one bucket."""

    gatherer = None  # the framework alone gathers parameters

    def __init__(self, unit: MegatronUnit, reducer: LoCoReduceScatter | LoCoAllReduce) -> None:
        self.reducer = reducer
        self._unit = unit

    def install(self) -> None:
        """Make the bucket group call this object."""
        group = self._unit.bucket_group
        sync = group.start_grad_sync
        if not isinstance(sync, _GradSync):
            sync = _GradSync(group, self._unit.group_name)
        sync.attachments[self._unit.place] = self

    def remove(self) -> None:
        """Leave the bucket to Megatron."""
        sync = self._unit.bucket_group.start_grad_sync
        del sync.attachments[self._unit.place]
        if not sync.attachments:
            sync.stop()
        self.reducer.retire()

    def forget_deferred(self) -> None:
        """No gradient waits here."""

    def reduce(self, output: Tensor, gradient: Tensor, op: Any) -> None:
        """Reduce `gradient` into `output`: in place, or this rank's shard of it."""
        group = self._unit.group
        factor = 1 / group.size() if op == dist.ReduceOp.AVG else 1.0
        self.reducer.before_reduction()
        if isinstance(self.reducer, LoCoReduceScatter):
            self.reducer.reduce(
                output,
                gradient,
                group,
                lambda: factor,
                lambda: reduce_scatters([output], [gradient], group, op),
            )
        else:
            self.reducer.reduce(gradient, factor)


def _all_reduce(gradient: Tensor, group: dist.ProcessGroup, factor: float) -> None:
    """All-reduce in full precision, as Megatron does."""
    op = dist.ReduceOp.SUM if factor == 1 else dist.ReduceOp.AVG
    dist.all_reduce(gradient, op=op, group=group)


class MegatronCandidate:
    """One bucket that nothing is attached to yet."""

    def __init__(self, ddp: Any, unit: MegatronUnit) -> None:
        self.unit = unit
        self.module: nn.Module = ddp.module
        self._ddp = ddp

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The group of its shards, and that of the instances."""
        return list(dict.fromkeys((*self.unit.process_groups, self.unit.group)))

    @property
    def peers(self) -> int:
        """Ranks that LoCo reduces over."""
        return self.unit.group.size()

    def check(self) -> None:
        """Raise a ValueError for what Megatron does in another way with this bucket."""
        label, config, model = self.unit.label, self._ddp.ddp_config, self._ddp.config
        if isinstance(self.unit.bucket_group.start_grad_sync, _GradSync):
            raise ValueError(f"{label} has LoCo attached already: call detach() on that LoCo first")
        for name in ("fp8_param_gather", "reduce_scatter_with_fp32_accumulation"):
            if getattr(config, name, False):
                raise ValueError(
                    f"{label}: {name}=True is not supported, LoCo quantizes gradients in another "
                    "way: set it to False"
                )
        for name in ("enable_cuda_graph", "external_cuda_graph"):
            if getattr(model, name, False):
                raise ValueError(f"{label}: {name}=True, and a CUDA graph cannot hold LoCo")
        if getattr(model, "cuda_graph_impl", None) not in (None, "none"):
            raise ValueError(
                f"{label}: cuda_graph_impl={model.cuda_graph_impl!r}, and a CUDA graph cannot hold "
                'LoCo: set it to "none"'
            )

    def check_config(self, config: LoCoConfig) -> None:
        """Raise a ValueError for what an all-reduce has not, or FSDP2 alone has."""
        refuse_weight_bits(config, "Megatron-LM")
        if self.unit.group_name == REDUCE_SCATTER:
            return
        if config.intra_node_bits is not None:
            raise ValueError(
                f"intra_node_bits={config.intra_node_bits}: an all-reduce reduces inside of nodes "
                "in full precision, it must be None"
            )
        if self.unit.group_name == INSTANCES and config.topology == "hierarchical":
            raise ValueError(
                'topology="hierarchical": several instances of the distributed optimizer reduce '
                'inside of each first already: it must be "auto" or "flat"'
            )

    def bypass_reason(self) -> str | None:
        """Nothing."""
        return None

    def attachment(self, plan: Plan, parts: Parts) -> Attachment:
        """Its reduce-scatter or all-reduce."""
        unit, route = self.unit, Route(None, None)
        if plan.bypass_reason is None and unit.group_name != INSTANCES:
            route = parts.groups.acquire(unit.group, plan.config)
        reducer: LoCoReduceScatter | LoCoAllReduce
        if unit.group_name == REDUCE_SCATTER:
            reducer = LoCoReduceScatter(
                unit,
                plan.config,
                plan.bypass_reason,
                backend=plan.backend,
                groups=route.hops,
                topology_reason=route.reason,
                node_size=plan.node_size,
                workspace=parts.workspace,
                notices=parts.notices,
            )
        else:
            reducer = LoCoAllReduce(
                unit,
                plan.config,
                plan.bypass_reason,
                group=unit.group,
                hops=route.hops,
                topology_reason=route.reason,
                backend=plan.backend,
                node_size=plan.node_size,
                workspace=parts.workspace,
                notices=parts.notices,
                stock=_all_reduce,
            )
        return MegatronAttachment(unit, reducer)
