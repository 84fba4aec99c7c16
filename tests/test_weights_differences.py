"""Parameters as differences: replicas that all ranks keep alike, whoever takes the steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from definition import sent
from loco_fsdp import LoCo, LoCoConfig, LoCoFSDP, attach
from ranks import RankPool
from toy import cpu_mesh
from weights import (
    BLOCK,
    Chain,
    Replicas,
    Shown,
    config,
    forward,
    rows_are_their_owners,
    sharded,
    train,
)

Ranks = Callable[[int], RankPool]


def sgd(model: Chain) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def sent_across(loco: LoCo) -> float:
    """Bytes of parameters to other nodes so far."""
    return loco.stats()["weight_inter_node_bytes"]


# Of a unit of 24 x 12 and 24 on 4 ranks: 72 + 6 elements a rank, 3 + 1 blocks of 32. In 4 bits with
# room for one block more 80 bytes of codes and 20 of scales, in multiples of 16; whole 2 each.
DIFFERENCE, WHOLE = 80 + 32, 2 * 78


# --- the loop --------------------------------------------------------------------------------


def loop(dtype: torch.dtype, shapes: dict[str, tuple[int, ...]], steps: int) -> None:
    model, loco = sharded(4, dtype=dtype, shapes=shapes)
    optimizer = sgd(model)
    expected = Replicas(model, dtype)
    for step in range(steps):
        if step:
            expected.send_differences()
        forward(model).backward()
        expected.check()
        expected.check(backward=True)
        optimizer.step()
        optimizer.zero_grad()
        loco.stats()
    expected.differ_from_parameters()
    with torch.no_grad():
        forward(model)
    rows_are_their_owners(loco)
    assert loco.stats()["weight_refreshes"] == len(model.units)
    assert loco.stats()["stale_gathers"] == 0


EVEN = {"weight": (24, 12), "bias": (24,)}
UNEVEN = {"weight": (7, 12), "bias": (3,), "last": (13,)}


@pytest.mark.parametrize("world_size", [4, 6])
def test_after_20_steps_each_row_is_its_owners(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(loop, torch.bfloat16, EVEN, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_replicas_have_the_dtype_of_the_gather(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(4).run(loop, dtype, UNEVEN, 3)


def counted() -> list[float]:
    model, loco = sharded(4, number=1)
    optimizer = sgd(model)
    found = []
    for _ in range(3):
        train(model, optimizer)
        found.append(sent_across(loco))
    inside = loco.stats()["weight_wire_bytes"] - sent_across(loco)
    memory = loco.stats()["replica_bytes"]
    assert loco.units[0].replica_bytes == memory
    return [*found, inside, memory]


def test_bytes_are_counted(ranks: Ranks) -> None:
    """Whole, then a difference a step; two gathers of two rows to the node's other rank each."""
    for *across, inside, memory in ranks(4).run(counted):
        assert across == [WHOLE, WHOLE + DIFFERENCE, WHOLE + 2 * DIFFERENCE]
        assert inside == 3 * 2 * 2 * WHOLE
        assert memory == 2 * WHOLE


def measured() -> tuple[float, float]:
    model, loco = sharded(4, number=1, dtype=torch.float32)
    before = [parameter.detach().to_local().flatten().clone() for parameter in model.parameters()]
    train(model, sgd(model))
    forward(model)
    unsent, norm = torch.zeros(()), torch.zeros(())
    for old, parameter in zip(before, model.parameters(), strict=True):
        new = parameter.detach().to_local().flatten()
        unsent += (new - old - sent(new - old, 4, BLOCK)).square().sum()
        norm += new.square().sum()
    return loco.stats()["weight_relative_error"], (unsent / norm).sqrt().item()


def test_what_is_left_out_is_measured(ranks: Ranks) -> None:
    for actual, expected in ranks(4).run(measured):
        assert actual == pytest.approx(expected, rel=1e-3)
        assert expected > 1e-6


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
    model = Chain(3, **EVEN)
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


# --- frozen parameters -----------------------------------------------------------------------


def frozen() -> list[float]:
    model, loco = sharded(4)
    optimizer = sgd(model)
    expected = Replicas(model)
    sent = []
    model.units[0].requires_grad_(False)
    for step in range(2):  # one unit is frozen: after its first gather nothing is sent of it
        if step:
            expected.send_differences([1])
        train(model, optimizer)
        expected.check()
        sent.append(sent_across(loco))
    model.units[1].weight.requires_grad_(False)  # which has taken a step that nobody has seen yet
    expected.send_differences([1])
    train(model, optimizer)
    expected.check()
    sent.append(sent_across(loco))
    before = dict(expected.values)
    expected.send_differences([1])  # of the bias alone
    expected.values["1.weight"] = before["1.weight"]
    train(model, optimizer)
    expected.check()
    sent.append(sent_across(loco))
    return sent


def test_frozen_parameters_are_not_sent(ranks: Ranks) -> None:
    """A bias has 6 elements a rank, in one block; with room for one more 32 bytes and 8."""
    for found in ranks(4).run(frozen):
        first = 2 * WHOLE
        assert found[0] == first
        assert found[1] == first + DIFFERENCE
        assert found[2] == first + 2 * DIFFERENCE
        assert found[3] == first + 2 * DIFFERENCE + 32 + 16


# --- in other hands --------------------------------------------------------------------------


def switched() -> None:
    """Paused, parameters are those of stock; detached and attached again, they start anew."""
    model, loco = sharded(4)
    optimizer = sgd(model)
    expected, stock = Replicas(model), Replicas(model)
    train(model, optimizer)
    stock.send_whole()
    with loco.paused():
        loss = forward(model)
    stock.check()
    loss.backward()  # as its forward
    stock.check(backward=True)
    optimizer.step()
    optimizer.zero_grad()
    expected.send_differences()  # of both steps
    with loco.paused():
        pass
    train(model, optimizer)
    expected.check()
    expected.check(backward=True)
    loco.detach()
    stock.send_whole()
    train(model, optimizer)
    stock.check()
    loco = attach(model, config(4))
    expected.send_whole()
    train(model, optimizer)
    expected.check()
    expected.send_differences()
    forward(model)
    expected.check()


def test_pausing_detaching_and_attaching(ranks: Ranks) -> None:
    ranks(4).run(switched)


def wrapped() -> None:
    model = Chain(2, **EVEN)
    LoCoFSDP(
        model,
        LoCoConfig(weight_bits=4, block_size=BLOCK, node_size=2),
        mesh=cpu_mesh(),
        wrap=Shown,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    expected = Replicas(model)
    optimizer = sgd(model)
    train(model, optimizer)
    expected.check()
    expected.send_differences()
    train(model, optimizer)
    expected.check()
    assert [unit.weight_bits for unit in model.loco.units] == [4, 4]
    assert f"{2 * WHOLE}" in model.loco.summary()


def test_loco_fsdp_takes_it(ranks: Ranks) -> None:
    ranks(4).run(wrapped)
