"""The compiled codec against its definition, `loco_fsdp.codec.eager`.

Bit-identical at 8 and 4 bits: codes, scales, the stored error (a zero may have another sign) and
what is decoded. At 2 and 1 bits the scale is a sum, taken in another order: within 4 units in the
last place; all else follows it.
"""

from __future__ import annotations

import math
import threading
import warnings
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._dynamo.utils import counters

from loco_fsdp.codec import BlockLayout, BlockTable, EncodeStats, ErrorState, compiled, eager, ops

pytestmark = pytest.mark.skipif(not compiled.has_compiler(), reason="no C++ compiler")

PEERS = 2
BETA = 0.9
SPARE_ROWS = 3
FLT_MAX = torch.finfo(torch.float32).max
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Variant:
    """What is compiled once, and the dtypes, which cost no compilation."""

    bits: int
    block_size: int
    gradient_dtype: torch.dtype
    error_dtype: torch.dtype | None

    def __str__(self) -> str:
        dtypes = f"{self.gradient_dtype}-{self.error_dtype}".replace("torch.", "")
        return f"{self.bits}bits-{self.block_size}-{dtypes}"


# Every width, dtype and a few block sizes, in few compilations.
VARIANTS = [
    Variant(4, 256, torch.float32, torch.float16),
    Variant(4, 256, torch.bfloat16, torch.float8_e4m3fn),
    Variant(4, 256, torch.float16, torch.int8),
    Variant(8, 32, torch.bfloat16, torch.bfloat16),
    Variant(4, 256, torch.float32, None),
    Variant(2, 64, torch.float32, torch.float32),
    Variant(1, 1024, torch.float32, torch.float16),
]
EXACT = [variant for variant in VARIANTS if variant.bits >= 4]


class Side:
    """Everything that one of the two codecs writes."""

    def __init__(self, table: BlockTable, variant: Variant, peers: int = PEERS) -> None:
        layout = table.layout
        rows = layout.num_blocks + SPARE_ROWS
        self.table = table
        self.wire = torch.zeros(peers, layout.bytes_per_shard, dtype=torch.uint8)
        self.stats = EncodeStats(
            torch.zeros(peers, layout.num_blocks, 2), torch.zeros(1, dtype=torch.int64)
        )
        self.error = None
        if variant.error_dtype is not None:
            payload = torch.zeros(peers, rows, layout.block_size, dtype=variant.error_dtype)
            self.error = ErrorState(payload, torch.zeros(peers, rows))

    @property
    def codes(self) -> Tensor:
        layout = self.table.layout
        return self.wire[:, : layout.num_blocks * layout.bytes_per_block]

    @property
    def scales(self) -> Tensor:
        return self.wire[:, self.table.layout.scales_offset :].contiguous().view(torch.float32)

    def copy_(self, other: Side) -> None:
        self.wire.copy_(other.wire)
        if self.error is not None and other.error is not None:
            self.error.payload.copy_(other.error.payload)
            self.error.scale.copy_(other.error.scale)


def make_table(variant: Variant, numels: tuple[int, ...], order: str = "following") -> BlockTable:
    layout = BlockLayout(numels, variant.bits, variant.block_size)
    if order == "permuted":
        generator = torch.Generator().manual_seed(layout.num_blocks)
        rows = torch.randperm(layout.num_blocks + SPARE_ROWS, generator=generator)
        return layout.place(CPU, rows[: layout.num_blocks].tolist())
    return layout.place(CPU, range(SPARE_ROWS, SPARE_ROWS + layout.num_blocks))


def assert_scales(ours: Side, theirs: Side, bits: int) -> None:
    nan = theirs.scales.isnan()
    assert torch.equal(ours.scales.isnan(), nan)
    difference = ours.scales.view(torch.int32) - theirs.scales.view(torch.int32)
    assert (difference[~nan].abs() <= (0 if bits >= 4 else 4)).all()


def assert_same(ours: Side, theirs: Side) -> None:
    assert_scales(ours, theirs, 4)
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.stats.nonfinite, theirs.stats.nonfinite)
    torch.testing.assert_close(
        ours.stats.squares, theirs.stats.squares, rtol=1e-4, atol=0, equal_nan=True
    )
    if ours.error is not None and theirs.error is not None:
        assert torch.equal(ours.error.scale, theirs.error.scale)
        assert torch.equal(ours.error.payload.float(), theirs.error.payload.float())


def assert_close(ours: Side, theirs: Side, table: BlockTable) -> None:
    """Of 2 and 1 bits, where a rounding of the scale moves everything a little."""
    assert_scales(ours, theirs, 1)
    assert torch.equal(ours.stats.nonfinite, theirs.stats.nonfinite)
    assert (ours.codes != theirs.codes).float().mean() < 1e-3
    if ours.error is not None and theirs.error is not None:
        mine, other = eager.load_error(ours.error), eager.load_error(theirs.error)
        size = torch.zeros_like(other)
        size[:, table.rows] = theirs.scales[:, : table.layout.num_blocks].nan_to_num().unsqueeze(-1)
        step = torch.finfo(theirs.error.payload.dtype).eps
        limit = size * 2**-20 + other.abs() * 2 * step
        assert ((mine - other).abs() > limit).float().mean() < 1e-3


