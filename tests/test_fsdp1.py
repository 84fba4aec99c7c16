"""FSDP1: shards cut the flat gradient without regard to parameters, blocks do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from checkpoints import bits_of, contents
from definition import all_reduced, sent
from loco_fsdp import LoCo, LoCoConfig, attach
from ranks import RankPool, heard, raised
from toy import Given, Mlp, Net, backward, batch

Ranks = Callable[[int], RankPool]

BLOCK, STEPS = 32, 5
# 77 + 3 + 300 + 1 + 195 = 576 elements: shards of 288 or 144 cut c, or c and e.
SHAPES = {"a": (7, 11), "b": (3,), "c": (300,), "d": (1,), "e": (65, 3)}
NUMELS = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
WAYS: dict[str, dict[str, Any]] = {
    "flat": {"topology": "flat"},
    "hierarchical": {"topology": "hierarchical", "node_size": 2},
    "hierarchical, 8 bits inside": {
        "topology": "hierarchical",
        "node_size": 2,
        "intra_node_bits": 8,
    },
    "replicas": {},
}
SIZES = [("flat", 2), ("flat", 4), ("flat", 5), ("hierarchical", 4), ("replicas", 4)]


def groups_of(local: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's group inside of its replica, and that of all replicas."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    inside = [dist.new_group(range(f, f + local)) for f in range(0, world_size, local)]
    across = [dist.new_group(range(f, world_size, local)) for f in range(local)]
    return inside[rank // local], across[rank % local]


def wrap(module: nn.Module, way: str, **options: Any) -> tuple[Any, LoCo]:
    loco_options = {"block_size": BLOCK, **WAYS[way], **options.pop("loco", {})}
    across = None
    if way == "replicas":
        options["process_group"], across = groups_of(2)
    model = FullyShardedDataParallel(module, device_id=torch.device("cpu"), **options)
    return model, attach(model, LoCoConfig(**loco_options), replicate_group=across)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def flat(given: dict[str, Tensor]) -> Tensor:
    return torch.cat([given[name].flatten() for name in SHAPES])


def given_steps(way: str, bits: int, use_orig_params: bool) -> Any:
    """This rank's shard of the result of each step, and its errors by hop and parameter."""
    options = {"bits": bits, "error_dtype": "float32", "spike_limit": None}
    model, loco = wrap(Given(**SHAPES), way, use_orig_params=use_orig_params, loco=options)
    results = []
    for step in range(STEPS):
        model.zero_grad()
        backward(model, **gradients(dist.get_rank(), step))
        results.append(shard_of(model).clone())
    state = contents(loco.state_dict())["errors"]
    errors = [
        (kind, name, payload * scale.unsqueeze(-1)) for kind, name, _, payload, scale in state
    ]
    return results, errors, loco.stats()


def shard_of(model: Any) -> Tensor:
    """The reduced gradient that this rank holds, without what pads its end."""
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None and p.numel()]
    return torch.cat(grads)


FIRSTS = dict(zip(SHAPES, (0, 77, 80, 380, 381), strict=True))
# With `use_orig_params` FSDP1 lets parameters start at multiples of 16 bytes.
ALIGNED = dict(zip(SHAPES, (0, 80, 84, 384, 388), strict=True))


