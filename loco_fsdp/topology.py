"""Groups of ranks: which of them share a node, and what each of them says."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch.distributed as dist

from loco_fsdp.config import LoCoConfig
from loco_fsdp.fsdp_compat import group_number

logger = logging.getLogger("loco_fsdp")


@dataclass(frozen=True)
class Hops:
    """The process groups of the two hops of a hierarchical reduction.

    Attributes:
        intra: ranks of this node, in the order of the shard group.
        inter: ranks of all nodes at the same place in theirs, in the order of nodes.
    """

    intra: dist.ProcessGroup
    inter: dist.ProcessGroup


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


class HopCache:
    """Makes the groups of the hops once for each shard group. A collective of that group."""

    def __init__(self) -> None:
        self._by_ranks: dict[tuple[tuple[int, ...], LoCoConfig], Hops | None] = {}

    def hops(self, group: dist.ProcessGroup, config: LoCoConfig) -> Hops | None:
        """The two hops of a reduction over `group`, or None for a flat one.

        Raises:
            ValueError: `topology="hierarchical"` on ranks that do not fill nodes evenly, in order.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if config.topology == "flat" or len(ranks) == 1:
            return None
        if (ranks, config) not in self._by_ranks:
            self._by_ranks[ranks, config] = _make_hops(group, config)
        return self._by_ranks[ranks, config]


def _make_hops(group: dist.ProcessGroup, config: LoCoConfig) -> Hops | None:
    node_size = ranks_per_node(config.node_size)
    told = gather((socket.gethostname(), node_size), group)
    problem = layout_problem(told)
    if problem is not None:
        if config.topology == "hierarchical":
            raise ValueError(f'topology="hierarchical": {problem}')
        if group.rank() == 0:
            logger.warning("LoCo reduces over a flat all-to-all: %s", problem)
        return None
    ranks = [rank for rank, _ in told]
    nodes = [list(members) for _, members in groupby(ranks, key=lambda rank: rank // node_size)]
    local_size = len(nodes[0])
    if local_size == 1 or len(nodes) == 1:
        return None
    node, local_rank = divmod(group.rank(), local_size)
    _even_group_numbers(group)
    # Only its members make a group; all ranks make the one inside their node first.
    intra = dist.new_group(nodes[node], use_local_synchronization=True)
    inter = dist.new_group(
        [members[local_rank] for members in nodes], use_local_synchronization=True
    )
    return Hops(intra, inter)


def _even_group_numbers(group: dist.ProcessGroup) -> None:
    """Let all ranks of `group` give the next group that they make the same name.

    torch names a group that only its members make by its ranks and by how many groups there were
    before, and waits for ever where these differ: in pipelines, for example, whose first and last
    stage share a group of their own. Groups of one rank make up for it.
    """
    most = max(number for _, number in gather(group_number(), group))
    while group_number() < most:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)


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
