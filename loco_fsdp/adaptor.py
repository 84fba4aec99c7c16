"""`attach`: puts LoCo into a model that `fully_shard` has sharded, and hands out its `LoCo`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import nn

from loco_fsdp.codec import GRADIENT_DTYPES, choose_backend
from loco_fsdp.config import LoCoConfig
from loco_fsdp.fsdp_compat import FSDPUnit, fsdp_units, is_stock
from loco_fsdp.reduce_scatter import LoCoReduceScatter
from loco_fsdp.stats import Counters, nonfinite_blocks, relative_error
from loco_fsdp.topology import gather, ranks_per_node
from loco_fsdp.workspace import Workspace

logger = logging.getLogger("loco_fsdp")

Select = Callable[[str, nn.Module], "bool | LoCoConfig"]


@dataclass(frozen=True)
class UnitInfo:
    """One FSDP unit as LoCo sees it.

    Attributes:
        name: names of its modules, from the module that was attached to.
        numel: elements of its parameters, over all ranks of its shard group.
        bits: of a code on the wire; `None` if the unit is bypassed.
        error_bytes: bytes of its error buffer on this rank; 0 before its first reduction.
        bypass_reason: why stock FSDP2 reduces it; `None` if it does not.
    """

    name: str
    numel: int
    bits: int | None
    error_bytes: int
    bypass_reason: str | None


@dataclass(frozen=True)
class _Planned:
    """What is to be attached to one FSDP unit."""

    unit: FSDPUnit
    config: LoCoConfig
    backend: str
    bypass_reason: str | None


class LoCo:
    """What is attached to a model. Made by `attach` and by `LoCoFSDP`, not by hand."""

    def __init__(self, planned: list[_Planned], node_size: int) -> None:
        workspace = Workspace()
        self._attached = True
        self._comms = [
            LoCoReduceScatter(
                plan.unit, plan.config, workspace, node_size, plan.backend, plan.bypass_reason
            )
            for plan in planned
        ]
        for comm in self._comms:
            comm.install()
        if dist.get_rank() == 0:
            logger.info("%s", self.summary())

    @property
    def units(self) -> list[UnitInfo]:
        """The FSDP units of the model, in the order of `named_modules`."""
        return [
            UnitInfo(
                comm.unit.name,
                comm.unit.numel,
                comm.config.bits if comm.bypass_reason is None else None,
                comm.error.nbytes,
                comm.bypass_reason,
            )
            for comm in self._comms
        ]

    def summary(self) -> str:
        """A table of the units; logged once on rank 0, to the logger "loco_fsdp" at INFO."""
        rows = [("FSDP unit", "elements", "bits", "error bytes", "bypassed because")]
        for unit in self.units:
            bits = "-" if unit.bits is None else str(unit.bits)
            reason = unit.bypass_reason or ""
            rows.append((unit.name, f"{unit.numel:,}", bits, f"{unit.error_bytes:,}", reason))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0])]
                + [row[column].rjust(widths[column]) for column in (1, 2, 3)]
                + [row[4]]
            ).rstrip()
            for row in rows
        ]
        return "\n".join(["LoCo on:", *lines])

    def stats(self) -> dict[str, float]:
        """What was sent so far, over all units of this rank. Waits for the device.

        `wire_bytes`: bytes that this rank sent to other ranks to reduce gradients;
        `inter_node_bytes`: those of them that went to other nodes;
        `baseline_bytes`: bytes that a ring reduce-scatter in the reduce dtype would have sent;
        `compression_ratio`: `baseline_bytes / wire_bytes`, 1 before the first reduction;
        `relative_error`: norm of what the last reductions could not send over the norm of
        gradient + error;
        `error_norm`: norm of the error buffers;
        `nonfinite_blocks`: blocks sent as NaN;
        `reductions`, `bypassed_reductions`: compressed ones, and those by stock FSDP2;
        `reductions_without_feedback`: compressed ones whose parameters could not be told apart.
        """
        total = Counters()
        for comm in self._comms:
            total += comm.counters
        encode_stats = [comm.encode_stats for comm in self._comms]
        return {
            **{name: float(value) for name, value in vars(total).items()},
            "compression_ratio": total.baseline_bytes / total.wire_bytes
            if total.wire_bytes
            else 1.0,
            "relative_error": relative_error(encode_stats),
            "error_norm": math.hypot(*(comm.error.norm().item() for comm in self._comms)),
            "nonfinite_blocks": float(nonfinite_blocks(encode_stats)),
        }

    def reset_error(self) -> None:
        """Set the error of all units to 0. Call it on all ranks, between two steps."""
        for comm in self._comms:
            comm.error.reset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reduce in full precision, as stock FSDP2, while this is open. Enter it on all ranks."""
        for comm in self._comms:
            comm.paused = True
            comm.choose_scaling()
        try:
            yield
        finally:
            for comm in self._comms:
                comm.paused = False
                if self._attached:
                    comm.choose_scaling()

    def detach(self) -> None:
        """Give the model back to stock FSDP2 and free the buffers; what was counted stays.

        Raises:
            RuntimeError: it is detached already.
        """
        if not self._attached:
            raise RuntimeError("this LoCo is detached already: attach(model) makes a new one")
        for comm in self._comms:
            comm.remove()
        self._attached = False


