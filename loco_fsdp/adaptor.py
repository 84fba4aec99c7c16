"""`attach`: puts LoCo into a model that `fully_shard` has sharded, and hands out its `LoCo`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from loco_fsdp.agreement import Select, agreed_plans
from loco_fsdp.checkpoint import load_state, save_state
from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.candidate import Attachment, Candidate, Parts
from loco_fsdp.frontends.ddp import DDPCandidate, ddp_units
from loco_fsdp.frontends.fsdp1 import FSDP1Candidate, fsdp1_units
from loco_fsdp.frontends.fsdp2 import fsdp_units
from loco_fsdp.frontends.fsdp2_hooks import FSDPCandidate
from loco_fsdp.frontends.megatron import MegatronCandidate, is_megatron, megatron_units
from loco_fsdp.gather.gatherer import Gatherer
from loco_fsdp.gather.stats import report_gathers
from loco_fsdp.reduction.groups import HopGroups
from loco_fsdp.reduction.notices import LATE, Notices
from loco_fsdp.reduction.precision import without_autocast
from loco_fsdp.reduction.reducer import Reducer
from loco_fsdp.reduction.stats import report
from loco_fsdp.reduction.unit import Unit
from loco_fsdp.reduction.workspace import Workspace
from loco_fsdp.report import Report, UnitInfo, memory, summarize, unit_info

logger = logging.getLogger("loco_fsdp")


class LoCo:
    """What is attached to a model. Made by `attach` and by `LoCoFSDP`, not by hand."""

    def __init__(
        self,
        find_units: Callable[[], Iterable[Unit]],
        attachments: Sequence[Attachment],
        parts: Parts,
    ) -> None:
        self._find_units: Callable[[], Iterable[Unit]] | None = find_units
        self._attachments = attachments
        self._workspace, notices, self._groups = parts
        self._last: Report | None = None
        notices.late_units = self._late
        for attachment in attachments:
            attachment.install()
            reducer = attachment.reducer
            notices.say(reducer.unit.label, reducer.remarks, reducer.deciding_groups())
        if dist.get_rank() == 0:
            logger.info("%s", self.summary())

    @property
    def attached(self) -> bool:
        """False after `detach`."""
        return self._last is None

    @property
    def units(self) -> list[UnitInfo]:
        """The units of the model, in the order of `named_modules`, or of Megatron's buffers."""
        if self._last is not None:
            return list(self._last.units)
        known = [unit_info(each.reducer, each.gatherer) for each in self._attachments]
        return [*known, *(UnitInfo(unit.name, unit.numel, None, 0, LATE) for unit in self._late())]

    @property
    def _reducers(self) -> list[Reducer]:
        return [attachment.reducer for attachment in self._attachments]

    @property
    def _gatherers(self) -> list[Gatherer]:
        return [each.gatherer for each in self._attachments if each.gatherer is not None]

    def _late(self) -> list[Unit]:
        """Units that the framework has made since."""
        known = [reducer.unit for reducer in self._reducers]
        found = [] if self._find_units is None else self._find_units()
        return [unit for unit in found if unit not in known]

    def summary(self) -> str:
        """A table of the units; logged once on rank 0, to the logger "loco_fsdp" at INFO."""
        return summarize(self.units, self._workspace.nbytes)

    @without_autocast
    def stats(self) -> dict[str, float]:
        """What was sent so far, over all units of this rank.

        Waits for the device once; nothing that a training step does waits for it.

        `wire_bytes`: bytes that this rank sent to other ranks to reduce gradients;
        `inter_node_bytes`: those of them that went to other nodes;
        `full_precision_bytes`: those of them that were not compressed, but for the first hop of
        "hierarchical";
        `baseline_bytes`: bytes that a ring in the reduce dtype would have sent;
        `compression_ratio`: `baseline_bytes / wire_bytes`, 1 before the first reduction;
        `relative_error`: norm of what the last reductions could not send over the norm of
        gradient + error;
        `error_norm`: norm of the error buffers;
        `nonfinite_blocks`: blocks sent as NaN;
        `spikes`: exchanges of a unit whose error was dropped, see `LoCoConfig.spike_limit`;
        `reductions`, `bypassed_reductions`: compressed ones, and those in full precision;
        `reductions_without_feedback`: compressed ones whose parameters could not be told apart;
        `weight_wire_bytes`, `weight_inter_node_bytes`: bytes that this rank sent to other ranks,
        and those of them to other nodes, to gather parameters with `weight_bits`;
        `weight_relative_error`: norm of what these have left out over the norm of the parameters,
        in the last gathers of this rank's shards;
        `weight_refreshes`: times that a unit's parameters were sent whole for `weight_bits=4`;
        `stale_gathers`: gathers for `weight_bits=4` that used parameters from before a change which
        `refresh_weights` was not told of;
        `error_bytes`, `replica_bytes`, `table_bytes`, `buffer_bytes`: memory of the errors, of the
        replicas for `weight_bits=4`, of the tables of blocks, and of the buffers to send and to
        receive, which all units share.

        Squares are summed in float32: `relative_error` and `error_norm` are not finite once values
        exceed 1e18 or so. After `detach` these are the numbers from then.
        """
        if self._last is not None:
            return dict(self._last.stats)
        rows = [row for unit_rows in self._measured() for row in unit_rows]
        return {
            **report([reducer.counters for reducer in self._reducers], rows),
            **report_gathers(self._gatherers),
            **memory(self._attachments),
            "buffer_bytes": float(self._workspace.nbytes),
        }

    @without_autocast
    def unit_stats(self) -> dict[str, dict[str, float]]:
        """`stats` of each unit alone, by its name; without `buffer_bytes`, as it has none."""
        if self._last is not None:
            return {name: dict(stats) for name, stats in self._last.unit_stats.items()}
        return {
            each.reducer.unit.name: {
                **report([each.reducer.counters], rows),
                **report_gathers([] if each.gatherer is None else [each.gatherer]),
                **memory([each]),
            }
            for each, rows in zip(self._attachments, self._measured(), strict=True)
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

    def refresh_weights(self) -> None:
        """Parameters were changed by something else than an optimizer: send them whole next time.

        For `weight_bits=4`, after a change in place, such as weights swapped for their averages or
        loaded tensor by tensor; `load_state_dict` of the model does it. Call it on all ranks. In
        evaluations, and in the first forward after one, such changes are noticed anyhow.
        """
        for gatherer in self._gatherers:
            gatherer.refresh()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reduce, and gather, in full precision while this is open. Enter it on all ranks.

        The result is that of stock FSDP2. A backward gathers parameters as its forward did.
        """
        for reducer in self._reducers:
            reducer.pauses += 1
        try:
            yield
        finally:
            for reducer in self._reducers:  # none any more, if it was detached meanwhile
                reducer.pauses -= 1

    def detach(self) -> None:
        """Give the model back to stock FSDP2, and free buffers and groups. Call it on all ranks.

        What was counted stays, and nothing of the model is held any more. Replicas of a model of
        `LoCoFSDP` on a 2-D mesh go on being reduced, in full precision; `attach(model)` compresses
        them again.

        Raises:
            RuntimeError: it is detached already.
        """
        if not self.attached:
            raise RuntimeError("this LoCo is detached already: attach(model) makes a new one")
        for attachment in self._attachments:
            attachment.remove()
        self._workspace.free()
        self._last = Report(self.units, self.stats(), self.unit_stats())
        self._find_units, self._attachments = None, ()
        self._groups.release()

    @without_autocast
    def state_dict(self, *, error: bool = True) -> dict[str, bytes]:
        """The state of this rank, for `torch.distributed.checkpoint` or any other checkpoint.

        One entry, whose key names the rank, as every rank's error is its own. Its bytes are a copy
        of the errors at this moment, of this rank's own rows of replicas (`weight_bits=4`),
        counters, what was attached, and versions. Call it between two optimizer steps, on all
        ranks. After `detach` it holds nothing, and warns.

        Args:
            error: False: without the errors, which are most of it (docs/checkpointing.md says how
                much) and without rows of replicas; errors start at 0 after loading, and parameters
                are sent whole.
        """
        if not self.attached and dist.get_rank() == 0:
            logger.warning(
                "the state of a LoCo that is detached holds no errors: save that of the LoCo which "
                "attach(model) has returned since"
            )
        return save_state(self._reducers, self._gatherers, error)

    @without_autocast
    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = False) -> None:
        """Go on from `state_dict()`. A collective: call it on all ranks.

        With the same ranks, topology and configuration everything is as it was. Otherwise counters
        are, and the errors that do not fit start at 0, as after a reset; a warning on the first
        rank says why. Gradients of an accumulation that wait for the all-reduce of `LoCoFSDP` on a
        2-D mesh are given up.

        Args:
            state_dict: as `state_dict()` made it on the same rank, or filled by
                `torch.distributed.checkpoint.load`.
            strict: raise instead of warning.

        Raises:
            ValueError: `state_dict` is damaged, or ranks give states of different steps; or
                `strict` is set, and it holds no state for a rank, or errors that do not fit. One
                from before the first step lacks nothing.
                Raised on all ranks; nothing is loaded then.
            RuntimeError: this LoCo is detached.
        """
        if not self.attached:
            raise RuntimeError("this LoCo is detached: load into a new one, made by attach(model)")
        load_state(self._reducers, self._gatherers, state_dict, strict)
        for attachment in self._attachments:
            attachment.forget_deferred()


def attach(
    module: nn.Module | Sequence[nn.Module],
    config: LoCoConfig | None = None,
    *,
    select: Select | None = None,
    replicate_group: dist.ProcessGroup | None = None,
) -> LoCo:
    """Reduce the gradients of a model in low bits, from the next backward on.

    One call serves the whole model. Call it on all ranks, after the framework has wrapped the model
    and outside of a backward.

    Args:
        module: a model that `torch.distributed.fsdp.fully_shard` was applied to (FSDP2), a
            `torch.nn.parallel.DistributedDataParallel`, a model with modules of
            `torch.distributed.fsdp.FullyShardedDataParallel` (FSDP1), or a
            `megatron.core.distributed.DistributedDataParallel` of Megatron-LM or the list of its
            chunks. Of a model of `LoCoFSDP` that was detached, `model.loco` becomes the new `LoCo`.
        config: how to compress; `None`: `LoCoConfig()`.
        select: called with the name and the module of every unit. True: compress it, False: leave
            it to the framework, a `LoCoConfig`: compress it in that way. Must answer the same on
            all ranks.
        replicate_group: of an FSDP1 model whose `process_group` is that of one replica, such as the
            ranks of a node: the ranks that hold the same shard in all replicas. Replicas then start
            equal, gradients are averaged in full precision inside of each and in low bits over
            them.

    Returns:
        The `LoCo` of this model.

    Raises:
        ValueError: only a part of a unit is in `module`; LoCo, a communication hook or another
            custom reduce-scatter is there already; the framework's settings leave no place for it;
            or the ranks do not agree. Then nothing is attached, on any rank.
        TypeError: `module` has none of these, `config` is no `LoCoConfig`, or `select` returned
            something else than it may.
    """
    if not dist.is_initialized():
        raise ValueError("attach needs torch.distributed: call init_process_group first")
    find_units, candidates = _find(module, replicate_group)
    plans = agreed_plans(candidates, config, select)
    parts = Parts(Workspace(), Notices(), HopGroups())
    attachments = [
        candidate.attachment(plan, parts) for candidate, plan in zip(candidates, plans, strict=True)
    ]
    loco = LoCo(find_units, attachments, parts)
    for submodule in module.modules() if isinstance(module, nn.Module) else ():
        earlier = vars(submodule).get("loco")
        if isinstance(earlier, LoCo) and not earlier.attached:
            submodule.loco = loco  # type: ignore[assignment]
    return loco


def _find(
    module: nn.Module | Sequence[nn.Module], replicate_group: dist.ProcessGroup | None
) -> tuple[Callable[[], Iterable[Unit]], Sequence[Candidate]]:
    """What finds the units of a model again, and those that it has now."""
    chunks = [module] if isinstance(module, nn.Module) else list(module)
    if chunks and all(is_megatron(chunk) for chunk in chunks):
        return list, [MegatronCandidate(*found) for found in megatron_units(chunks)]
    if not isinstance(module, nn.Module):
        raise TypeError(
            "attach takes a list only of chunks of megatron.core.distributed."
            f"DistributedDataParallel, got {[type(chunk).__name__ for chunk in chunks]}"
        )
    if fsdp1 := list(fsdp1_units(module, replicate_group)):
        found = [FSDP1Candidate(unit, replicate_group) for unit in fsdp1]
        return partial(fsdp1_units, module, replicate_group), found
    if replicate_group is not None:
        raise ValueError(
            f"replicate_group is for FSDP1, and this {type(module).__name__} has none: with FSDP2 "
            "use LoCoFSDP on a 2-D mesh"
        )
    if isinstance(module, DistributedDataParallel):
        return list, [DDPCandidate(module, unit) for unit in ddp_units(module)]
    if candidates := [FSDPCandidate(unit) for unit in fsdp_units(module)]:
        return partial(fsdp_units, module), candidates
    raise TypeError(
        "attach takes a model that torch.distributed.fsdp.fully_shard was applied to (or LoCoFSDP, "
        "which does both), a DistributedDataParallel of torch or of megatron.core (or a list of "
        "its chunks), or a FullyShardedDataParallel. There is no unit of any of them in this "
        f"{type(module).__name__}"
    )
