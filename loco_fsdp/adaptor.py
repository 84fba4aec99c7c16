"""`attach`: puts LoCo into a model that `fully_shard` has sharded, and hands out its `LoCo`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from loco_fsdp.agreement import Select, agreed_plans
from loco_fsdp.all_reduce import LoCoAllReduce
from loco_fsdp.checkpoint import load_state, save_state
from loco_fsdp.config import LoCoConfig
from loco_fsdp.fsdp_compat import fsdp_units
from loco_fsdp.reduce_scatter import LoCoReduceScatter
from loco_fsdp.reducer import Reducer
from loco_fsdp.stats import report
from loco_fsdp.topology import HopCache, ranks_per_node
from loco_fsdp.workspace import Workspace

logger = logging.getLogger("loco_fsdp")


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


class LoCo:
    """What is attached to a model. Made by `attach` and by `LoCoFSDP`, not by hand."""

    def __init__(self, reducers: Sequence[Reducer], workspace: Workspace) -> None:
        self._reducers = reducers
        self._workspace = workspace
        self._attached = True
        for reducer in reducers:
            reducer.install()
        if dist.get_rank() == 0:
            logger.info("%s", self.summary())

    @property
    def units(self) -> list[UnitInfo]:
        """The FSDP units of the model, in the order of `named_modules`."""
        return [
            UnitInfo(
                reducer.unit.name,
                reducer.unit.numel,
                reducer.bits if reducer.inactive_reason is None else None,
                reducer.error_bytes,
                reducer.inactive_reason,
            )
            for reducer in self._reducers
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
        notes = []
        if self._workspace.nbytes:
            notes.append(f"Buffers to send and to receive: {self._workspace.nbytes:,} bytes")
        if any(r.unit.replicas > 1 and not isinstance(r, LoCoAllReduce) for r in self._reducers):
            notes.append(
                "The all-reduce over replicas stays in full precision: shard the model with "
                "LoCoFSDP(model, mesh=mesh) to reduce over replicas in low bits instead"
            )
        return "\n".join(["LoCo on:", *lines, *notes])

    def stats(self) -> dict[str, float]:
        """What was sent so far, over all units of this rank.

        Waits for the device once; nothing that a training step does waits for it.

        `wire_bytes`: bytes that this rank sent to other ranks to reduce gradients;
        `inter_node_bytes`: those of them that went to other nodes;
        `baseline_bytes`: bytes that a ring reduce-scatter in the reduce dtype would have sent;
        `compression_ratio`: `baseline_bytes / wire_bytes`, 1 before the first reduction;
        `relative_error`: norm of what the last reductions could not send over the norm of
        gradient + error;
        `error_norm`: norm of the error buffers;
        `nonfinite_blocks`: blocks sent as NaN;
        `reductions`, `bypassed_reductions`: compressed ones, and those by stock FSDP2;
        `reductions_without_feedback`: compressed ones whose parameters could not be told apart;
        `error_bytes`, `buffer_bytes`: memory of the errors, and of the buffers to send and to
        receive, which all units share.

        Squares are summed in float32: `relative_error` and `error_norm` are not finite once values
        exceed 1e18 or so.
        """
        counters = [reducer.counters for reducer in self._reducers]
        rows = [row for unit_rows in self._measured() for row in unit_rows]
        return {
            **report(counters, rows),
            "error_bytes": float(sum(reducer.error_bytes for reducer in self._reducers)),
            "buffer_bytes": float(self._workspace.nbytes),
        }

    def unit_stats(self) -> dict[str, dict[str, float]]:
        """`stats` of each FSDP unit alone, by its name; without `buffer_bytes`, as it has none."""
        return {
            reducer.unit.name: {
                **report([reducer.counters], rows),
                "error_bytes": float(reducer.error_bytes),
            }
            for reducer, rows in zip(self._reducers, self._measured(), strict=True)
        }

    def _measured(self) -> list[list[list[float]]]:
        """What each hop of each unit measured, read from the device at once."""
        device = self._reducers[0].unit.device
        rows = [
            torch.stack(hop.measured()).to(device)
            for reducer in self._reducers
            for hop in reducer.hops
        ]
        values = iter(torch.stack(rows).tolist())
        return [[next(values) for _ in reducer.hops] for reducer in self._reducers]

    def reset_error(self) -> None:
        """Set the error of all units to 0. Call it on all ranks, between two steps."""
        for reducer in self._reducers:
            reducer.reset_error()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reduce in full precision, as stock FSDP2, while this is open. Enter it on all ranks."""
        for reducer in self._reducers:
            reducer.paused = True
            reducer.choose_scaling()
        try:
            yield
        finally:
            for reducer in self._reducers:
                reducer.paused = False
                if self._attached:
                    reducer.choose_scaling()

    def detach(self) -> None:
        """Give the model back to stock FSDP2 and free the buffers; what was counted stays.

        Raises:
            RuntimeError: it is detached already.
        """
        if not self._attached:
            raise RuntimeError("this LoCo is detached already: attach(model) makes a new one")
        for reducer in self._reducers:
            reducer.remove()
        self._workspace.free()
        self._attached = False

    def state_dict(self, *, error: bool = True) -> dict[str, bytes]:
        """The state of this rank, for `torch.distributed.checkpoint` or any other checkpoint.

        One entry, whose key names the rank, as every rank's error is its own. Its bytes are a copy
        of the errors at this moment, counters, what was attached, and versions. Call it between two
        optimizer steps, on all ranks.

        Args:
            error: False: without the errors, which are most of it (docs/checkpointing.md says how
                much); they start at 0 after loading.
        """
        return save_state(self._reducers, error)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = False) -> None:
        """Go on from `state_dict()`. A collective: call it on all ranks.

        With the same ranks, topology and configuration everything is as it was. Otherwise counters
        are, and the errors that do not fit start at 0, as after a reset; a warning on the first
        rank says why.

        Args:
            state_dict: as `state_dict()` made it on the same rank, or filled by
                `torch.distributed.checkpoint.load`.
            strict: raise instead of warning.

        Raises:
            ValueError: `state_dict` is damaged, or ranks give states of different steps; or
                `strict` is set, and it holds no state for a rank, or errors that do not fit.
                Raised on all ranks; nothing is loaded then.
            RuntimeError: this LoCo is detached.
        """
        if not self._attached:
            raise RuntimeError("this LoCo is detached: load into a new one, made by attach(model)")
        load_state(self._reducers, state_dict, strict)
        for reducer in self._reducers:
            reducer.choose_scaling()


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
            already, or the ranks do not agree. Then nothing is attached, on any rank.
        TypeError: `config` is no `LoCoConfig`, or `select` returned something else than it may.
    """
    return attach_to(module, config, select, replicas=None)


def attach_to(
    module: nn.Module,
    config: LoCoConfig | None,
    select: Select | None,
    replicas: dist.ProcessGroup | None,
) -> LoCo:
    """`attach`; with `replicas`, to the all-reduce over them instead of to the reduce-scatter."""
    if not dist.is_initialized():
        raise ValueError("attach needs torch.distributed: call init_process_group first")
    units = list(fsdp_units(module))
    if not units:
        raise ValueError(
            f"attach found no FSDP unit in {type(module).__name__}: apply "
            "torch.distributed.fsdp.fully_shard first, or use LoCoFSDP, which does both"
        )
    plans = agreed_plans(units, config, select, replicas)
    workspace, hop_groups = Workspace(), HopCache()
    reducers: list[Reducer] = []
    for plan in plans:
        node_size = ranks_per_node(plan.config.node_size)
        if replicas is not None:
            reducers.append(
                LoCoAllReduce(
                    plan.unit,
                    plan.config,
                    plan.bypass_reason,
                    group=replicas,
                    backend=plan.backend,
                    node_size=node_size,
                    workspace=workspace,
                )
            )
            continue
        bypassed = plan.bypass_reason is not None
        groups = None if bypassed else hop_groups.hops(plan.unit.process_groups[0], plan.config)
        reducers.append(
            LoCoReduceScatter(
                plan.unit,
                plan.config,
                plan.bypass_reason,
                backend=plan.backend,
                groups=groups,
                node_size=node_size,
                workspace=workspace,
            )
        )
    return LoCo(reducers, workspace)
