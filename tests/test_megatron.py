"""Megatron-LM: buckets whose shards cut parameters, reduced in low bits in each of its ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from checkpoints import contents
from definition import all_reduced, all_reduced_over_nodes, sent
from loco_fsdp import LoCoConfig, attach
from megatron_shim import model_parallel, on_cpu
from ranks import RankPool, heard, raised
from toy import Given

pytest.importorskip("megatron.core")

Ranks = Callable[[int], RankPool]

BLOCK, STEPS = 32, 5
SHAPES = {"a": (7, 11), "b": (3,), "c": (300,), "d": (1,), "e": (65, 3)}
FLAT, NODES = {"topology": "flat"}, {"topology": "hierarchical", "node_size": 2}

AVERAGE = {"average_in_collective": True}
SHARDED = {"use_distributed_optimizer": True}
INSTANCES = {**SHARDED, "num_distributed_optimizer_instances": 2}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "all-reduce": ({}, FLAT, (2, 4)),
    "all-reduce, averages": (AVERAGE, FLAT, (2, 4)),
    "all-reduce over nodes": ({}, NODES, (4,)),
    "distributed optimizer": (SHARDED, FLAT, (2, 4)),
    "distributed optimizer, averages": ({**SHARDED, **AVERAGE}, FLAT, (2, 4)),
    "distributed optimizer, padded": (
        {**SHARDED, "pad_buckets_for_high_nccl_busbw": True},
        FLAT,
        (2, 4),
    ),
    "distributed optimizer over nodes": (SHARDED, NODES, (4,)),
    "two instances": (INSTANCES, {}, (4,)),
    "two instances, averages": ({**INSTANCES, **AVERAGE}, {}, (4,)),
    "overlapped all-reduce": ({"overlap_grad_reduce": True}, FLAT, (2,)),
    "overlapped distributed optimizer": ({**SHARDED, "overlap_grad_reduce": True}, FLAT, (2,)),
}
CASES = [(row, ranks) for row, (_, _, sizes) in ROWS.items() for ranks in sizes]


def wrap(module: torch.nn.Module, **options: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
    return DistributedDataParallel(config, DistributedDataParallelConfig(**options), module)


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def one_step(model: Any, given: dict[str, Tensor]) -> None:
    model.zero_grad_buffer()
    model(**given).backward()
    model.finish_grad_sync()


def given_steps(row: str, bits: int) -> Any:
    """The bucket after each step, where parameters are in it, and errors."""
    options, loco_options, _ = ROWS[row]
    instances = options.get("num_distributed_optimizer_instances", 1)
    with on_cpu(), model_parallel(num_distributed_optimizer_instances=instances):
        model = wrap(Given(**SHAPES), **options)
        chosen = {"bits": bits, "block_size": BLOCK, "spike_limit": None, "error_dtype": "float32"}
        loco = attach(model, LoCoConfig(**{**chosen, **loco_options}))
        results = []
        for step in range(STEPS):
            one_step(model, gradients(dist.get_rank(), step))
            ((bucket,),) = [group.buckets for group in model.bucket_groups]
            results.append(bucket.grad_data.clone())
        places = {
            name: (parameter.main_grad.storage_offset(), parameter.numel())
            for name, parameter in model.module.named_parameters()
        }
        state = contents(loco.state_dict())["errors"]
        errors = [
            (kind, name, values * scale.unsqueeze(-1)) for kind, name, _, values, scale in state
        ]
        stats = loco.stats()
        loco.detach()
    return results, places, errors, stats


def pieces_of(places: dict[str, tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """First and last element, in the bucket, of each parameter's part of a shard of it."""
    cut = [
        (max(start, first), min(start + numel, last)) for start, numel in sorted(places.values())
    ]
    return [(a, b) for a, b in cut if a < b]


def in_bucket(given: dict[str, Tensor], places: dict[str, tuple[int, int]], numel: int) -> Tensor:
    bucket = torch.zeros(numel)
    for name, (start, size) in places.items():
        bucket[start : start + size] = given[name].flatten()
    return bucket


