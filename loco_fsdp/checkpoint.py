"""The state of a `LoCo` as one entry of a checkpoint, and back again."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.codec import ErrorState
from loco_fsdp.hop import Hop
from loco_fsdp.reducer import Reducer
from loco_fsdp.stats import Counters
from loco_fsdp.topology import gather
from loco_fsdp.version import __version__

logger = logging.getLogger("loco_fsdp")

_FORMAT = 1

# What torch.compile and activation checkpointing put into the names of what they wrap.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

Progress = dict[str, tuple[int, int, "int | None"]]
"""Reductions, bypassed reductions and bits of each FSDP unit: equal on all ranks of its groups."""

SavedError = tuple[str, str, dict[str, Any], Tensor, Tensor]
"""Kind of the hop, name of the parameter, what has to be as it was, payload, scale."""


def save_state(reducers: Sequence[Reducer], with_error: bool) -> dict[str, bytes]:
    """What `LoCo.state_dict` returns.

    One value in bytes, because `torch.distributed.checkpoint` loads only what it finds a template
    for, and the errors of a checkpoint need not have the shapes of those that are there now.
    """
    state = {
        "format": _FORMAT,
        "loco_fsdp": __version__,
        "torch": str(torch.__version__),
        "world_size": dist.get_world_size(),
        "units": {_clean(reducer.unit.name): _unit_state(reducer) for reducer in reducers},
        "errors": _errors(reducers) if with_error else None,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {_key(): buffer.getvalue()}


def _key() -> str:
    return f"rank_{dist.get_rank()}"


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _unit_state(reducer: Reducer) -> dict[str, Any]:
    return {
        "parameters": [_clean(name) for name in reducer.unit.parameter_names],
        "config": reducer.config.to_dict(),
        "bits": reducer.bits,
        "counters": vars(reducer.counters).copy(),
        "nonfinite_blocks": {hop.kind: hop.nonfinite_blocks for hop in reducer.hops},
        "guard": None if reducer.guard is None else reducer.guard.state(),
    }


def _errors(reducers: Sequence[Reducer]) -> list[SavedError]:
    return [
        (
            hop.kind,
            _clean(reducer.unit.parameter_names[index]),
            _place(reducer, hop, index, hop.bits),
            *error,
        )
        for reducer in reducers
        for hop in reducer.hops
        for index, error in hop.error.by_parameter().items()
    ]


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
    """What loading gives one FSDP unit."""

    counters: Counters
    bits: int | None
    guard: tuple[int, list[float]] | None = None
    nonfinite_blocks: dict[str, int] = field(default_factory=dict)
    errors: dict[str, dict[int, ErrorState]] = field(default_factory=dict)


@dataclass
class _Finding:
    """What a rank found in its state, told to the others.

    Attributes:
        progress: None where the rank has no state, or one from before the first reduction.
        misfits: why errors start at 0.
        fault: why nothing can be loaded.
    """

    progress: Progress | None = None
    misfits: list[str] = field(default_factory=list)
    fault: str | None = None


def load_state(reducers: Sequence[Reducer], state_dict: Mapping[str, Any], strict: bool) -> None:
    """What `LoCo.load_state_dict` does: read, agree with all ranks, and only then change things."""
    updates: list[_UnitUpdate] | None = None
    finding = _Finding()
    try:
        if _key() in state_dict:
            updates = _read(reducers, state_dict[_key()], finding.misfits)
            finding.progress = _progress(reducers, updates)
        else:
            finding.misfits.append(f"the checkpoint has no {_key()!r}")
    except Exception as raised:
        finding.fault = f"rank {dist.get_rank()} cannot load its LoCo state: {raised}"
    groups = dict.fromkeys(group for r in reducers for group in r.deciding_groups())
    for group in groups:
        finding = _agreed([told for _, told in gather(finding, group)])
    if finding.fault is None and finding.progress is None:
        finding.misfits = ["the checkpoint holds no LoCo state, or one without any reduction"]
    if finding.fault is None and strict and finding.misfits:
        finding.fault = f"{finding.misfits[0]}; strict=False loads the rest"
    if finding.fault is not None:
        raise ValueError(f"nothing was loaded: {finding.fault}")
    if finding.misfits and all(group.rank() == 0 for group in groups):
        first, *others = finding.misfits
        more = f" (and {len(others)} more like it)" if others else ""
        logger.warning("not all LoCo errors were loaded, and others start at 0: %s%s", first, more)
    if updates is None and finding.progress is None:
        return
    for reducer, update in zip(reducers, updates or map(_blank, reducers), strict=True):
        if finding.progress is not None:
            known = finding.progress[_clean(reducer.unit.name)]
            update.counters.reductions, update.counters.bypassed_reductions, update.bits = known
        _apply(reducer, update)


def _blank(reducer: Reducer) -> _UnitUpdate:
    return _UnitUpdate(Counters(), reducer.config.bits)


def _apply(reducer: Reducer, update: _UnitUpdate) -> None:
    reducer.counters = update.counters
    reducer.set_bits(update.bits)
    for hop in reducer.hops:
        hop.error.load(update.errors.get(hop.kind, {}))
        hop.nonfinite_blocks = update.nonfinite_blocks.get(hop.kind, 0)
    if reducer.guard is not None:
        reducer.guard.load(*(update.guard or (0, [])))


def _read(reducers: Sequence[Reducer], blob: Any, misfits: list[str]) -> list[_UnitUpdate]:
    """What the state of this rank gives each unit; why errors do not fit goes to `misfits`."""
    if not isinstance(blob, bytes):
        raise ValueError(f"{_key()!r} holds {type(blob).__name__}, not bytes")
    try:
        # weights_only: a checkpoint may come from anywhere, and must not run code.
        state = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"its {len(blob)} bytes are damaged ({error})") from error
    if state["format"] != _FORMAT:
        raise ValueError(
            f"format {state['format']} of loco-fsdp {state['loco_fsdp']}, this is "
            f"{__version__}, which reads format {_FORMAT}"
        )
    updates = [_unit_update(reducer, state["units"]) for reducer in reducers]
    if state["errors"] is None:
        misfits.append("the checkpoint was saved without errors")
    elif state["world_size"] != dist.get_world_size():
        misfits.append(
            f"saved by {state['world_size']} ranks, there are {dist.get_world_size()} now"
        )
    else:
        misfits.extend(_match_errors(reducers, updates, state["errors"]))
    return updates


def _unit_update(reducer: Reducer, units: dict[str, dict[str, Any]]) -> _UnitUpdate:
    saved = units.get(_clean(reducer.unit.name))
    if saved is None:
        # Wrapped in another way: as many reductions as the unit that held its first parameter.
        first = _clean(reducer.unit.parameter_names[0])
        holders = [unit for unit in units.values() if first in unit["parameters"]]
        update = _blank(reducer)
        for unit in holders[:1]:
            update.counters.reductions = unit["counters"]["reductions"]
            update.counters.bypassed_reductions = unit["counters"]["bypassed_reductions"]
        return update
    update = _UnitUpdate(
        Counters(**saved["counters"]),
        reducer.config.bits,
        nonfinite_blocks=saved["nonfinite_blocks"],
    )
    if reducer.guard is not None and saved["config"]["bits"] == reducer.config.bits:
        update.bits, update.guard = saved["bits"], saved["guard"]
    return update


def _match_errors(
    reducers: Sequence[Reducer],
    updates: list[_UnitUpdate],
    errors: list[SavedError],
) -> list[str]:
    """Put the errors that fit into `updates`; why the others do not, each reason once."""
    targets = {
        (hop.kind, _clean(name)): (reducer, update, hop, index)
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


def _progress(reducers: Sequence[Reducer], updates: list[_UnitUpdate]) -> Progress | None:
    progress = {
        _clean(reducer.unit.name): (
            update.counters.reductions,
            update.counters.bypassed_reductions,
            update.bits,
        )
        for reducer, update in zip(reducers, updates, strict=True)
    }
    if not any(reductions + bypassed for reductions, bypassed, _ in progress.values()):
        return None
    return progress


def _agreed(findings: list[_Finding]) -> _Finding:
    """What ranks conclude from what each of them found."""
    for finding in findings:
        if finding.fault is not None:
            return finding
    known = [finding.progress for finding in findings if finding.progress is not None]
    for other in known[1:]:
        for name, progress in known[0].items():
            if other[name] != progress:
                return _Finding(
                    fault=(
                        f"FSDP unit {name!r} has (reductions, bypassed reductions, bits) "
                        f"{progress} on one rank and {other[name]} on another: load states of the "
                        "same step"
                    )
                )
    misfits = [misfit for finding in findings for misfit in finding.misfits]
    return _Finding(known[0] if known else None, list(dict.fromkeys(misfits)))
