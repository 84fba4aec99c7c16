"""Seconds that ranks take for the same thing: from a common start, in a loop, or waiting."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

_WARMUP = 2
_ENOUGH_S = 0.3  # what is short is repeated more often, up to so long: it varies most
_MOST = 20  # times as often
_MATRIX_WIDTH = 256
_LONGEST_COMPUTATION_S = 0.02  # longer than an operating system lets one of several ranks run
_LOOP = 20  # waits between two clocks


def seconds_from_barrier(
    function: Callable[[], object], device: torch.device, repeats: int
) -> float:
    """Median seconds of `function` on the slowest rank, all starting together. A collective."""

    def together() -> float:
        dist.barrier()
        return _seconds(function, device)

    return median(_over_ranks(_repeat(together, device, repeats), dist.ReduceOp.MAX, device))


def seconds_in_loop(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of `function` on an average rank, while all call it again and again.

    A collective.
    """
    dist.barrier()
    seconds = _repeat(lambda: _seconds(function, device), device, repeats)
    return _median_of_means(seconds, device)


def waiting_seconds(compute_s: float, device: torch.device, repeats: int) -> float:
    """Seconds that an average rank waits for the others after computing for `compute_s`.

    All compute the same, but are not done together, least of all where they share cores. Told from
    loops with a barrier and without one, less what a barrier itself takes. A collective.
    """
    matrix = torch.ones(_MATRIX_WIDTH, _MATRIX_WIDTH, device=device)
    product = torch.empty_like(matrix)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)
        _synchronize(device)

    multiply_s = seconds_in_loop(lambda: compute(_LOOP), device, repeats) / _LOOP
    times = round(min(compute_s, _LONGEST_COMPUTATION_S) / multiply_s)

    def loop_s(wait: bool) -> float:
        def loop() -> None:
            for _ in range(_LOOP):
                compute(times)
                if wait:
                    dist.barrier()

        dist.barrier()
        return _seconds(loop, device) / _LOOP

    added = [loop_s(wait=True) - loop_s(wait=False) for _ in range(2 * repeats)]
    barrier_s = seconds_from_barrier(dist.barrier, device, repeats)
    return max(_median_of_means(added, device) - barrier_s, 0.0)


def _repeat(timed: Callable[[], float], device: torch.device, repeats: int) -> list[float]:
    """What `timed` returns, `repeats` times or more; as often on all ranks."""
    warm_s = [timed() for _ in range(_WARMUP)][-1]
    (slowest_s,) = _over_ranks([warm_s], dist.ReduceOp.MAX, device)
    enough = min(int(_ENOUGH_S / slowest_s), _MOST * repeats)
    return [timed() for _ in range(max(repeats, enough))]


def _median_of_means(seconds: list[float], device: torch.device) -> float:
    return median(_over_ranks(seconds, dist.ReduceOp.SUM, device)) / dist.get_world_size()


def _over_ranks(
    seconds: list[float], op: dist.ReduceOp.RedOpType, device: torch.device
) -> list[float]:
    reduced = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(reduced, op=op)
    values: list[float] = reduced.tolist()
    return values


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