@st.composite
def gradients(draw: st.DrawFn, variant: Variant, shard_numel: int) -> Tensor:
    """Signed, of very different sizes, with what may stand in a gradient now and then."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    x = torch.randn(PEERS, shard_numel, generator=generator)
    exponent = torch.randint(-30, 31, (PEERS, 1), generator=generator)
    if draw(st.booleans()):  # each element its own size
        exponent = torch.randint(-30, 31, x.shape, generator=generator)
    x = x * 2.0**exponent
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0
    special = st.sampled_from(
        [None, 0.0, math.nan, math.inf, -math.inf, 1e-45, 1e-38, -(2.0**-126), 3e38, FLT_MAX]
    )
    length = draw(st.sampled_from([1, 5, variant.block_size, 3 * variant.block_size]))
    for value in draw(st.lists(special, max_size=3)):
        first = int(torch.randint(shard_numel, (), generator=generator))
        if value is not None:
            x[draw(st.integers(0, PEERS - 1)), first : first + length] = value
    return x.to(variant.gradient_dtype)


@st.composite
def part_numels(draw: st.DrawFn, block_size: int) -> tuple[int, ...]:
    numel = st.one_of(
        st.just(1),
        st.integers(1, 3 * block_size),
        st.integers(1, 5).map(lambda blocks: blocks * block_size),
        st.just(0),
    )
    return (*draw(st.lists(numel, max_size=5)), draw(st.integers(1, 2 * block_size)))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@settings(max_examples=25)
@given(data=st.data())
def test_everything_is_what_the_definition_gives(variant: Variant, data: st.DataObject) -> None:
    numels = data.draw(part_numels(variant.block_size))
    table = make_table(variant, numels, data.draw(st.sampled_from(["following", "permuted"])))
    ours, theirs = Side(table, variant), Side(table, variant)
    factor = data.draw(st.sampled_from([1.0, 0.5, 1 / 3]))
    for _ in range(2):
        x = data.draw(gradients(variant, table.layout.shard_numel))
        compiled.encode(x, ours.wire, table, ours.stats, ours.error, BETA)
        eager.encode(x, theirs.wire, table, theirs.stats, theirs.error, BETA)
        if variant.bits >= 4:
            assert_same(ours, theirs)
        else:
            assert_close(ours, theirs, table)
            ours.copy_(theirs)

        outputs = torch.empty(2, table.layout.shard_numel, dtype=variant.gradient_dtype)
        compiled.decode(ours.wire, outputs[0], table, factor)
        eager.decode(theirs.wire, outputs[1], table, factor)
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0, equal_nan=True)

        our_sum, their_sum = Side(table, variant, 1), Side(table, variant, 1)
        for codec, side in ((compiled, our_sum), (eager, their_sum)):
            codec.decode_encode(theirs.wire, side.wire, table, side.stats, side.error, BETA, factor)
        if variant.bits >= 4:
            assert_same(our_sum, their_sum)
        else:
            assert_close(our_sum, their_sum, table)


@pytest.mark.parametrize("variant", EXACT[:2], ids=str)
def test_shards_larger_than_the_scratch(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that end inside a part, between parts and with several peers."""
    numels = (10 * 256, 300, 7 * 256 + 3, 256, 1, 20 * 256)
    table = make_table(variant, numels, "permuted")
    x = torch.randn(PEERS, sum(numels)).to(variant.gradient_dtype)
    theirs = Side(table, variant)
    eager.encode(x, theirs.wire, table, theirs.stats, theirs.error, BETA)
    expected = torch.empty(sum(numels), dtype=variant.gradient_dtype)
    eager.decode(theirs.wire, expected, table)
    for rows in (4, 9, 43, 1000):
        monkeypatch.setattr(compiled.compiled_rows, "max_rows", lambda _, rows=rows: rows)
        compiled._chunks.cache_clear()
        ours = Side(table, variant)
        compiled.encode(x, ours.wire, table, ours.stats, ours.error, BETA)
        assert_same(ours, theirs)
        output = torch.empty_like(expected)
        compiled.decode(ours.wire, output, table)
        assert torch.equal(output, expected)
    compiled._chunks.cache_clear()


