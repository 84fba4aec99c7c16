"""`LoCoFSDP`: shard a model and attach LoCo to it, in one line."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from loco_fsdp.adaptor import LoCo, attach
from loco_fsdp.blocks import Wrap, units_to_shard
from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.fsdp2 import FSDPUnit, fsdp_units
from loco_fsdp.frontends.fsdp2_hooks import ReplicaAllReduce

logger = logging.getLogger("loco_fsdp")


class LoCoFSDP(FSDPModule):
    """Shard `module` in place with `fully_shard` and attach LoCo to it.

    `LoCoFSDP(module, ...)` returns the same object, whose class is now also `LoCoFSDP` and
    `FSDPModule`, and has the name that `fully_shard` gives it. Parameter names and `state_dict`
    keys stay, and slicing a `Sequential` or `ModuleList` gives a plain container.

    Args:
        module: the model; nothing in it may be sharded yet.
        config: how to compress; `None`: `LoCoConfig()`.
        mesh: device mesh, 1-D (shard) or 2-D (replicate, shard) with named dimensions; `None`: all
            ranks, as `fully_shard`. On a 2-D mesh FSDP2 reduces inside of each replica, in full
            precision, and LoCo over replicas: what crosses nodes, if each replica is one.
        wrap: which modules become FSDP units beside the root: a module class, a tuple of them, or
            `(name, module) -> bool`. `None`: the classes named in the model's `_no_split_modules`
            if it has them, else its outermost repeated blocks, and a warning if neither leaves
            more than one unit. Blocks are what a `ModuleList`, `ModuleDict` or `Sequential` holds
            more than one of; nothing inside of a block, such as experts, is a unit of its own.
            Give `wrap` if ranks may run different ones of these blocks.
        broadcast_parameters: on a 2-D mesh, give all replicas the parameters of the first one that
            FSDP shards, as their gradients keep them equal from then on. Parameters on the meta
            device are left out: initialize them equally.
        **fully_shard_kwargs: for every `fully_shard` call, for example `mp_policy`.

    Raises:
        ValueError: something is sharded already, `wrap` matches no module or tears a parameter
            that modules share, `mesh` has more than two dimensions or two without names, or
            `shard_placement_fn` shards over something else than a 2-D mesh's second dimension.
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
    ignored = fully_shard_kwargs.get("ignored_params") or ()
    # Children before their parents, which take what is left.
    for submodule in reversed(units_to_shard(module, wrap, ignored)):
        fully_shard(submodule, **fully_shard_kwargs)
    fully_shard(module, **fully_shard_kwargs)
    units = list(fsdp_units(module))
    if replicas is not None and shard_mesh is not None:
        _check_groups(units, shard_mesh.get_group())
        for unit in units:
            ReplicaAllReduce(unit, replicas)
        if broadcast_parameters:
            _broadcast(module, units, replicas)
    loco = attach(module, config)
    if wrap is None:
        _warn_of_one_unit(module, units)
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


def _check_groups(units: list[FSDPUnit], shard_group: dist.ProcessGroup) -> None:
    """Ranks of `replicas` have to hold the same shard of everything."""
    for unit in units:
        if unit.process_groups != [shard_group]:
            raise ValueError(
                f"shard_placement_fn shards FSDP unit {unit.name!r} over other ranks than the "
                "second dimension of the mesh, so that replicas hold different parts of it: use "
                "fully_shard and attach for this model"
            )


def _broadcast(module: nn.Module, units: list[FSDPUnit], replicas: dist.ProcessGroup) -> None:
    """Give all replicas the shards of the first one."""
    source = dist.get_process_group_ranks(replicas)[0]
    for name in (name for unit in units for name in unit.parameter_names):
        parameter = module.get_parameter(name)
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        if local.is_meta or local.numel() == 0:
            continue
        device = parameter.device_mesh.device_type if isinstance(parameter, DTensor) else None
        staged = local.to(device)  # offloaded parameters are on the CPU
        dist.broadcast(staged, source, group=replicas)
        if staged is not local:
            local.copy_(staged)


def _warn_of_one_unit(module: nn.Module, units: list[FSDPUnit]) -> None:
    owners = [sub for sub in module.modules() if any(True for _ in sub.parameters(recurse=False))]
    if len(units) == 1 and len(owners) > 1 and dist.get_rank() == 0:
        logger.warning(
            "all parameters of %s are in one FSDP unit, %s: they are gathered at once, and reduced "
            "after the whole backward. Name the modules that are to be units with wrap",
            type(module).__name__,
            units[0].name,
        )


@cache
def _with_loco(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `fully_shard` made, with `LoCoFSDP` before it.

    Under the same name: `save_pretrained` writes it, without "FSDP", for `from_pretrained`.
    """
    return type(cls.__name__, (LoCoFSDP, cls), {"__module__": cls.__module__})
