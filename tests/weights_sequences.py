"""What ranks do in a sequence of anything that may change parameters, and what has to hold then.

After each forward each rank compares its own shard of what was seen with its parameters. With 4
bits these may be apart by half a step of the last difference, and by the rounding of the replica;
what no reduction has announced is seen as it is. With 8 bits the shard is quantized by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from definition import sent
from loco_fsdp import attach
from toy import cpu_mesh
from weights import BLOCK, Chain, Shown, config, forward, rows_are_their_owners, shards, swapped

Shards = dict[str, Tensor]

SHAPES = {"weight": (24, 12), "bias": (10,)}  # the last rank has less of a bias
UNITS = (0, 1)
ROUNDING = 2.0**-8  # of a number to bfloat16
MOST_LEFT_OUT = 2.0**-8  # by what an evaluation sees, in norm

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p, size: torch.optim.SGD(p, lr=size),
    "momentum": lambda p, size: torch.optim.SGD(p, lr=size / 2, momentum=0.75),
    "AdamW fused": lambda p, size: torch.optim.AdamW(p, lr=size / 2, fused=True),
    "AdamW foreach": lambda p, size: torch.optim.AdamW(p, lr=size / 2, foreach=True),
}
MODES: dict[str, Any] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@dataclass
class Microbatch:
    """A forward and its backward.

    sync: whether its backward reduces gradients
    paused: nothing, the "forward" or "both"
    between: how an evaluation looks at parameters before the backward, if one does
    after: how one does after it
    alike: whether the one between is paused as the forward is
    """

    sync: bool
    paused: str | None
    between: str | None
    after: str | None
    alike: bool = True


@dataclass
class Start:
    """What a sequence starts with.

    bits: of parameters
    size: of a step
    recomputes: whether there is activation checkpointing
    """

    bits: int
    optimizer: str
    size: float
    recomputes: bool


PLAIN = Microbatch(True, None, None, None)

held: dict[str, Any] = {}  # of this rank, from one call to the next


def call(function: Callable[..., None], *args: Any) -> list[str]:
    """What does not hold after `function`: ranks do not fail alone, others would wait for them."""
    held["wrong"] = []
    function(*args)
    loco = held["loco"]
    if loco.attached:
        expect(loco.stats()["stale_gathers"] == 0, "old parameters were counted")
    return held["wrong"]


def expect(holds: bool, message: str) -> None:
    if not holds:
        held["wrong"].append(message)


def start(options: Start) -> None:
    if "loco" in held and held["loco"].attached:
        held["loco"].detach()
    held.clear()
    held["wrong"] = []
    model = held["model"] = Chain(len(UNITS), **SHAPES)
    held["units"] = list(model.units)
    fsdp: dict[str, Any] = {
        "mesh": cpu_mesh(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for number, unit in enumerate(held["units"]):
        if options.recomputes:
            model.units[number] = checkpoint_wrapper(unit)
        fully_shard(model.units[number], **fsdp)
    fully_shard(model, **fsdp)
    held["optimizer"] = OPTIMIZERS[options.optimizer](model.parameters(), options.size)
    held["averages"] = [parameter.detach().clone() for parameter in model.parameters()]
    attach_anew(options.bits)


def attach_anew(bits: int) -> None:
    held["loco"] = attach(held["model"], config(bits))
    held["bits"] = bits
    held["told"] = set(UNITS)  # units whose parameters are sent whole next
    held["due"] = set()  # units that have reduced a gradient since they were gathered
    held["known"] = {}  # by unit: the parameters at its last gather, and what was seen of them
    held["restored"] = False  # loaded, and not gathered since


def detach() -> None:
    held["loco"].detach()


def own(number: int) -> Shards:
    """This rank's parameters as FSDP2 gathers them, flat."""
    return {
        name: parameter.detach().to_local().bfloat16().flatten()
        for name, parameter in held["units"][number].named_parameters()
    }


def compute(stock: bool = False) -> Tensor:
    """A forward of a training whose parameters are looked at."""
    loss = forward(held["model"])
    check_all(stock)
    return loss


def check_all(stock: bool = False, evaluates: bool = False) -> None:
    """What the last forward has computed with."""
    for number in UNITS:
        check(number, held["units"][number].seen, stock, evaluates)


def check(number: int, seen: Shards, stock: bool, evaluates: bool) -> None:
    """`seen` are the whole parameters that a unit was gathered to."""
    flat = torch.cat([value.float().flatten() for value in seen.values()])
    first = flat.clone()
    dist.broadcast(first, 0)
    expect(torch.equal(first, flat), f"{number}: ranks see different parameters")
    parameters = own(number)
    part = {name: shards(value)[dist.get_rank()].clone() for name, value in seen.items()}
    if stock or not held["loco"].attached:
        expect(equal(part, parameters), f"{number}: not what stock sees")
    elif held["bits"] == 8:
        wanted = {name: sent(value, 8, BLOCK).bfloat16() for name, value in parameters.items()}
        expect(equal(part, wanted), f"{number}: not in 8 bits")
    else:
        check_difference(number, part, parameters)
        if evaluates and number in held["due"]:
            expect(
                left_out(part, parameters) <= MOST_LEFT_OUT + ROUNDING,
                f"{number}: an evaluation {left_out(part, parameters):.3g} from the parameters",
            )
        held["known"][number] = parameters, part
        held["told"].discard(number)
        held["due"].discard(number)
        held["restored"] = False


