"""`LoCoFSDP`: shard a model and attach LoCo to it, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from loco_fsdp.adaptor import LoCo, attach
from loco_fsdp.config import LoCoConfig
from loco_fsdp.fsdp_compat import fsdp_units
from loco_fsdp.replicas import ReplicaAllReduce

Wrap: TypeAlias = "type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]"


class LoCoFSDP(FSDPModule):
    """Shard `module` in place with `fully_shard` and attach LoCo to it.

    `LoCoFSDP(module, ...)` returns the same object, whose class is now also `LoCoFSDP` and
    `FSDPModule`. Parameter names and `state_dict` keys stay, and slicing a `Sequential` or
    `ModuleList` gives a plain container.

    Args:
        module: the model; nothing in it may be sharded yet.
        config: how to compress; `None`: `LoCoConfig()`.
        mesh: device mesh, 1-D (shard) or 2-D (replicate, shard) with named dimensions; `None`: all
            ranks, as `fully_shard`. On a 2-D mesh FSDP2 reduces inside of each replica, in full
            precision, and LoCo over replicas: what crosses nodes, if each replica is one.
        wrap: which modules become FSDP units beside the root: a module class, a tuple of them, or
            `(name, module) -> bool`. `None`: the classes named in the model's `_no_split_modules`
            if it has them, else the children of every `ModuleList`.
        broadcast_parameters: on a 2-D mesh, give all replicas the parameters of the first one, as
            their gradients keep them equal from then on. Parameters on the meta device are left
            out: initialize them equally.
        **fully_shard_kwargs: for every `fully_shard` call, for example `mp_policy`.

    Raises:
        ValueError: something is sharded already, `wrap` matches no module, or `mesh` has more than
            two dimensions or two without names.
        TypeError: `module` is no module, or `wrap` is none of the above.

    and what `attach` and `fully_shard` raise. If `attach` raises, the model is sharded all the
    same.
    """

    loco: LoCo

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is LoCoFSDP:
            return _shard_and_attach(*args, **kwargs)
        # Slicing a container calls its class: build the container that was there before.
        original = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        return original(*args, **kwargs)

    def __init__(
        self,
        module: nn.Module,
        config: LoCoConfig | None = None,
        *,
        mesh: DeviceMesh | None = None,
        wrap: Wrap | None = None,
        broadcast_parameters: bool = True,
        **fully_shard_kwargs: Any,
    ) -> None:
        # Python calls this with what __new__ returned: a module that is initialised already.
        pass


def _shard_and_attach(
    module: nn.Module,
    config: LoCoConfig | None = None,
    *,
    mesh: DeviceMesh | None = None,
    wrap: Wrap | None = None,
    broadcast_parameters: bool = True,
    **fully_shard_kwargs: Any,
) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise TypeError(f"LoCoFSDP shards an nn.Module, not {type(module).__name__}")
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDPModule):
            raise ValueError(
                f"{name or type(submodule).__name__} is sharded already: use attach(model, config)"
            )
    if hasattr(module, "loco"):
        raise ValueError(
            f"{type(module).__name__} has an attribute 'loco', where LoCoFSDP puts its own: "
            "rename it, or use fully_shard and attach"
        )
    if config is not None and not isinstance(config, LoCoConfig):
        raise TypeError(f"config={config!r}: it must be a LoCoConfig or None")
    shard_mesh, replicas = _split_mesh(mesh)
    if shard_mesh is not None:
        fully_shard_kwargs["mesh"] = shard_mesh
    # Children before their parents, which take what is left.
    for submodule in reversed(list(_units_to_shard(module, wrap))):
        fully_shard(submodule, **fully_shard_kwargs)
    fully_shard(module, **fully_shard_kwargs)
    if replicas is not None:
        for unit in fsdp_units(module):
            ReplicaAllReduce(unit, replicas)
        if broadcast_parameters:
            _broadcast(module, replicas)
    loco = attach(module, config)
    module.__class__ = _with_loco(module.__class__)  # type: ignore[arg-type]
    module.loco = loco  # type: ignore[assignment]
    return module


def _split_mesh(
    mesh: DeviceMesh | None,
) -> tuple[DeviceMesh | None, dist.ProcessGroup | None]:
    """The mesh to shard over, and the group of replicas if the mesh has them."""
    if mesh is None or mesh.ndim == 1:
        return mesh, None
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh={mesh}: it must be 1-D (shard), or 2-D (replicate, shard) with names: "
            'init_device_mesh(..., mesh_dim_names=("replicate", "shard"))'
        )
    return mesh[mesh.mesh_dim_names[1]], mesh.get_group(0)


def _broadcast(module: nn.Module, replicas: dist.ProcessGroup) -> None:
    """Give all replicas the shards of the first one."""
    source = dist.get_process_group_ranks(replicas)[0]
    for parameter in module.parameters():
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.is_meta or local.numel() == 0:
            continue
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else None
        staged = local.to(device)  # offloaded parameters are on the CPU
        dist.broadcast(staged, source, group=replicas)
        if staged is not local:
            local.copy_(staged)


def _units_to_shard(module: nn.Module, wrap: Wrap | None) -> Iterator[nn.Module]:
    """The modules below `module` that become FSDP units, in the order of `named_modules`."""
    matches = _matcher(module, wrap)
    found = [
        sub for name, sub in module.named_modules() if sub is not module and matches(name, sub)
    ]
    if not found and wrap is not None:
        names = sorted({type(sub).__name__ for sub in module.modules()})
        raise ValueError(
            f"wrap={wrap!r} matches no module of {type(module).__name__}, "
            f"which holds {', '.join(names)}"
        )
    return iter(found)


def _matcher(module: nn.Module, wrap: Wrap | None) -> Callable[[str, nn.Module], bool]:
    if wrap is None:
        if names := getattr(module, "_no_split_modules", None):
            return lambda _, sub: type(sub).__name__ in names
        children = {
            child
            for parent in module.modules()
            if isinstance(parent, nn.ModuleList)
            for child in parent
            if not isinstance(child, nn.ModuleList)
        }
        return lambda _, sub: sub in children
    classes = wrap if isinstance(wrap, tuple) else (wrap,)
    if all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        return lambda _, sub: isinstance(sub, classes)  # type: ignore[arg-type]
    if callable(wrap) and not isinstance(wrap, type):
        return wrap
    raise TypeError(
        f"wrap={wrap!r}: it must be a module class, a tuple of them, "
        "(name, module) -> bool, or None"
    )


@cache
def _with_loco(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `fully_shard` made, with `LoCoFSDP` before it."""
    return type(f"LoCo{cls.__name__}", (LoCoFSDP, cls), {})