def defined(
    row: str, world_size: int, bits: int, places: dict[str, tuple[int, int]], numel: int
) -> list[Tensor]:
    """Each rank's bucket after the first step, with NaN where it has no say."""
    options, _, _ = ROWS[row]
    averages = options.get("average_in_collective", False)
    given = [in_bucket(gradients(r, 0), places, numel) for r in range(world_size)]
    if not averages:
        given = [one / world_size for one in given]
    factor = 1 / world_size if averages else 1.0
    if row.endswith("nodes") and "optimizer" in row:
        given = [given[0] + given[1], given[2] + given[3]]
    results = []
    for rank in range(world_size):
        result = torch.full((numel,), torch.nan)
        shards = 2 if "instances" in row else world_size
        first, size = rank % shards * (numel // shards), numel // shards
        if "all-reduce" in row:
            first, size = 0, numel
        for a, b in pieces_of(places, first, first + size):
            own = [one[a:b] for one in given]
            if "instances" in row:
                inner = 0.5 if averages else 1.0
                own = [(own[0] + own[1]) * inner, (own[2] + own[3]) * inner]
                result[a:b] = all_reduced(own, inner, bits, BLOCK)
            elif row == "all-reduce over nodes":
                result[a:b] = all_reduced_over_nodes(own, 2, bits, BLOCK, factor)
            elif "all-reduce" in row:
                result[a:b] = all_reduced(own, factor, bits, BLOCK)
            else:
                total = torch.zeros(b - a)
                for one in own:
                    total = total + sent(one, bits, BLOCK)
                result[a:b] = total * factor
        results.append(result)
    return results


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("row", "world_size"), CASES)
def test_the_first_step_is_the_definition(
    ranks: Ranks, row: str, world_size: int, bits: int
) -> None:
    found = ranks(world_size).run(given_steps, row, bits)
    _, places, _, _ = found[0]
    right = defined(row, world_size, bits, places, found[0][0][0].numel())
    assert sum(int((~bucket.isnan()).sum()) for bucket in right) >= 576  # each element somewhere
    for (results, _, _, stats), bucket in zip(found, right, strict=True):
        known = ~bucket.isnan()
        assert torch.equal(results[0][known], bucket[known])
        assert stats["reductions"] == STEPS and stats["reductions_without_feedback"] == 0
    if "optimizer" not in row and "instances" not in row:
        assert all(torch.equal(results[-1], found[0][0][-1]) for results, *_ in found)


def owed(row: str, world_size: int, found: list[Any]) -> Tensor:
    """What the errors of all ranks owe to the sum, in the bucket."""
    options, _, _ = ROWS[row]
    places, numel = found[0][1], found[0][0][0].numel()
    shards = 2 if "instances" in row else world_size
    size = numel // shards
    factor = 1.0
    if options.get("average_in_collective", False):
        factor = 1 / shards if "instances" in row else 1 / world_size
    total = torch.zeros(numel, dtype=torch.float64)
    for rank, (_, _, errors, _) in enumerate(found):
        sends = range(world_size)
        if row.endswith("nodes"):
            sends = range(rank % 2, world_size, 2)
        if "instances" in row:
            sends = range(rank % 2, rank % 2 + 1)
        for _, name, blocks in errors:
            start, count = places[name]
            row_number = 0
            for shard in [0] if "all-reduce" in row else sends:
                first, last = shard * size, (shard + 1) * size
                if "all-reduce" in row:
                    first, last = 0, numel
                a, b = max(start, first), min(start + count, last)
                if a < b:
                    rows = -(-(b - a) // BLOCK)
                    values = blocks[0, row_number : row_number + rows].flatten()[: b - a]
                    total[a:b] += values.double() / 0.1 * factor
                    row_number += rows
            assert row_number == blocks.shape[1]
    return total


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    ("row", "world_size"),
    [
        case
        for case in CASES
        if case
        not in (("all-reduce", 4), ("all-reduce, averages", 4), ("all-reduce over nodes", 4))
    ],
)
def test_what_did_not_come_yet_is_in_the_errors(
    ranks: Ranks, row: str, world_size: int, bits: int
) -> None:
    """All-reduces over more ranks have errors of sums as well: tests of DDP have those."""
    found = ranks(world_size).run(given_steps, row, bits)
    places, numel = found[0][1], found[0][0][0].numel()
    shards = 2 if "instances" in row else world_size
    size = numel // shards
    if "all-reduce" in row:
        came = torch.stack(found[0][0]).double().sum(0)
    else:
        came = torch.cat(
            [
                torch.stack([one[rank * size : (rank + 1) * size] for one in found[rank][0]])
                .double()
                .sum(0)
                for rank in range(shards)
            ]
        )
    wanted = torch.zeros(numel, dtype=torch.float64)
    for rank in range(world_size):
        for step in range(STEPS):
            wanted += in_bucket(gradients(rank, step), places, numel).double() / world_size
    missing = owed(row, world_size, found)
    assert missing.abs().max() > 1e-3
    real = torch.zeros(numel, dtype=torch.bool)
    for start, count in places.values():
        real[start : start + count] = True
    torch.testing.assert_close((came + missing)[real], wanted[real], rtol=0, atol=1e-6)


