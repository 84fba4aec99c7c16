"""`torch.nn.parallel.DistributedDataParallel`, by a communication hook.

Read in torch 2.9, 2.13 and 2.14. What is private here, and why:

- `DistributedDataParallel._comm_hooks`: which hooks there are; a second one is refused by torch, in
  words that do not name who was first, and one of ours stays for as long as the model.

DDP hands over buckets of gradients, whose parameters it chooses anew after the first backward. So
all parameters of one dtype are one unit: its errors belong to parameters, which rank sums a block
follows from the parameters alone, and spikes are measured over all buckets of a backward. What
comes out does not depend on the buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.candidate import Parts, Plan, refuse_weight_bits
from loco_fsdp.reduction.all_reduce import LoCoAllReduce
from loco_fsdp.reduction.groups import Route


class DDPUnit:
    """All parameters of one dtype of a DDP model."""

    spans = None
    active = None  # each bucket says which of them it holds
    lost_reason = None

    def __init__(self, ddp: DistributedDataParallel, dtype: torch.dtype) -> None:
        named = [
            (name, parameter)
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad
            and parameter.dtype == dtype
            and name not in ddp.parameters_to_ignore
        ]
        self.name = f"parameters in {str(dtype).removeprefix('torch.')}"
        self.parameter_names = tuple(name for name, _ in named)
        self.parameters = [parameter for _, parameter in named]
        self.shard_numels = tuple(parameter.numel() for parameter in self.parameters)
        self.numel = sum(self.shard_numels)
        self.device = self.parameters[0].device
        self.reduce_dtype = dtype
        self.process_groups: list[dist.ProcessGroup] = [ddp.process_group]
        self.world_size = ddp.process_group.size()
        self.remarks: list[str] = []

    @property
    def label(self) -> str:
        """As messages call it."""
        return f"DDP unit {self.name!r}"


def ddp_units(ddp: DistributedDataParallel) -> Iterator[DDPUnit]:
    """The units of a DDP model."""
    dtypes = [
        parameter.dtype
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    ]
    for dtype in dict.fromkeys(dtypes):
        yield DDPUnit(ddp, dtype)


def divide_and_sum(gradient: Tensor, group: dist.ProcessGroup, factor: float) -> None:
    """All-reduce in full precision, as DDP without a hook."""
    gradient.div_(round(1 / factor))
    dist.all_reduce(gradient, group=group)


@dataclass
class _HookState:
    """What the one hook of a DDP model calls: all that is attached to it.

    Attributes:
        group: ranks of the model.
        attachments: by parameter, what reduces it, and its index there.
        streams: where reductions on a GPU run, so that the backward goes on meanwhile.
    """

    group: dist.ProcessGroup
    attachments: dict[Tensor, tuple[DDPAllReduce, int]] = field(default_factory=dict)
    streams: dict[torch.device, torch.Stream] = field(default_factory=dict)

    def stream(self, device: torch.device) -> torch.Stream:
        """The stream of reductions on this device."""
        if device not in self.streams:
            self.streams[device] = torch.Stream(device)
        return self.streams[device]


# Not annotated: DDP compares annotations with classes, and here they are strings.
def _reduce_bucket(state, bucket):  # type: ignore[no-untyped-def]
    """The communication hook: average a bucket, on a stream of its own where there are streams."""
    gradient = bucket.buffer()
    device = gradient.device
    if device.type == "cpu":
        _reduce(state, bucket, gradient)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(gradient)
        return future
    stream = state.stream(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        _reduce(state, bucket, gradient)
        gradient.record_stream(stream)
        future = torch.futures.Future(devices=[device])
        future.set_result(gradient)  # whoever waits for it waits for the stream
    return future


def _reduce(state: _HookState, bucket: Any, gradient: Tensor) -> None:
    parameters = bucket.parameters()
    found = state.attachments.get(parameters[0])
    if found is None:
        divide_and_sum(gradient, state.group, 1 / state.group.size())
    else:
        attachment, _ = found
        indices = tuple(state.attachments[parameter][1] for parameter in parameters)
        attachment.reduce(gradient, indices)
    if bucket.is_last():
        for attachment in dict.fromkeys(one for one, _ in state.attachments.values()):
            attachment.end()


def _hook_state(ddp: DistributedDataParallel) -> _HookState:
    """That of our hook, which is registered if it is not yet."""
    hooks: Sequence[tuple[Any, Any]] = ddp._comm_hooks
    for _, state in hooks:
        assert isinstance(state, _HookState)
        return state
    state = _HookState(ddp.process_group)
    ddp.register_comm_hook(state, _reduce_bucket)
    return state


class DDPAllReduce:
    """LoCo's part in the all-reduce of one unit."""

    gatherer = None  # the framework alone gathers parameters

    def __init__(self, ddp: DistributedDataParallel, unit: DDPUnit, reducer: LoCoAllReduce) -> None:
        self.reducer = reducer
        self._ddp: DistributedDataParallel | None = ddp
        self._unit = unit
        self._reduced: set[int] = set()

    def install(self) -> None:
        """Make the hook of the model call this object."""
        assert self._ddp is not None
        attachments = _hook_state(self._ddp).attachments
        for index, parameter in enumerate(self._unit.parameters):
            attachments[parameter] = (self, index)

    def remove(self) -> None:
        """Leave buckets to be reduced in full precision: torch cannot take a hook away."""
        assert self._ddp is not None
        attachments = _hook_state(self._ddp).attachments
        for parameter in self._unit.parameters:
            del attachments[parameter]
        self._ddp, self._unit.parameters = None, []
        self.reducer.retire()

    def forget_deferred(self) -> None:
        """No gradient waits here."""

    def reduce(self, gradient: Tensor, indices: tuple[int, ...]) -> None:
        """Average a bucket `[sum of numels]` of these parameters, in place."""
        if self._reduced.intersection(indices):
            self.end()  # DDP may leave buckets out, the last one too
        if not self._reduced:
            self.reducer.before_reduction()
            self.reducer.begin(gradient.device, range(len(self._unit.parameters)))
        self._reduced.update(indices)
        self.reducer.reduce_part(gradient, indices, 1 / self._unit.world_size)

    def end(self) -> None:
        """The last bucket of a backward is reduced."""
        if self._reduced:
            self._reduced.clear()
            self.reducer.end()


