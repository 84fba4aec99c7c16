"""Parameters as differences: replicas that all ranks keep alike, whoever takes the steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from definition import sent
from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from ranks import RankPool
from toy import cpu_mesh
from weights import (
    BLOCK,
    DIFFERENCE,
    SHAPES,
    WHOLE,
    Chain,
    Replicas,
    Shown,
    config,
    forward,
    rows_are_their_owners,
    sent_across,
    sgd,
    sharded,
    train,
)

Ranks = Callable[[int], RankPool]


# --- the loop --------------------------------------------------------------------------------


def loop(
    dtype: torch.dtype, shapes: dict[str, tuple[int, ...]], steps: int, backend: str = "auto"
) -> None:
    model, loco = sharded(4, dtype=dtype, shapes=shapes, options={"backend": backend})
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


UNEVEN = {"weight": (7, 12), "bias": (3,), "last": (13,)}


@pytest.mark.parametrize("world_size", [4, 6])
def test_after_20_steps_each_row_is_its_owners(ranks: Ranks, world_size: int) -> None:
    ranks(world_size).run(loop, torch.bfloat16, SHAPES, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_replicas_have_the_dtype_of_the_gather(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(4).run(loop, dtype, UNEVEN, 3)


@pytest.mark.parametrize("backend", ["eager", "triton"])
def test_every_backend_keeps_the_same_replicas(ranks: Ranks, backend: str) -> None:
    ranks(4).run(loop, torch.bfloat16, UNEVEN, 3, backend)


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
    model = Chain(2, **SHAPES)
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
