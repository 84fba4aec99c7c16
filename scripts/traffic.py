"""Counts the bytes of gradient that leave this rank, at the collectives that send them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor

import loco_fsdp.reduction.all_reduce
import loco_fsdp.reduction.reduce_scatter

# FSDP2 reduces by reduce_scatter_single since torch 2.13 and by reduce_scatter_tensor before;
# loco-fsdp by its exchanges, and inside of nodes by reduce_scatters of several tensors. All take
# (output, input, ...).
COLLECTIVES = (
    (dist, "reduce_scatter_single"),
    (dist, "reduce_scatter_tensor"),
    (loco_fsdp.reduction.reduce_scatter, "exchange"),
    (loco_fsdp.reduction.reduce_scatter, "reduce_scatters"),
    (loco_fsdp.reduction.all_reduce, "exchange"),
    (loco_fsdp.reduction.all_reduce, "gather_rows"),
)


class GradientTraffic:
    """While it is entered, counts what reduce-scatters and exchanges send.

    Of an input of B bytes over N ranks, a rank keeps its own Nth part and sends B * (N - 1) / N: in
    an exchange and in a ring reduce-scatter alike. A row that is gathered goes to all N - 1 others.
    Nothing but gradients may go through
    these collectives meanwhile; FSDP2's parameters go through all-gathers, which are not counted.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []

    def __enter__(self) -> GradientTraffic:
        for module, name in COLLECTIVES:
            if hasattr(module, name):
                original = getattr(module, name)
                self._originals.append((module, name, original))
                setattr(module, name, self._counted(original))
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for module, name, original in self._originals:
            setattr(module, name, original)
        self._originals.clear()

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def counted(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            sent = list(arguments.values())[1]
            tensors = [sent] if isinstance(sent, Tensor) else sent
            world_size = dist.get_world_size(arguments.get("group"))
            parts = 1 if collective.__name__ == "gather_rows" else world_size
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            self.bytes_sent += num_bytes * (world_size - 1) // parts
            return collective(*args, **kwargs)

        return counted
