"""The all-to-all of packed bytes: what every hop of a reduction in low bits sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

# Of the messages between CPUs: never those that a training sends itself over the same group.
_TAG = 0x10C0


def exchange(
    receive: Tensor,
    send: Tensor,
    group: dist.ProcessGroup,
    receive_sizes: list[int] | None = None,
    send_sizes: list[int] | None = None,
) -> None:
    """Send each rank of `group` its part of `send`, and get one from each. A collective of `group`.

    On GPUs this is `all_to_all_single`; on CPUs, where that of gloo uses about half of a link, an
    `exchange_pieces`.

    Args:
        receive: where parts go, in the order of ranks.
        send: parts for the ranks, in their order.
        group: ranks that exchange.
        receive_sizes: elements of each part of `receive`; None: all the same.
        send_sizes: elements of each part of `send`; None: all the same.
    """
    if send.device.type != "cpu":
        flat = (receive.view(-1), send.view(-1))  # sizes count elements, not rows
        dist.all_to_all_single(*flat, receive_sizes, send_sizes, group)
        return
    world_size = group.size()
    exchange_pieces(
        [[part] for part in _parts(receive, receive_sizes, world_size)],
        [[part] for part in _parts(send, send_sizes, world_size)],
        group,
    )


def exchange_pieces(
    receive: Sequence[Sequence[Tensor]],
    send: Sequence[Sequence[Tensor]],
    group: dist.ProcessGroup,
) -> None:
    """An exchange whose parts lie in several pieces, in one launch where the backend can.

    1. Ask for what all other ranks send, so that nobody who sends has to wait for a receiver.
    2. Send to all others, each rank to the next one first: never all ranks to the same one.
    3. Copy the own part, and wait.

    Args:
        receive: contiguous pieces from each rank, as many and as large as it sends.
        send: contiguous pieces for each rank.
        group: ranks that exchange. All of them call this.
    """
    world_size, rank = group.size(), group.rank()
    others = [(rank + step) % world_size for step in range(1, world_size)]
    # Empty pieces are empty on both sides: no message is sent for them.
    messages = [
        dist.P2POp(operation, piece, group=group, tag=_TAG + number, group_peer=peer)
        for operation, pieces, peers in (
            (dist.irecv, receive, reversed(others)),
            (dist.isend, send, others),
        )
        for peer in peers
        for number, piece in enumerate(pieces[peer])
        if piece.numel()
    ]
    work = dist.batch_isend_irecv(messages) if messages else []
    for mine, own in zip(receive[rank], send[rank], strict=True):
        mine.copy_(own)
    for one in work:
        one.wait()


def _parts(tensor: Tensor, sizes: list[int] | None, world_size: int) -> list[Tensor]:
    flat = tensor.view(-1)
    return list(flat.split_with_sizes(sizes or [flat.numel() // world_size] * world_size))


def gather_rows(receive: Tensor, row: Tensor, group: dist.ProcessGroup) -> None:
    exchange_pieces([[r] for r in receive], [[row.view(-1)]] * group.size(), group)