def test_many_peers_are_summed_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_MAX_PEERS", 2)
    layout = BlockLayout((1000, 7), bits=4, block_size=256)
    table = layout.place(CPU)
    # Sizes so different that another order gives another sum.
    x = torch.randn(4, layout.shard_numel) * torch.tensor([[1.0], [3e7], [-3e7], [1e3]])
    side = Side(table, Variant(4, 256, torch.float32, None), peers=4)
    eager.encode(x, side.wire, table, side.stats)
    outputs = torch.empty(2, layout.shard_numel)
    compiled.decode(side.wire, outputs[0], table)
    eager.decode(side.wire, outputs[1], table)
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("k", [-60, -7, 60])
def test_powers_of_two_change_no_code(k: int) -> None:
    variant = VARIANTS[0]
    table = make_table(variant, (1000,))
    x = torch.randn(PEERS, 1000)
    plain, scaled = Side(table, variant), Side(table, variant)
    for _ in range(3):
        compiled.encode(x, plain.wire, table, plain.stats, plain.error, BETA)
        compiled.encode(x * 2.0**k, scaled.wire, table, scaled.stats, scaled.error, BETA)
        assert torch.equal(plain.codes, scaled.codes)
        assert torch.equal(plain.scales * 2.0**k, scaled.scales)


def run_unit(numels: tuple[int, ...], variant: Variant = VARIANTS[0]) -> None:
    table = make_table(variant, numels)
    side = Side(table, variant)
    x = torch.randn(PEERS, sum(numels)).to(variant.gradient_dtype)
    compiled.encode(x, side.wire, table, side.stats, side.error, BETA)
    compiled.decode(side.wire, torch.empty(sum(numels)), table)


def test_units_of_other_sizes_and_dtypes_are_not_compiled_anew() -> None:
    run_unit((512,))
    before = counters["stats"]["unique_graphs"]
    for numels in ((1,), (256,), (2,) * 40, (256 * 256, 5), (1_000_000, 17, 256)):
        run_unit(numels)
        for variant in EXACT[1:3]:
            run_unit(numels, variant)
    assert counters["stats"]["unique_graphs"] == before


def largest_allocation(function: object) -> int:
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        function()  # type: ignore[operator]
    return max(event.self_cpu_memory_usage for event in profiler.events())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_of_the_size_of_the_gradient_is_allocated(dtype: torch.dtype) -> None:
    variant = Variant(4, 256, dtype, torch.float16)
    numels = (2**21, 2**21 + 3)
    table = make_table(variant, numels)
    side, sums = Side(table, variant), Side(table, variant, 1)
    x, output = torch.randn(PEERS, sum(numels)).to(dtype), torch.empty(sum(numels), dtype=dtype)

    def reduce(codec: object) -> None:
        codec.encode(x, side.wire, table, side.stats, side.error, BETA)
        codec.decode(side.wire, output, table)
        codec.decode_encode(side.wire, sums.wire, table, sums.stats, sums.error, BETA)

    reduce(compiled)
    assert largest_allocation(lambda: reduce(compiled)) < output.nbytes // 32
    assert largest_allocation(lambda: reduce(eager)) >= output.nbytes


def test_it_runs_compiled_where_fsdp2_calls_it() -> None:
    """In the thread of backward, below an operator, and where dynamo is disabled."""
    variant = VARIANTS[0]
    table = make_table(variant, (777,))
    x = torch.randn(PEERS, 777)
    theirs = Side(table, variant)
    eager.encode(x, theirs.wire, table, theirs.stats, theirs.error, BETA)

    def check() -> None:
        ours = Side(table, variant)
        ops.encode(x, ours.wire, table, ours.stats, ours.error, BETA, backend="compiled")
        assert_same(ours, theirs)

    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            check()
            return grad

    def in_backward() -> None:
        InBackward.apply(torch.ones(1, requires_grad=True)).sum().backward()

    def in_thread() -> None:
        failures: list[BaseException] = []

        def target() -> None:
            try:
                in_backward()
            except BaseException as failure:
                failures.append(failure)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        assert not failures

    for call in (check, torch._dynamo.disable(check), in_backward, in_thread):
        compiled.compiled_rows.encoder.cache_clear()
        before = counters["stats"]["unique_graphs"]
        call()
        assert counters["stats"]["unique_graphs"] == before + 1


def test_without_a_compiler_the_definition_runs_after_one_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    compiled.has_compiler.cache_clear()
    variant = VARIANTS[0]
    table = make_table(variant, (300,))
    ours, theirs = Side(table, variant), Side(table, variant)
    x = torch.randn(PEERS, 300)
    eager.encode(x, theirs.wire, table, theirs.stats, theirs.error, BETA)
    before = counters["stats"]["unique_graphs"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled.encode(x, ours.wire, table, ours.stats, ours.error, BETA)
        compiled.decode(ours.wire, torch.empty(300), table)
        compiled.decode_encode(ours.wire, ours.wire[:1].clone(), table, theirs.stats)
    compiled.has_compiler.cache_clear()
    assert [str(warning.message) for warning in caught if "g++" in str(warning.message)]
    assert len(caught) == 1
    assert torch.equal(ours.wire, theirs.wire)
    assert counters["stats"]["unique_graphs"] == before
