"""The all-to-all of packed bytes: what every hop of a reduction in low bits sends."""

from __future__ import annotations

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

    On GPUs this is `all_to_all_single`. On CPUs, where that of gloo uses about half of a link:

    1. Ask for what all other ranks send, so that nobody who sends has to wait for a receiver.
    2. Send to all others, each rank to the next one first: never all ranks to the same one.
    3. Copy the own part, and wait.

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
    world_size, rank = group.size(), group.rank()
    received = _parts(receive, receive_sizes, world_size)
    sent = _parts(send, send_sizes, world_size)
    others = [(rank + step) % world_size for step in range(1, world_size)]
    # Empty parts are empty on both sides: no message is sent for them.
    work = [
        dist.irecv(received[peer], group=group, group_src=peer, tag=_TAG)
        for peer in reversed(others)
        if received[peer].numel()
    ]
    work += [
        dist.isend(sent[peer], group=group, group_dst=peer, tag=_TAG)
        for peer in others
        if sent[peer].numel()
    ]
    received[rank].copy_(sent[rank])
    for one in work:
        assert one is not None  # only for ranks outside of the group
        one.wait()


def _parts(tensor: Tensor, sizes: list[int] | None, world_size: int) -> list[Tensor]:
    flat = tensor.view(-1)
    return list(flat.split_with_sizes(sizes or [flat.numel() // world_size] * world_size))
