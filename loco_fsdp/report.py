"""What a `LoCo` tells of its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loco_fsdp.frontends.candidate import Attachment
from loco_fsdp.gather.gatherer import Gatherer
from loco_fsdp.reduction.reducer import Reducer

_INSIDE_NODE = "parameters not in low bits: they do not leave the node"


@dataclass(frozen=True)
class UnitInfo:
    """One unit as LoCo sees it: an FSDP unit, or what DDP or Megatron-LM reduces with one state.

    Attributes:
        name: of FSDP units names of the modules, from the module that was attached to.
        numel: elements of its parameters, over all ranks of its shard group.
        bits: of a code on the wire; `None` if the unit is bypassed.
        error_bytes: bytes of its error buffer on this rank; 0 before its first reduction.
        bypass_reason: why it is reduced in full precision; `None` if it is not.
        remarks: what is not as well as one may think.
        weight_bits: of its parameters between nodes; `None` where FSDP2 gathers them alone.
        replica_bytes: bytes of the replica of them on this rank; 0 before the first gather.
    """

    name: str
    numel: int
    bits: int | None
    error_bytes: int
    bypass_reason: str | None
    remarks: tuple[str, ...] = ()
    weight_bits: int | None = None
    replica_bytes: int = 0


@dataclass(frozen=True)
class Report:
    """All that a `LoCo` tells, at one moment."""

    units: list[UnitInfo]
    stats: dict[str, float]
    unit_stats: dict[str, dict[str, float]]


def unit_info(reducer: Reducer, gatherer: Gatherer | None) -> UnitInfo:
    """What there is to say of a unit."""
    remarks = reducer.remarks
    if reducer.config.weight_bits and gatherer is None and reducer.bypass_reason is None:
        remarks.append(_INSIDE_NODE)
    if reducer.bits is not None and reducer.bits != reducer.config.bits:
        remarks.append(
            f"guard={reducer.config.guard} raised {reducer.config.bits} bits to {reducer.bits}"
        )
    return UnitInfo(
        reducer.unit.name,
        reducer.unit.numel,
        reducer.bits if reducer.inactive_reason is None else None,
        reducer.error_bytes,
        reducer.inactive_reason,
        tuple(remark for remark in remarks if remark != reducer.inactive_reason),
        None if gatherer is None else gatherer.bits,
        0 if gatherer is None else gatherer.replica_bytes,
    )


def memory(attachments: Sequence[Attachment]) -> dict[str, float]:
    """Bytes that units keep, for `LoCo.stats`."""
    reducers = [each.reducer for each in attachments]
    gatherers = [each.gatherer for each in attachments if each.gatherer is not None]
    tables = [reducer.table_bytes for reducer in reducers]
    tables += [gatherer.table_bytes for gatherer in gatherers]
    return {
        "error_bytes": float(sum(reducer.error_bytes for reducer in reducers)),
        "replica_bytes": float(sum(gatherer.replica_bytes for gatherer in gatherers)),
        "table_bytes": float(sum(tables)),
    }


def summarize(units: Sequence[UnitInfo], buffer_bytes: int) -> str:
    """A table of the units; of parameters only where some are gathered in low bits."""
    with_weights = any(unit.weight_bits is not None for unit in units)
    rows = [["unit", "elements", "bits", "error bytes"]]
    rows[0] += ["weight bits", "replica bytes"] if with_weights else []
    for unit in units:
        rows.append([unit.name, f"{unit.numel:,}", _bits(unit.bits), f"{unit.error_bytes:,}"])
        if with_weights:
            rows[-1] += [_bits(unit.weight_bits), f"{unit.replica_bytes:,}"]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    remarks = ["remarks", *map(_remarks, units)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:]), remark]).rstrip()
        for row, remark in zip(rows, remarks, strict=True)
    ]
    if buffer_bytes:
        lines.append(f"Buffers to send and to receive: {buffer_bytes:,} bytes")
    return "\n".join(["LoCo on:", *lines])


def _bits(bits: int | None) -> str:
    return "-" if bits is None else str(bits)


def _remarks(unit: UnitInfo) -> str:
    bypassed = [] if unit.bypass_reason is None else [f"bypassed: {unit.bypass_reason}"]
    return "; ".join([*bypassed, *unit.remarks])
