"""The state of a `LoCo` as one entry of a checkpoint, and back again."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.codec import ErrorState
from loco_fsdp.gather.gatherer import Gatherer, SavedReplica
from loco_fsdp.reduction.hop import Hop
from loco_fsdp.reduction.reducer import Reducer
from loco_fsdp.reduction.stats import Counters
from loco_fsdp.reduction.topology import gather
from loco_fsdp.version import __version__
from loco_fsdp.wrappers import without_wrappers

logger = logging.getLogger("loco_fsdp")

_FORMAT = 1


class UnitProgress(NamedTuple):
    """How far an FSDP unit is: equal on all ranks of its groups.

    reductions, bypassed_reductions: as in `LoCo.stats`
    bits: of a code, which a guard may have raised; None: full precision
    num_measured: reductions since the guard's last decision; ranks have to decide together
    """

    reductions: int
    bypassed_reductions: int
    bits: int | None
    num_measured: int


Progress = dict[str, UnitProgress]
"""How far each FSDP unit is, by its name."""

SavedError = tuple[str, str, dict[str, Any], Tensor, Tensor]
"""Kind of the hop, name of the parameter, what has to be as it was, payload, scale."""


def save_state(
    reducers: Sequence[Reducer], gatherers: Sequence[Gatherer], with_error: bool
) -> dict[str, bytes]:
    """What `LoCo.state_dict` returns.

    One value in bytes, because `torch.distributed.checkpoint` loads only what it finds a template
    for, and the errors of a checkpoint need not have the shapes of those that are there now.
    """
    state = {
        "format": _FORMAT,
        "loco_fsdp": __version__,
        "torch": str(torch.__version__),
        "world_size": dist.get_world_size(),
        "units": {
            without_wrappers(reducer.unit.name): _unit_state(reducer) for reducer in reducers
        },
        "errors": _errors(reducers) if with_error else None,
        "replicas": _replicas(gatherers) if with_error else {},
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {_key(): buffer.getvalue()}


def _key() -> str:
    return f"rank_{dist.get_rank()}"


def _unit_state(reducer: Reducer) -> dict[str, Any]:
    return {
        "parameters": [without_wrappers(name) for name in reducer.unit.parameter_names],
        "config": reducer.config.to_dict(),
        "bits": reducer.bits,
        "counters": vars(reducer.counters).copy(),
        "nonfinite_blocks": {hop.kind: hop.nonfinite_blocks for hop in reducer.hops},
        "usual": {hop.kind: hop.usual_state() for hop in reducer.hops},
        "guard": None if reducer.guard is None else reducer.guard.state(),
    }


def _errors(reducers: Sequence[Reducer]) -> list[SavedError]:
    return [
        (
            hop.kind,
            without_wrappers(reducer.unit.parameter_names[index]),
            _place(reducer, hop, index, hop.bits),
            *error,
        )
        for reducer in reducers
        for hop in reducer.hops
        for index, error in hop.error.by_parameter().items()
    ]


def _replicas(gatherers: Sequence[Gatherer]) -> dict[str, dict[str, Any]]:
    saved = {without_wrappers(gatherer.unit.name): gatherer.save() for gatherer in gatherers}
    return {name: replica._asdict() for name, replica in saved.items() if replica is not None}


def _place(reducer: Reducer, hop: Hop, parameter: int, bits: int) -> dict[str, Any]:
    """All that has to be the same for a saved error to mean what it meant."""
    return {
        "ranks": hop.ranks,
        "bits": bits,
        "block_size": hop.error.block_size,
        "error_dtype": reducer.config.error_dtype,
        "elements": reducer.place_of_error(hop, parameter),
    }


@dataclass
class _UnitUpdate:
    """What loading gives one FSDP unit.

    Attributes:
        num_measured: of the guard, and the sums that it measured on this rank.
    """

    counters: Counters
    bits: int | None
    num_measured: int = 0
    guard_sums: list[float] = field(default_factory=list)
    nonfinite_blocks: dict[str, int] = field(default_factory=dict)
    usual: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, dict[int, ErrorState]] = field(default_factory=dict)


@dataclass
class _Finding:
    """What a rank found in its state, told to the others.

    Attributes:
        progress: None where the rank has no state.
        misfits: why errors start at 0.
        replicas: names of the units whose parameters go on from a saved replica; the others are
            sent whole, which loses nothing.
        fault: why nothing can be loaded.
    """

    progress: Progress | None = None
    misfits: list[str] = field(default_factory=list)
    replicas: frozenset[str] = frozenset()
    fault: str | None = None


def load_state(
    reducers: Sequence[Reducer],
    gatherers: Sequence[Gatherer],
    state_dict: Mapping[str, Any],
    strict: bool,
) -> None:
    """What `LoCo.load_state_dict` does: read, agree with all ranks, and only then change things."""
    updates: list[_UnitUpdate] | None = None
    replicas: dict[str, SavedReplica] = {}
    finding = _Finding()
    try:
        if _key() in state_dict:
            state = _unpacked(state_dict[_key()])
            updates = _read(reducers, state, finding.misfits)
            finding.progress = _progress(reducers, updates)
            replicas = _fitting(gatherers, state)
            finding.replicas = frozenset(replicas)
        else:
            finding.misfits.append(f"the checkpoint has no {_key()!r}")
    except Exception as raised:
        finding.fault = f"rank {dist.get_rank()} cannot load its LoCo state: {raised}"
    groups = dict.fromkeys(group for r in reducers for group in r.deciding_groups())
    for group in groups:
        finding = _agreed([told for _, told in gather(finding, group)])
    if finding.fault is None and strict and finding.misfits:
        finding.fault = f"{finding.misfits[0]}; strict=False loads the rest"
    if finding.fault is not None:
        raise ValueError(f"nothing was loaded: {finding.fault}")
    if finding.progress is None or not (_has_begun(finding.progress) or finding.misfits):
        # DCP leaves the state as it is now where a checkpoint has none: it cannot be told apart.
        finding.misfits = ["the checkpoint holds no LoCo state, or one without any reduction"]
    if finding.misfits and all(group.rank() == 0 for group in groups):
        first, *others = finding.misfits
        more = f" (and {len(others)} more like it)" if others else ""
        logger.warning("not all LoCo errors were loaded, and others start at 0: %s%s", first, more)
    if updates is None and finding.progress is None:
        return
    for reducer, update in zip(reducers, updates or map(_blank, reducers), strict=True):
        if finding.progress is not None:
            known = finding.progress[without_wrappers(reducer.unit.name)]
            update.counters.reductions = known.reductions
            update.counters.bypassed_reductions = known.bypassed_reductions
            update.bits, update.num_measured = known.bits, known.num_measured
        _apply(reducer, update)
    for gatherer in gatherers:
        name = without_wrappers(gatherer.unit.name)
        gatherer.load(replicas[name] if name in finding.replicas else None)


def _blank(reducer: Reducer) -> _UnitUpdate:
    return _UnitUpdate(Counters(), reducer.config.bits)


def _apply(reducer: Reducer, update: _UnitUpdate) -> None:
    reducer.counters = update.counters
    reducer.set_bits(update.bits)
    for hop in reducer.hops:
        hop.error.load(update.errors.get(hop.kind, {}))
        hop.nonfinite_blocks = update.nonfinite_blocks.get(hop.kind, 0)
        if hop.kind in update.usual:
            hop.load_usual(update.usual[hop.kind])
    if reducer.guard is not None:
        reducer.guard.load(update.num_measured, update.guard_sums)


def _fitting(gatherers: Sequence[Gatherer], state: dict[str, Any]) -> dict[str, SavedReplica]:
    """The saved replicas that units can go on from, by their names."""
    saved = {
        name: SavedReplica(**replica)
        for name, replica in state.get("replicas", {}).items()  # version 0.1.0 had none
    }
    by_name = {without_wrappers(gatherer.unit.name): gatherer for gatherer in gatherers}
    return {
        name: replica
        for name, replica in saved.items()
        if name in by_name and by_name[name].fits(replica)
    }


def _unpacked(blob: Any) -> dict[str, Any]:
    """What `save_state` has packed."""
    if not isinstance(blob, bytes):
        raise ValueError(f"{_key()!r} holds {type(blob).__name__}, not bytes")
    try:
        # weights_only: a checkpoint may come from anywhere, and must not run code.
        state: dict[str, Any] = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"its {len(blob)} bytes are damaged ({error})") from error
    if state["format"] != _FORMAT:
        raise ValueError(
            f"format {state['format']} of loco-fsdp {state['loco_fsdp']}, this is "
            f"{__version__}, which reads format {_FORMAT}"
        )
    return state


def _read(
    reducers: Sequence[Reducer], state: dict[str, Any], misfits: list[str]
) -> list[_UnitUpdate]:
    """What the state of this rank gives each unit; why errors do not fit goes to `misfits`."""
    # Up to version 0.1.0 the names of units that are wrappers themselves were saved as they were.
    units = {without_wrappers(name): unit for name, unit in state["units"].items()}
    updates = [_unit_update(reducer, units) for reducer in reducers]
    if not any(_has_reduced(unit["counters"]) for unit in units.values()):
        pass  # there was no error yet that could be missing
    elif state["errors"] is None:
        misfits.append("the checkpoint was saved without errors")
    elif state["world_size"] != dist.get_world_size():
        misfits.append(
            f"saved by {state['world_size']} ranks, there are {dist.get_world_size()} now"
        )
    else:
        misfits.extend(_match_errors(reducers, updates, state["errors"]))
    return updates


def _has_reduced(counters: dict[str, Any]) -> bool:
    return bool(counters["reductions"] + counters["bypassed_reductions"])


def _unit_update(reducer: Reducer, units: dict[str, dict[str, Any]]) -> _UnitUpdate:
    saved = units.get(without_wrappers(reducer.unit.name))
    first = without_wrappers(reducer.unit.parameter_names[0])
    holder = next((unit for unit in units.values() if first in unit["parameters"]), saved)
    if holder is None:
        return _blank(reducer)
    if holder is not saved:
        # Wrapped in another way: it goes on from the unit that held its first parameter.
        update = _blank(reducer)
        update.counters.reductions = holder["counters"]["reductions"]
        update.counters.bypassed_reductions = holder["counters"]["bypassed_reductions"]
        _take_decisions(reducer, update, holder)
        return update
    update = _UnitUpdate(
        Counters(**saved["counters"]),
        reducer.config.bits,
        nonfinite_blocks=saved["nonfinite_blocks"],
        usual=saved.get("usual", {}),  # version 0.1.0 did not save it
    )
    _take_decisions(reducer, update, saved)
    return update


def _take_decisions(reducer: Reducer, update: _UnitUpdate, saved: dict[str, Any]) -> None:
    """The width that a guard has chosen, and what it has measured since."""
    if reducer.guard is not None and saved["config"]["bits"] == reducer.config.bits:
        update.bits = saved["bits"]
        if saved["guard"] is not None:
            update.num_measured, update.guard_sums = saved["guard"]


def _match_errors(
    reducers: Sequence[Reducer],
    updates: list[_UnitUpdate],
    errors: list[SavedError],
) -> list[str]:
    """Put the errors that fit into `updates`; why the others do not, each reason once."""
    targets = {
        (hop.kind, without_wrappers(name)): (reducer, update, hop, index)
        for reducer, update in zip(reducers, updates, strict=True)
        for hop in reducer.hops
        for index, name in enumerate(reducer.unit.parameter_names)
    }
    kinds = sorted({kind for kind, _ in targets})
    misfits: dict[str, None] = {}
    for kind, parameter, place, payload, scale in errors:
        if (kind, parameter) not in targets:
            reason = (
                f"the model has no parameter {parameter!r}"
                if kind in kinds
                else f"saved for a {kind!r} exchange, there are {', '.join(map(repr, kinds))} now"
            )
            misfits[reason] = None
            continue
        reducer, update, hop, index = targets[kind, parameter]
        problem = _misfit(reducer, update, hop, index, place)
        if problem is None:
            update.errors.setdefault(kind, {})[index] = ErrorState(payload, scale)
        else:
            misfits[problem] = None
    return list(misfits)


def _misfit(
    reducer: Reducer, update: _UnitUpdate, hop: Hop, index: int, saved: dict[str, Any]
) -> str | None:
    unit = f"FSDP unit {reducer.unit.name!r}"
    if reducer.bypass_reason is not None:
        return f"{unit} is bypassed: {reducer.bypass_reason}"
    if not reducer.config.error_feedback:
        return f"{unit} has error_feedback=False"
    bits = hop.bits if hop.kind == "intra-node" or update.bits is None else update.bits
    now = _place(reducer, hop, index, bits)
    changed = [f"{k}={saved[k]!r}, now {now[k]!r}" for k in now if saved[k] != now[k]]
    return f"{unit} was saved with {'; '.join(changed)}" if changed else None


def _progress(reducers: Sequence[Reducer], updates: list[_UnitUpdate]) -> Progress:
    return {
        without_wrappers(reducer.unit.name): UnitProgress(
            update.counters.reductions,
            update.counters.bypassed_reductions,
            update.bits,
            update.num_measured,
        )
        for reducer, update in zip(reducers, updates, strict=True)
    }


def _has_begun(progress: Progress) -> bool:
    """Whether anything was reduced."""
    return any(_has_reduced(unit._asdict()) for unit in progress.values())


def _agreed(findings: list[_Finding]) -> _Finding:
    """What ranks conclude from what each of them found."""
    for finding in findings:
        if finding.fault is not None:
            return finding
    misfits = [misfit for finding in findings for misfit in finding.misfits]
    known = [finding.progress for finding in findings if finding.progress is not None]
    begun = [progress for progress in known if _has_begun(progress)]
    if begun and len(begun) < len(known):
        misfits.append("a rank has a state without any reduction, while others have more")
    known = begun or known
    for other in known[1:]:
        for name, progress in known[0].items():
            if other[name] != progress:
                return _Finding(
                    fault=(
                        f"FSDP unit {name!r} has {_listed(progress)} on one rank and "
                        f"{_listed(other[name])} on another: load states of the same step"
                    )
                )
    replicas = frozenset.intersection(*(finding.replicas for finding in findings))
    return _Finding(known[0] if known else None, list(dict.fromkeys(misfits)), replicas)


def _listed(progress: UnitProgress) -> str:
    return ", ".join(f"{name}={value}" for name, value in progress._asdict().items())
