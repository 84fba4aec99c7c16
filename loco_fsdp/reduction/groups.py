"""The process groups of hierarchical reductions: made once, shared, and destroyed by the last."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch.distributed as dist

from loco_fsdp.config import LoCoConfig
from loco_fsdp.reduction.collectives import make_group
from loco_fsdp.reduction.topology import gather, layout_problem, ranks_per_node


@dataclass(frozen=True)
class Hops:
    """The process groups of the two hops of a hierarchical reduction.

    Attributes:
        intra: ranks of this node, in the order of the shard group.
        inter: ranks of all nodes at the same place in theirs, in the order of nodes.
    """

    intra: dist.ProcessGroup
    inter: dist.ProcessGroup


class Route(NamedTuple):
    """How a unit is reduced over its shard group.

    hops: the groups of a hierarchical reduction; None: flat
    reason: why it is flat, though nodes may have several ranks; None if there is nothing to say
    """

    hops: Hops | None
    reason: str | None = None


_Key = tuple[tuple[int, ...], int]
"""Ranks of the shard group, and ranks per node."""


@dataclass
class _Made:
    """Groups of this process, and how many `HopGroups` hold them."""

    name: str
    hops: Hops
    holders: int = 0


class _Registry:
    """All groups that this process has made in the life of one default group."""

    def __init__(self) -> None:
        self.world: dist.ProcessGroup | None = None
        self.made: dict[_Key, _Made] = {}
        self.num_names = 0

    def check_world(self) -> None:
        """Forget all groups if the default group was destroyed, and they with it."""
        if self.world is not dist.group.WORLD:
            self.world, self.made = dist.group.WORLD, {}


_registry = _Registry()


class HopGroups:
    """The groups that one `LoCo` holds.

    One set serves all units, configurations and calls of `attach` with the same shard group and
    ranks per node.
    """

    def __init__(self) -> None:
        self._routes: dict[_Key, Route] = {}
        self._held: list[_Made] = []
        self._world = dist.group.WORLD

    def acquire(self, group: dist.ProcessGroup, config: LoCoConfig) -> Route:
        """How to reduce over `group`. A collective of it.

        Raises:
            ValueError: `topology="hierarchical"` on ranks that do not fill nodes evenly, in order.
        """
        if config.topology == "flat":
            return Route(None)
        route = self.through_nodes(group, config.node_size)
        if route.reason is not None and config.topology == "hierarchical":
            raise ValueError(f'topology="hierarchical": {route.reason}')
        return route

    def through_nodes(self, group: dist.ProcessGroup, node_size: int | None) -> Route:
        """The two hops of `group`, if it has several nodes of several ranks. A collective of it."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return Route(None)
        key = (ranks, ranks_per_node(node_size))
        if key not in self._routes:
            self._routes[key] = self._find(group, key)
        return self._routes[key]

    def _find(self, group: dist.ProcessGroup, key: _Key) -> Route:
        """Groups that all ranks have, or new ones."""
        _registry.check_world()
        made = _registry.made.get(key)
        _, node_size = key
        mine = (socket.gethostname(), node_size, made and made.name, _registry.num_names)
        told = gather(mine, group)
        if problem := layout_problem([(rank, (host, size)) for rank, (host, size, *_) in told]):
            return Route(None, problem)
        nodes = [
            list(members)
            for _, members in groupby((rank for rank, _ in told), key=lambda r: r // node_size)
        ]
        if len(nodes) == 1 or len(nodes[0]) == 1:
            return Route(None)
        # A rank that has detached less often than others still has the groups of the last time.
        if made is None or len({name for _, (*_, name, _) in told}) > 1:
            made = _make(group, nodes, max(number for _, (*_, number) in told))
            _registry.made[key] = made
        made.holders += 1
        self._held.append(made)
        return Route(made.hops)

    def release(self) -> None:
        """Let go of all groups; what nobody else holds is destroyed. On all ranks."""
        _registry.check_world()
        for made in self._held:
            made.holders -= 1
            if made.holders > 0 or self._world is not dist.group.WORLD:
                continue  # destroyed with the default group, in the latter case
            for key in [key for key, other in _registry.made.items() if other is made]:
                del _registry.made[key]
            for hop_group in (made.hops.intra, made.hops.inter):
                dist.destroy_process_group(hop_group)
        self._routes, self._held = {}, []


def _make(group: dist.ProcessGroup, nodes: list[list[int]], number: int) -> _Made:
    """The groups inside nodes, then those between them; on all ranks of `group`."""
    _registry.num_names = number + 1  # the same on all ranks, and never the same again
    name = f"loco_fsdp {number}"
    places = [list(members) for members in zip(*nodes, strict=True)]
    return _Made(
        name,
        Hops(
            make_group(group, nodes, f"{name} inside nodes"),
            make_group(group, places, f"{name} between nodes"),
        ),
    )
