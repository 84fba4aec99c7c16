"""Parameters in 8 bits: what every rank computes with, and what is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from definition import sent
from loco_fsdp import LoCoConfig, LoCoFSDP
from ranks import RankPool
from toy import cpu_mesh
from weights import BLOCK, Chain, forward, sharded, shards, train, whole

Ranks = Callable[[int], RankPool]


def in_8_bits(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Each rank's shard, quantized by itself."""
    full = whole(parameter, dtype)
    parts = [sent(part, 8, BLOCK) for part in shards(full) if part.numel()]
    return torch.cat(parts).to(dtype).view(full.shape)


def all_in_8_bits(model: Chain, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """Of each unit, by name."""
    for unit in model.units:
        assert not torch.equal(in_8_bits(unit.weight, dtype), whole(unit.weight, dtype))
    return [
        {name: in_8_bits(parameter, dtype) for name, parameter in unit.named_parameters()}
        for unit in model.units
    ]


def check(model: Chain, expected: list[dict[str, Any]], *, backward: bool = False) -> None:
    for unit, values in zip(model.units, expected, strict=True):
        for name, value in values.items():
            assert torch.equal(unit.seen[name], value), name
            if backward:
                assert torch.equal(unit.seen_in_backward[name], value), name


def steps(node_size: int, dtype: torch.dtype, shapes: dict[str, tuple[int, ...]], fsdp: Any) -> Any:
    model, loco = sharded(8, dtype=dtype, node_size=node_size, shapes=shapes, **fsdp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        expected = all_in_8_bits(model, dtype)
        forward(model).backward()
        check(model, expected, backward=True)
        optimizer.step()
        optimizer.zero_grad()
    return loco.stats()


EVEN = {"weight": (24, 12), "bias": (24,)}
UNEVEN = {"weight": (7, 12), "bias": (3,), "last": (13,)}  # the last ranks have less, or nothing


@pytest.mark.parametrize("world_size, node_size", [(4, 4), (4, 1), (4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("shapes", [EVEN, UNEVEN], ids=["even", "uneven"])
def test_all_compute_with_each_shard_in_8_bits(
    ranks: Ranks, world_size: int, node_size: int, shapes: dict[str, tuple[int, ...]]
) -> None:
    ranks(world_size).run(steps, node_size, torch.bfloat16, shapes, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_parameters_may_be_gathered_in_any_dtype(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks(4).run(steps, 2, dtype, UNEVEN, {})


@pytest.mark.parametrize("reshard", [False, 2])
@pytest.mark.parametrize("node_size", [1, 2])
def test_backward_computes_with_what_forward_did(
    ranks: Ranks, reshard: bool | int, node_size: int
) -> None:
    """With a number FSDP2 gathers again over another group: what is there is quantized already."""
    ranks(4).run(steps, node_size, torch.bfloat16, UNEVEN, {"reshard_after_forward": reshard})


def counted(node_size: int, reshard: bool | int) -> dict[str, float]:
    model, loco = sharded(8, number=1, node_size=node_size, reshard_after_forward=reshard)
    forward(model).backward()
    return loco.stats()


def test_bytes_are_counted(ranks: Ranks) -> None:
    """A shard has 72 + 6 elements in 3 + 1 blocks of 32: 128 bytes of codes and 16 of scales.

    Two hops on 2 x 2: one row to the other node, and two to the other rank of the node. Twice,
    unless the backward gathers over the node alone, which FSDP2 does. With one rank a node all
    three rows leave it; on one node none does.
    """
    row = 144
    for stats in ranks(4).run(counted, 2, True):
        assert stats["weight_wire_bytes"] == 2 * (row + 2 * row)
        assert stats["weight_inter_node_bytes"] == 2 * row
    for stats in ranks(4).run(counted, 2, 2):
        assert stats["weight_inter_node_bytes"] == row
    for stats in ranks(4).run(counted, 1, True):
        assert stats["weight_wire_bytes"] == stats["weight_inter_node_bytes"] == 2 * 3 * row
    for stats in ranks(4).run(counted, 4, True):
        assert stats["weight_wire_bytes"] == 2 * 3 * row
        assert stats["weight_inter_node_bytes"] == 0


def measured() -> tuple[float, float]:
    model, loco = sharded(8, number=1, dtype=torch.float32)
    with torch.no_grad():
        forward(model)
    unsent, norm = torch.zeros(()), torch.zeros(())
    for parameter in model.units[0].parameters():
        part = parameter.detach().to_local().flatten()
        unsent += (part - sent(part, 8, BLOCK)).square().sum()
        norm += part.square().sum()
    return loco.stats()["weight_relative_error"], (unsent / norm).sqrt().item()


def test_what_is_left_out_is_measured(ranks: Ranks) -> None:
    for actual, expected in ranks(4).run(measured):
        assert actual == pytest.approx(expected, rel=1e-4)
        assert expected > 1e-3


def not_finite() -> None:
    model, _ = sharded(8, number=1)
    weight = model.units[0].weight
    local = weight.detach().to_local()
    if dist.get_rank() == 1:
        local[0, 3] = torch.inf
    with torch.no_grad():
        forward(model)
    seen = model.units[0].seen["weight"].chunk(4)
    assert [part.isfinite().all().item() for part in seen] == [True, False, True, True]
    # Its block alone: the first 32 elements of the shard of rank 1.
    assert seen[1].flatten()[:32].isnan().all() and seen[1].flatten()[32:].isfinite().all()


def test_a_block_that_is_not_finite_is_seen(ranks: Ranks) -> None:
    ranks(4).run(not_finite)


def paused_and_detached() -> None:
    model, loco = sharded(8, node_size=2)
    stock = [
        {name: whole(p, torch.bfloat16) for name, p in unit.named_parameters()}
        for unit in model.units
    ]
    with loco.paused():
        loss = forward(model)
    loss.backward()
    check(model, stock, backward=True)
    expected = all_in_8_bits(model)
    forward(model).backward()
    check(model, expected, backward=True)
    loco.detach()
    forward(model).backward()
    check(model, stock, backward=True)


def test_paused_and_detached_parameters_are_those_of_stock(ranks: Ranks) -> None:
    """The forward decides: its backward computes with the same parameters."""
    ranks(4).run(paused_and_detached)


def evaluated(mode: Any) -> None:
    model, _ = sharded(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)  # what FSDP2 makes in inference mode it cannot train with
    for _ in range(2):
        with mode():
            forward(model)
        check(model, all_in_8_bits(model))
        train(model, optimizer)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_sees_the_same(ranks: Ranks, mode: Any) -> None:
    ranks(4).run(evaluated, mode)


def with_async_unshard() -> None:
    model, _ = sharded(8)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)
    expected = all_in_8_bits(model)
    forward(model).backward()
    check(model, expected, backward=True)


def test_asynchronous_gathers(ranks: Ranks) -> None:
    ranks(4).run(with_async_unshard)


def wrapped() -> None:
    model = LoCoFSDP(
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
        LoCoConfig(weight_bits=8, block_size=BLOCK, node_size=2),
        mesh=cpu_mesh(),
        wrap=nn.Linear,
    )
    seen: list[torch.Tensor] = []
    model[1].register_forward_pre_hook(
        lambda module, _: seen.append(module.weight.detach().clone())
    )
    model(torch.ones(2, 16)).sum().backward()
    assert torch.equal(seen[0], in_8_bits(model[1].weight, torch.float32))
    assert [unit.weight_bits for unit in model.loco.units] == [8, 8]
    assert "weight bits" in model.loco.summary()


def test_loco_fsdp_takes_it(ranks: Ranks) -> None:
    ranks(4).run(wrapped)