def attach(
    module: nn.Module, config: LoCoConfig | None = None, *, select: Select | None = None
) -> LoCo:
    """Reduce the gradients of a sharded model in low bits, from the next backward on.

    One call serves the whole model. Call it on all ranks, after `fully_shard` and outside of a
    backward.

    Args:
        module: holds modules that `torch.distributed.fsdp.fully_shard` was applied to.
        config: how to compress; `None`: `LoCoConfig()`.
        select: called with the name and the module of every FSDP unit. True: compress it, False:
            leave it to stock FSDP2, a `LoCoConfig`: compress it in that way. Must answer the same
            on all ranks.

    Returns:
        The `LoCo` of this model.

    Raises:
        ValueError: no FSDP unit in `module`, LoCo or another custom reduce-scatter is there
        already,
            or the ranks do not agree. Then nothing is attached, on any rank.
        TypeError: `config` is no `LoCoConfig`, or `select` returned something else than it may.
        NotImplementedError: `config` asks for something that is not built yet.
    """
    if not dist.is_initialized():
        raise ValueError("attach needs torch.distributed: call init_process_group first")
    units = list(fsdp_units(module))
    if not units:
        raise ValueError(
            f"attach found no FSDP unit in {type(module).__name__}: apply "
            "torch.distributed.fsdp.fully_shard first, or use LoCoFSDP, which does both"
        )
    # An error of one rank alone must not leave the others waiting in a collective: first all ranks
    # tell each other what they are about to do, and what is wrong.
    error: Exception | None = None
    planned: list[_Planned] = []
    try:
        planned = [_plan(unit, _checked(config), select) for unit in units]
    except Exception as raised:
        error = raised
    _agree(units, planned, error)
    return LoCo(planned, ranks_per_node(planned[0].config.node_size))


def _checked(config: LoCoConfig | None) -> LoCoConfig:
    if config is None:
        return LoCoConfig()
    if not isinstance(config, LoCoConfig):
        raise TypeError(f"config={config!r}: it must be a LoCoConfig or None")
    return config


def _plan(unit: FSDPUnit, config: LoCoConfig, select: Select | None) -> _Planned:
    """What to do with one FSDP unit.

    Raises what `attach` raises.
    """
    if isinstance(unit.reduce_scatter, LoCoReduceScatter):
        raise ValueError(
            f"FSDP unit {unit.name!r} has LoCo attached already: call detach() on that LoCo first"
        )
    choice = select(unit.name, cast(nn.Module, unit.modules[0])) if select is not None else True
    if isinstance(choice, LoCoConfig):
        config = choice
    elif not isinstance(choice, bool):
        raise TypeError(
            f"select({unit.name!r}, ...) returned {choice!r}: "
            "it must be True, False or a LoCoConfig"
        )
    if config.topology == "hierarchical":
        raise NotImplementedError('topology="hierarchical" is not built yet: use "flat" or "auto"')
    backend = choose_backend(config.backend, unit.device)
    if not is_stock(unit.reduce_scatter):
        raise ValueError(
            f"FSDP unit {unit.name!r} has a reduce-scatter of its own, "
            f"{type(unit.reduce_scatter).__name__}, which LoCo would replace: do not set it"
        )
    return _Planned(unit, config, backend, _bypass_reason(unit, config, bool(choice)))


def _bypass_reason(unit: FSDPUnit, config: LoCoConfig, selected: bool) -> str | None:
    """Why stock FSDP2 has to reduce this unit; equal on all ranks."""
    if unit.world_size == 1:
        return "shard group of one rank: nothing to send"
    if not selected:
        return "not selected"
    if unit.numel < config.min_numel:
        return f"fewer than min_numel={config.min_numel} elements"
    if unit.reduce_dtype not in GRADIENT_DTYPES:
        return f"gradients are reduced in {unit.reduce_dtype}"
    return None


def _agree(units: list[FSDPUnit], planned: list[_Planned], error: Exception | None) -> None:
    """Raise on all ranks of every shard group if one of them has an error or another plan."""
    mine: tuple[Literal["error", "plan"], Any]
    if error is not None:
        mine = ("error", f"{type(error).__name__}: {error}")
    else:
        mine = (
            "plan",
            [
                (plan.unit.name, plan.unit.numel, plan.config.to_dict(), plan.bypass_reason)
                for plan in planned
            ],
        )
    # All ranks go through the groups in the same order, and pass on what they have learned.
    groups = [group for unit in units for group in unit.process_groups if group.size() > 1]
    for group in dict.fromkeys(groups):
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
    first_rank, (_, first) = plans[0]
    for rank, (_, plan) in plans:
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
