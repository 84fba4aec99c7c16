"""What is to be attached to each unit, and that all ranks mean the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from traceback import format_exception_only
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from loco_fsdp.codec import choose_backend
from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.candidate import Candidate, Plan
from loco_fsdp.reduction.topology import gather, ranks_per_node
from loco_fsdp.version import __version__

Select = Callable[[str, nn.Module], "bool | LoCoConfig"]

Message: TypeAlias = tuple[Literal["error", "plan"], Any]
"""What a rank tells the others: what is wrong, or its versions and what it is about to do."""


def agreed_plans(
    candidates: Sequence[Candidate], config: LoCoConfig | None, select: Select | None
) -> list[Plan]:
    """The plans of all units, after all ranks of their groups have made the same ones.

    An error of one rank alone must not leave the others waiting in a collective: all ranks tell
    each other what they are about to do, or what is wrong, and then all go on, or all raise.
    """
    error: BaseException | None = None
    plans: list[Plan] = []
    mine: Message
    try:
        plans = [_plan(candidate, _checked(config), select) for candidate in candidates]
        told = [_told(*pair) for pair in zip(candidates, plans, strict=True)]
        mine = ("plan", (_versions(), told))
    except BaseException as raised:  # sys.exit in `select` would leave the others waiting, too
        error = raised
        mine = ("error", "".join(format_exception_only(raised)).strip())
    _agree([group for candidate in candidates for group in candidate.groups], mine, error)
    return plans


def _versions() -> dict[str, str]:
    return {"loco-fsdp": __version__, "torch": str(torch.__version__)}


def _told(candidate: Candidate, plan: Plan) -> tuple[str, int, dict[str, Any], str | None]:
    """What has to be the same on all ranks."""
    unit = candidate.unit
    return unit.label, unit.numel, plan.config.to_dict(), plan.bypass_reason


def _checked(config: LoCoConfig | None) -> LoCoConfig:
    if config is None:
        return LoCoConfig()
    if not isinstance(config, LoCoConfig):
        raise TypeError(f"config={config!r}: it must be a LoCoConfig or None")
    return config


def _plan(candidate: Candidate, config: LoCoConfig, select: Select | None) -> Plan:
    """What to do with one unit; raises what `attach` raises."""
    unit = candidate.unit
    candidate.check()
    choice = select(unit.name, candidate.module) if select is not None else True
    if isinstance(choice, LoCoConfig):
        config = choice
    elif not isinstance(choice, bool):
        raise TypeError(
            f"select({unit.name!r}, ...) returned {choice!r}: "
            "it must be True, False or a LoCoConfig"
        )
    candidate.check_config(config)
    backend = choose_backend(config.backend, unit.device)
    bypass_reason = _bypass_reason(candidate, config, bool(choice))
    return Plan(config, backend, ranks_per_node(config.node_size), bypass_reason)


def _bypass_reason(candidate: Candidate, config: LoCoConfig, selected: bool) -> str | None:
    """Why the framework has to reduce this unit for good; equal on all ranks."""
    if (reason := candidate.bypass_reason()) is not None:
        return reason
    if candidate.peers == 1:
        return "group of one rank: nothing to send"
    if not selected:
        return "not selected"
    if candidate.unit.numel < config.min_numel:
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
            return f"ranks {first_rank} and {rank} do not have the same units"
        for a, b in zip(first, plan, strict=True):
            fields = [f"{k}={a[2][k]!r} and {b[2][k]!r}" for k in a[2] if a[2][k] != b[2][k]]
            if a[3] != b[3]:
                fields.append(f"bypassed={a[3]!r} and {b[3]!r}")
            if fields:
                return (
                    f"ranks {first_rank} and {rank} differ in {a[0]}: "
                    f"{', '.join(fields)}. Give all ranks the same configuration"
                )
    return None


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())
