"""The kernel that decodes rows, against `eager.decode_rows`."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch import Tensor

from kernel_cases import DEVICE, GRADIENT_DTYPES, Case, ignore_numpy, needs_gpu
from loco_fsdp.codec import BlockTable, triton_backend
from loco_kernels.unpack_dequantize_rows import unpack_dequantize_rows
from weight_cases import (
    check_any_rows,
    check_decode_rows,
    check_ties,
    weight_cases,
    wire_of,
    with_gaps,
    wrong_rows,
)

pytestmark = ignore_numpy


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 256, 1024])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_variant(bits: int, block_size: int, dtype: torch.dtype, add: bool) -> None:
    for numels, gap in (((1, block_size + 17, 31), 3), ((8, block_size + 16), 8)):
        case = Case(bits, block_size, numels, 2, dtype, error_dtype=None)
        check_any_rows(triton_backend, case, gap, 0, 0, special=0.002, add=add)


@hypothesis_settings(max_examples=40)
@given(
    weight_cases(),
    st.integers(0, 2**20),
    st.integers(-140, 120),
    st.sampled_from((0.0, 0.01, 1.0)),
    st.booleans(),
)
def test_any_wire(
    drawn: tuple[Case, int], seed: int, exponent: int, special: float, add: bool
) -> None:
    case, gap = drawn
    check_any_rows(triton_backend, case, gap, seed, exponent, special, add)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_sums_are_rounded_once_half_to_even(dtype: torch.dtype) -> None:
    check_ties(triton_backend, dtype)


@pytest.mark.parametrize("add", [False, True], ids=["write", "add"])
def test_any_byte_is_a_code(add: bool) -> None:
    """Also those that encoding never writes, such as -8 in 4 bits, and with a scale of 0."""
    for bits in (8, 4, 2, 1):
        case = Case(bits, 64, (256 * 8 // bits,), 1, error_dtype=None)
        wire = wire_of(case, 0)
        wire[0, :256] = torch.arange(256).to(torch.uint8)
        scales = wire[0, case.layout.wire.scales_offset :]
        scales[:4] = 0
        output = torch.full((1, case.layout.shard_numel), -0.0)
        check_decode_rows(triton_backend, case.table(), wire, output, torch.tensor([0]), add)


def test_vectors_move_only_where_everything_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        triton_backend,
        "unpack_dequantize_rows",
        lambda *tensors, aligned, **others: seen.append(aligned),
    )
    case = Case(4, 32, (64, 8), 2, error_dtype=None)
    wire, rows = wire_of(case, 0), torch.tensor([1, 0])

    def call(table: BlockTable, first: int = 0) -> None:
        numel = 2 * table.shard_numel
        output = torch.zeros(numel + first, dtype=torch.bfloat16)[first:].view(2, -1)
        triton_backend.decode_rows(wire, output, table, rows, add=True)

    call(with_gaps(case, 0))
    call(with_gaps(case, 8))
    call(with_gaps(case, 0), first=1)
    call(with_gaps(replace(case, numels=(65, 7)), 0))
    # All blocks are aligned in the first row, and none is in the second.
    call(with_gaps(case, 0)._replace(shard_numel=73))
    assert seen == [True, True, False, False, False]


@pytest.mark.parametrize(("error", "message", "wrong"), [*wrong_rows()])
def test_wrong_arguments_name_the_value(
    error: type[Exception], message: str, wrong: dict[str, Tensor]
) -> None:
    case = Case(peers=2)
    table = with_gaps(case, 0)
    right = {
        "wire": wire_of(case, 0).to(DEVICE),
        "output": torch.zeros(3, table.shard_numel, device=DEVICE),
        "output_rows": torch.tensor([2, 0], device=DEVICE),
    }
    with pytest.raises(error, match=message):
        triton_backend.decode_rows(table=table, add=True, **{**right, **wrong})


def test_wrong_numbers_are_named() -> None:
    case = Case(peers=2)
    table, wire = with_gaps(case, 0), wire_of(case, 0)
    output, rows = torch.zeros(3, table.shard_numel), torch.tensor([2, 0])
    right = {
        "scales_offset": table.wire.scales_offset,
        "bits": 4,
        "block_size": 32,
        "shard_numel": table.shard_numel,
        "add": True,
    }
    for name, value, message in (
        ("bits", 3, "bits must be 8, 4, 2 or 1, got 3"),
        ("block_size", 48, r"a power of two in 32\.\.1024, got 48"),
        ("scales_offset", 144, "no room for 8 scales from byte 144 on: num_bytes is 160"),
    ):
        with pytest.raises(ValueError, match=message):
            unpack_dequantize_rows(
                wire, output, table.starts, table.lengths, rows, **{**right, name: value}
            )


@needs_gpu
def test_offsets_of_rows_beyond_32_bits() -> None:
    case = Case(4, 256, (2**20,), 1, torch.bfloat16, error_dtype=None)
    table = case.layout.place(DEVICE)
    output = torch.zeros(2**11 + 1, 2**20, dtype=torch.bfloat16, device=DEVICE)
    last = torch.tensor([2**11], device=DEVICE)
    triton_backend.decode_rows(wire_of(case, 0).to(DEVICE), output, table, last, add=False)
    assert output[-1].any()
    assert not output[:-1].any()


@needs_gpu
def test_a_launch_neither_allocates_nor_synchronises() -> None:
    case = Case(4, 256, (4096,), 2, torch.bfloat16, error_dtype=None)
    table, wire = case.layout.place(DEVICE), wire_of(case, 0).to(DEVICE)
    output = torch.zeros(2, 4096, dtype=torch.bfloat16, device=DEVICE)
    rows = torch.tensor([1, 0], device=DEVICE)
    triton_backend.decode_rows(wire, output, table, rows, add=True)
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_backend.decode_rows(wire, output, table, rows, add=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
