"""Everything of FSDP2 that torch does not export, here and in `fsdp2_stand_ins`.

Read in torch 2.9, 2.13 and 2.14, and tested with them. Public names are used elsewhere directly.
What is private here, and why:

- `FSDPModule._get_fsdp_state()`, `._fsdp_param_group(s)`: `fully_shard([a, b])` makes two modules
  share one parameter group, a module without parameters has none, and one with parameters on
  several meshes has several; nothing public tells.
- `FSDPParamGroup.post_backward`: the flat gradient holds only the parameters that got a gradient in
  this backward, and the reduce-scatter is not told which. They can be seen just before it runs.
- `FSDPParamGroup._reset_iter_state`: gradients that wait for an all-reduce are forgotten with it.
- `FSDPParamGroup._reduce_scatter_comm`, `._all_gather_comm`, `._all_reduce_hook`: to put back what
  was there. The setters of `FSDPModule` set them for one group of a module only.
- `FSDPParamGroup.unshard`: an all-gather runs with autograd off, and is not told whether it is on
  for what will be computed. `torch._C._current_graph_task_id` tells of a backward, as FSDP2 asks.
- `FSDPParamGroup.post_forward_mesh_info`: the ranks of `reshard_after_forward=number`.
- `FSDPParamGroup.reduce_grads`, `.all_reduce_grads`, `.gradient_divide_factor`: what the user has
  set, which a reduction has to follow.
- `FSDPParam.unsharded_accumulated_grad`, `._unsharded_param`: who has a gradient; and a gradient of
  zeros for a parameter whose earlier gradients wait for this all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from loco_fsdp.frontends.fsdp2_stand_ins import Gathering, Watched, Watcher

AllReduceHook = Callable[[Tensor], None]


class ReduceScatter(Protocol):
    """What FSDP2 calls to reduce the gradient of a unit (`set_custom_reduce_scatter`)."""

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class AllGather(Protocol):
    """What FSDP2 calls to gather the parameters of a unit (`set_custom_all_gather`)."""

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None: ...


class FSDPUnit:
    """What FSDP2 shards and reduces together: one parameter group of one `fully_shard` call.

    Attributes:
        name: names of its modules, from the module that was searched, joined by commas; with the
            number of the group where they have several.
        parameter_names: names of its parameters, in the order in which they are packed.
        shard_numels: elements of each parameter in one rank's part of the flat gradient, with the
            padding of dim 0.
        outside: its parameters that the module that was searched does not hold.
    """

    def __init__(
        self, name: str, modules: tuple[FSDPModule, ...], group: Any, names: dict[nn.Module, str]
    ) -> None:
        self.name = name
        self.modules = modules
        self._group = group
        holders = [(param._module_info.module, param._module_info) for param in group.fsdp_params]
        self.parameter_names = tuple(
            _join(names.get(module, type(module).__name__.removeprefix("FSDP")), info.param_name)
            for module, info in holders
        )
        self.outside = tuple(
            parameter_name
            for parameter_name, (module, _) in zip(self.parameter_names, holders, strict=True)
            if module not in names
        )
        self.shard_numels = tuple(
            param.padded_sharded_param_size.numel() for param in group.fsdp_params
        )
        self._stock: ReduceScatter | None = None
        self._installed: ReduceScatter | None = None
        self._gathering: Gathering | None = None

    spans = None  # the flat gradient holds the active parameters alone

    @property
    def label(self) -> str:
        """As messages call it."""
        return f"FSDP unit {self.name!r}"

    def __eq__(self, other: object) -> bool:
        """Whether both are of one parameter group."""
        return isinstance(other, FSDPUnit) and self._group is other._group

    __hash__ = None  # type: ignore[assignment]

    @property
    def numel(self) -> int:
        """Elements of the unit's parameters, over all ranks of its shard group."""
        return sum(param._orig_size.numel() for param in self._group.fsdp_params)

    @property
    def world_size(self) -> int:
        """Ranks of the shard group; 1 where nothing is sharded."""
        return int(getattr(self._group.mesh_info, "shard_mesh_size", 1))

    @property
    def replicas(self) -> int:
        """Replicas that FSDP2 itself reduces over; 1 unless it replicates."""
        return int(getattr(self._group.mesh_info, "replicate_mesh_size", 1))

    @property
    def remarks(self) -> list[str]:
        """That FSDP2 itself reduces over replicas, or does not gather as it was told to."""
        remarks = []
        if self._gathering is not None and self.all_gather is not self._gathering.comm:
            remarks.append("parameters not in low bits: another all-gather was set after attaching")
        if self.replicas == 1:
            return remarks
        return [
            *remarks,
            f"its all-reduce over {self.replicas} replicas stays in full precision: shard the "
            "model with LoCoFSDP(model, mesh=mesh) to compress that instead",
        ]

    @property
    def lost_reason(self) -> str | None:
        """A later `set_custom_reduce_scatter` wins."""
        if self._installed is None or self.reduce_scatter is self._installed:
            return None
        return "another reduce-scatter was set after attaching"

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The shard group and, where FSDP2 replicates, the group of replicas."""
        return [group for group in (self._shard_group, self.replicate_group) if group is not None]

    @property
    def _shard_group(self) -> dist.ProcessGroup | None:
        return getattr(self._group.mesh_info, "shard_process_group", None)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The group that FSDP2 itself all-reduces over, if it does."""
        return getattr(self._group.mesh_info, "replicate_process_group", None)

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""
        device: torch.device = self._group.device
        return device

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype that gradients are reduced in; frozen parameters may have others."""
        policy = self._group.mp_policy
        dtype: torch.dtype | None = policy.reduce_dtype or policy.param_dtype
        if dtype is None:
            params = [param.sharded_param for param in self._group.fsdp_params]
            dtype = next((param.dtype for param in params if param.requires_grad), params[0].dtype)
        return dtype

    @property
    def reduce_scatter(self) -> ReduceScatter:
        """What reduces the unit's gradient now."""
        comm: ReduceScatter = self._group._reduce_scatter_comm
        return comm

    def install(self, comm: ReduceScatter) -> ReduceScatter:
        """Let `comm` reduce the unit's gradient; returns what did before."""
        self._stock, self._installed = self.reduce_scatter, comm
        self._group._reduce_scatter_comm = comm
        return self._stock

    def uninstall(self) -> None:
        """Put back what `install` returned, unless the user has set another one since."""
        if self.lost_reason is None:
            self._group._reduce_scatter_comm = self._stock
        self._stock = self._installed = None

    @property
    def all_gather(self) -> AllGather:
        """What gathers the unit's parameters now."""
        comm: AllGather = self._group._all_gather_comm
        return comm

    def install_all_gather(self, comm: AllGather, loaded: Callable[[], None]) -> AllGather:
        """Let `comm` gather the unit's parameters; returns what did before.

        Args:
            loaded: called when one of its modules has loaded a `state_dict`.
        """
        stock = self.all_gather
        self._gathering = Gathering(self._group, loaded, comm, stock)
        self._group._all_gather_comm = comm
        return stock

    def uninstall_all_gather(self) -> None:
        """Put back what `install_all_gather` returned, unless there is another one since."""
        assert self._gathering is not None
        if self.all_gather is self._gathering.comm:
            self._group._all_gather_comm = self._gathering.stock
        self._gathering.stop()
        self._gathering = None

    @property
    def records(self) -> bool:
        """Whether autograd was on when the parameters that are being gathered were asked for."""
        return self._gathering is not None and self._gathering.records

    @property
    def with_gradient(self) -> frozenset[int]:
        """Parameters with a sharded gradient that nobody has cleared."""
        params = enumerate(self._group.fsdp_params)
        return frozenset(i for i, param in params if param.sharded_param.grad is not None)

    @property
    def post_forward_ranks(self) -> int | None:
        """`reshard_after_forward`, where it is a number."""
        info = self._group.post_forward_mesh_info
        if info is None or info is self._group.mesh_info:
            return None
        return int(info.shard_mesh_size)

    @property
    def all_reduce_hook(self) -> AllReduceHook | None:
        """What FSDP2 calls with the unit's reduced shard."""
        hook: AllReduceHook | None = self._group._all_reduce_hook
        return hook

    @all_reduce_hook.setter
    def all_reduce_hook(self, hook: AllReduceHook | None) -> None:
        self._group._all_reduce_hook = hook

    @property
    def all_reduce_grads(self) -> bool:
        """False while gradients are accumulated before the all-reduce over replicas."""
        return bool(self._group.all_reduce_grads)

    @property
    def gradient_divide_factor(self) -> float | None:
        """What the user lets FSDP2 divide by; None: by the number of ranks."""
        factor: float | None = self._group.gradient_divide_factor
        return factor

    @property
    def _watched(self) -> Watched | None:
        """That of `watch`, called on this or on another `FSDPUnit` of the group."""
        watched: Watched | None = vars(self._group).get("_loco_watched")
        return watched

    @property
    def watcher(self) -> Watcher | None:
        """What `watch` was called with."""
        return None if self._watched is None else self._watched.watcher

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of reductions, and keep track of who has a gradient, from now on."""
        Watched(self._group, watcher)

    def unwatch(self) -> None:
        """Undo `watch`."""
        assert self._watched is not None
        self._watched.stop()

    @property
    def active(self) -> tuple[int, ...] | None:
        """Indices of the parameters in the gradient that is being reduced.

        None where that is not known: FSDP2 did not go through what `watch` has put in its place.
        """
        return None if self._watched is None else self._watched.active

    def forget_active(self) -> None:
        """The gradient is reduced: what is known of it must not be taken for the next one's."""
        if self._watched is not None:
            self._watched.active = None

    def without_gradient(self) -> list[int]:
        """Parameters of the reduction that have no sharded gradient yet."""
        params = self._group.fsdp_params
        return [i for i in self.active or () if params[i].sharded_param.grad is None]

    def clear_gradients(self, parameters: list[int]) -> None:
        """Take the sharded gradients of these parameters away."""
        for index in parameters:
            self._group.fsdp_params[index].sharded_param.grad = None


def fsdp_units(module: nn.Module) -> Iterator[FSDPUnit]:
    """The FSDP units with parameters in `module`, each once, in the order of `named_modules`."""
    names = {submodule: name for name, submodule in module.named_modules()}
    by_state: dict[int, list[tuple[str, FSDPModule]]] = {}
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDPModule) and _param_groups(submodule):
            by_state.setdefault(id(submodule._get_fsdp_state()), []).append((name, submodule))
    for members in by_state.values():
        name = ", ".join(name or "(root)" for name, _ in members)
        modules = tuple(submodule for _, submodule in members)
        groups = _param_groups(modules[0])
        for index, group in enumerate(groups):
            suffix = f" [{index}]" if len(groups) > 1 else ""
            yield FSDPUnit(name + suffix, modules, group, names)


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group = state._fsdp_param_group  # torch < 2.12: one group or None
    return [] if group is None else [group]


def _join(module_name: str, parameter_name: str) -> str:
    return f"{module_name}.{parameter_name}" if module_name else parameter_name


def is_stock(comm: ReduceScatter) -> bool:
    """Whether this is one of the reduce-scatters of FSDP2 itself."""
    return type(comm).__module__.startswith("torch.distributed.fsdp.")
