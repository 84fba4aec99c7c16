"""Properties of the quantizer that hold for every input, and values worked out by hand."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

import oracle
from loco_fsdp import quantize
from loco_fsdp.codec import BlockLayout
from loco_fsdp.codec.eager import SMALLEST_NORMAL, pack, unpack

BLOCK = 32
SHAPES = st.sampled_from([(1,), (31,), (32,), (33,), (5, 13), (2, 3, 16), (0,), (), (1, 129)])
BITS = st.sampled_from([8, 4, 2, 1])
EVEN_BITS = st.sampled_from([8, 4])


@st.composite
def tensors(draw: st.DrawFn, exponent: int = 30) -> Tensor:
    """Signed tensors of any shape whose blocks differ in size, some elements exactly zero."""
    shape = draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(shape, generator=generator)
    magnitude = torch.randint(-exponent, exponent + 1, shape, generator=generator)
    x = x * (2.0**magnitude if draw(st.booleans()) else 2.0 ** magnitude.flatten()[:1].sum())
    return torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, x)


def step(x: Tensor, bits: int, scale: Tensor) -> Tensor:
    """The scale of the block of each element."""
    return scale.repeat_interleave(BLOCK)[: x.numel()].view(x.shape)


@given(tensors(), EVEN_BITS)
def test_the_difference_is_at_most_half_a_step(x: Tensor, bits: int) -> None:
    q = quantize(x, bits=bits, block_size=BLOCK)
    half = step(x, bits, q.scale).double() / 2
    difference = (q.dequantize().double() - x.double()).abs()
    # One rounding of the scale and one of the product, both relative to the value.
    assert (difference <= half + x.double().abs() * 2**-22).all()


@given(tensors(), BITS)
def test_values_are_those_of_the_oracle(x: Tensor, bits: int) -> None:
    q = quantize(x, bits=bits, block_size=BLOCK)
    scales, sent = oracle.quantize_part(x.flatten().tolist(), bits, BLOCK)
    expected = torch.tensor(scales, dtype=torch.float64).view(x.shape)
    torch.testing.assert_close(step(x, bits, q.scale).double(), expected, rtol=3e-7, atol=1e-37)
    values = torch.tensor(sent, dtype=torch.float64).view(x.shape)
    different = ~torch.isclose(q.dequantize().double(), values, rtol=1e-6, atol=1e-37)
    # Only an element on a threshold between two codes may fall on either side of it.
    ratio = (x.double() / expected).abs()[different]
    threshold = oracle.THRESHOLD_2BIT if bits == 2 else ratio.floor() + 0.5
    assert ((ratio - threshold).abs() < 1e-4).all()


@given(tensors(), EVEN_BITS)
def test_quantizing_again_changes_nothing(x: Tensor, bits: int) -> None:
    once = quantize(x, bits=bits, block_size=BLOCK)
    twice = quantize(once.dequantize(), bits=bits, block_size=BLOCK)
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(once.scale, twice.scale)


@given(tensors(), BITS)
def test_the_sign_is_symmetric(x: Tensor, bits: int) -> None:
    plus = quantize(x, bits=bits, block_size=BLOCK).dequantize()
    minus = quantize(-x, bits=bits, block_size=BLOCK).dequantize()
    if bits < 4:  # no code stands for zero there: it is sent as plus
        plus, minus = plus[x != 0], minus[x != 0]
    assert torch.equal(plus, -minus)


@given(tensors(exponent=3), BITS, st.integers(-60, 60))
def test_powers_of_two_scale_exactly(x: Tensor, bits: int, k: int) -> None:
    q = quantize(x, bits=bits, block_size=BLOCK)
    scaled = quantize(x * 2.0**k, bits=bits, block_size=BLOCK)
    assert torch.equal(q.codes, scaled.codes)
    assert torch.equal(q.dequantize() * 2.0**k, scaled.dequantize())


@given(tensors(), BITS, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_shape_dtype_and_size(x: Tensor, bits: int, dtype: torch.dtype) -> None:
    q = quantize(x.to(dtype), bits=bits, block_size=BLOCK)
    num_blocks = math.ceil(x.numel() / BLOCK)
    assert q.dequantize(dtype).shape == x.shape
    assert q.dequantize(dtype).dtype is dtype
    assert q.scale.dtype is torch.float32
    assert q.nbytes == num_blocks * (BLOCK * bits // 8 + 4)


@given(BITS)
def test_codes_survive_packing(bits: int) -> None:
    lowest = -(2 ** (bits - 1))
    codes = torch.arange(256, dtype=torch.int16).remainder(2**bits).add(lowest).to(torch.int8)
    assert torch.equal(unpack(pack(codes, bits), bits), codes)


def test_packing_is_planar() -> None:
    codes = torch.zeros(32, dtype=torch.int8)
    codes[0], codes[16], codes[1] = 3, -2, 7
    packed = pack(codes, 4)
    assert packed[:2].tolist() == [0xE3, 0x07]  # -2 is 0xE in four bits
    two = torch.zeros(32, dtype=torch.int8)
    two[0], two[8], two[16], two[24] = 1, -2, -1, 0
    assert pack(two, 2)[0].item() == 0b00_11_10_01


def test_halves_are_rounded_to_even() -> None:
    halves = torch.arange(-7, 7) + 0.5
    x = torch.cat([torch.tensor([7.0]), halves])  # the scale is 1
    assert quantize(x, block_size=32).dequantize()[1:].tolist() == [
        -6, -6, -4, -4, -2, -2, 0, 0, 2, 2, 4, 4, 6, 6
    ]  # fmt: skip


def test_rounding_has_no_bias() -> None:
    x = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    difference = quantize(x).dequantize() - x
    # A uniform error of one step of 1/7 has variance step**2 / 12.
    assert abs(difference.mean().item()) < 3 * (1 / 7) / math.sqrt(12 * x.numel())


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_a_zero_block_is_exactly_zero_beside_any_other(bits: int) -> None:
    x = torch.cat([torch.zeros(BLOCK), torch.linspace(-1, 1, BLOCK)])
    q = quantize(x, bits=bits, block_size=BLOCK)
    assert q.scale[0] == 0
    assert (q.dequantize()[:BLOCK] == 0).all()
    assert torch.equal(
        q.dequantize()[BLOCK:], quantize(x[BLOCK:], bits=bits, block_size=BLOCK).dequantize()
    )


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("tiny", [1e-38, 1e-45, SMALLEST_NORMAL, 6e-8])
def test_tiny_blocks_are_finite(bits: int, tiny: float) -> None:
    x = torch.full((BLOCK,), tiny)
    q = quantize(x, bits=bits, block_size=BLOCK)
    assert q.dequantize().isfinite().all()
    if tiny < SMALLEST_NORMAL:
        assert (q.dequantize() == 0).all()
    assert quantize(x.half(), bits=bits, block_size=BLOCK).dequantize().isfinite().all()


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_block_comes_out_as_nan_and_only_it(bits: int, bad: float) -> None:
    x = torch.linspace(-1, 1, 3 * BLOCK)
    good = quantize(x, bits=bits, block_size=BLOCK).dequantize()
    x[BLOCK + 5] = bad
    q = quantize(x, bits=bits, block_size=BLOCK)
    assert q.dequantize()[BLOCK : 2 * BLOCK].isnan().all()
    assert torch.equal(q.dequantize()[:BLOCK], good[:BLOCK])
    assert torch.equal(q.dequantize()[2 * BLOCK :], good[2 * BLOCK :])


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_the_largest_floats_do_not_become_infinite(bits: int) -> None:
    largest = torch.finfo(torch.float32).max
    for top in (largest, largest * (1 - 2**-20), largest / 2):
        values = quantize(torch.full((BLOCK,), top), bits=bits, block_size=BLOCK).dequantize()
        assert not values.isinf().any()  # NaN where the largest level would overflow


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="bits=5"):
        quantize(torch.zeros(4), bits=5)
    with pytest.raises(ValueError, match="block_size=48"):
        quantize(torch.zeros(4), block_size=48)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        quantize(torch.zeros(4, dtype=torch.float64))


def test_the_wire_of_a_shard() -> None:
    layout = BlockLayout((300, 33), bits=4, block_size=256)
    assert layout.blocks_per_part == (2, 1)
    assert layout.wire.scales_offset == 3 * 128
    assert layout.bytes_per_shard == 3 * 128 + 16  # three scales take 12 bytes of 16
    table = layout.place(torch.device("cpu"))
    assert table.starts.tolist() == [0, 256, 300]
    assert table.lengths.tolist() == [256, 44, 33]