def cut(shards: int, starts: dict[str, int] = FIRSTS) -> list[list[tuple[int, int]]]:
    """First and last element of each piece of each shard, in parameters one after the other."""
    size = -(-(starts["e"] + NUMELS["e"]) // shards)
    pieces = []
    for shard in range(shards):
        inside = [
            (name, max(start, shard * size), min(start + NUMELS[name], (shard + 1) * size))
            for name, start in starts.items()
        ]
        pieces.append(
            [(a - starts[n] + FIRSTS[n], b - starts[n] + FIRSTS[n]) for n, a, b in inside if a < b]
        )
    return pieces


def defined(way: str, world_size: int, bits: int, starts: dict[str, int]) -> list[Tensor]:
    """Each rank's shard of the result of the first step."""
    given = [flat(gradients(rank, 0)) for rank in range(world_size)]
    if way == "replicas":
        means = [(given[0] + given[1]) / 2, (given[2] + given[3]) / 2]
        halves = [
            torch.cat([all_reduced([m[a:b] for m in means], 0.5, bits, BLOCK) for a, b in pieces])
            for pieces in cut(2, starts)
        ]
        return halves * 2
    if way == "hierarchical":
        given = [given[0] + given[1], given[2] + given[3]]
    results = []
    for pieces in cut(world_size, starts):
        sums = []
        for first, last in pieces:
            total = torch.zeros(last - first)
            for one in given:
                total = total + sent(one[first:last], bits, BLOCK)
            sums.append(total / world_size if world_size != 5 else total * (1 / 5))
        results.append(torch.cat(sums))
    return results


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("way", "world_size"), SIZES)
def test_the_first_step_is_the_definition(
    ranks: Ranks, way: str, world_size: int, bits: int, use_orig_params: bool
) -> None:
    found = ranks(world_size).run(given_steps, way, bits, use_orig_params)
    right = defined(way, world_size, bits, ALIGNED if use_orig_params else FIRSTS)
    for (results, _, stats), shard in zip(found, right, strict=True):
        assert torch.equal(results[0][: len(shard)], shard)
        assert not results[0][len(shard) :].any()  # what pads the last shard
        assert stats["reductions"] == STEPS and stats["reductions_without_feedback"] == 0


def owed(way: str, errors: list[Any], world_size: int) -> Tensor:
    """What the errors of all ranks owe to the mean of the flat gradient, `[576]`."""
    total = torch.zeros(sum(NUMELS.values()), dtype=torch.float64)
    for rank, one in enumerate(errors):
        for _, name, blocks in one:
            first, last = FIRSTS[name], FIRSTS[name] + NUMELS[name]
            # A rank's errors go through the pieces of what it sends: all of the unit, the shards
            # for its place in all nodes, or its own shard in its replica.
            shards = {
                "flat": range(world_size),
                "hierarchical": range(rank % 2, world_size, 2),
                "replicas": range(rank % 2, rank % 2 + 1),
            }[way]
            row = 0
            for shard in shards:
                for a, b in cut(2 if way == "replicas" else world_size)[shard]:
                    if a < last and b > first:
                        count = -(-(b - a) // BLOCK)
                        values = blocks[0, row : row + count].flatten()[: b - a].double()
                        total[a:b] += values / 0.1 / (2 if way == "replicas" else world_size)
                        row += count
            assert row == blocks.shape[1]
    return total


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("way", "world_size"), SIZES)
def test_what_did_not_come_yet_is_in_the_errors(
    ranks: Ranks, way: str, world_size: int, bits: int
) -> None:
    found = ranks(world_size).run(given_steps, way, bits, False)
    came = torch.cat(
        [torch.stack(results).double().sum(0) for results, _, _ in found][
            : 2 if way == "replicas" else None
        ]
    )[:576]
    wanted = torch.stack(
        [flat(gradients(r, s)).double() / world_size for r in range(world_size) for s in range(5)]
    ).sum(0)
    missing = owed(way, [errors for _, errors, _ in found], world_size)
    assert missing.abs().max() > 1e-3
    torch.testing.assert_close(came + missing, wanted, rtol=0, atol=1e-6)


