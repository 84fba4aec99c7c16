"""Tables of blocks: where blocks are, by tensor operations, against loops and by hand."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from loco_fsdp.codec import (
    BlockLayout,
    BlockTable,
    EncodeStats,
    ErrorState,
    WireLayout,
    eager,
    get_backend,
)
from loco_fsdp.reduction.error_feedback import ErrorBuffer

CPU = torch.device("cpu")
BLOCK = 32


@given(st.lists(st.sampled_from((0, 1, 31, 32, 33, 64, 100)), max_size=8))
def test_blocks_are_those_of_each_part_in_turn(numels: list[int]) -> None:
    table = BlockLayout(tuple(numels), 4, BLOCK).place(CPU)
    starts, lengths, before = [], [], 0
    for numel in numels:
        for first in range(0, numel, BLOCK):
            starts.append(before + first)
            lengths.append(min(BLOCK, numel - first))
        before += numel
    assert table.starts.tolist() == starts
    assert table.lengths.tolist() == lengths
    assert table.rows.tolist() == list(range(len(starts)))
    assert table.shard_numel == before and table.num_blocks == len(starts)
    assert table.aligned == all(numel % 8 == 0 for numel in numels)
    assert {column.dtype for column in (table.starts, table.lengths, table.rows)} == {torch.int64}
    flat = torch.arange(2.0 * before).view(2, before)
    blocks = eager.to_blocks(flat, table)
    assert blocks.shape == (2, len(starts), BLOCK)
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert torch.equal(blocks[:, index, :length], flat[:, start : start + length])
        assert not blocks[:, index, length:].any()
    assert torch.equal(eager.from_blocks(blocks, table), flat)


class CountedCalls(TorchDispatchMode):
    """How many operations of tensors run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(numel: int) -> int:
    layout, buffer = BlockLayout((numel, numel), 4, BLOCK), ErrorBuffer(1, BLOCK, torch.int8)
    buffer.add(dict(enumerate(layout.blocks_per_part)), CPU)
    with CountedCalls() as calls:
        layout.place(CPU, buffer.rows_of((1, 0)))
    return calls.count


def test_a_table_of_many_blocks_takes_as_many_operations_as_one_of_few() -> None:
    """Loops over blocks cost 0.2 s of Python time for 257,000 of them."""
    assert operations(100) == operations(320_000) < 50


def test_a_row_of_the_wire() -> None:
    wire = WireLayout(num_blocks=3, bits=4, block_size=256)
    assert (wire.bytes_per_block, wire.scales_offset, wire.num_bytes) == (128, 384, 400)
    assert wire.on_wire(1, 3) == (slice(128, 384), slice(388, 396))
    assert WireLayout(0, 4, 256).num_bytes == 0
    assert WireLayout(1, 1, 32).num_bytes == 16 + 16  # 4 bytes of codes


def test_rows_of_the_wire_are_as_long_as_the_fullest() -> None:
    table = BlockLayout((100, 40), 4, BLOCK).place(CPU)  # 4 and 2 blocks
    shared = table.in_rows(torch.tensor([0, 1, 1, 4, 6]))
    assert shared.wire == WireLayout(3, 4, BLOCK)
    assert shared.num_blocks == 6 and shared.shard_numel == 140
    assert table.row_starts is None
    assert table.nbytes == 3 * 6 * 8 and shared.nbytes == (3 * 6 + 5) * 8
    part = shared.part(1, 4, torch.tensor([7, 8, 9]))
    assert part.wire == shared.wire and part.row_starts is None
    assert part.starts.tolist() == [32, 64, 96]
    assert part.lengths.tolist() == [32, 32, 4]
    assert part.rows.tolist() == [7, 8, 9]


def stats_of(table: BlockTable) -> EncodeStats:
    return EncodeStats(torch.zeros(1, table.num_blocks, 2), torch.zeros(1, dtype=torch.int64))


def errors_of_sums(num_blocks: int) -> ErrorState:
    return ErrorState(
        torch.zeros(1, num_blocks, BLOCK, dtype=torch.float16), torch.zeros(1, num_blocks)
    )


@pytest.mark.parametrize("backend", ["eager", "compiled", "triton"])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_an_all_reduce_over_equal_rows_is_one_sum_of_all_blocks(bits: int, backend: str) -> None:
    """Three replicas, of which the second sums nothing: rows are exchanged as an all-to-all and an
    all-gather do, and what comes out and stays as errors is that of one replica that sums all."""
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("where there is a GPU, Triton does not interpret")
    replicas, bounds = 3, [0, 5, 5, 7]
    codec = get_backend(backend)
    whole = BlockLayout((100, 40, 8), bits, BLOCK).place(CPU)
    table = whole.in_rows(torch.tensor(bounds))
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(replicas, 1, whole.shard_numel, generator=generator)

    def blank(*rows: int, table: BlockTable) -> Tensor:
        return torch.full((*rows, table.wire.num_bytes), 0xA5, dtype=torch.uint8)

    sent = blank(replicas, replicas, table=table)
    received = blank(replicas, 1, table=whole)
    for gradient, rows, row in zip(gradients, sent, received, strict=True):
        codec.encode(gradient, rows, table, stats_of(table))
        codec.encode(gradient, row, whole, stats_of(whole))
    sums, errors = blank(replicas, table=table), []
    for replica, (first, last) in enumerate(pairwise(bounds)):
        part = table.part(first, last, torch.arange(last - first))
        errors.append(errors_of_sums(last - first))
        row = sums[replica : replica + 1]
        from_all = sent[:, replica].contiguous()
        codec.decode_encode(from_all, row, part, stats_of(part), errors[-1], 0.9, 1 / replicas)
    ours = torch.empty(whole.shard_numel)
    codec.decode(sums, ours, table)

    row, error = blank(1, table=whole), errors_of_sums(whole.num_blocks)
    from_all = received.squeeze(1)
    codec.decode_encode(from_all, row, whole, stats_of(whole), error, 0.9, 1 / replicas)
    theirs = torch.empty(whole.shard_numel)
    codec.decode(row, theirs, whole)
    assert torch.equal(ours, theirs)
    kept = torch.cat([eager.load_error(error) for error in errors], dim=1)
    assert kept.any()
    assert torch.equal(kept, eager.load_error(error))
