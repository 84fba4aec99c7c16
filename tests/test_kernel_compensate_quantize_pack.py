"""The kernel that encodes, against `eager.encode`."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from torch import Tensor

from kernel_cases import (
    DEVICE,
    Case,
    Outcome,
    assert_same,
    bytes_of,
    cases,
    columns,
    compensated,
    fma_rounds_once,
    gradients,
    ignore_numpy,
    needs_gpu,
    place_on_wire,
    rows_of_wire,
    split_wire,
    variants,
)
from loco_fsdp.codec import eager
from loco_fsdp.codec.layout import BlockLayout
from loco_kernels.compensate_quantize_pack import compensate_quantize_pack
from loco_kernels.unpack_dequantize_reduce import unpack_dequantize_reduce

pytestmark = ignore_numpy


def encode(case: Case, gradient: Tensor, before: Outcome) -> Outcome:
    """What the kernel makes of `before`."""
    table, outcome = case.table(), before.copy(DEVICE)
    compensate_quantize_pack(
        gradient.to(DEVICE),
        outcome.wire,
        *(column.to(DEVICE) for column in columns(table)),
        **place_on_wire(table),
        **rows_of_wire(table),
        beta=case.beta,
        aligned=case.aligned,
        **outcome.keywords(),
    )
    return outcome.copy(torch.device("cpu"))


def check_against_eager(case: Case, steps: list[Tensor]) -> Outcome:
    """Encode the last gradient, with the error that the reference has made of those before."""
    table, expected = case.table(), Outcome.blank(case)
    for gradient in steps:
        before = expected.copy(torch.device("cpu"))
        h = compensated(case, gradient, expected.error)
        eager.encode(gradient, expected.wire, table, expected.stats, expected.error, case.beta)
    actual = encode(case, steps[-1], before)
    assert_same(case, h, expected, actual)
    return actual


@pytest.mark.parametrize("case", variants(), ids=str)
def test_every_variant(case: Case) -> None:
    check_against_eager(case, [gradients(case, 0, -10), gradients(case, 1, -9, special=0.002)])


@hypothesis_settings(max_examples=60)
@given(
    cases(),
    st.integers(0, 2**20),
    st.integers(-140, 120),
    st.sampled_from((0.0, 0.0, 0.01, 0.5, 1.0)),
)
def test_any_gradient(case: Case, seed: int, exponent: int, special: float) -> None:
    steps = [gradients(case, seed, exponent), gradients(case, seed + 1, exponent, special)]
    check_against_eager(case, steps)


def test_codes_are_rounded_half_to_even() -> None:
    values = torch.tensor([[7.0, *(k + 0.5 for k in range(-7, 7))]])
    case = Case(4, 32, (15,), 1, error_dtype=None)
    outcome = encode(case, values, Outcome.blank(case))
    codes, scale = split_wire(outcome.wire, case.table())
    assert scale.item() == 1
    assert torch.equal(codes[0, 0, :15], values[0].round().to(torch.int8))


@pytest.mark.skipif(not fma_rounds_once(), reason="this interpreter rounds twice in tl.fma")
@pytest.mark.parametrize("bits", [8, 4])
def test_codes_beside_a_tie_are_those_of_an_exact_division(bits: int) -> None:
    """h / scale is the float32 nearest to k + 0.5, or one of its neighbours."""
    case = Case(bits, 1024, (1024,) * 8, 2, error_dtype=None)
    top = 2 ** (bits - 1) - 1
    generator = torch.Generator().manual_seed(0)
    scale = 1 + torch.rand(2, 8, 1, generator=generator)
    scale *= 2.0 ** torch.randint(-120, 110, (2, 8, 1), generator=generator)
    h = (torch.randint(-top, top, (2, 8, 1024), generator=generator) + 0.5) * scale
    h[..., 341:682] = h[..., 341:682].nextafter(torch.tensor(torch.inf))
    h[..., 682:] = h[..., 682:].nextafter(torch.tensor(-torch.inf))
    h[..., :1] = top * scale
    check_against_eager(case, [h.flatten(1)])


@pytest.mark.parametrize("bits", [8, 4])
def test_no_code_leaves_its_range_when_the_scale_is_rounded_down(bits: int) -> None:
    """max|h| / scale then lies above the largest level."""
    top = 2 ** (bits - 1) - 1
    generator = torch.Generator().manual_seed(0)
    absmax = 1 + torch.rand(2, 500, generator=generator)
    absmax[:, 1::2] *= -1
    assert (absmax.abs() / (absmax.abs() / top) > top).any()
    case = Case(bits, 32, (1,) * 500, 2, error_dtype=None)
    outcome = check_against_eager(case, [absmax])
    codes, _ = split_wire(outcome.wire, case.table())
    assert torch.equal(codes[..., 0], (absmax.sign() * top).to(torch.int8))


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_block_that_is_not_finite_is_sent_as_nan_and_forgets_its_error(
    bits: int, special: float
) -> None:
    case = Case(bits, 32, (32, 32), 1)
    first, second = gradients(case, 0), gradients(case, 1)
    second[0, 5] = special
    outcome = check_against_eager(case, [first, second])
    _, scale = split_wire(outcome.wire, case.table())
    assert scale.isnan().tolist() == [[True, False]]
    assert outcome.stats.nonfinite.item() == 1
    assert outcome.error is not None
    assert not bytes_of(outcome.error.payload[0, case.table().rows[0]]).any()
    assert eager.load_error(outcome.error).isfinite().all()


def test_a_sum_with_the_error_that_overflows_counts_as_not_finite() -> None:
    case = Case(4, 32, (32,), 1, error_dtype=torch.float32)
    outcome = Outcome.blank(case)
    assert outcome.error is not None
    outcome.error.payload.fill_(1.5)
    outcome.error.scale.fill_(2.0**127)
    outcome = encode(case, torch.full((1, 32), 3e38), outcome)
    assert outcome.error is not None
    assert split_wire(outcome.wire, case.table())[1].isnan().all()
    assert not outcome.error.payload[0, case.table().rows].any()


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_powers_of_two_scale_exactly(bits: int) -> None:
    """The codes of two steps are the same for gradients times 2**k, and scales are times it."""
    case = Case(bits, 32, (100,), 1)
    steps = [gradients(case, step) for step in range(2)]

    def run(k: int) -> tuple[Tensor, Tensor, Outcome]:
        outcome = Outcome.blank(case)
        for gradient in steps:
            outcome = encode(case, gradient * 2.0**k, outcome)
        return (*split_wire(outcome.wire, case.table()), outcome)

    codes, scale, reference = run(0)
    for k in (-60, 60):
        other_codes, other_scale, other = run(k)
        assert torch.equal(other_codes, codes)
        assert torch.equal(other_scale, scale * 2.0**k)
        assert other.error is not None and reference.error is not None
        assert torch.equal(other.error.payload, reference.error.payload)


def test_what_is_sent_has_no_bias() -> None:
    """The mean of what 100,000 uniform numbers become differs by under 3 standard errors."""
    case = Case(4, 1024, (100_000,), 1, error_dtype=None)
    x = torch.rand(1, 100_000, generator=torch.Generator().manual_seed(0))
    outcome = encode(case, x, Outcome.blank(case))
    sent = torch.empty(100_000)
    eager.decode(outcome.wire, sent, case.table())
    difference = (sent - x[0]).double()
    assert difference.mean().abs() < 3 * difference.std() / 100_000**0.5


@pytest.mark.parametrize("bits", [2, 1])
def test_padding_changes_no_scale_and_has_no_error(bits: int) -> None:
    """No code of these widths stands for zero, so that padding must be left out by its place."""
    case = Case(bits, 32, (5,), 1, error_dtype=torch.float32)
    outcome = check_against_eager(case, [torch.full((1, 5), -3.0)])
    assert outcome.error is not None
    assert not outcome.error.payload[..., 5:].any()
    _, scale = split_wire(outcome.wire, case.table())
    assert scale.item() == 3.0


def test_wrong_arguments_name_the_value() -> None:
    case = Case()
    gradient, outcome, table = gradients(case, 0), Outcome.blank(case), case.table()
    keywords = {**place_on_wire(table), **rows_of_wire(table), **outcome.keywords()}

    def call(gradient: Tensor = gradient, wire: Tensor = outcome.wire, **other: Any) -> None:
        compensate_quantize_pack(gradient, wire, *columns(table), **{**keywords, **other})

    with pytest.raises(ValueError, match="bits must be 8, 4, 2 or 1, got 3"):
        call(bits=3)
    with pytest.raises(ValueError, match=r"a power of two in 32\.\.1024, got 48"):
        call(block_size=48)
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1\), got 1\.5"):
        call(beta=1.5)
    with pytest.raises(TypeError, match=r"gradient must be .*, got torch\.float64"):
        call(gradient.double())
    with pytest.raises(ValueError, match=r"wire must be contiguous, got strides \(1, 2\)"):
        call(wire=outcome.wire.T.contiguous().T)
    with pytest.raises(ValueError, match=r"gradient must have shape \[2, \*\], got \[1, 196\]"):
        call(gradient[:1])
    with pytest.raises(ValueError, match="payload and error_scale must be given together"):
        call(payload=None)
    with pytest.raises(ValueError, match="scales_offset in multiples of 16, got 160 and 4"):
        call(scales_offset=4)
    with pytest.raises(ValueError, match=r"row_starts must have shape \[3\], got \[2\]"):
        call(gradient[:1], row_starts=table.starts[:2])
    with pytest.raises(TypeError, match=r"payload must be .*, got torch\.float64"):
        call(payload=outcome.keywords()["payload"].double())


@needs_gpu
def test_offsets_beyond_32_bits() -> None:
    numel = 2**31 + 128
    layout = BlockLayout((numel,), 4, 256)
    gradient = torch.zeros(1, numel, dtype=torch.bfloat16, device=DEVICE)
    gradient[0, -128:] = 7
    wire = torch.empty(1, layout.bytes_per_shard, dtype=torch.uint8, device=DEVICE)
    table = layout.place(DEVICE)
    place = {**place_on_wire(table), **rows_of_wire(table), "aligned": True}
    compensate_quantize_pack(
        gradient,
        wire,
        *columns(table),
        squares=torch.empty(1, layout.num_blocks, 2, device=DEVICE),
        nonfinite=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        **place,
    )
    output = gradient[0].fill_(3)
    unpack_dequantize_reduce(wire, output, table.starts, table.lengths, **place)
    assert (output[-128:] == 7).all()
    assert not output[:-128].any()


@needs_gpu
def test_a_launch_neither_allocates_nor_synchronises() -> None:
    case = Case(4, 256, (4096,), 2, torch.bfloat16)
    table, outcome = case.table(), Outcome.blank(case).copy(DEVICE)
    gradient = gradients(case, 0).to(DEVICE)
    on_device = [column.to(DEVICE) for column in columns(table)]

    def launch() -> None:
        compensate_quantize_pack(
            gradient,
            outcome.wire,
            *on_device,
            **place_on_wire(table),
            **rows_of_wire(table),
            beta=0.9,
            aligned=True,
            **outcome.keywords(),
        )

    launch()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
