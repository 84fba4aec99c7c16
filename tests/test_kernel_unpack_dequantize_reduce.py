"""The kernel that decodes and sums, against `eager.decode`."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch import Tensor

from kernel_cases import (
    DEVICE,
    GRADIENT_DTYPES,
    Case,
    Outcome,
    cases,
    gradients,
    ignore_numpy,
    place_on_wire,
    rows_of_wire,
)
from loco_fsdp.codec import eager
from loco_kernels.unpack_dequantize_reduce import unpack_dequantize_reduce

pytestmark = ignore_numpy


def received(case: Case, gradient: Tensor) -> Tensor:
    """A wire from every peer."""
    outcome = Outcome.blank(case)
    eager.encode(gradient, outcome.wire, case.table(), outcome.stats)
    return outcome.wire


def decode(case: Case, wire: Tensor, output: Tensor, factor: float = 1.0) -> None:
    """Run the kernel; `output` is written."""
    table, written = case.table(), output.to(DEVICE)
    unpack_dequantize_reduce(
        wire.to(DEVICE),
        written,
        table.starts.to(DEVICE),
        table.lengths.to(DEVICE),
        **place_on_wire(table),
        **rows_of_wire(table),
        factor=factor,
        aligned=case.aligned,
    )
    output.copy_(written)


def check_against_eager(case: Case, wire: Tensor, factor: float = 1.0) -> None:
    """The same bits, where NaN is NaN whatever its bits."""
    expected, actual = (
        torch.full((case.layout.shard_numel,), 7.0, dtype=case.gradient_dtype) for _ in range(2)
    )
    eager.decode(wire, expected, case.table(), factor)
    decode(case, wire, actual, factor)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(
        actual.nan_to_num().view(torch.uint8), expected.nan_to_num().view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 256, 1024])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_variant(bits: int, block_size: int, dtype: torch.dtype) -> None:
    for numels in ((1, block_size + 17, 31), (8, block_size + 16)):
        case = Case(bits, block_size, numels, 3, dtype)
        check_against_eager(case, received(case, gradients(case, 0)), factor=1 / 3)
        case = Case(bits, block_size, numels, 1, dtype, wire_rows=3)
        check_against_eager(case, received(case, gradients(case, 0)), factor=1 / 3)


@hypothesis_settings(max_examples=50)
@given(
    cases(),
    st.integers(0, 2**20),
    st.integers(-140, 120),
    st.sampled_from((0.0, 0.01, 1.0)),
    st.sampled_from((1.0, 1 / 3, 0.25)),
)
def test_any_wire(case: Case, seed: int, exponent: int, special: float, factor: float) -> None:
    check_against_eager(case, received(case, gradients(case, seed, exponent, special)), factor)


def test_any_byte_is_a_code() -> None:
    """Also those that encoding never writes, such as -8 in 4 bits."""
    for bits in (8, 4, 2, 1):
        case = Case(bits, 64, (256 * 8 // bits,), 1)
        wire = received(case, gradients(case, 0))
        wire[0, :256] = torch.arange(256).to(torch.uint8)
        check_against_eager(case, wire)


def test_the_sum_is_in_float32() -> None:
    """448 + 7 * 0.875: sums in bfloat16 that start from 448 stay there."""
    case = Case(4, 32, (64,), 8, torch.bfloat16)
    gradient = torch.full((8, 64), 0.875, dtype=torch.bfloat16)
    gradient[0] = 448
    output = torch.empty(64, dtype=torch.bfloat16)
    decode(case, received(case, gradient), output)
    assert torch.equal(output, torch.full_like(output, 454))


def test_magnitudes_survive_every_output_dtype() -> None:
    for dtype, value in ((torch.bfloat16, 1e6), (torch.float32, 1e6), (torch.float16, 1e-6)):
        case = Case(4, 32, (40,), 2, dtype)
        gradient = torch.full((2, 40), value, dtype=dtype)
        output = torch.empty(40, dtype=dtype)
        decode(case, received(case, gradient), output)
        torch.testing.assert_close(output.float(), 2 * gradient[0].float(), rtol=1e-2, atol=0)


def test_wrong_arguments_name_the_value() -> None:
    case = Case()
    wire = received(case, gradients(case, 0))
    with pytest.raises(TypeError, match=r"output must be .*, got torch\.int32"):
        decode(case, wire, torch.empty(196, dtype=torch.int32))
    with pytest.raises(TypeError, match=r"wire must be torch\.uint8, got torch\.int8"):
        decode(case, wire.view(torch.int8), torch.empty(196))
    with pytest.raises(ValueError, match="no room for 8 scales from byte"):
        decode(case, wire[:, :128].contiguous(), torch.empty(196))
