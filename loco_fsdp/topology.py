"""Groups of ranks: which of them share a node, and what each of them says."""

from __future__ import annotations

import os
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


def gather(value: Any, group: dist.ProcessGroup) -> list[tuple[int, Any]]:
    """Every rank of `group` with its `value`, in order. A collective of picklable objects."""
    ranks = dist.get_process_group_ranks(group)
    values: list[Any] = [None] * len(ranks)
    dist.all_gather_object(values, value, group=group)
    return list(zip(ranks, values, strict=True))