def train(way: str, steps: range, **options: Any) -> Any:
    torch.manual_seed(0)
    model, loco = wrap(Net(), way, auto_wrap_policy=ModuleWrapPolicy({Mlp}), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in steps:
        one_step(model, optimizer, step)
    return model, loco, optimizer


def one_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model((step + 1) * batch()).square().mean().backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()


def weights(model: nn.Module) -> list[list[int]]:
    return bits_of([parameter.detach() for parameter in model.parameters()])


def resumed(way: str, path: str) -> Any:
    straight, straight_loco, _ = train(way, range(6))
    model, loco, optimizer = train(way, range(3))
    dcp.save({"loco": loco}, checkpoint_id=path)
    other, other_loco, other_optimizer = train(way, range(0))
    with torch.no_grad():
        for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    other_optimizer.load_state_dict(optimizer.state_dict())
    warnings = heard(lambda: dcp.load({"loco": other_loco}, checkpoint_id=path))
    for step in range(3, 6):
        one_step(other, other_optimizer, step)
    names = [unit.name for unit in other_loco.units]
    return (
        weights(straight) == weights(other),
        straight_loco.stats() == other_loco.stats(),
        (
            warnings,
            names,
        ),
    )


@pytest.mark.parametrize(("way", "world_size"), [*SIZES, ("hierarchical, 8 bits inside", 4)])
def test_a_checkpoint_resumes_bitwise(
    ranks: Ranks, tmp_path: Any, way: str, world_size: int
) -> None:
    names = ["(root)", "blocks.0", "blocks.1"]
    expected = (True, True, ([], names))
    assert ranks(world_size).run(resumed, way, str(tmp_path)) == [expected] * world_size


def switches(strategy: str, dtype: torch.dtype, accumulate: bool) -> Any:
    """Weights after steps of stock FSDP1, with LoCo paused, and after it was detached."""
    results = []
    for way in ("stock", "paused", "detached"):
        torch.manual_seed(0)
        model = FullyShardedDataParallel(
            Net(),
            device_id=torch.device("cpu"),
            auto_wrap_policy=ModuleWrapPolicy({Mlp}),
            sharding_strategy=ShardingStrategy[strategy],
            mixed_precision=MixedPrecision(reduce_dtype=dtype),
            use_orig_params=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loco = None if way == "stock" else attach(model, LoCoConfig())
        if loco is not None and way == "detached":
            loco.detach()
        for step in range(3):
            optimizer.zero_grad()
            pause = loco.paused() if loco is not None and way == "paused" else None
            if pause is not None:
                pause.__enter__()
            if accumulate:
                with model.no_sync():
                    model(batch()).square().mean().backward()
            model((step + 2) * batch()).square().mean().backward()
            if pause is not None:
                pause.__exit__(None, None, None)
            optimizer.step()
        results.append(weights(model))
    return results[0] == results[1], results[0] == results[2]


@pytest.mark.parametrize(
    ("strategy", "dtype", "accumulate"),
    [
        ("FULL_SHARD", torch.float32, False),
        ("SHARD_GRAD_OP", torch.float32, True),
        ("FULL_SHARD", torch.bfloat16, True),
    ],
)
def test_paused_and_detached_it_is_stock_fsdp1(
    ranks: Ranks, strategy: str, dtype: torch.dtype, accumulate: bool
) -> None:
    assert ranks(4).run(switches, strategy, dtype, accumulate) == [(True, True)] * 4


def replicas_start_equal() -> Any:
    torch.manual_seed(dist.get_rank() // 2)  # each replica its own weights
    model, loco = wrap(Net(), "replicas", use_orig_params=True)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ends = []
    for detached in (False, True):
        if detached:
            loco.detach()
        one_step(model, optimizer, 0)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    again = attach(model, LoCoConfig(), replicate_group=loco_group(model))
    one_step(model, optimizer, 1)
    ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    return start, ends, loco.stats()["reductions"], again.stats()["reductions"]


def loco_group(model: Any) -> dist.ProcessGroup:
    group: dist.ProcessGroup = model._comm_hook.group
    return group


def test_replicas_start_equal_and_stay_so(ranks: Ranks) -> None:
    found = ranks(4).run(replicas_start_equal)
    for rank in (0, 1):
        start, ends, before, after = found[rank]
        other_start, other_ends, _, _ = found[rank + 2]
        assert torch.equal(start, other_start)
        assert all(torch.equal(a, b) for a, b in zip(ends, other_ends, strict=True))
        assert (before, after) == (1, 1)
        assert not torch.equal(ends[0], ends[1])


def refused() -> list[str]:
    def fsdp(**options: Any) -> Any:
        return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), **options)

    hooked = fsdp()
    hooked.register_comm_hook(None, lambda *_: None)
    twice = fsdp()
    attach(twice)
    inside, across = groups_of(2)
    hybrid = fsdp(sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=(inside, across))
    return [
        raised(attach, hybrid),
        raised(attach, fsdp(sharding_strategy=ShardingStrategy.NO_SHARD)),
        raised(attach, hooked),
        raised(attach, twice),
        raised(lambda: attach(nn.Linear(2, 2), replicate_group=across)),
    ]


def test_what_cannot_be_served_is_refused_by_name(ranks: Ranks) -> None:
    for hybrid, not_sharded, hooked, twice, other in ranks(4).run(refused):
        assert "HYBRID_SHARD" in hybrid and "replicate_group=" in hybrid
        assert "use DistributedDataParallel" in not_sharded
        assert "has the communication hook" in hooked
        assert "call detach() on that LoCo first" in twice
        assert "replicate_group is for FSDP1" in other
