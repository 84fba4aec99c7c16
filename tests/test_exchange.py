"""The exchange of bytes: every part arrives where it belongs, and a dead rank is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from loco_fsdp.reduction.exchange import exchange, gather_rows
from ranks import RankPool, raised

Ranks = Callable[[int], RankPool]


def group_of(members: list[int]) -> dist.ProcessGroup | None:
    """The group of these ranks, None on others; a collective of all ranks."""
    group = dist.new_group(members)
    return group if dist.get_rank() in members else None


def equal_parts(members: list[int], size: int) -> list[list[int]]:
    """Rows received; row r of what global rank g sends is filled with 10 * g + r."""
    group = group_of(members)
    if group is None:
        return []
    rows = torch.arange(len(members), dtype=torch.uint8).view(-1, 1) + 10 * dist.get_rank()
    receive = torch.full((len(members), size), 255, dtype=torch.uint8)
    exchange(receive, rows.expand(-1, size).contiguous(), group)
    return receive.tolist()


@pytest.mark.parametrize(
    ("world_size", "members", "expected"),
    [
        (2, [0, 1], [[0, 10], [1, 11]]),
        (3, [0, 1, 2], [[0, 10, 20], [1, 11, 21], [2, 12, 22]]),
        (3, [1, 2], [[], [10, 20], [11, 21]]),
        (4, [1, 3], [[], [10, 30], [], [11, 31]]),
        (4, [0, 1, 2, 3], [[0, 10, 20, 30], [1, 11, 21, 31], [2, 12, 22, 32], [3, 13, 23, 33]]),
        (2, [1], [[], [10]]),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100_000])
def test_rows_arrive_in_the_order_of_ranks(
    ranks: Ranks, world_size: int, members: list[int], expected: list[list[int]], size: int
) -> None:
    for rows, values in zip(
        ranks(world_size).run(equal_parts, members, size), expected, strict=True
    ):
        assert rows == [[value] * size for value in values]


def test_nothing_to_send(ranks: Ranks) -> None:
    assert ranks(2).run(equal_parts, [0, 1], 0) == [[[], []]] * 2


def unequal_parts(sizes: list[list[int]]) -> list[int]:
    """Rank r exchanges `sizes[r][s]` elements with rank s, all of them the number of who sent."""
    group = dist.group.WORLD
    assert group is not None
    mine = sizes[group.rank()]
    send = torch.full((sum(mine),), group.rank(), dtype=torch.uint8)
    receive = torch.full((sum(mine),), 255, dtype=torch.uint8)
    exchange(receive, send, group, mine)
    return receive.tolist()


def test_parts_of_unequal_size_and_empty_ones(ranks: Ranks) -> None:
    sizes = [[0, 2, 1], [2, 1, 0], [1, 0, 0]]
    assert ranks(3).run(unequal_parts, sizes) == [[1, 1, 2], [0, 0, 1], [0]]


def gathered(members: list[int], size: int) -> list[list[int]]:
    group = group_of(members)
    if group is None:
        return []
    receive = torch.full((len(members), size), 255, dtype=torch.uint8)
    gather_rows(receive, torch.full((1, size), dist.get_rank(), dtype=torch.uint8), group)
    return receive.tolist()


@pytest.mark.parametrize("members", [[0, 1, 2], [1, 2], [2]])
@pytest.mark.parametrize("size", [0, 3, 100_000])
def test_everybody_gets_every_row(ranks: Ranks, members: list[int], size: int) -> None:
    rows = [[rank] * size for rank in members]
    expected = [rows if rank in members else [] for rank in range(3)]
    assert ranks(3).run(gathered, members, size) == expected


def beside_own_messages() -> list[int]:
    """What a training's own message and an exchange give, if the message is asked for first."""
    group = dist.group.WORLD
    assert group is not None
    rank = group.rank()
    message = torch.zeros(2, dtype=torch.uint8)
    waiting = dist.irecv(message, group=group, group_src=1 - rank)
    receive = torch.zeros(4, dtype=torch.uint8)
    exchange(receive, torch.full((4,), 1 + rank, dtype=torch.uint8), group)
    dist.send(torch.full((2,), 7 + rank, dtype=torch.uint8), group=group, group_dst=1 - rank)
    assert waiting is not None
    waiting.wait()
    return [*receive.tolist(), *message.tolist()]


def test_messages_of_the_training_do_not_get_the_bytes(ranks: Ranks) -> None:
    assert ranks(2).run(beside_own_messages) == [[1, 1, 2, 2, 8, 8], [1, 1, 2, 2, 7, 7]]


def one_dies() -> str:
    group = dist.group.WORLD
    assert group is not None
    exchange(torch.zeros(3), torch.zeros(3), group)
    if group.rank() == 1:
        os._exit(1)
    return raised(exchange, torch.zeros(3), torch.zeros(3), group)


def test_a_dead_rank_is_an_error_on_the_others() -> None:
    """They would wait for ever for bytes that nobody sends."""
    pool = RankPool(3)
    with pytest.raises(AssertionError) as failed:
        pool.run(one_dies)
    assert "rank 1:\ndied" in str(failed.value)
    assert "did not answer" not in str(failed.value)
