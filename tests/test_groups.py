"""Groups of hierarchical reductions: how many there are, who makes them, and that none is left."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from loco_fsdp import LoCoConfig, attach
from loco_fsdp.reduction import collectives, exchange
from ranks import RankPool, rank_pools
from toy import Given, Net, backward, batch, cpu_mesh, reduced, shard

Ranks = Callable[[int], RankPool]

TWO_NODES = {"topology": "hierarchical", "node_size": 2, "block_size": 32}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Ranks of this file's own: those of all tests still have groups of reductions that none
    detached, and would share them here."""
    with rank_pools() as pools:
        yield pools


def live_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def handles() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def in_turns(turns: int) -> list[Any]:
    model = fully_shard(Given(a=(64,)), mesh=cpu_mesh())
    values, groups, used = [], [live_groups()], []
    for _ in range(turns):
        loco = attach(model, LoCoConfig(**TWO_NODES))
        model.zero_grad()
        backward(model, a=torch.full((64,), 7.0 * (dist.get_rank() + 1)))
        values.append(reduced(model.a).unique().item())
        groups.append(live_groups())
        loco.detach()
        groups.append(live_groups())
        used.append(handles())
    return [set(values), [count - groups[0] for count in groups], used]


def test_phases_of_a_training_leave_no_group_behind(ranks: Ranks) -> None:
    """Each turn left two groups, ten file descriptors and six threads."""
    for values, groups, used in ranks(4).run(in_turns, 20):
        assert values == {17.5}
        assert groups == [0] + [2, 0] * 20
        assert used[-1] == used[1]  # the first turn may open what stays


def shared() -> list[int]:
    """Six configurations in one model, and a second model with the same ranks."""
    before = live_groups()
    models = [nn.ModuleList(fully_shard(Given(a=(64,)), mesh=cpu_mesh()) for _ in range(6))]
    models.append(fully_shard(Given(a=(64,)), mesh=cpu_mesh()))
    locos = [
        attach(
            models[0],
            select=lambda name, _: LoCoConfig(**{**TWO_NODES, "reset_interval": 2 + int(name)}),
        ),
        attach(models[1], LoCoConfig(**TWO_NODES)),
    ]
    counts = [live_groups() - before]
    locos[0].detach()
    counts.append(live_groups() - before)
    backward(models[1], a=torch.ones(64))  # its groups are still there
    locos[1].detach()
    return [*counts, live_groups() - before]


def test_configurations_and_models_share_groups(ranks: Ranks) -> None:
    assert ranks(4).run(shared) == [[2, 2, 0]] * 4


def needs_none() -> list[int]:
    """Shard groups that are nodes, or that have one rank on each: flat, without groups."""
    counts = []
    for mesh, node_size in ((cpu_mesh(2, 2), 2), (cpu_mesh(), 4), (cpu_mesh(), 1)):
        base = live_groups()
        model = fully_shard(Given(a=(64,)), mesh=mesh)
        loco = attach(model, LoCoConfig(topology="hierarchical", node_size=node_size))
        counts.append(live_groups() - base)
        loco.detach()
    return counts


def test_one_node_and_one_rank_per_node_need_no_groups(ranks: Ranks) -> None:
    assert ranks(4).run(needs_none) == [[0, 0, 0]] * 4


def one_rank_detaches_less_often() -> list[float]:
    """Rank 0 has kept a LoCo that the others let go of: they have no groups, and it does."""
    models = [fully_shard(Given(a=(64,)), mesh=cpu_mesh()) for _ in range(3)]
    first = attach(models[0], LoCoConfig(**TWO_NODES))
    if dist.get_rank() > 0:
        first.detach()
    loco = attach(models[1], LoCoConfig(**TWO_NODES))
    backward(models[1], a=torch.full((64,), 7.0 * (dist.get_rank() + 1)))
    loco.detach()
    if dist.get_rank() == 0:
        first.detach()
    loco = attach(models[2], LoCoConfig(**TWO_NODES))
    backward(models[2], a=torch.full((64,), 7.0 * (dist.get_rank() + 1)))
    loco.detach()
    return [reduced(model.a).unique().item() for model in models[1:]]


def test_ranks_that_have_detached_differently_do_not_hang(ranks: Ranks) -> None:
    assert ranks(4).run(one_rank_detaches_less_often) == [[17.5, 17.5]] * 4


