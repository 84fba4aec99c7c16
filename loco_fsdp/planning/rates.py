"""Measures collectives as a training step calls them: seconds beside the bytes, and bytes/s."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.planning.cluster import Cluster, Job
from loco_fsdp.planning.cost_model import measurable_calls, rate_key
from loco_fsdp.planning.timing import seconds_from_barrier
from loco_fsdp.planning.ways import Transfer
from loco_fsdp.reduction.collectives import all_gather, reduce_scatters
from loco_fsdp.reduction.exchange import exchange

# Of (the whole tensor `[ranks, n]`, one that is as large, and the group).
Collective = Callable[[Tensor, Tensor, dist.ProcessGroup], object]
Rates = dict[str, tuple[float, float]]

COLLECTIVES: dict[str, Collective] = {
    "reduce-scatter": lambda whole, other, group: reduce_scatters(
        [other[0]], [whole.view(-1)], group
    ),
    "all-gather": lambda whole, other, group: all_gather(whole.view(-1), other[0], group),
    "all-reduce": lambda whole, other, group: dist.all_reduce(whole, group=group),
    "exchange": lambda whole, other, group: exchange(other, whole, group),
}
_SPREAD = 4  # between the two sizes from which larger ones are told


def measure_rates(
    cluster: Cluster,
    job: Job,
    device: torch.device,
    *,
    max_bytes: int,
    repeats: int,
    collectives: dict[str, Collective] = COLLECTIVES,
) -> Rates:
    """`Cluster.rates` of the collectives that `job` would call. A collective of all ranks.

    Each is timed with the smallest and the largest of its tensors; where they differ, a line goes
    through both.

    Args:
        cluster: how many ranks are on how many nodes, in order.
        job: what calls them.
        device: where tensors are.
        max_bytes: of a tensor; collectives of larger ones are told from smaller ones.
        repeats: of each measurement; the median counts, of the slowest rank.
        collectives: what to measure, by name.
    """
    groups = _make_groups(cluster)
    rates = {}
    for transfer, call_bytes in measurable_calls(cluster, job).items():
        if transfer.collective not in collectives:
            continue
        largest = min(call_bytes[-1], max_bytes)
        smallest = min(call_bytes[0], largest)
        if largest < call_bytes[-1]:
            smallest = min(smallest, max(largest // _SPREAD, 1))
        points = [
            _seconds(transfer, collectives, num_bytes, groups[transfer.scope], device, repeats)
            for num_bytes in sorted({smallest, largest})
        ]
        key = rate_key(transfer.collective, transfer.scope, transfer.dtype)
        rates[key] = line_through(points[0], points[-1])
    for group in groups.values():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return rates


def line_through(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Seconds at no bytes, and bytes/s, of two measurements (bytes, seconds).

    Where noise makes the larger one no slower, all of its time is of its bytes.
    """
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    if large_bytes <= small_bytes or large_s <= small_s:
        return 0.0, large_bytes / large_s
    bytes_per_s = (large_bytes - small_bytes) / (large_s - small_s)
    return large_s - large_bytes / bytes_per_s, bytes_per_s


def _make_groups(cluster: Cluster) -> dict[str, dist.ProcessGroup]:
    """This rank's group of each scope."""
    nodes, local = cluster.num_nodes, cluster.ranks_per_node
    world = dist.group.WORLD
    assert world is not None
    if nodes == 1 or local == 1:
        return {"all": world}
    by_node = [[node * local + place for place in range(local)] for node in range(nodes)]
    by_place = [list(ranks) for ranks in zip(*by_node, strict=True)]
    return {"all": world, "node": _own_group(by_node), "across": _own_group(by_place)}


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    """Makes all of them, and returns the one of this rank."""
    made: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in groups]
    return next(made[index] for index, ranks in enumerate(groups) if dist.get_rank() in ranks)


def _seconds(
    transfer: Transfer,
    collectives: dict[str, Collective],
    num_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    repeats: int,
) -> tuple[int, float]:
    """Bytes of a tensor of about `num_bytes`, of equal parts, and seconds of its collective."""
    dtype: torch.dtype = getattr(torch, transfer.dtype)
    part_numel = -(-num_bytes // (dtype.itemsize * group.size()))
    whole, other = torch.ones(2, group.size(), part_numel, dtype=dtype, device=device)
    collective = collectives[transfer.collective]
    seconds = seconds_from_barrier(lambda: collective(whole, other, group), device, repeats)
    return whole.nbytes, seconds
