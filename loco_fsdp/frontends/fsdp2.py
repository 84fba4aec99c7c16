"""Everything of FSDP2 that torch does not export, in one place.

Read in torch 2.9, 2.13 and 2.14, and tested with them. Public names are used elsewhere directly.
What is private here, and why:

- `FSDPModule._get_fsdp_state()`, `._fsdp_param_group(s)`: `fully_shard([a, b])` makes two modules
  share one parameter group, a module without parameters has none, and one with parameters on
  several meshes has several; nothing public tells.
- `FSDPParamGroup.post_backward`: the flat gradient holds only the parameters that got a gradient in
  this backward, and the reduce-scatter is not told which. They can be seen just before it runs.
- `FSDPParamGroup._reset_iter_state`: gradients that wait for an all-reduce are forgotten with it.
- `FSDPParamGroup._reduce_scatter_comm`, `._all_reduce_hook`: to put back what was there. The
  setters of `FSDPModule` set them for one group of a module only.
- `FSDPParamGroup.reduce_grads`, `.all_reduce_grads`, `.gradient_divide_factor`: what the user has
  set, which a reduction has to follow.
- `FSDPParam.unsharded_accumulated_grad`, `._unsharded_param`: who has a gradient; and a gradient of
  zeros for a parameter whose earlier gradients wait for this all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

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


class Watcher(Protocol):
    """What is told when FSDP2 reduces a unit."""

    def owed(self) -> Collection[int]:
        """Parameters that have to take part in the next reduction, with or without a gradient."""

    def before_reduction(self) -> None:
        """The unit's gradients are about to be packed."""

    def after_reduction(self) -> None:
        """Its sharded gradients are there, or those of an accumulation are put by."""

    def forget_iteration(self) -> None:
        """The user gives up the iteration: `FSDPModule.reset_iter_state`."""


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
        """That FSDP2 itself reduces over replicas."""
        if self.replicas == 1:
            return []
        return [
            f"its all-reduce over {self.replicas} replicas stays in full precision: shard the "
            "model with LoCoFSDP(model, mesh=mesh) to compress that instead"
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
    def _watched(self) -> _Watched | None:
        """That of `watch`, called on this or on another `FSDPUnit` of the group."""
        watched: _Watched | None = vars(self._group).get("_loco_watched")
        return watched

    @property
    def watcher(self) -> Watcher | None:
        """What `watch` was called with."""
        return None if self._watched is None else self._watched.watcher

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of reductions, and keep track of who has a gradient, from now on."""
        _Watched(self._group, watcher)

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


class _Watched:
    """Stands in for two methods of one parameter group, until `stop`.

    Attributes:
        watcher: who is told of reductions.
        active: parameters in the gradient that is being reduced.
    """

    def __init__(self, group: Any, watcher: Watcher) -> None:
        self.watcher: Watcher | None = watcher
        self.active: tuple[int, ...] | None = None
        self._group = group
        self._before = {
            name: vars(group).get(name) for name in ("post_backward", "_reset_iter_state")
        }
        group.post_backward = self._post_backward
        if hasattr(type(group), "_reset_iter_state"):  # torch 2.13
            group._reset_iter_state = self._reset_iter_state
        group._loco_watched = self

    def stop(self) -> None:
        """Put back what was there. What somebody else has put over it since stays, and calls us."""
        self.watcher = self.active = None
        del self._group._loco_watched
        for name, before in self._before.items():
            if vars(self._group).get(name) != getattr(self, f"_{name.lstrip('_')}"):
                continue
            if before is None:
                delattr(self._group, name)
            else:
                setattr(self._group, name, before)

    def _call(self, name: str, *args: Any) -> Any:
        before = self._before[name]
        # Not bound when this was made: somebody may replace the method of the class.
        return before(*args) if before else getattr(type(self._group), name)(self._group, *args)

    def _post_backward(self, *unused: Any) -> Any:
        watcher = self.watcher
        if watcher is None or not self._group.reduce_grads:
            return self._call("post_backward", *unused)
        if not self._note_active(watcher.owed()):
            return self._call("post_backward", *unused)
        watcher.before_reduction()
        result = self._call("post_backward", *unused)
        watcher.after_reduction()
        return result

    def _note_active(self, owed: Collection[int]) -> bool:
        """Find out who takes part in the next reduction; whether anybody does."""
        params = self._group.fsdp_params
        active = [i for i, param in enumerate(params) if _has_gradient(self._group, param)]
        if missing := sorted(set(owed).difference(active)):
            _add_zero_gradients(params, missing, active)
            active = sorted((*active, *missing))
        self.active = tuple(active)
        return bool(active)

    def _reset_iter_state(self) -> None:
        if self.watcher is not None:
            self.watcher.forget_iteration()
        self._call("_reset_iter_state")


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


def _has_gradient(group: Any, param: Any) -> bool:
    """Whether `FSDPParamGroup.post_backward` is about to pack this parameter's gradient."""
    if not hasattr(param, "_unsharded_param"):
        return False
    unsharded = param._unsharded_param
    return (
        param.unsharded_accumulated_grad is not None
        or unsharded.grad is not None
        or (getattr(group, "reduce_scatter_unused_params", False) and unsharded.requires_grad)
    )


def _add_zero_gradients(params: list[Any], missing: list[int], active: list[int]) -> None:
    accumulated = [params[index].unsharded_accumulated_grad for index in active]
    dtype = next((grad.dtype for grad in accumulated if grad is not None), None)
    for index in missing:
        unsharded = params[index]._unsharded_param
        if dtype is None:
            unsharded.grad = torch.zeros_like(unsharded)
        else:  # FSDP2 wants all gradients of a reduction in one dtype
            params[index].unsharded_accumulated_grad = torch.zeros_like(unsharded, dtype=dtype)


def _join(module_name: str, parameter_name: str) -> str:
    return f"{module_name}.{parameter_name}" if module_name else parameter_name


def is_stock(comm: ReduceScatter) -> bool:
    """Whether this is one of the reduce-scatters of FSDP2 itself."""
    return type(comm).__module__.startswith("torch.distributed.fsdp.")
