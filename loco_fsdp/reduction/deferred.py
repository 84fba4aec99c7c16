"""Gradients that wait for an all-reduce, by parameter."""

from __future__ import annotations

import torch
from torch import Tensor


class DeferredGradients:
    """Sums of a unit's reduce-scattered gradients since its last all-reduce, on this rank.

    A sum belongs to a parameter: in an accumulation parameters may take turns, and those that sit
    out when the all-reduce comes are owed theirs all the same.

    `put_by` and `take` are given a gradient `[sum(numels)]`, whose gradients these are, and how
    many elements each of them has.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    @property
    def parameters(self) -> set[int]:
        """Who waits."""
        return set(self._sums)

    def put_by(self, gradient: Tensor, parameters: tuple[int, ...], numels: list[int]) -> None:
        """Add a gradient to the sums; the caller may overwrite it afterwards."""
        if not self._sums:
            gradient = gradient.clone()
            self._sums = dict(zip(parameters, gradient.split_with_sizes(numels), strict=True))
            return
        parts = dict(zip(parameters, gradient.split_with_sizes(numels), strict=True))
        known = [parameter for parameter in parameters if parameter in self._sums]
        if known:
            torch._foreach_add_([self._sums[p] for p in known], [parts[p] for p in known])
        for parameter in parts.keys() - self._sums.keys():
            self._sums[parameter] = parts[parameter].clone()

    def take(self, gradient: Tensor, parameters: tuple[int, ...], numels: list[int]) -> None:
        """Add the sums of these parameters to a gradient, in place, and forget them."""
        parts = dict(zip(parameters, gradient.split_with_sizes(numels), strict=True))
        waiting = [parameter for parameter in parameters if parameter in self._sums]
        if waiting:
            sums = [self._sums.pop(parameter) for parameter in waiting]
            torch._foreach_add_([parts[parameter] for parameter in waiting], sums)

    def forget(self) -> None:
        """Give all sums up."""
        self._sums.clear()