def world_made_anew(path: str) -> list[float]:
    """The default group is destroyed while LoCo is attached, and made again."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values, old = [], None
    for life in range(3):
        model = fully_shard(Given(a=(64,)), mesh=cpu_mesh())
        loco = attach(model, LoCoConfig(**TWO_NODES))
        if old is not None:
            old.detach()
        backward(model, a=torch.full((64,), 7.0 * (rank + 1)))
        values.append(reduced(model.a).unique().item())
        old = loco
        dist.destroy_process_group()
        store = dist.FileStore(f"{path}/{life}", world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
    return values


def test_groups_die_with_the_default_group() -> None:
    pool = RankPool(4)
    with tempfile.TemporaryDirectory() as path:
        assert pool.run(world_made_anew, path) == [[17.5] * 3] * 4
    pool.stop()


# --- what is called ----------------------------------------------------------------------------


def made(bound: bool) -> list[Any]:
    """Calls that make groups; ranks 0 and 1 have made some of their own before."""
    if dist.get_rank() < 2:
        for _ in range(1 + dist.get_rank()):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
    calls: list[Any] = []
    new_group = dist.new_group

    def record_new(ranks: list[int], **kwargs: Any) -> dist.ProcessGroup:
        calls.append(("new_group", ranks))
        return new_group(ranks, **kwargs)

    def record_split(
        parent: dist.ProcessGroup, split_ranks: list[list[int]], **kwargs: Any
    ) -> dist.ProcessGroup:
        calls.append(("split_group", dist.get_process_group_ranks(parent), split_ranks))
        members = dist.get_process_group_ranks(parent)
        (mine,) = ([members[r] for r in part] for part in split_ranks if parent.rank() in part)
        return new_group(mine, use_local_synchronization=True)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "new_group", record_new))
        stack.enter_context(patch.object(dist, "split_group", record_split))
        if bound:
            stack.enter_context(patch.object(collectives, "_is_split", lambda _: True))
        mesh = cpu_mesh()
        model = fully_shard(Given(a=(64,)), mesh=mesh)
        calls.clear()
        loco = attach(model, LoCoConfig(**TWO_NODES))
        backward(model, a=torch.full((64,), 7.0))
    loco.detach()
    return [calls, reduced(model.a).unique().item()]


def test_each_rank_makes_its_two_groups_whatever_groups_it_has(ranks: Ranks) -> None:
    """One made up for the other's groups with dummies: [2, 2, 3, 3] calls, a hang on NCCL."""
    for rank, (calls, value) in enumerate(ranks(4).run(made, False)):
        inside, between = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert calls == [("new_group", inside), ("new_group", between)]
        assert value == 7.0


def test_all_ranks_of_the_parent_split_it_where_devices_are_bound(ranks: Ranks) -> None:
    for calls, value in ranks(4).run(made, True):
        assert calls == [
            ("split_group", [0, 1, 2, 3], [[0, 1], [2, 3]]),
            ("split_group", [0, 1, 2, 3], [[0, 2], [1, 3]]),
        ]
        assert value == 7.0


class Backend:
    """What a group's backend says of itself; NCCL can all of it."""

    supports_coalescing = supports_splitting = True

    def name(self) -> str:
        return "nccl"


@pytest.mark.parametrize(("bound", "splits"), [(None, False), ("cpu", True)])
def test_a_parent_is_split_only_where_torch_says_so(bound: str | None, splits: bool) -> None:
    world = type("World", (), {"bound_device_id": bound and torch.device(bound)})
    with (
        patch.object(collectives, "backend_of", lambda *_: Backend()),
        patch.object(collectives.dist, "group", type("group", (), {"WORLD": world})),
    ):
        assert collectives._is_split(None) is splits  # type: ignore[arg-type]


