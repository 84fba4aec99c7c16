"""Everything of FSDP2 that torch does not export, in one place.

Read in torch 2.9, 2.13 and 2.14, and tested with them. Public names are used elsewhere directly.
What is private here, and why:

- `FSDPModule._get_fsdp_state()`, `._fsdp_param_group(s)`: `fully_shard([a, b])` makes two modules
  share one parameter group, a module without parameters has none, and one with parameters on
  several meshes has several; nothing public tells.
- `FSDPParamGroup.post_backward`: the flat gradient holds only the parameters that got a gradient in
  this backward, and the reduce-scatter is not told which. They can be seen just before it runs.
- `FSDPParamGroup._reduce_scatter_comm`, `._all_reduce_hook`, `.force_sum_reduction_for_comms`: to
  put back what was there. The setters of `FSDPModule` set them for one group of a module only.
- `FSDPParamGroup.all_reduce_grads`, `.gradient_divide_factor`: what the user has set, which an
  all-reduce hook has to follow.
- `torch.distributed.distributed_c10d._world.pg_names`, `.group_count`: `new_group` makes names from
  the length of the one, and from torch 2.14 on from the other.
- `torch.distributed._coalescing_manager`: several reduce-scatters in one launch of NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


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


class FSDPUnit:
    """What FSDP2 shards and reduces together: one parameter group of one `fully_shard` call.

    Attributes:
        name: names of its modules, from the module that was searched, joined by commas; with the
            number of the group where they have several.
        parameter_names: names of its parameters, in the order in which they are packed.
        shard_numels: elements of each parameter in one rank's part of the flat gradient, with the
            padding of dim 0.
        active: indices of the parameters in the gradient that is being reduced. Kept up to date
            between `watch` and `unwatch`.
    """

    def __init__(
        self, name: str, modules: tuple[FSDPModule, ...], group: Any, names: dict[nn.Module, str]
    ) -> None:
        self.name = name
        self.modules = modules
        self._group = group
        self.parameter_names = tuple(
            _join(names[param._module_info.module], param._module_info.param_name)
            for param in group.fsdp_params
        )
        self.shard_numels = tuple(
            param.padded_sharded_param_size.numel() for param in group.fsdp_params
        )
        self.active: tuple[int, ...] = ()

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
        """Replicas that FSDP2 itself reduces over; 1 unless its mesh is 2-D."""
        return int(getattr(self._group.mesh_info, "replicate_mesh_size", 1))

    @property
    def process_groups(self) -> list[dist.ProcessGroup]:
        """The shard group and, if the mesh is 2-D, the group of replicas."""
        mesh_info = self._group.mesh_info
        names = ("shard_process_group", "replicate_process_group")
        return [getattr(mesh_info, name) for name in names if hasattr(mesh_info, name)]

    @property
    def device(self) -> torch.device:
        """Where gradients are reduced."""
        device: torch.device = self._group.device
        return device

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype that gradients are reduced in; frozen parameters may have others."""
        policy = self._group.mp_policy
        params = [param.sharded_param for param in self._group.fsdp_params]
        trained = next((param for param in params if param.requires_grad), params[0])
        dtype: torch.dtype = policy.reduce_dtype or policy.param_dtype or trained.dtype
        return dtype

    @property
    def force_sum(self) -> bool:
        """Whether FSDP2 divides by itself and asks the reduce-scatter for sums only."""
        return bool(self._group.force_sum_reduction_for_comms)

    @force_sum.setter
    def force_sum(self, enable: bool) -> None:
        self._group.force_sum_reduction_for_comms = enable

    @property
    def reduce_scatter(self) -> ReduceScatter:
        """What reduces the unit's gradient now."""
        comm: ReduceScatter = self._group._reduce_scatter_comm
        return comm

    @reduce_scatter.setter
    def reduce_scatter(self, comm: ReduceScatter) -> None:
        self._group._reduce_scatter_comm = comm

    @property
    def all_reduce_hook(self) -> Callable[[Tensor], None] | None:
        """What FSDP2 calls with the unit's reduced shard."""
        hook: Callable[[Tensor], None] | None = self._group._all_reduce_hook
        return hook

    @all_reduce_hook.setter
    def all_reduce_hook(self, hook: Callable[[Tensor], None] | None) -> None:
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

    def watch(self) -> None:
        """Keep `active` up to date from now on."""
        group = self._group

        def watched_post_backward(*unused: Any) -> Any:
            self.active = tuple(
                index
                for index, param in enumerate(group.fsdp_params)
                if _has_gradient(group, param)
            )
            return type(group).post_backward(group, *unused)

        group.post_backward = watched_post_backward

    def unwatch(self) -> None:
        """Undo `watch`."""
        del self._group.post_backward  # the instance attribute; the method is the class's


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


def _join(module_name: str, parameter_name: str) -> str:
    return f"{module_name}.{parameter_name}" if module_name else parameter_name


def is_stock(comm: ReduceScatter) -> bool:
    """Whether this is one of the reduce-scatters of FSDP2 itself."""
    return type(comm).__module__.startswith("torch.distributed.fsdp.")


def group_number() -> int:
    """What torch names the next group by that only its members make, beside their ranks.

    Up to torch 2.13 the number of groups that this rank is in, then of those that it has been asked
    to make.
    """
    world = dist.distributed_c10d._world
    return world.group_count if torch.__version__ >= "2.14" else len(world.pg_names)


# torch 2.13 renames them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def all_gather(output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather of equal parts into one tensor."""
    _all_gather(output_tensor, input_tensor, group=group)


def reduce_scatters(
    output_tensors: list[Tensor], input_tensors: list[Tensor], group: dist.ProcessGroup
) -> None:
    """Sum-reduce-scatter of each input into its output, in one launch where the backend can."""
    with ExitStack() as stack:
        if dist.get_backend(group) == "nccl":
            stack.enter_context(dist._coalescing_manager(group))  # type: ignore[attr-defined]
        for output_tensor, input_tensor in zip(output_tensors, input_tensors, strict=True):
            _reduce_scatter(output_tensor, input_tensor, group=group)
