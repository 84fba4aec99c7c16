"""The kernel that encodes a difference, against `eager.encode_difference`."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch import Tensor

from kernel_cases import DEVICE, GRADIENT_DTYPES, Case, Outcome, ignore_numpy, needs_gpu, split_wire
from loco_fsdp.codec import eager, triton_backend
from loco_fsdp.codec.layout import BlockLayout
from loco_kernels.subtract_quantize_pack import subtract_quantize_pack
from weight_cases import (
    check_any_difference,
    check_encode_difference,
    weight_cases,
    with_gaps,
    wrong_differences,
)

pytestmark = ignore_numpy


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 256, 1024])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_variant(bits: int, block_size: int, dtype: torch.dtype) -> None:
    for numels, gap in (((1, block_size + 17, 31), 3), ((8, block_size + 16), 8)):
        case = Case(bits, block_size, numels, 1, dtype, error_dtype=None)
        check_any_difference(triton_backend, case, gap, 0, -9, special=0.002)


@hypothesis_settings(max_examples=40)
@given(
    weight_cases(),
    st.integers(0, 2**20),
    st.integers(-140, 120),
    st.sampled_from((0.0, 0.0, 0.01, 0.5, 1.0)),
)
def test_any_difference(drawn: tuple[Case, int], seed: int, exponent: int, special: float) -> None:
    case, gap = drawn
    check_any_difference(triton_backend, case, gap, seed, exponent, special)


@pytest.mark.parametrize("parameter_dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("replica_dtype", GRADIENT_DTYPES, ids=str)
def test_both_are_widened_before_they_are_subtracted(
    parameter_dtype: torch.dtype, replica_dtype: torch.dtype
) -> None:
    """Numbers whose difference neither of two 16-bit dtypes holds."""
    case = Case(8, 32, (64,), 1, error_dtype=None)
    parameter = (1 + torch.arange(64) / 64).to(parameter_dtype)
    replica = (torch.arange(64) / 2**12).to(replica_dtype)
    outcome = check_encode_difference(triton_backend, case, with_gaps(case, 0), parameter, replica)
    _, scale = split_wire(outcome.wire, case.table())
    largest = (parameter.double() - replica.double()).view(2, 32).amax(-1)
    torch.testing.assert_close(scale[0].double(), largest / 127, rtol=2**-23, atol=0)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_a_block_that_is_not_finite_is_sent_as_nan_and_counted(bits: int) -> None:
    """Also where both are the same infinity, and where the difference alone overflows."""
    case = Case(bits, 32, (32,) * 4, 1, error_dtype=None)
    parameter, replica = torch.ones(128), torch.zeros(128)
    parameter[5] = torch.nan
    parameter[40] = replica[40] = torch.inf
    parameter[70], replica[70] = 3e38, -3e38
    outcome = check_encode_difference(triton_backend, case, with_gaps(case, 0), parameter, replica)
    _, scale = split_wire(outcome.wire, case.table())
    assert scale.isnan().tolist() == [[True, True, True, False]]
    assert outcome.stats.nonfinite.item() == 3


def test_vectors_move_only_where_everything_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        triton_backend,
        "subtract_quantize_pack",
        lambda *tensors, aligned, **others: seen.append(aligned),
    )
    case = Case(4, 32, (64, 8), 1, error_dtype=None)
    outcome = Outcome.blank(case)

    def call(table: eager.BlockTable, parameter: Tensor, replica: Tensor) -> None:
        triton_backend.encode_difference(parameter, replica, outcome.wire, table, outcome.stats)

    flat = torch.zeros(80, dtype=torch.bfloat16)
    call(with_gaps(case, 0), flat[:72], flat[8:])
    call(with_gaps(case, 0), flat[1:73], flat[:72])
    call(with_gaps(case, 0), flat[:72], flat[1:73])
    call(with_gaps(replace(case, numels=(65, 7)), 0), flat[:72], flat[:72])
    assert seen == [True, False, False, False]


@pytest.mark.parametrize(("error", "message", "wrong"), [*wrong_differences()])
def test_wrong_arguments_name_the_value(
    error: type[Exception], message: str, wrong: dict[str, Tensor]
) -> None:
    case = Case(peers=1)
    table, outcome = with_gaps(case, 0), Outcome.blank(case).copy(DEVICE)
    flat = torch.zeros(table.shard_numel, device=DEVICE)
    right = {"parameter": flat, "replica": flat, "wire": outcome.wire}
    with pytest.raises(error, match=message):
        triton_backend.encode_difference(table=table, stats=outcome.stats, **{**right, **wrong})


def test_wrong_numbers_are_named() -> None:
    case = Case(peers=1, error_dtype=None)
    table, outcome = with_gaps(case, 0), Outcome.blank(case)
    flat = torch.zeros(table.shard_numel)
    right = {
        "scales_offset": table.wire.scales_offset,
        "bits": 4,
        "block_size": 32,
        "shard_numel": table.shard_numel,
        **outcome.keywords(),
    }
    for name, value, message in (
        ("bits", 3, "bits must be 8, 4, 2 or 1, got 3"),
        ("block_size", 48, r"a power of two in 32\.\.1024, got 48"),
        ("scales_offset", 4, "scales_offset in multiples of 16, got 160 and 4"),
        ("squares", torch.zeros(2, 8, 2), r"squares must have shape \[1, 8, 2\], got \[2, 8, 2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            subtract_quantize_pack(
                flat, flat, outcome.wire, table.starts, table.lengths, **{**right, name: value}
            )


@needs_gpu
def test_offsets_beyond_32_bits() -> None:
    numel = 2**31 + 128
    layout = BlockLayout((numel,), 4, 256)
    table = layout.place(DEVICE)
    parameter = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    replica = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    parameter[-128:] = 7
    wire = torch.zeros(1, layout.bytes_per_shard, dtype=torch.uint8, device=DEVICE)
    squares = torch.empty(1, layout.num_blocks, 2, device=DEVICE)
    stats = eager.EncodeStats(squares, torch.zeros(1, dtype=torch.int64, device=DEVICE))
    triton_backend.encode_difference(parameter, replica, wire, table, stats)
    row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    triton_backend.decode_rows(wire, replica[None], table, row, add=True)
    assert (replica[-128:] == 7).all()
    assert not replica[:-128].any()