def called_on_nccl(way: str) -> list[str]:
    """The collectives of one reduction where the backend is NCCL, by name, run by gloo's."""
    calls: list[str] = []

    def all_to_all_single(output: Tensor, given: Tensor, *args: Any) -> None:
        assert args == (None, None, args[2])
        calls.append(f"all_to_all_single {given.dtype} {args[2].size()}")
        plain(output, given, group=args[2])

    plain = dist.all_to_all_single

    def all_gather(output: Tensor, given: Tensor, group: Any) -> None:
        calls.append(f"all_gather {given.dtype} {group.size()}")
        dist.all_gather(list(output.view(group.size(), -1).unbind(0)), given, group=group)

    def reduce_scatter(output: Tensor, given: Tensor, group: Any, op: Any) -> None:
        assert op == dist.ReduceOp.SUM
        calls.append(f"reduce_scatter {given.dtype} {group.size()}")
        total = given.clone()
        dist.all_reduce(total, group=group)
        output.copy_(total.view(group.size(), -1)[group.rank()].view_as(output))

    class Coalescing(ExitStack):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            calls.append("coalescing")
            self.callback(calls.append, "coalesced")

    from loco_fsdp import LoCoFSDP

    model = Given(a=(64,))
    config = LoCoConfig(block_size=32, node_size=2, topology="auto" if way == "hsdp" else way)
    if way == "hsdp":
        LoCoFSDP(model, config, mesh=cpu_mesh(4, 1))
    else:
        fully_shard(model, mesh=cpu_mesh())
        attach(model, config)
    with ExitStack() as stack:
        for target, name, stand_in in (
            (exchange.dist, "all_to_all_single", all_to_all_single),
            (exchange.dist, "batch_isend_irecv", None),
            (exchange, "all_gather", all_gather),
            (collectives, "_reduce_scatter", reduce_scatter),
            (collectives.dist, "_coalescing_manager", Coalescing),
            (collectives, "backend_of", lambda *_: Backend()),
        ):
            stack.enter_context(patch.object(target, name, stand_in))
        backward(model, a=torch.full((64,), 7.0 * (dist.get_rank() + 1)))
    assert reduced(model.a).unique().item() == 17.5
    return calls


@pytest.mark.parametrize(
    ("way", "calls"),
    [
        ("flat", ["all_to_all_single torch.uint8 4"]),
        (
            "hierarchical",
            [
                *("coalescing", *["reduce_scatter torch.float32 2"] * 2, "coalesced"),
                "all_to_all_single torch.uint8 2",
            ],
        ),
        ("hsdp", ["all_to_all_single torch.uint8 4", "all_gather torch.uint8 4"]),
    ],
)
def test_what_goes_to_nccl_is_standard_collectives(
    ranks: Ranks, way: str, calls: list[str]
) -> None:
    """Messages between pairs cost 11 ms of the host over 256 replicas."""
    assert ranks(4).run(called_on_nccl, way) == [calls] * 4


def coalesced(supports: bool) -> list[str]:
    calls: list[str] = []

    class Coalescing(ExitStack):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            calls.append("coalescing")

    backend = type("Other", (Backend,), {"supports_coalescing": supports})()
    model = shard(Net())
    attach(model, LoCoConfig(**TWO_NODES))
    with (
        patch.object(collectives.dist, "_coalescing_manager", Coalescing),
        patch.object(collectives, "backend_of", lambda *_: backend),
        patch.object(exchange, "is_gloo", lambda *_: True),
    ):
        model(batch()).sum().backward()
    return calls


def test_backends_are_asked_whether_they_coalesce(ranks: Ranks) -> None:
    assert ranks(4).run(coalesced, True) == [["coalescing"] * 3] * 4
    assert ranks(4).run(coalesced, False) == [[]] * 4


def debugged() -> list[Any]:
    """A group of torch's debug mode, which wraps its backends, and an exchange over it."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group([0, 1])
    dist.set_debug_level(dist.DebugLevel.OFF)
    kind = type(collectives.backend_of(group, torch.device("cpu"))).__name__
    receive = torch.zeros(2, 3, dtype=torch.uint8)
    row = torch.full((1, 3), 7 + dist.get_rank(), dtype=torch.uint8)
    exchange.gather_rows(receive, row, group)
    answer = [kind, collectives.is_gloo(group, torch.device("cpu")), receive.tolist()]
    dist.destroy_process_group(group)
    return answer


def test_gloo_is_known_under_the_debug_mode_that_wraps_it(ranks: Ranks) -> None:
    expected = ["_ProcessGroupWrapper", True, [[7] * 3, [8] * 3]]
    assert ranks(2).run(debugged) == [expected] * 2
