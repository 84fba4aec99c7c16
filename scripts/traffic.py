"""Counts the bytes of gradient that leave this rank, at the collectives that send them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist

# FSDP2 reduces by reduce_scatter_single since torch 2.13 and by reduce_scatter_tensor before;
# loco-fsdp by all_to_all_single.
COLLECTIVES = ("reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single")


class GradientTraffic:
    """While it is entered, counts what reduce-scatters and all-to-alls send.

    Of an input of B bytes over N ranks, a rank keeps its own Nth part and sends B * (N - 1) / N:
    in an all-to-all and in a ring reduce-scatter alike. Nothing but gradients may go through
    these collectives meanwhile; FSDP2's parameters go through all-gathers, which are not counted.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> GradientTraffic:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self._originals[name] = getattr(dist, name)
                setattr(dist, name, self._counted(self._originals[name]))
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)
        self._originals.clear()

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(collective)

        @functools.wraps(collective)
        def counted(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            world_size = dist.get_world_size(arguments.get("group"))
            self.bytes_sent += arguments["input"].nbytes * (world_size - 1) // world_size
            return collective(*args, **kwargs)

        return counted
