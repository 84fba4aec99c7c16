"""Where parameters can be gathered in low bits, and what is said where they cannot."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from loco_fsdp.reduction import collectives, exchange
from ranks import RankPool, heard, raised
from toy import cpu_mesh
from weights import SHAPES, Chain, Replicas, Shown, config, forward, sharded, train, whole

Ranks = Callable[[int], RankPool]


def refused(node_size: int, reshard: bool | int) -> str:
    """And nothing is attached: the same model takes another configuration."""
    model = Chain(1, **SHAPES)
    fully_shard(model, mesh=cpu_mesh(), reshard_after_forward=reshard)
    message = raised(attach, model, config(4, node_size))
    assert attach(model, config(8, node_size)).units[0].weight_bits == 8
    forward(model).backward()
    return message


REFUSED = [
    (1, True, "weight_bits=4: each node has one rank.*Use weight_bits=8, or None"),
    (3, True, "weight_bits=4: the shard group has 1 and 3 ranks.*Use weight_bits=8, or None"),
    (2, 2, "weight_bits=4: FSDP unit .* has reshard_after_forward=2.*leave it True"),
]


@pytest.mark.parametrize("node_size, reshard, message", REFUSED)
def test_differences_are_refused_with_a_remedy(
    ranks: Ranks, node_size: int, reshard: bool | int, message: str
) -> None:
    for found in ranks(4).run(refused, node_size, reshard):
        assert re.match(f"ValueError: .*{message}", found), found


def in_another_framework(framework: str) -> str:
    model: nn.Module = nn.Linear(8, 8)
    if framework == "DDP":
        return raised(attach, DistributedDataParallel(model), config(8))
    if framework == "FSDP1":
        wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        return raised(attach, wrapped, config(4))
    return raised(LoCoFSDP, model, config(4), mesh=cpu_mesh(2, 2))


@pytest.mark.parametrize("framework", ["DDP", "FSDP1", "2-D mesh"])
def test_other_frameworks_gather_themselves(ranks: Ranks, framework: str) -> None:
    for message in ranks(4).run(in_another_framework, framework):
        assert re.match(f"ValueError: .*weight_bits=[48]: .*{framework}.*it must be None", message)


def on_one_node() -> list[str]:
    model, loco = sharded(4, node_size=4)
    exact = Replicas(model)
    forward(model).backward()
    exact.check(backward=True)
    assert loco.stats()["weight_wire_bytes"] == 0
    (unit, _) = loco.units
    assert unit.weight_bits is None
    return list(unit.remarks)


def test_on_one_node_there_is_nothing_to_spare(ranks: Ranks) -> None:
    for remarks in ranks(4).run(on_one_node):
        assert remarks == ["parameters not in low bits: they do not leave the node"]


def native_hsdp() -> None:
    """Shards over ranks 0, 1 and 2, 3: with one rank a node each gather leaves it."""
    model = Chain(1, **SHAPES)
    fully_shard(model.units[0], mesh=cpu_mesh(2, 2))
    fully_shard(model, mesh=cpu_mesh(2, 2))
    loco = attach(model, config(8, node_size=1))
    before = whole(model.units[0].weight, torch.float32)
    forward(model).backward()
    seen = model.units[0].seen["weight"]
    assert torch.equal(seen, model.units[0].seen_in_backward["weight"])
    assert 0 < (seen - before).abs().max() < 0.02 * before.abs().max()
    assert loco.stats()["weight_inter_node_bytes"] > 0


def test_a_shard_group_may_be_a_part_of_the_ranks(ranks: Ranks) -> None:
    ranks(4).run(native_hsdp)


def selected() -> None:
    """Each unit as it is told to; what is left to FSDP2 is left wholly."""
    model = Chain(4, **SHAPES)
    for unit in model.units:
        fully_shard(unit, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    ways: dict[str, bool | LoCoConfig] = {
        "units.0": config(4),
        "units.1": config(8),
        "units.2": config(None),
        "units.3": False,
    }
    loco = attach(model, config(8), select=lambda name, module: ways[name])
    assert [unit.weight_bits for unit in loco.units] == [4, 8, None, None]
    exact = Replicas(model, torch.float32)
    forward(model)
    for number, is_exact in enumerate([True, False, True, True]):
        seen = model.units[number].seen["weight"]
        assert torch.equal(seen, exact.values[f"{number}.weight"]) == is_exact
    by_unit = loco.unit_stats()
    assert by_unit["units.0"]["weight_refreshes"] == 1
    assert by_unit["units.0"]["replica_bytes"] == 2 * 4 * 78
    assert by_unit["units.1"]["weight_relative_error"] > 0
    for name in ("units.2", "units.3"):
        assert by_unit[name]["weight_wire_bytes"] == 0
    total = loco.stats()["weight_wire_bytes"]
    assert total == sum(stats["weight_wire_bytes"] for stats in by_unit.values())


def test_units_may_differ(ranks: Ranks) -> None:
    ranks(4).run(selected)


def replaced() -> tuple[list[str], list[str]]:
    """A later all-gather of the user wins, and is still there after detach."""
    model, loco = sharded(4, number=1)
    fsdp: Any = model.units[0]
    calls = []

    class Counting:
        def __init__(self, stock: Any) -> None:
            self.stock = stock

        def allocate(self, *args: Any, **kwargs: Any) -> Any:
            return self.stock.allocate(*args, **kwargs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            calls.append(kwargs)
            return self.stock(*args, **kwargs)

    stock = fsdp._get_fsdp_state()._fsdp_param_group._all_gather_comm._stock
    fsdp.set_custom_all_gather(Counting(stock))
    warnings = heard(lambda: forward(model).backward())
    assert calls
    remarks = list(loco.units[0].remarks)
    loco.detach()
    number = len(calls)
    forward(model)
    assert len(calls) > number
    return remarks, warnings


def test_another_all_gather_of_the_user_wins(ranks: Ranks) -> None:
    remark = "parameters not in low bits: another all-gather was set after attaching"
    for rank, (remarks, warnings) in enumerate(ranks(4).run(replaced)):
        assert remark in remarks
        assert any(remark in warning for warning in warnings) == (rank == 0)


def nothing_left() -> None:
    model, loco = sharded(None)
    hooks = [len(unit._load_state_dict_post_hooks) for unit in model.units]
    loco.detach()
    loco = attach(model, config(4))
    groups = [module._get_fsdp_state() for module in model.modules() if isinstance(module, Shown)]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, optimizer)
    counted = {name: n for name, n in loco.stats().items() if name.startswith("weight")}
    loco.detach()
    for state in groups:
        (group,) = state._fsdp_param_groups
        assert type(group._all_gather_comm).__module__.startswith("torch.")
        assert "unshard" not in vars(group)
    assert [len(unit._load_state_dict_post_hooks) for unit in model.units] == hooks
    assert counted.items() <= loco.stats().items()
    assert counted["weight_refreshes"] == 2
    loco.refresh_weights()  # there is nothing to refresh


def test_detach_leaves_nothing(ranks: Ranks) -> None:
    ranks(4).run(nothing_left)


def as_float64() -> list[str]:
    model, loco = sharded(4, number=1, dtype=torch.float64)
    exact = Replicas(model, torch.float64)
    warnings = heard(lambda: forward(model).backward())
    exact.check(backward=True)
    assert loco.stats()["weight_wire_bytes"] == 0
    return warnings


def test_what_is_gathered_in_another_dtype_is_left_to_fsdp2(ranks: Ranks) -> None:
    for rank, warnings in enumerate(ranks(4).run(as_float64)):
        wanted = "parameters in full precision: they are gathered as torch.float64"
        assert any(wanted in warning for warning in warnings) == (rank == 0)


def reported() -> str:
    model, loco = sharded(4)
    forward(model)
    assert isinstance(model, FSDPModule)
    return loco.summary()


def test_the_summary_has_a_column_for_parameters(ranks: Ranks) -> None:
    for summary in ranks(4).run(reported):
        header, *rows = summary.splitlines()[1:3]
        assert "weight bits  replica bytes" in header
        assert rows[0].split()[:6] == ["units.0", "312", "8", "0", "4", "312"]


def called_on_nccl(weight_bits: int) -> list[str]:
    """The collectives of a forward where the backend is NCCL, run by gloo's."""
    calls: list[str] = []

    def all_gather(output: Tensor, given: Tensor, group: Any) -> None:
        calls.append(f"{given.dtype} {group.size()}")
        dist.all_gather(list(output.view(group.size(), -1).unbind(0)), given, group=group)

    class Coalescing(ExitStack):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            calls.append("coalescing")
            self.callback(calls.append, "coalesced")

    nccl = type("Backend", (), {"supports_coalescing": True, "name": lambda self: "nccl"})()
    model, _ = sharded(weight_bits, number=1)
    plain, _ = sharded(weight_bits, number=1)  # over gloo
    with ExitStack() as stack:
        for target, name, stand_in in (
            (exchange, "all_gather", all_gather),
            (collectives, "all_gather", all_gather),
            (collectives.dist, "_coalescing_manager", Coalescing),
            (collectives, "backend_of", lambda *_: nccl),
        ):
            stack.enter_context(patch.object(target, name, stand_in))
        forward(model)
    forward(plain)
    assert torch.equal(model.units[0].seen["weight"], plain.units[0].seen["weight"])
    return calls


@pytest.mark.parametrize(
    ("weight_bits", "calls"),
    [
        (8, ["torch.uint8 2", "torch.uint8 2"]),
        (4, ["torch.bfloat16 2", "coalescing", *["torch.bfloat16 2"] * 2, "coalesced"]),
    ],
)
def test_nccl_gathers_parameters_by_standard_collectives(
    ranks: Ranks, weight_bits: int, calls: list[str]
) -> None:
    assert ranks(4).run(called_on_nccl, weight_bits) == [calls] * 4
