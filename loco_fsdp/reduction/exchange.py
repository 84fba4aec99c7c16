"""The collectives of packed bytes: what every hop of a reduction in low bits sends.

One call of a standard collective, whatever the number of ranks. Where gloo serves the tensors it is
messages between pairs instead: gloo's own all-to-all and all-gather use about half of a link.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from loco_fsdp.reduction.collectives import all_gather, all_gathers, is_gloo

# Of the messages between CPUs: never that of those that a training sends over the same group.
_TAG = 0x10C0


def exchange(
    receive: Tensor, send: Tensor, group: dist.ProcessGroup, sizes: list[int] | None = None
) -> None:
    """Send each rank of `group` its part of `send`, and get one from each: an all-to-all.

    Args:
        receive: where parts go, in the order of ranks, one after the other.
        send: parts for the ranks, in their order.
        group: ranks that exchange. All of them call this.
        sizes: elements of the part for each rank, and of that from it; None: all the same.
    """
    if not is_gloo(group, send.device):
        dist.all_to_all_single(receive.view(-1), send.view(-1), sizes, sizes, group)
        return
    sizes = sizes or [send.numel() // group.size()] * group.size()
    received, sent = (tensor.view(-1).split_with_sizes(sizes) for tensor in (receive, send))
    _exchange_messages(received, sent, group)


def gather_all_rows(
    receive: Sequence[Tensor], rows: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """`gather_rows` of several rows, each into rows of its own; in one launch where that can be."""
    if not is_gloo(group, rows[0].device):
        all_gathers([r.view(-1) for r in receive], [row.view(-1) for row in rows], group)
        return
    for into, row in zip(receive, rows, strict=True):
        gather_rows(into, row, group)


def gather_rows(receive: Tensor, row: Tensor, group: dist.ProcessGroup) -> None:
    """Send every rank of `group` the same `row`, and get one from each: an all-gather.

    Args:
        receive: `[ranks, size]`, rows in the order of ranks.
        row: `[1, size]`
        group: ranks that exchange. All of them call this.
    """
    if not is_gloo(group, row.device):
        all_gather(receive.view(-1), row.view(-1), group)
        return
    _exchange_messages(receive.unbind(0), [row.view(-1)] * group.size(), group)


def _exchange_messages(
    receive: Sequence[Tensor], send: Sequence[Tensor], group: dist.ProcessGroup
) -> None:
    """An all-to-all of contiguous parts by messages between pairs of ranks.

    1. Ask for what all other ranks send, so that nobody who sends has to wait for a receiver.
    2. Send to all others, each rank to the next one first: never all ranks to the same one.
    3. Copy the own part, and wait.
    """
    world_size, rank = group.size(), group.rank()
    others = [(rank + step) % world_size for step in range(1, world_size)]
    # Empty parts are empty on both sides: no message is sent for them.
    messages = [
        dist.P2POp(operation, parts[peer], group=group, tag=_TAG, group_peer=peer)
        for operation, parts, peers in (
            (dist.irecv, receive, reversed(others)),
            (dist.isend, send, others),
        )
        for peer in peers
        if parts[peer].numel()
    ]
    work = dist.batch_isend_irecv(messages) if messages else []
    receive[rank].copy_(send[rank])
    for one in work:
        one.wait()