def trained(row: str, path: str, way: str) -> Any:
    """Gradients of steps 3 to 5 after steps 0 to 2 in one go, or with a checkpoint between."""
    options, loco_options, _ = ROWS[row]
    instances = options.get("num_distributed_optimizer_instances", 1)
    with on_cpu(), model_parallel(num_distributed_optimizer_instances=instances):

        def fresh() -> Any:
            model = wrap(Given(**SHAPES), **options)
            return model, attach(model, LoCoConfig(block_size=BLOCK, **loco_options))

        def load() -> None:
            dcp.load({"loco": loco}, checkpoint_id=path)

        model, loco = fresh()
        results: list[Tensor] = []
        messages: list[str] = []
        for step in range(6):
            if step == 3 and way == "resumed":
                dcp.save({"loco": loco}, checkpoint_id=path)
                model, loco = fresh()
                messages = heard(load)
            one_step(model, gradients(dist.get_rank(), step))
            if step >= 3:
                results.append(model.bucket_groups[0].buckets[0].grad_data.clone())
        stats = loco.stats()
        loco.detach()
        return results, stats, messages


@pytest.mark.parametrize(("row", "world_size"), [case for case in CASES if case[1] == 4])
def test_a_checkpoint_resumes_bitwise(
    ranks: Ranks, tmp_path: Any, row: str, world_size: int
) -> None:
    straight = ranks(world_size).run(trained, row, str(tmp_path), "straight")
    resumed = ranks(world_size).run(trained, row, str(tmp_path), "resumed")
    for (results, stats, _), (others, other_stats, messages) in zip(straight, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))
        assert stats == other_stats and messages == []


def switched(row: str) -> Any:
    """Gradients of stock Megatron, with LoCo paused, and after it was detached."""
    options, _, _ = ROWS[row]
    instances = options.get("num_distributed_optimizer_instances", 1)
    results = []
    with on_cpu(), model_parallel(num_distributed_optimizer_instances=instances):
        for way in ("stock", "paused", "detached"):
            model = wrap(Given(**SHAPES), **options)
            start = [group.start_grad_sync for group in model.bucket_groups]
            loco = None if way == "stock" else attach(model, LoCoConfig())
            if loco is not None and way == "detached":
                loco.detach()
                assert [group.start_grad_sync for group in model.bucket_groups] == start
            if loco is not None and way == "paused":
                with loco.paused():
                    one_step(model, gradients(dist.get_rank(), 0))
                assert loco.stats()["bypassed_reductions"] == 1
            else:
                one_step(model, gradients(dist.get_rank(), 0))
            results.append(model.bucket_groups[0].buckets[0].grad_data.clone())
    return [torch.equal(results[0], other) for other in results[1:]]


@pytest.mark.parametrize(
    "row", ["all-reduce", "all-reduce, averages", "distributed optimizer", "two instances"]
)
def test_paused_and_detached_it_is_stock_megatron(ranks: Ranks, row: str) -> None:
    assert ranks(4).run(switched, row) == [[True, True]] * 4


def told() -> Any:
    """Two chunks, with experts, in buckets of their own; and what is refused."""
    with on_cpu(), model_parallel(expert_model_parallel_size=2):
        chunks = []
        for _ in range(2):
            module = Given(dense=(64, 8), expert=(64, 4))
            module.expert.allreduce = False
            chunks.append(wrap(module, use_distributed_optimizer=True))
        loco = attach(chunks, LoCoConfig(bits=8, block_size=32))
        for chunk in chunks:
            one_step(chunk, {"dense": torch.full((64, 8), 4.0), "expert": torch.full((64, 4), 4.0)})
        names = [unit.name for unit in loco.units]
        values = [
            bucket.grad_data.view(group.buckets[0].grad_data.shape)[:1].item()
            for group in (*chunks[0].bucket_groups, *chunks[0].expert_parallel_bucket_groups)
            for bucket in group.buckets
            if group.intra_distributed_optimizer_instance_rank == 0
        ]
        errors = [
            raised(attach, chunks[0]),
            raised(attach, wrap(Given(a=(8,)), fp8_param_gather=True)),
            raised(attach, [*chunks, torch.nn.Linear(2, 2)]),
            raised(attach, wrap(Given(a=(8,))), LoCoConfig(intra_node_bits=8)),
        ]
        return names, values, errors, loco.summary()


def test_chunks_experts_and_what_is_refused(ranks: Ranks) -> None:
    for names, values, errors, summary in ranks(4).run(told):
        assert names == [
            "chunk 0 bucket 0",
            "chunk 0 expert bucket 0",
            "chunk 1 bucket 0",
            "chunk 1 expert bucket 0",
        ]
        # Dense: the mean of four ranks; experts: the sum of their two ranks over four.
        assert values in ([4.0, 2.0], [4.0], [2.0], [])
        assert "chunk 1 expert bucket 0" in summary
        again, fp8, mixed, intra = errors
        assert "call detach() on that LoCo first" in again
        assert "fp8_param_gather=True is not supported" in fp8
        assert "a list only of chunks" in mixed and "Linear" in mixed
        assert "intra_node_bits=8: an all-reduce" in intra
