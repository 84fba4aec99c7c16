"""Seconds over several ranks, of which one is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from loco_fsdp.planning.timing import seconds_from_barrier, seconds_in_loop, waiting_seconds
from ranks import RankPool

CPU = torch.device("cpu")


def times_of_one_slow_rank() -> tuple[float, float]:
    def sleep() -> None:
        time.sleep(0.08 * (dist.get_rank() == 1))

    return seconds_from_barrier(sleep, CPU, 3), seconds_in_loop(sleep, CPU, 3)


def test_slowest_rank_counts_from_a_barrier_and_the_average_one_in_a_loop(
    ranks: Callable[[int], RankPool],
) -> None:
    first, second = ranks(2).run(times_of_one_slow_rank)
    assert first == second
    slowest_s, average_s = first
    assert slowest_s >= 0.08
    assert 0.04 <= average_s < slowest_s


def waiting_of_ranks_that_are_slow_in_turns() -> float:
    calls = count(dist.get_rank())

    def multiply(*args: object, out: object) -> None:
        time.sleep(0.01 * (next(calls) % 2))

    with patch.object(torch, "mm", multiply):
        return waiting_seconds(0.005, CPU, 3)


def test_each_of_two_ranks_waits_for_half_of_what_the_other_is_slower(
    ranks: Callable[[int], RankPool],
) -> None:
    """Alone a rank takes 0 and 10 ms by turns, 5 on average; waiting for the other, always 10."""
    first, second = ranks(2).run(waiting_of_ranks_that_are_slow_in_turns)
    assert first == second == pytest.approx(0.005, rel=0.4)
