"""What `torch.distributed` does not offer, or offers under another name in each release.

Read in torch 2.9, 2.13 and 2.14. What is private here, and why:

- `ProcessGroup._get_backend`: what serves a device. The name of a group is "undefined" or
  "cpu:gloo,cuda:nccl" in ordinary programs, and says nothing of what its backend can do.
- `_coalescing_manager`: several reduce-scatters or all-gathers in one launch.
- `distributed_c10d._process_group_name`: torch names a group by its ranks and by how many groups
  there are, and waits for ever where ranks count differently, as in pipelines. Nor may a name come
  again after its group was destroyed: the store still has the addresses of the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

# torch 2.13 renames them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What runs the collectives of `group` on tensors on `device`."""
    return group._get_backend(device)


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether gloo does; torch's debug modes, which wrap it, pass its name on."""
    return str(backend_of(group, device).name()).lower() == "gloo"


def all_gather(output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> None:
    """All-gather of equal parts into one tensor."""
    _all_gather(output_tensor, input_tensor, group=group)


def all_gathers(
    output_tensors: list[Tensor], input_tensors: list[Tensor], group: dist.ProcessGroup
) -> None:
    """All-gather of each input into its output, in one launch where the backend can."""
    with _coalesced(group, output_tensors[0].device):
        for output_tensor, input_tensor in zip(output_tensors, input_tensors, strict=True):
            all_gather(output_tensor, input_tensor, group)


def reduce_scatters(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    group: dist.ProcessGroup,
    op: Any = dist.ReduceOp.SUM,
) -> None:
    """Reduce-scatter of each input into its output, in one launch where the backend can."""
    with _coalesced(group, output_tensors[0].device):
        for output_tensor, input_tensor in zip(output_tensors, input_tensors, strict=True):
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)


def _coalesced(group: dist.ProcessGroup, device: torch.device) -> AbstractContextManager[object]:
    """Collectives that are called in it are one launch, where the backend can."""
    if not backend_of(group, device).supports_coalescing:
        return nullcontext()
    manager: AbstractContextManager[object] = dist._coalescing_manager(  # type: ignore[attr-defined]
        group, device=device
    )
    return manager


def make_group(
    parent: dist.ProcessGroup, parts: Sequence[Sequence[int]], name: str
) -> dist.ProcessGroup:
    """The group of this rank's part of `parent`. A collective of `parent`.

    Where torch has bound ranks to devices, NCCL makes a group by splitting a communicator, which
    all its ranks have to do: then `parent` is split. Elsewhere its members make each part.

    Args:
        parent: ranks that all call this, with the same arguments.
        parts: global ranks of each part; each rank is in one.
        name: of the group, never used before by any of its ranks; what makes it differ from those
            of other parts is added.
    """
    rank = dist.get_rank()
    (part,) = (list(part) for part in parts if rank in part)
    with _naming(f"{name}, rank {part[0]}"):
        if _is_split(parent):
            places = {r: place for place, r in enumerate(dist.get_process_group_ranks(parent))}
            group = dist.split_group(
                parent, [[places[r] for r in part] for part in parts], group_desc=name
            )
        else:
            group = dist.new_group(part, use_local_synchronization=True, group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    return group


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Let torch give the group that is made meanwhile this name."""
    torch_module: Any = distributed_c10d
    by_torch = torch_module._process_group_name
    torch_module._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        torch_module._process_group_name = by_torch


def _is_split(parent: dist.ProcessGroup) -> bool:
    device = getattr(dist.group.WORLD, "bound_device_id", None)
    return device is not None and bool(backend_of(parent, device).supports_splitting)
