"""What is to be attached to each FSDP unit, and that all ranks mean the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from traceback import format_exception_only
from typing import Any, Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn

from loco_fsdp.codec import choose_backend
from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.fsdp2 import FSDPUnit, is_stock
from loco_fsdp.frontends.fsdp2_hooks import ReplicaAllReduce, replicas_of
from loco_fsdp.reduction.reducer import Reducer
from loco_fsdp.reduction.topology import gather, ranks_per_node
from loco_fsdp.version import __version__

Select = Callable[[str, nn.Module], "bool | LoCoConfig"]

Message: TypeAlias = tuple[Literal["error", "plan"], Any]
"""What a rank tells the others: what is wrong, or its versions and what it is about to do."""


@dataclass(frozen=True)
class Plan:
    """What is to be attached to one FSDP unit.

    Attributes:
        unit: the unit.
        config: how it is compressed.
        backend: what runs its codec.
        node_size: ranks of a node.
        bypass_reason: why it stays in full precision; None if it does not.
        replicas: what keeps its replicas equal, if its model was sharded inside of each alone.
    """

    unit: FSDPUnit
    config: LoCoConfig
    backend: str
    node_size: int
    bypass_reason: str | None
    replicas: ReplicaAllReduce | None


def agreed_plans(
    units: list[FSDPUnit],
    config: LoCoConfig | None,
    select: Select | None,
) -> list[Plan]:
    """The plans of all units, after all ranks of their groups have made the same ones.

    An error of one rank alone must not leave the others waiting in a collective: all ranks tell
    each other what they are about to do, or what is wrong, and then all go on, or all raise.
    """
    error: BaseException | None = None
    plans: list[Plan] = []
    mine: Message
    try:
        plans = [_plan(unit, _checked(config), select) for unit in units]
        mine = ("plan", (_versions(), [_told(plan) for plan in plans]))
    except BaseException as raised:  # sys.exit in `select` would leave the others waiting, too
        error = raised
        mine = ("error", "".join(format_exception_only(raised)).strip())
    groups = [group for unit in units for group in unit.process_groups]
    hooks = [replicas_of(unit) for unit in units]
    _agree([*groups, *(hook.group for hook in hooks if hook is not None)], mine, error)
    return plans


def _versions() -> dict[str, str]:
    return {"loco-fsdp": __version__, "torch": str(torch.__version__)}


def _told(plan: Plan) -> tuple[str, int, dict[str, Any], str | None]:
    """What has to be the same on all ranks."""
    return plan.unit.name, plan.unit.numel, plan.config.to_dict(), plan.bypass_reason


def _checked(config: LoCoConfig | None) -> LoCoConfig:
    if config is None:
        return LoCoConfig()
    if not isinstance(config, LoCoConfig):
        raise TypeError(f"config={config!r}: it must be a LoCoConfig or None")
    return config


def _plan(unit: FSDPUnit, config: LoCoConfig, select: Select | None) -> Plan:
    """What to do with one FSDP unit; raises what `attach` raises."""
    if unit.outside:
        raise ValueError(
            f"FSDP unit {unit.name!r} has parameters outside of the module to attach to "
            f"({', '.join(unit.outside[:3])}): attach to one that holds all of the unit"
        )
    hook = replicas_of(unit)
    if isinstance(unit.watcher, Reducer) or (hook is not None and hook.compressor is not None):
        raise ValueError(
            f"FSDP unit {unit.name!r} has LoCo attached already: call detach() on that LoCo first"
        )
    if not is_stock(unit.reduce_scatter):
        raise ValueError(
            f"FSDP unit {unit.name!r} has a reduce-scatter of its own, "
            f"{type(unit.reduce_scatter).__name__}, which LoCo would replace: do not set it"
        )
    choice = select(unit.name, cast(nn.Module, unit.modules[0])) if select is not None else True
    if isinstance(choice, LoCoConfig):
        config = choice
    elif not isinstance(choice, bool):
        raise TypeError(
            f"select({unit.name!r}, ...) returned {choice!r}: "
            "it must be True, False or a LoCoConfig"
        )
    if hook is not None and config.topology != "auto":
        raise ValueError(
            f'topology={config.topology!r}: on a 2-D mesh it must be "auto", which reduces in low '
            "bits over replicas"
        )
    backend = choose_backend(config.backend, unit.device)
    peers = unit.world_size if hook is None else hook.group.size()
    bypass_reason = _bypass_reason(unit, config, bool(choice), peers)
    return Plan(unit, config, backend, ranks_per_node(config.node_size), bypass_reason, hook)


def _bypass_reason(unit: FSDPUnit, config: LoCoConfig, selected: bool, peers: int) -> str | None:
    """Why stock FSDP2 has to reduce this unit for good; equal on all ranks."""
    if peers == 1 and unit.replicas > 1:
        return "not sharded: only the all-reduce of a LoCoFSDP model is compressed"
    if peers == 1:
        return "group of one rank: nothing to send"
    if not selected:
        return "not selected"
    if unit.numel < config.min_numel:
        return f"fewer than min_numel={config.min_numel} elements"
    return None


def _agree(groups: list[dist.ProcessGroup], mine: Message, error: BaseException | None) -> None:
    """Raise on all ranks of all groups if one of them has an error or another plan."""
    # All ranks go through the groups in the same order, and pass on what they have learned.
    for group in dict.fromkeys(group for group in groups if group.size() > 1):
        problem = _first_difference(gather(mine, group))
        if mine[0] == "plan" and problem is not None:
            mine = ("error", problem)
    if error is not None:
        raise error
    if mine[0] == "error":
        raise ValueError(f"attach did nothing: {mine[1]}")


def _first_difference(plans: list[tuple[int, Any]]) -> str | None:
    """What is wrong with the plans of these ranks, or None."""
    for rank, (kind, content) in plans:
        if kind == "error":
            return f"rank {rank} raised {content}"
    first_rank, (_, (first_versions, first)) = plans[0]
    for rank, (_, (versions, plan)) in plans:
        if versions != first_versions:
            return (
                f"rank {first_rank} runs {_listed(first_versions)}, and rank {rank} "
                f"{_listed(versions)}. Install the same on all"
            )
        if plan == first:
            continue
        if [row[:2] for row in plan] != [row[:2] for row in first]:
            return f"ranks {first_rank} and {rank} do not have the same FSDP units"
        for a, b in zip(first, plan, strict=True):
            fields = [f"{k}={a[2][k]!r} and {b[2][k]!r}" for k in a[2] if a[2][k] != b[2][k]]
            if a[3] != b[3]:
                fields.append(f"bypassed={a[3]!r} and {b[3]!r}")
            if fields:
                return (
                    f"ranks {first_rank} and {rank} differ in FSDP unit {a[0]!r}: "
                    f"{', '.join(fields)}. Give all ranks the same configuration"
                )
    return None


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
