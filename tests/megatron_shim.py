"""Groups of megatron-core for tests, and `on_cpu`, inside of which it runs without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_on_cpu import on_cpu

__all__ = ["model_parallel", "on_cpu"]

_groups: dict[str, dict[str, Any]] = {}


@contextmanager
def model_parallel(**options: Any) -> Iterator[None]:
    """The groups of megatron-core, over all ranks; the same options get the same groups again."""
    from megatron.core import parallel_state

    key = repr(sorted(options.items()))
    if key in _groups:
        vars(parallel_state).update(_groups[key])
    else:
        parallel_state.initialize_model_parallel(**options)
        _groups[key] = {
            name: value for name, value in vars(parallel_state).items() if name.isupper()
        }
    try:
        yield
    finally:
        dist.barrier()
        parallel_state.destroy_model_parallel()
