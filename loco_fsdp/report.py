"""What a `LoCo` tells of its units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loco_fsdp.reduction.reducer import Reducer


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
    """

    name: str
    numel: int
    bits: int | None
    error_bytes: int
    bypass_reason: str | None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All that a `LoCo` tells, at one moment."""

    units: list[UnitInfo]
    stats: dict[str, float]
    unit_stats: dict[str, dict[str, float]]


def unit_info(reducer: Reducer) -> UnitInfo:
    """What there is to say of a unit."""
    remarks = reducer.remarks
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
    )


def summarize(units: Sequence[UnitInfo], buffer_bytes: int) -> str:
    """A table of the units."""
    rows = [("unit", "elements", "bits", "error bytes", "remarks")]
    for unit in units:
        bits = "-" if unit.bits is None else str(unit.bits)
        bypassed = [] if unit.bypass_reason is None else [f"bypassed: {unit.bypass_reason}"]
        remarks = "; ".join([*bypassed, *unit.remarks])
        rows.append((unit.name, f"{unit.numel:,}", bits, f"{unit.error_bytes:,}", remarks))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [row[column].rjust(widths[column]) for column in (1, 2, 3)]
            + [row[4]]
        ).rstrip()
        for row in rows
    ]
    if buffer_bytes:
        lines.append(f"Buffers to send and to receive: {buffer_bytes:,} bytes")
    return "\n".join(["LoCo on:", *lines])
