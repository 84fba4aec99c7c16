"""Two hops: which ranks they join, and what comes out."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import oracle
from loco_fsdp import LoCoConfig, attach
from loco_fsdp.reduction.groups import HopGroups, Hops
from loco_fsdp.reduction.topology import layout_problem
from ranks import RankPool, raised
from toy import Given, backward, cpu_mesh, reduced

Ranks = Callable[[int], RankPool]
TWO_NODES = LoCoConfig(topology="hierarchical", node_size=2, block_size=32)


def told(ranks: list[int], hosts: str, node_size: int) -> list[tuple[int, tuple[str, int]]]:
    return [(rank, (host, node_size)) for rank, host in zip(ranks, hosts, strict=True)]


@pytest.mark.parametrize(
    "layout",
    [
        told([0, 1, 2, 3], "aabb", 2),
        told([4, 5, 6, 7], "aabb", 2),  # a group that does not start at 0
        told([0, 2, 4, 6], "aabb", 4),  # every other rank, as under tensor parallelism
        told([0, 1, 2, 3], "aaaa", 2),  # node_size set on one host
        told([0, 1, 2], "abc", 1),
        told([1, 0, 3, 2], "aabb", 2),  # in another order inside the nodes
    ],
)
def test_layouts_of_even_nodes(layout: list[tuple[int, tuple[str, int]]]) -> None:
    assert layout_problem(layout) is None


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (told([0, 1, 2], "aab", 2), "has 1 and 2 ranks on its nodes"),
        (told([0, 2, 1, 3], "abab", 2), "do not go through the nodes one after the other"),
        (told([0, 1, 2, 3], "abab", 2), "ranks 0 and 1 share one, but are on a and b"),
        (
            [(0, ("a", 2)), (1, ("a", 2)), (2, ("b", 1))],
            "nodes have 1 and 2 ranks, they must have as many",
        ),
    ],
)
def test_layouts_that_do_not_fit(layout: list[tuple[int, tuple[str, int]]], message: str) -> None:
    assert message in str(layout_problem(layout))


def ranks_of(hops: Hops | None) -> tuple[list[int], list[int]] | None:
    if hops is None:
        return None
    return dist.get_process_group_ranks(hops.intra), dist.get_process_group_ranks(hops.inter)


def make_hops(case: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    config, group = TWO_NODES, dist.group.WORLD
    if case == "one node":
        config = LoCoConfig(topology="hierarchical", node_size=4)
    elif case == "one rank per node":
        config = LoCoConfig(topology="hierarchical", node_size=1)
    elif case == "flat":
        config = LoCoConfig(topology="flat", node_size=2)
    elif case == "auto":
        config = LoCoConfig(node_size=2)
    elif case == "across":
        group = mesh["outer"].get_group()  # ranks 0 and 2, or 1 and 3: one on each node
    elif case == "uneven":
        config = LoCoConfig(topology="hierarchical", node_size=3)
    groups = HopGroups()
    if case == "uneven":
        return [raised(groups.acquire, group, config)]
    hops = groups.acquire(group, config).hops
    again = groups.acquire(group, config).hops
    answer = [ranks_of(hops), again is hops]
    groups.release()
    return answer


def test_the_groups_of_each_hop(ranks: Ranks) -> None:
    two_nodes = [
        [([0, 1], [0, 2]), True],
        [([0, 1], [1, 3]), True],
        [([2, 3], [0, 2]), True],
        [([2, 3], [1, 3]), True],
    ]
    assert ranks(4).run(make_hops, "two nodes") == two_nodes
    assert ranks(4).run(make_hops, "auto") == two_nodes
    for case in ("one node", "one rank per node", "flat", "across"):
        assert ranks(4).run(make_hops, case) == [[None, True]] * 4, case
    for (message,) in ranks(4).run(make_hops, "uneven"):
        assert message.startswith('ValueError: topology="hierarchical": the shard group has')


def uneven_auto() -> list[str]:
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno == logging.WARNING:
                records.append(record.getMessage())

    handler = Handler()
    logging.getLogger("loco_fsdp").addHandler(handler)
    model = torch.nn.Sequential(Given(a=(4, 32)), Given(a=(4, 32)))
    for module in model:
        fully_shard(module, mesh=cpu_mesh())
    attach(model, LoCoConfig(node_size=3))
    logging.getLogger("loco_fsdp").removeHandler(handler)
    return records


def test_auto_falls_back_to_flat_with_one_warning(ranks: Ranks) -> None:
    first, *others = ranks(4).run(uneven_auto)
    assert len(first) == 1
    assert "FSDP unit '0': over a flat all-to-all: the shard group has 1 and 3 ranks" in first[0]
    assert others == [[], [], []]


def seeded(rank: int, step: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(numel, generator=generator)


SHAPES = {"a": (7, 40), "b": (130,)}


def two_hops(config: LoCoConfig, reduce_dtype: torch.dtype) -> tuple[list[Any], dict[str, float]]:
    model = Given(**SHAPES)
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    loco = attach(model, config)
    model.set_gradient_divide_factor(1)
    results = []
    for step in range(3):
        model.zero_grad()
        flat = seeded(dist.get_rank(), step, 7 * 40 + 130)
        backward(model, a=flat[:280].view(7, 40), b=flat[280:])
        results.append([reduced(model.a).flatten(), reduced(model.b)])
    return results, loco.stats()


def test_two_hops_compress_the_sum_of_a_node(ranks: Ranks) -> None:
    """Against the oracle: nodes sum, then their sums are sent with feedback, by parameter."""
    config = LoCoConfig(topology="hierarchical", node_size=2, block_size=32, error_dtype="float32")
    results, stats = ranks(4).run(two_hops, config, torch.float32)[0]
    # Shards of `a` are 2 rows of 40, the last one of 1 row and padding; of `b` 33, the last 31.
    shard_numels = {"a": 80, "b": 33}
    errors = {
        (name, node, shard): [0.0] * numel
        for name, numel in shard_numels.items()
        for node in range(2)
        for shard in range(4)
    }
    for step in range(3):
        for index, (name, numel) in enumerate(shard_numels.items()):
            total = torch.zeros(4 * numel, dtype=torch.float64)
            for node in range(2):
                flats = [seeded(rank, step, 410) for rank in (2 * node, 2 * node + 1)]
                first, last = (0, 280) if name == "a" else (280, 410)
                summed = sum(flat[first:last] for flat in flats)
                padded = torch.zeros(4 * numel)
                padded[: last - first] = summed
                for shard in range(4):
                    part = padded[shard * numel : (shard + 1) * numel].tolist()
                    key = (name, node, shard)
                    sent, errors[key] = oracle.feedback_step(part, errors[key], 4, 32, 0.9)
                    total[shard * numel : (shard + 1) * numel] += torch.tensor(sent).double()
            actual = results[step][index].double()
            torch.testing.assert_close(actual, total[: len(actual)], rtol=1e-4, atol=1e-4)
    # Per shard 3 + 2 blocks of 32: 80 bytes of codes and 20 of scales in 32. Two of four shards are
    # for a rank's own place; one of them leaves the node, two in full precision stay inside.
    shard_bytes = 80 + 32
    assert stats["inter_node_bytes"] == 3 * shard_bytes
    assert stats["wire_bytes"] == 3 * (shard_bytes + 2 * 113 * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_two_hops_are_exact_where_they_can_be(ranks: Ranks, dtype: torch.dtype) -> None:
    for value, error_bytes in ranks(4).run(lossless, dtype):
        assert value == 17.5
        # 16 elements of a shard in one block of 32 float16 and a scale, for 2 nodes
        assert error_bytes == 2 * (32 * 2 + 4)


def lossless(dtype: torch.dtype) -> tuple[float, int]:
    model = Given(weight=(8, 8))
    fully_shard(model, mesh=cpu_mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    loco = attach(model, TWO_NODES)
    backward(model, weight=torch.full((8, 8), 7.0 * (dist.get_rank() + 1)))
    return reduced(model.weight).unique().item(), loco.units[0].error_bytes


def low_bits_inside() -> tuple[float, list[int], dict[str, float]]:
    """Lossless for 8 and for 4 bits: values 127 and 7 times a scale in separate parameters."""
    model = Given(weight=(8, 8))
    fully_shard(model, mesh=cpu_mesh())
    config = LoCoConfig(topology="hierarchical", node_size=2, block_size=32, intra_node_bits=8)
    loco = attach(model, config)
    for _ in range(3):
        model.zero_grad()
        backward(model, weight=torch.full((8, 8), 127.0 * 7 * (dist.get_rank() + 1)))
    error_bytes = [unit.error_bytes for unit in loco.units]
    return reduced(model.weight).unique().item(), error_bytes, loco.stats()


def test_the_first_hop_in_8_bits(ranks: Ranks) -> None:
    # A shard is 16 elements in one block of 32: in 8 bits 32 bytes of codes and 16 for its scale,
    # in 4 bits 16 and 16. Two ranks share a node: each sends one shard per node inside of it.
    for value, error_bytes, stats in ranks(4).run(low_bits_inside):
        assert value == 127 * 17.5
        assert error_bytes == [(4 + 2) * (32 * 2 + 4)]
        assert stats["inter_node_bytes"] == 3 * 32
        assert stats["wire_bytes"] == 3 * (32 + 2 * 48)
        assert stats["reductions"] == 3


def compare_bytes() -> list[float]:
    bytes_sent = []
    for topology in ("flat", "hierarchical"):
        model = Given(weight=(256, 256))
        fully_shard(model, mesh=cpu_mesh())
        loco = attach(model, LoCoConfig(topology=topology, node_size=2))
        backward(model, weight=torch.ones(256, 256))
        bytes_sent.append(loco.stats()["inter_node_bytes"])
    return bytes_sent


def test_two_hops_send_half_the_bytes_between_nodes(ranks: Ranks) -> None:
    # flat: both ranks of a node to both of the other; hierarchical: each to one
    for flat, hierarchical in ranks(4).run(compare_bytes):
        assert hierarchical == flat / 2 == 64 * (128 + 4)


def attach_among_other_groups() -> list[str]:
    """Ranks 0 and 1 are in a group of their own, as the ends of a pipeline are."""
    dist.new_group([0, 1])
    model = fully_shard(Given(a=(64,)), mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(topology="hierarchical", node_size=2, bits=8, block_size=32))
    backward(model, a=torch.full((64,), 127.0 * (dist.get_rank() + 1)))
    return [str(reduced(model.a).unique().item()), str(loco.stats()["reductions"])]


def test_ranks_may_be_in_different_numbers_of_groups(ranks: Ranks) -> None:
    # (1 + 2 + 3 + 4) / 4 of 127, without loss.
    assert ranks(4).run(attach_among_other_groups) == [["317.5", "1.0"]] * 4
