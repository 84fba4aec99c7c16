"""The operators of low-bit parameters: their definition against values worked out by hand, and what
holds of them on every backend."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_cases import DEVICE, GRADIENT_DTYPES, bytes_of, ignore_numpy, needs_compiler
from loco_fsdp.codec import (
    BlockLayout,
    BlockTable,
    EncodeStats,
    decode,
    decode_rows,
    eager,
    encode_difference,
)

pytestmark = ignore_numpy
CPU = torch.device("cpu")
UNWRITTEN = 0xA5
BACKENDS = ["eager", pytest.param("compiled", marks=needs_compiler), "triton"]

# Two parts of 8 and 3 elements, in blocks of 8, in a shard of 16: elements 0, 1, 10 and 14, 15 are
# in no block.
SMALL = BlockLayout((8, 3), bits=4, block_size=8)
SMALL_TABLE = SMALL.place(CPU, starts=(2, 11), shard_numel=16)
NO_BLOCK = [0, 1, 10, 14, 15]
# 4-bit codes of elements 0 and 4, 1 and 5, ... of a block share a byte: of 7, -7, 4, 0, 2, 0, 0, 2
# and of 7, -1, 2.
CODES = [0x27, 0x09, 0x04, 0x20, 0x07, 0x0F, 0x02, 0x00]


def empty_stats(table: BlockTable, device: torch.device = CPU) -> EncodeStats:
    return EncodeStats(
        torch.zeros(1, table.num_blocks, 2, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )


def small_wire(*scales: tuple[float, float]) -> Tensor:
    """A row with the codes above for each pair of scales."""
    wire = torch.full((len(scales), 32), UNWRITTEN, dtype=torch.uint8)
    wire[:, :8] = torch.tensor(CODES, dtype=torch.uint8)
    wire[:, 16:24] = torch.tensor(scales).view(torch.uint8)
    return wire


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_a_difference_in_numbers(dtype: torch.dtype) -> None:
    parameter = torch.full((16,), torch.nan)  # seen nowhere but in blocks
    replica = torch.arange(16.0)
    parameter[2:10] = replica[2:10] + torch.tensor([7, -7, 3.5, 0.5, 1.5, -0.5, 0, 2])
    parameter[11:14] = replica[11:14] + torch.tensor([1.75, -0.25, 0.5])
    wire, stats = torch.full((1, 32), UNWRITTEN, dtype=torch.uint8), empty_stats(SMALL_TABLE)
    inputs = parameter.to(dtype), replica.to(dtype)
    eager.encode_difference(*inputs, wire, SMALL_TABLE, stats)
    assert torch.equal(wire, small_wire((1.0, 0.25)))
    # 49 + 49 + 12.25 + 0.25 + 2.25 + 0.25 + 0 + 4, of which four halves are not sent.
    assert stats.squares.tolist() == [[[117.0, 1.0], [3.375, 0.0]]]
    assert stats.nonfinite.item() == 0


def test_a_difference_that_is_not_finite() -> None:
    parameter, replica = torch.zeros(16), torch.zeros(16)
    parameter[4] = replica[4] = torch.inf
    parameter[11] = 7
    wire, stats = torch.zeros(1, 32, dtype=torch.uint8), empty_stats(SMALL_TABLE)
    for count in (1, 2):
        eager.encode_difference(parameter, replica, wire, SMALL_TABLE, stats)
        assert stats.nonfinite.item() == count
    scales = wire[0, 16:24].view(torch.float32)
    assert scales[0].isnan() and scales[1] == 1
    assert stats.squares.tolist() == [[[0.0, 0.0], [49.0, 0.0]]]


def test_rows_added_in_numbers() -> None:
    """Steps of bfloat16 are 1 from 128, and 2 from 256 on: odd sums there are ties."""
    output = torch.full((3, 16), 256.0, dtype=torch.bfloat16)
    output[2, 5:] = 258
    output[0] = 1
    before = output.clone()
    wire = small_wire((1.0, 0.25), (torch.nan, 2.0))
    eager.decode_rows(wire, output, SMALL_TABLE, torch.tensor([2, 0]), add=True)
    #   old 256 + 7 = 263, 256 - 7 = 249, 256 + 4; from here on 258: + 0, + 2, + 0, + 0, + 2
    assert output[2, 2:10].tolist() == [264, 249, 260, 258, 260, 258, 258, 260]
    #   258 + 1.75 = 259.75, 258 - 0.25 = 257.75, 258 + 0.5
    assert output[2, 11:14].tolist() == [260, 258, 258]
    assert output[0, 2:10].isnan().all()
    assert output[0, 11:14].tolist() == [15, -1, 5]
    assert torch.equal(output[1], before[1])  # no row of the wire is for it
    assert torch.equal(output[:, NO_BLOCK], before[:, NO_BLOCK])


def test_rows_written_in_numbers() -> None:
    output = torch.full((2, 16), torch.nan)
    wire = small_wire((1.0, 0.25), (0.5, 0.0))
    eager.decode_rows(wire, output, SMALL_TABLE, torch.tensor([1, 0]), add=False)
    assert output[1, 2:10].tolist() == [7, -7, 4, 0, 2, 0, 0, 2]
    assert output[1, 11:14].tolist() == [1.75, -0.25, 0.5]
    assert output[0, 2:10].tolist() == [3.5, -3.5, 2, 0, 1, 0, 0, 1]
    assert output[0, 11:14].tolist() == [0, 0, 0]
    assert output[:, NO_BLOCK].isnan().all()


@pytest.mark.parametrize(
    ("old", "scale", "new"), [(256.0, 1.0, 264.0), (258.0, 1.0, 264.0), (258.0, 1 + 2**-10, 266.0)]
)
def test_ties_go_to_the_even_neighbour(old: float, scale: float, new: float) -> None:
    """256 + 7 lies between 262 and 264, 258 + 7 between 264 and 266. A little more than 7 makes no
    tie, though 7 is what rounding it alone would make of it."""
    output = torch.full((1, 16), old, dtype=torch.bfloat16)
    wire = small_wire((scale, 1.0))
    eager.decode_rows(wire, output, SMALL_TABLE, torch.tensor([0]), add=True)
    assert output[0, 2].item() == new


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_rows_written_are_what_decode_makes_of_each(backend: str, dtype: torch.dtype) -> None:
    layout = BlockLayout((70, 3), bits=4, block_size=32)
    table, stats = layout.place(DEVICE if backend == "triton" else CPU), None
    device = table.starts.device
    wire = torch.zeros(2, layout.bytes_per_shard, dtype=torch.uint8, device=device)
    generator = torch.Generator().manual_seed(0)
    for row in range(2):
        stats = empty_stats(table, device)
        parameter = torch.randn(73, generator=generator).to(device)
        zeros = torch.zeros(73, device=device)
        encode_difference(parameter, zeros, wire[row : row + 1], table, stats, backend=backend)
    output = torch.empty(2, 73, dtype=dtype, device=device)
    rows = torch.tensor([1, 0], device=device)
    decode_rows(wire, output, table, rows, add=False, backend=backend)
    for row in range(2):
        alone = torch.empty(73, dtype=dtype, device=device)
        decode(wire[row : row + 1], alone, table, backend=backend)
        assert torch.equal(bytes_of(output[1 - row]), bytes_of(alone))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_replicas_follow_a_parameter_that_moves(backend: str, dtype: torch.dtype) -> None:
    """What is left is half a step of the last difference and one rounding; it does not add up.

    Two ranks own a shard each; the second's is 100 times larger and moves as much faster.
    """
    layout = BlockLayout((150, 40), bits=4, block_size=64)
    table = layout.place(DEVICE if backend == "triton" else CPU)
    device, numel = table.starts.device, layout.shard_numel
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([[1.0], [100.0]], device=device)
    parameter = size * torch.randn(2, numel, generator=generator).to(device)
    replica = parameter.to(dtype, copy=True)
    wire = torch.zeros(2, layout.bytes_per_shard, dtype=torch.uint8, device=device)
    own, others = torch.tensor([0, 1], device=device), replica.clone()
    # Half of a step of the dtype, relative to the value, and the roundings in float32.
    rounding = torch.finfo(dtype).eps / 2 + 2**-22

    largest_move, largest = torch.zeros(2, device=device), torch.zeros(2, device=device)
    for step in range(8 if backend == "triton" else 40):  # the interpreter is slow
        # Every fourth step is small, and some elements move by as much as they are large.
        move = 0.01 * size * torch.randn(2, numel, generator=generator).to(device)
        move[:, step % numel] *= 30
        parameter += move * (0.05 if step % 4 == 3 else 1)
        largest_move = torch.maximum(largest_move, move.abs().amax(1))
        last = (parameter.double() - replica.double()).abs().amax(1)
        for rank in range(2):
            mine = parameter[rank], replica[rank], wire[rank : rank + 1]
            encode_difference(*mine, table, empty_stats(table, device), backend=backend)
        decode_rows(wire, replica, table, own, add=True, backend=backend)
        left = (parameter.double() - replica.double()).abs()
        half_step = last / 14
        allowed = half_step[:, None] + replica.double().abs() * rounding
        assert (left <= allowed).all()
        # Another replica, whose rows arrive in another order, holds the same bits.
        decode_rows(wire.flip(0), others, table, own.flip(0), add=True, backend=backend)
        assert torch.equal(bytes_of(others), bytes_of(replica))
        largest = torch.maximum(largest, last)
    lost = parameter.double().abs().amax(1) * rounding * 2
    assert (largest <= (largest_move + lost) * 14 / 13).all()


def normal_and_inference(inference: bool) -> dict[str, Any]:
    layout = BlockLayout((70, 3), bits=4, block_size=32)
    table = layout.place(CPU)
    squares, nonfinite = empty_stats(table)
    tensors = {
        "parameter": torch.arange(73.0),
        "replica": torch.ones(73),
        "wire": torch.zeros(1, layout.bytes_per_shard, dtype=torch.uint8),
        "squares": squares,
        "nonfinite": nonfinite,
        "output": torch.ones(2, 73),
        "output_rows": torch.tensor([1]),
    }
    assert all(x.is_inference() == inference for x in tensors.values())
    return {"table": table, **tensors}


def difference_and_rows(x: dict[str, Any], backend: str) -> None:
    """One after the other, from what `normal_and_inference` made."""
    stats = EncodeStats(x["squares"], x["nonfinite"])
    encode_difference(x["parameter"], x["replica"], x["wire"], x["table"], stats, backend=backend)
    decode_rows(x["wire"], x["output"], x["table"], x["output_rows"], add=True, backend=backend)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, Triton does not interpret")
@pytest.mark.parametrize("backend", BACKENDS)
def test_inference_mode_takes_tensors_of_both_kinds(backend: str) -> None:
    """Made in it or before it, in any mixture: of parameters, wires and outputs."""
    expected = normal_and_inference(False)
    difference_and_rows(expected, "eager")
    for kinds in itertools.product((False, True), repeat=4):
        made = {False: normal_and_inference(False)}
        with torch.inference_mode():
            made[True] = normal_and_inference(True)
            names = ("parameter", "wire", "squares", "output")
            x = {
                **made[True],
                **{name: made[k][name] for name, k in zip(names, kinds, strict=True)},
            }
            difference_and_rows(x, backend)
            for name in ("wire", "nonfinite", "output"):
                assert torch.equal(x[name], expected[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, Triton does not interpret")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_requires_grad_is_taken(backend: str) -> None:
    expected, x = normal_and_inference(False), normal_and_inference(False)
    difference_and_rows(expected, "eager")
    x["parameter"].requires_grad_()
    difference_and_rows(x, backend)
    assert torch.equal(x["output"], expected["output"])
    assert not x["squares"].requires_grad


def flat_table(table: BlockTable) -> tuple[Any, ...]:
    columns = table.starts, table.lengths, table.rows, table.row_starts
    wire = table.wire
    sizes = wire.num_blocks, wire.bits, wire.block_size
    return (*columns, *sizes, table.shard_numel, table.aligned)


def test_operators_pass_the_checks_of_torch() -> None:
    x = normal_and_inference(False)
    flat = flat_table(x["table"])
    stats = x["squares"], x["nonfinite"]
    difference = (x["parameter"], x["replica"], x["wire"], *flat, *stats, "eager")
    torch.library.opcheck(torch.ops.loco_fsdp.encode_difference, difference)
    rows = (x["wire"], x["output"], *flat, x["output_rows"], True, "eager")
    torch.library.opcheck(torch.ops.loco_fsdp.decode_rows, rows)


def test_fake_tensors_go_through() -> None:
    with FakeTensorMode():
        difference_and_rows(normal_and_inference(False), "triton")


def test_a_wire_whose_rows_share_the_blocks_out_is_refused() -> None:
    x = normal_and_inference(False)
    x["table"] = x["table"].in_rows(torch.tensor([0, 1, 4]))
    with pytest.raises(ValueError, match="all blocks of the table, got row_starts for 2 rows"):
        difference_and_rows(x, "eager")
    stats = x["wire"], x["output"], x["table"], x["output_rows"]
    with pytest.raises(ValueError, match="all blocks of the table, got row_starts for 2 rows"):
        decode_rows(*stats, add=False, backend="eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="rows are not checked on a GPU")
@pytest.mark.parametrize("rows", [[2], [-1], [0, 0]], ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_rows_that_the_output_has_not_are_named(backend: str, rows: list[int]) -> None:
    x = normal_and_inference(False)
    wire = x["wire"].repeat(len(rows), 1)
    with pytest.raises(ValueError, match=rf"output_rows .* in 0\.\.1, got \[{str(rows)[1:-1]}\]"):
        decode_rows(wire, x["output"], x["table"], torch.tensor(rows), add=True, backend=backend)
    assert (x["output"] == 1).all()
