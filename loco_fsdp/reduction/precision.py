"""Arithmetic in the dtypes that the code names, whatever a program around it has switched on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Switch `torch.autocast` off inside of `function`, which may run in a backward under it.

    Gradients, errors and scales have dtypes for a reason; autocast would change some, and knows no
    8-bit numbers at all.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with ExitStack() as stack:
            for device_type in _autocast_types():
                stack.enter_context(torch.autocast(device_type, enabled=False))
            return function(*args, **kwargs)

    return call


def _autocast_types() -> list[str]:
    """Types of devices that autocast is on for in this thread."""
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [device_type for device_type in types if torch.is_autocast_enabled(device_type)]