class DDPCandidate:
    """One unit of a DDP model that nothing is attached to yet."""

    def __init__(self, ddp: DistributedDataParallel, unit: DDPUnit) -> None:
        self.unit = unit
        self.module: nn.Module = ddp.module
        self.groups = unit.process_groups
        self.peers = unit.world_size
        self._ddp = ddp

    def check(self) -> None:
        """Raise a ValueError if something else has the place of the hook."""
        if self._ddp.mixed_precision is not None:
            raise ValueError(
                "DDP's mixed_precision= has a communication hook of its own: use torch.autocast, "
                "or a model in bfloat16"
            )
        for hook, state in self._ddp._comm_hooks:
            if not isinstance(state, _HookState):
                raise ValueError(
                    f"this DDP model has the communication hook {hook.__qualname__} already, and "
                    "torch allows one: leave it out"
                )
            if state.attachments:
                raise ValueError(
                    f"{self.unit.label} has LoCo attached already: call detach() on that LoCo first"
                )

    def check_config(self, config: LoCoConfig) -> None:
        """Raise a ValueError for what an all-reduce has not."""
        refuse_weight_bits(config, "DDP")
        if config.intra_node_bits is not None:
            raise ValueError(
                f"intra_node_bits={config.intra_node_bits}: DDP reduces inside of nodes in full "
                "precision, it must be None"
            )

    def bypass_reason(self) -> str | None:
        """Nothing."""
        return None

    def attachment(self, plan: Plan, parts: Parts) -> DDPAllReduce:
        """Its all-reduce."""
        route = Route(None, None)
        if plan.bypass_reason is None:
            route = parts.groups.acquire(self.unit.process_groups[0], plan.config)
        reducer = LoCoAllReduce(
            self.unit,
            plan.config,
            plan.bypass_reason,
            group=self.unit.process_groups[0],
            hops=route.hops,
            topology_reason=route.reason,
            backend=plan.backend,
            node_size=plan.node_size,
            workspace=parts.workspace,
            notices=parts.notices,
            stock=divide_and_sum,
        )
        return DDPAllReduce(self._ddp, self.unit, reducer)
