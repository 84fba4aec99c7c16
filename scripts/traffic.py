"""Counts the bytes of gradient that leave this rank, at the collectives that send them."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Of (module, name): FSDP2 reduces by reduce_scatter_single since torch 2.13 and by
# reduce_scatter_tensor before, which FSDP1 calls as well and Megatron-LM by a name of its own; DDP,
# and Megatron-LM between instances, by all_reduce; loco-fsdp by its exchanges, and inside of nodes
# by reduce_scatters of several tensors. All take (output, input, ...), but all_reduce and
# gather_rows, of which see below.
MEGATRON = "megatron.core.distributed.param_and_grad_buffer"
COLLECTIVES = (
    ("torch.distributed", "all_reduce"),
    ("torch.distributed", "reduce_scatter_single"),
    ("torch.distributed", "reduce_scatter_tensor"),
    (MEGATRON, "dist_reduce_scatter_func"),
    ("loco_fsdp.reduction.reduce_scatter", "exchange"),
    ("loco_fsdp.reduction.reduce_scatter", "reduce_scatters"),
    ("loco_fsdp.reduction.all_reduce", "exchange"),
    ("loco_fsdp.reduction.all_reduce", "gather_rows"),
)


class GradientTraffic:
    """While it is entered, counts what reduce-scatters and exchanges send.

    Of an input of B bytes over N ranks, a rank keeps its own Nth part and sends B * (N - 1) / N: in
    an exchange and in a ring reduce-scatter alike, and twice that in a ring all-reduce. A row that
    is gathered goes to all N - 1 others. Nothing but gradients may go through these collectives
    meanwhile, except single numbers: losses and norms are left out, and parameters go through
    all-gathers, which are not counted.
    """

    def __init__(self) -> None:
        self.bytes_sent = 0
        self._originals: list[tuple[Any, str, Callable[..., Any]]] = []

    def __enter__(self) -> GradientTraffic:
        for module_name, name in COLLECTIVES:
            module = sys.modules.get(module_name)  # Megatron-LM may not be there
            if hasattr(module, name):
                original = getattr(module, name)
                self._originals.append((module, name, original))
                setattr(module, name, self._counted(name, original))
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

    def _counted(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(collective)
        is_all_reduce, is_gather = name == "all_reduce", name == "gather_rows"

        @functools.wraps(collective)
        def counted(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            sent = list(arguments.values())[0 if is_all_reduce else 1]
            tensors = [sent] if isinstance(sent, Tensor) else sent
            group = arguments.get("group")
            is_stand_in = group is not None and not isinstance(group, dist.ProcessGroup)
            is_number = sum(tensor.numel() for tensor in tensors) == 1
            if not (is_stand_in or is_number):
                world_size = dist.get_world_size(group)
                parts = 1 if is_gather else world_size
                num_bytes = sum(tensor.nbytes for tensor in tensors)
                self.bytes_sent += (1 + is_all_reduce) * num_bytes * (world_size - 1) // parts
            return collective(*args, **kwargs)

        return counted