def check_difference(number: int, part: Shards, parameters: Shards) -> None:
    if number not in held["known"] or number in held["told"]:
        expect(equal(part, parameters), f"{number}: not sent whole")
        return
    old, before = held["known"][number]
    if not equal(old, parameters) and number not in held["due"]:
        expect(equal(part, parameters), f"{number}: changed, and not sent whole")
        return
    if number not in held["due"] and not held["restored"]:
        expect(equal(part, before), f"{number}: nothing has changed, and it is not what it was")
    for name, value in parameters.items():
        missing = (value.float() - before[name].float()).abs()
        allowed = half_step(missing)
        if torch.equal(old[name], value):  # nothing new, and maybe nothing sent
            allowed = allowed.maximum(missing)
        allowed = 1.001 * allowed + ROUNDING * value.abs().maximum(part[name].abs()).float()
        apart = (part[name].float() - value.float()).abs()
        expect(
            bool((apart <= allowed).all()),
            f"{number}.{name}: {apart.norm():.3g} from the parameters, allowed {allowed.norm():.3g}"
            f", {missing.norm():.3g} if nothing was sent",
        )


def left_out(part: Shards, parameters: Shards) -> float:
    """What is missing of the parameters, in norm."""
    value = torch.cat(list(parameters.values())).float()
    return float((torch.cat(list(part.values())).float() - value).norm() / value.norm())


def equal(one: Shards, other: Shards) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


def half_step(difference: Tensor) -> Tensor:
    """How far 4 bits may be from each element: their largest code is 7."""
    padding = -difference.numel() % BLOCK
    blocks = torch.nn.functional.pad(difference, (0, padding)).view(-1, BLOCK)
    steps = blocks.amax(1, keepdim=True).expand_as(blocks) / 7
    return (steps / 2).flatten()[: difference.numel()]


def evaluate(mode: str, paused: bool) -> None:
    with MODES[mode](), held["loco"].paused() if paused else nullcontext():
        forward(held["model"])
    check_all(stock=paused, evaluates=True)
    if held["loco"].attached and held["bits"] == 4 and not paused:
        rows_are_their_owners(held["loco"])


def evaluate_averages(mode: str) -> None:
    with swapped(held["model"], held["averages"]):
        evaluate(mode, False)


def train(microbatches: list[Microbatch], zero: str, before_step: str | None) -> None:
    model, optimizer, units = held["model"], held["optimizer"], held["units"]
    if zero == "before the forward":
        optimizer.zero_grad()
    for number, microbatch in enumerate(microbatches):
        model.set_requires_gradient_sync(microbatch.sync)
        for unit in units:
            unit.seen_in_backward.clear()
        loco = held["loco"]
        with loco.paused() if microbatch.paused else nullcontext():
            loss = compute(stock=microbatch.paused is not None)
            seen = [dict(unit.seen) for unit in units]
        if microbatch.between:
            evaluate(microbatch.between, microbatch.alike and microbatch.paused is not None)
        if zero == "before the backward" and number == 0:
            optimizer.zero_grad()
        with loco.paused() if microbatch.paused == "both" else nullcontext():
            loss.backward()
        for index, unit in enumerate(units):
            for name, value in unit.seen_in_backward.items():
                same = torch.equal(value, seen[index][name])
                expect(same, f"{index}.{name}: a backward not as its forward")
            if microbatch.sync and any(p.requires_grad for p in unit.parameters()):
                held["due"].add(index)
        if microbatch.after:
            evaluate(microbatch.after, False)
    if before_step == "look":
        look()
    elif before_step is not None:
        evaluate_averages(before_step)
    optimizer.step()
    if zero in ("after the step", "to zeros"):
        optimizer.zero_grad(set_to_none=zero == "after the step")
    for average, parameter in zip(held["averages"], model.parameters(), strict=True):
        average.lerp_(parameter.detach(), 0.3)


def look() -> None:
    """Somebody gathers a unit by hand.

    Not one of which all is frozen: FSDP2 then forgets in which dtype it has to reduce gradients.
    """
    for number in UNITS:
        unit: Any = held["model"].units[number]
        shown: Shown = held["units"][number]
        if not any(parameter.requires_grad for parameter in shown.parameters()):
            continue
        unit.unshard()
        seen = {name: value.detach().clone() for name, value in shown.named_parameters()}
        unit.reshard()
        check(number, seen, stock=False, evaluates=False)


def drop_a_forward() -> None:
    """One whose loss nobody uses."""
    held["model"].set_requires_gradient_sync(True)
    compute()


def tell() -> None:
    """Parameters are sent whole, but for those that a saved replica knows."""
    if not held["restored"]:
        held["told"] = set(UNITS)


def edit() -> None:
    with torch.no_grad():
        for parameter in held["model"].parameters():
            parameter.mul_(-0.5)
    held["loco"].refresh_weights()
    tell()


def freeze(number: int, name: str | None, frozen: bool) -> None:
    unit = held["units"][number]
    (unit if name is None else getattr(unit, name)).requires_grad_(not frozen)


def save() -> None:
    state = {name: value.clone() for name, value in held["model"].state_dict().items()}
    found = {key: held[key] for key in ("bits", "restored")}
    found |= {key: held[key].copy() for key in ("told", "due", "known")}
    held["saved"] = held["loco"].state_dict(), state, found


def load_model() -> None:
    held["model"].load_state_dict(held["saved"][1])
    tell()


def load_loco() -> None:
    state, _, found = held["saved"]
    held["loco"].load_state_dict(state)
    if found["bits"] == 4 and found["known"]:
        held.update({key: found[key].copy() for key in ("told", "due", "known")}, restored=True)
    else:
        held.update(told=set(UNITS), restored=False)


def load(order: str, between: str | None, zero: bool) -> None:
    loads = [load_model, load_loco] if order == "model first" else [load_loco, load_model]
    if zero:
        held["optimizer"].zero_grad()
    loads[0]()
    if between is not None:
        evaluate(between, False)
    loads[1]()
