"""Which ranks share a node, and what each of them says."""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any

import torch.distributed as dist


def ranks_per_node(node_size: int | None) -> int:
    """Ranks of a node: `node_size`, else LOCAL_WORLD_SIZE (set by torchrun), else all ranks."""
    if node_size is not None:
        return node_size
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def remote_peers(group: dist.ProcessGroup, node_size: int) -> int:
    """Ranks of `group` on other nodes than this one; global ranks fill nodes in order."""
    node = dist.get_rank() // node_size
    return sum(rank // node_size != node for rank in dist.get_process_group_ranks(group))


def leaves_node(group: dist.ProcessGroup, node_size: int) -> bool:
    """Whether the next rank in a ring of `group` is on another node."""
    next_rank = dist.get_process_group_ranks(group)[(group.rank() + 1) % group.size()]
    return next_rank // node_size != dist.get_rank() // node_size


def gather(value: Any, group: dist.ProcessGroup) -> list[tuple[int, Any]]:
    """Every rank of `group` with its `value`, in order. A collective of picklable objects."""
    ranks = dist.get_process_group_ranks(group)
    values: list[Any] = [None] * len(ranks)
    dist.all_gather_object(values, value, group=group)
    return list(zip(ranks, values, strict=True))


def layout_problem(told: list[tuple[int, tuple[str, int]]]) -> str | None:
    """Why these ranks cannot reduce inside their nodes first, or None.

    Args:
        told: every rank of the group, in order, with its host and its number of ranks per node.
    """
    node_sizes = sorted({node_size for _, (_, node_size) in told})
    if len(node_sizes) > 1:
        return f"nodes have {' and '.join(map(str, node_sizes))} ranks, they must have as many"
    hosts: dict[int, tuple[int, str]] = {}
    for rank, (host, node_size) in told:
        first_rank, first_host = hosts.setdefault(rank // node_size, (rank, host))
        if host != first_host:
            return (
                f"with {node_size} ranks per node, ranks {first_rank} and {rank} share one, but "
                f"are on {first_host} and {host}; set node_size, or number ranks node by node"
            )
    runs = [
        (node, len(list(members)))
        for node, members in groupby(rank // node_size for rank, (_, node_size) in told)
    ]
    if len({node for node, _ in runs}) < len(runs):
        return "the ranks of the shard group do not go through the nodes one after the other"
    sizes = sorted({size for _, size in runs})
    if len(sizes) > 1:
        return (
            f"the shard group has {' and '.join(map(str, sizes))} ranks on its nodes, not as many"
        )
    return None
