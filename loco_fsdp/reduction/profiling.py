"""Named ranges of a profile: what a stage does, in which hop, for which FSDP unit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import record_function


@contextmanager
def stage(name: str, hop: str, unit_name: str) -> Iterator[None]:
    """A range in `torch.profiler` and, where CUDA is, in NVTX, for Nsight Systems.

    Args:
        name: the stage, "encode" for example.
        hop: the exchange it is part of, "inter-node" for example.
        unit_name: the FSDP unit.
    """
    label = f"LoCo::{name} {hop} ({unit_name})"
    has_nvtx = torch.cuda.is_available() and torch.version.hip is None
    if has_nvtx:
        torch.cuda.nvtx.range_push(label)  # type: ignore[no-untyped-call]
    try:
        with record_function(label):
            yield
    finally:
        if has_nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
