"""Parameters as differences: each step is sent once, whoever takes it and whoever looks between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from loco_fsdp import attach
from ranks import RankPool
from toy import cpu_mesh
from weights import (
    DIFFERENCE,
    SHAPES,
    WHOLE,
    Chain,
    Replicas,
    config,
    forward,
    sent_across,
    sgd,
    sharded,
    train,
)

Ranks = Callable[[int], RankPool]

# --- who takes steps -------------------------------------------------------------------------


def in_backward(model: Chain) -> None:
    """Each parameter takes its step as soon as it has a gradient."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=1e-3)

        def step(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


OPTIMIZERS: dict[str, Any] = {
    "for loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def optimized(name: str) -> None:
    """Some optimizers leave the version counters of parameters alone."""
    model, loco = sharded(4)
    expected = Replicas(model)
    if name == "in backward":
        in_backward(model)
    else:
        optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(4):
        if step:
            expected.send_differences()
        forward(model).backward()
        expected.check()
        expected.check(backward=True)
        if name != "in backward":
            optimizer.step()
            optimizer.zero_grad()
    expected.differ_from_parameters()
    assert loco.stats()["stale_gathers"] == 0


@pytest.mark.parametrize("name", [*OPTIMIZERS, "in backward"])
def test_every_step_is_seen(ranks: Ranks, name: str) -> None:
    ranks(4).run(optimized, name)


# --- when it is sent -------------------------------------------------------------------------


def accumulated(sync: bool, zero_first: bool) -> list[float]:
    """Three microbatches a step; gradients are zeroed after it, or before the next backward."""
    model, loco = sharded(4, number=1)
    optimizer = sgd(model)
    expected = Replicas(model)
    found = []
    for step in range(3):
        for microbatch in range(3):
            model.set_requires_gradient_sync(sync or microbatch == 2)
            if (step and (microbatch == 0 or sync)) or (sync and microbatch):
                expected.send_differences()
            loss = forward(model)
            expected.check()
            if zero_first and microbatch == 0:
                optimizer.zero_grad()
            loss.backward()
            expected.check(backward=True)
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        found.append(sent_across(loco))
    assert loco.stats()["stale_gathers"] == 0
    return found


@pytest.mark.parametrize("zero_first", [False, True])
def test_accumulation_sends_once_a_step(ranks: Ranks, zero_first: bool) -> None:
    for found in ranks(4).run(accumulated, False, zero_first):
        assert found == [WHOLE, WHOLE + DIFFERENCE, WHOLE + 2 * DIFFERENCE]


def test_accumulation_of_reduced_gradients(ranks: Ranks) -> None:
    """Each reduction may be followed by a step, for all that is known."""
    for found in ranks(4).run(accumulated, True, False):
        assert found == [WHOLE + n * DIFFERENCE for n in (2, 5, 8)]


def evaluated(mode: Any, when: str) -> None:
    """After an evaluation FSDP2 gathers a unit again after its backward, and before the step."""
    model, loco = sharded(4, number=3)
    optimizer = sgd(model)
    expected = Replicas(model)
    forward(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(3):
        expected.send_differences()
        if when == "before the forward":
            evaluate(model, mode, expected)
        loss = forward(model)
        expected.check()
        if when == "before the backward":
            evaluate(model, mode, expected)
        loss.backward()
        expected.check(backward=True)
        if when == "before the step":
            expected.send_differences()  # of nothing but what was left out
            evaluate(model, mode, expected)
            optimizer.step()
            expected.send_whole()  # what announced the step is gone: ranks looked, and saw it
            optimizer.zero_grad()
            forward(model).backward()
            expected.check()
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
        expected.differ_from_parameters()
    assert loco.stats()["stale_gathers"] == 0


def evaluate(model: Chain, mode: Any, expected: Replicas) -> None:
    with mode():
        for _ in range(2):
            forward(model)
            expected.check()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("when", ["before the forward", "before the backward", "before the step"])
def test_evaluations_change_nothing(ranks: Ranks, mode: Any, when: str) -> None:
    """The first gather after a step sends the difference, whoever it is for."""
    ranks(4).run(evaluated, mode, when)


def trained(evaluates: bool) -> list[Tensor]:
    model, _ = sharded(4, number=3)
    optimizer = sgd(model)
    for _ in range(4):
        if evaluates:
            with torch.no_grad():
                forward(model)
        train(model, optimizer)
    return [parameter.detach().to_local().clone() for parameter in model.parameters()]


def test_a_training_goes_on_as_without_evaluations(ranks: Ranks) -> None:
    with_them, without = (ranks(4).run(trained, evaluates) for evaluates in (True, False))
    for one, other in zip(with_them, without, strict=True):
        assert all(map(torch.equal, one, other))


def unsharded_between() -> None:
    """Somebody looks at parameters between backward and step."""
    model, loco = sharded(4)
    optimizer = sgd(model)
    expected = Replicas(model)
    for _ in range(3):
        forward(model).backward()
        expected.check(backward=True)
        for unit in model.units:
            unit.unshard()
            unit.reshard()
        optimizer.step()
        optimizer.zero_grad()
        expected.send_whole()
    assert loco.stats()["stale_gathers"] == 0


def test_parameters_may_be_unsharded_before_the_step(ranks: Ranks) -> None:
    ranks(4).run(unsharded_between)


def recomputed(prefetch: int, wrapped_first: bool) -> None:
    """Activation checkpointing calls the forward again, inside of the backward."""
    model = Chain(3, **SHAPES)
    fsdp: dict[str, Any] = {
        "mesh": cpu_mesh(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    units = list(model.units)
    for number, unit in enumerate(units):
        if wrapped_first:
            fully_shard(unit, **fsdp)
            model.units[number] = checkpoint_wrapper(unit)
        else:
            model.units[number] = checkpoint_wrapper(unit)
            fully_shard(model.units[number], **fsdp)
    fully_shard(model, **fsdp)
    loco = attach(model, config(4))
    fsdp_units = [module for module in model.modules() if isinstance(module, FSDPModule)][1:]
    for first, second in zip(fsdp_units, fsdp_units[prefetch:], strict=False):
        if prefetch:
            first.set_modules_to_forward_prefetch([second])
            second.set_modules_to_backward_prefetch([first])
    shown = type("Units", (), {"units": units})()  # without the wrappers
    expected = Replicas(shown)
    optimizer = sgd(model)
    for step in range(4):
        if step:
            expected.send_differences()
        forward(model).backward()
        expected.check()
        expected.check(backward=True)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            expected.send_differences()
            with torch.no_grad():
                forward(model)
            expected.check()
            forward(model).backward()  # gradients that nobody uses
            optimizer.zero_grad()
    expected.differ_from_parameters()
    assert loco.stats()["weight_refreshes"] == 3
    assert loco.stats()["stale_gathers"] == 0


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_activation_checkpointing_and_prefetching(
    ranks: Ranks, prefetch: int, wrapped_first: bool
) -> None:
    ranks(4).run(recomputed, prefetch, wrapped_first)


def resharded(reshard: bool, async_op: bool) -> None:
    model, _ = sharded(4, reshard_after_forward=reshard)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(async_op)
    optimizer = sgd(model)
    expected = Replicas(model)
    for step in range(3):
        if step:
            expected.send_differences()
        forward(model).backward()
        expected.check()
        expected.check(backward=True)
        optimizer.step()
        optimizer.zero_grad()
    expected.differ_from_parameters()


@pytest.mark.parametrize("reshard, async_op", [(False, False), (True, True)])
def test_parameters_may_stay_gathered(ranks: Ranks, reshard: bool, async_op: bool) -> None:
    ranks(4).run(resharded, reshard, async_op)
