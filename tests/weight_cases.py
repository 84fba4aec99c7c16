"""Inputs and checks that the tests of low-bit parameters share, whatever backend they test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from kernel_cases import (
    DEVICE,
    Case,
    Outcome,
    assert_same,
    assert_same_compiled,
    cases,
    gradients,
)
from loco_fsdp.codec import BlockTable, compiled, eager

CPU = torch.device("cpu")


@st.composite
def weight_cases(draw: st.DrawFn) -> tuple[Case, int]:
    """A case without an error, and the elements between parts of the shard that no block has."""
    case = draw(cases())
    return replace(case, wire_rows=None, error_dtype=None), draw(st.sampled_from((0, 3, 8)))


def with_gaps(case: Case, gap: int) -> BlockTable:
    """The blocks of a shard that has `gap` elements before, between and after its parts."""
    starts = accumulate(case.numels[:-1], lambda start, numel: start + numel + gap, initial=gap)
    shard_numel = sum(case.numels) + gap * (len(case.numels) + 1)
    return case.layout.place(CPU, starts=tuple(starts), shard_numel=shard_numel)


def shards(
    case: Case, rows: int, numel: int, seed: int, exponent: int = 0, special: float = 0.0
) -> Tensor:
    """`gradients` of another shape, `[rows, numel]`."""
    other = replace(case, peers=rows, numels=(numel,))
    return gradients(other, seed, exponent, special)


def wire_of(case: Case, seed: int, exponent: int = 0, special: float = 0.0) -> Tensor:
    """A row for each peer."""
    outcome = Outcome.blank(case)
    gradient = gradients(case, seed, exponent, special)
    eager.encode(gradient, outcome.wire, case.table(), outcome.stats)
    return outcome.wire


def _device_of(codec: ModuleType) -> torch.device:
    return CPU if codec is compiled else DEVICE


def _on(table: BlockTable, device: torch.device) -> BlockTable:
    columns = (table.starts, table.lengths, table.rows)
    starts, lengths, rows = (column.to(device) for column in columns)
    return table._replace(starts=starts, lengths=lengths, rows=rows)


def check_encode_difference(
    codec: ModuleType, case: Case, table: BlockTable, parameter: Tensor, replica: Tensor
) -> Outcome:
    """What the definition writes, and so does `codec`, but as `assert_same` allows."""
    expected, device = Outcome.blank(case, peers=1), _device_of(codec)
    actual = expected.copy(device)
    eager.encode_difference(parameter, replica, expected.wire, table, expected.stats)
    inputs = parameter.to(device), replica.to(device)
    codec.encode_difference(*inputs, actual.wire, _on(table, device), actual.stats)
    blocks = eager.to_blocks((parameter.float() - replica.float())[None], table)
    h = eager.from_blocks(blocks, case.table())  # as `assert_same` has them, without gaps
    check = assert_same_compiled if codec is compiled else assert_same
    check(case, h, expected, actual.copy(CPU))
    return expected


def check_decode_rows(
    codec: ModuleType,
    table: BlockTable,
    wire: Tensor,
    output: Tensor,
    output_rows: Tensor,
    add: bool,
) -> Tensor:
    """What the definition makes of the output; `codec` makes the same bits, but of NaN."""
    expected, device = output.clone(), _device_of(codec)
    actual = output.to(device, copy=True)
    eager.decode_rows(wire, expected, table, output_rows, add)
    codec.decode_rows(wire.to(device), actual, _on(table, device), output_rows.to(device), add)
    actual = actual.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(
        actual.nan_to_num().view(torch.uint8), expected.nan_to_num().view(torch.uint8)
    )
    return expected


def check_any_rows(
    codec: ModuleType, case: Case, gap: int, seed: int, exponent: int, special: float, add: bool
) -> None:
    """Rows of the output in any order, and two that the wire has none for, of which one is the
    first: no row of the wire is for the row of its own number by chance."""
    table, num_rows = with_gaps(case, gap), case.peers + 2
    generator = torch.Generator().manual_seed(seed)
    output_rows = 1 + torch.randperm(num_rows - 1, generator=generator)[: case.peers]
    output = shards(case, num_rows, table.shard_numel, seed + 1, exponent, special)
    wire = wire_of(case, seed, exponent - 4, special)
    check_decode_rows(codec, table, wire, output, output_rows, add)


def check_any_difference(
    codec: ModuleType, case: Case, gap: int, seed: int, exponent: int, special: float
) -> None:
    table = with_gaps(case, gap)
    parameter, change = shards(case, 2, table.shard_numel, seed, exponent, special)
    replica = (parameter.float() + change.float() / 16).to(case.gradient_dtype)
    check_encode_difference(codec, case, table, parameter, replica)


def ties(dtype: torch.dtype) -> tuple[Case, Tensor, Tensor]:
    """A case, its wire, and a row of an output: half of the sums lie between two neighbours.

    1.5 + k units + c / 2 units, where a unit is the step of the dtype from 1 to 2.
    """
    unit = torch.finfo(dtype).eps
    case = Case(8, 256, (1024,), 1, dtype, error_dtype=None)
    codes = (torch.arange(1024).remainder(200) - 100).to(torch.int8).view(torch.uint8)
    wire = torch.zeros(1, case.layout.bytes_per_shard, dtype=torch.uint8)
    on_codes, on_scales = case.layout.wire.on_wire(0, case.layout.num_blocks)
    wire[0, on_codes] = codes
    wire[0, on_scales] = torch.full((4,), unit / 2).view(torch.uint8)
    output = 1.5 + unit * torch.arange(1024).div(256, rounding_mode="floor")
    return case, wire, output.to(dtype).unsqueeze(0)


def check_ties(codec: ModuleType, dtype: torch.dtype) -> None:
    case, wire, output = ties(dtype)
    table = case.layout.place(CPU)
    new = check_decode_rows(codec, table, wire, output, torch.tensor([0]), add=True)
    exact = output.double() + wire[0, :1024].view(torch.int8) * (torch.finfo(dtype).eps / 2)
    difference = (new.double() - exact).abs()
    tied = difference == torch.finfo(dtype).eps / 2
    assert tied.sum() == 512
    integers = new.view(torch.int32 if dtype is torch.float32 else torch.int16)
    assert not (integers & 1)[tied].any()  # even
    assert not difference[~tied].any()


def wrong_differences() -> Iterator[object]:
    """Error, message, and what is wrong among the arguments of `encode_difference`."""

    def wrong(error: type[Exception], message: str, **arguments: Tensor) -> object:
        (name,) = arguments
        return pytest.param(error, message, arguments, id=f"{name} {message}")

    case = Case(peers=1)
    numel, num_bytes = case.layout.shard_numel, case.layout.bytes_per_shard
    for name in ("parameter", "replica"):
        doubles = torch.zeros(numel, dtype=torch.float64, device=DEVICE)
        yield wrong(TypeError, f"{name} must be .*, got torch.float64", **{name: doubles})
        short = torch.zeros(numel - 1, device=DEVICE)
        yield wrong(ValueError, rf"{name} must have shape \[{numel}\], got", **{name: short})
        strided = torch.zeros(2 * numel, device=DEVICE)[::2]
        yield wrong(ValueError, f"{name} must be contiguous, got strides", **{name: strided})
    elsewhere = torch.zeros(numel, device="meta")
    yield wrong(ValueError, "replica must be on .* got meta", replica=elsewhere)
    two = torch.zeros(2, num_bytes, dtype=torch.uint8, device=DEVICE)
    yield wrong(ValueError, r"wire must have shape \[1, .*got \[2, ", wire=two)
    signed = torch.zeros(1, num_bytes, dtype=torch.int8, device=DEVICE)
    yield wrong(TypeError, "wire must be torch.uint8, got torch.int8", wire=signed)


def wrong_rows() -> Iterator[object]:
    """Error, message, and what is wrong among the arguments of `decode_rows`."""

    def wrong(error: type[Exception], message: str, **arguments: Tensor) -> object:
        (name,) = arguments
        return pytest.param(error, message, arguments, id=f"{name} {message}")

    case = Case(peers=2)
    numel = case.layout.shard_numel
    integers = torch.zeros(3, numel, dtype=torch.int32, device=DEVICE)
    yield wrong(TypeError, "output must be .*, got torch.int32", output=integers)
    long = torch.zeros(3, numel + 1, device=DEVICE)
    yield wrong(ValueError, rf"output must have shape \[\*, {numel}\], got", output=long)
    strided = torch.zeros(numel, 3, device=DEVICE).T
    yield wrong(ValueError, "output must be contiguous, got strides", output=strided)
    signed = torch.zeros(2, case.layout.bytes_per_shard, dtype=torch.int8, device=DEVICE)
    yield wrong(TypeError, "wire must be torch.uint8, got torch.int8", wire=signed)
    narrow = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    yield wrong(TypeError, "output_rows must be torch.int64, got", output_rows=narrow)
    many = torch.tensor([0, 1, 2], device=DEVICE)
    yield wrong(ValueError, r"output_rows must have shape \[2\], got \[3\]", output_rows=many)
