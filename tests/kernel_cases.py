"""Inputs, references and calls that the tests of the kernels share.

Where there is no GPU the kernels run in Triton's interpreter, which has to be asked for before
Triton is imported: tests import this module first. References run on the CPU always.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import triton
import triton.language as tl
from torch import Tensor

from loco_fsdp.codec import eager
from loco_fsdp.codec.eager import EncodeStats, ErrorState
from loco_fsdp.codec.layout import BlockLayout, BlockTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ERROR_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)

# Step between neighbours just below 2, in the dtype of a payload; of int8: one of 64.
STEP = {
    torch.float32: 2**-23,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
    torch.int8: 2**-6,
    torch.float8_e4m3fn: 2**-3,
}
_UNWRITTEN = 0xA5
_SPARE_ROWS = 3

# The interpreter computes with NumPy, which warns where hardware does not.
ignore_numpy = pytest.mark.filterwarnings("ignore::RuntimeWarning")


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler"
)


def needs_gpu(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test of what only hardware can show."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    return pytest.mark.gpu(skip(test))


@triton.jit
def _fma_kernel(x_ptr, y_ptr, z_ptr):
    tl.store(z_ptr, tl.fma(tl.load(x_ptr), tl.load(x_ptr), tl.load(y_ptr)))


def fma_rounds_once() -> bool:
    """Always on a GPU; the interpreters of older versions of Triton multiply, then add."""
    x = torch.tensor(1 + 2**-23, device=DEVICE)
    z = torch.zeros((), device=DEVICE)
    _fma_kernel[(1,)](x, -x * x, z)
    return z.item() != 0


@dataclass(frozen=True)
class Case:
    """Shapes and dtypes of one call."""

    bits: int = 4
    block_size: int = 32
    numels: tuple[int, ...] = (1, 100, 31, 64)
    peers: int = 2
    gradient_dtype: torch.dtype = torch.float32
    error_dtype: torch.dtype | None = torch.float16
    beta: float = 0.9
    wire_rows: int | None = None  # over which blocks are shared out; None: a row for each peer

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.numels, self.bits, self.block_size)

    @property
    def aligned(self) -> bool:
        return all(numel % 8 == 0 for numel in self.numels)

    @property
    def num_rows(self) -> int:
        return self.layout.num_blocks + _SPARE_ROWS

    def table(self) -> BlockTable:
        """Blocks whose errors lie in some rows of a larger buffer, in no order."""
        generator = torch.Generator().manual_seed(self.num_rows)
        rows = torch.randperm(self.num_rows, generator=generator)
        table = self.layout.place(torch.device("cpu"), rows[: self.layout.num_blocks])
        if self.wire_rows is None:
            return table
        assert self.peers == 1
        cuts = torch.randint(table.num_blocks + 1, (self.wire_rows - 1,), generator=generator)
        ends = torch.tensor([0, table.num_blocks])
        return table.in_rows(torch.cat([ends, cuts]).sort().values)

    def alone(self) -> "Case":
        """The same in one row of the wire for each peer."""
        return replace(self, wire_rows=None)

    def __str__(self) -> str:
        dtypes = (self.gradient_dtype, self.error_dtype)
        gradient, error = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        rows = "" if self.wire_rows is None else f"-{self.wire_rows}rows"
        return f"{self.bits}bit-{self.block_size}-{gradient}-{error}{rows}"


def variants() -> list[Case]:
    """Every width and dtype; block sizes, and whether parts are aligned, by turns."""
    block_sizes = itertools.cycle((32, 64, 256, 128, 1024, 512, 256))
    dtypes = itertools.product((8, 4, 2, 1), GRADIENT_DTYPES, (None, *ERROR_DTYPES))
    found = []
    for (bits, gradient_dtype, error_dtype), block_size in zip(dtypes, block_sizes, strict=False):
        aligned = block_size in (256, 1024)
        numels = (8, block_size + 16) if aligned else (1, block_size + block_size // 2, 31)
        found.append(Case(bits, block_size, numels, 2, gradient_dtype, error_dtype))
    shared = [replace(case, peers=1, wire_rows=3) for case in found[::5]]
    return found + shared


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small cases of all dtypes, widths and block sizes, with tails of all kinds."""
    block_size = draw(st.sampled_from((32, 64, 128, 256, 512, 1024)))
    tail = st.integers(1, 2 * block_size)
    numels = draw(st.lists(tail | st.sampled_from((1, block_size)), min_size=1, max_size=4))
    if draw(st.booleans()):
        numels = [8 * -(-numel // 8) for numel in numels]
    wire_rows = draw(st.sampled_from((None, None, 1, 2, 4)))
    return Case(
        bits=draw(st.sampled_from((8, 4, 2, 1))),
        block_size=block_size,
        numels=tuple(numels),
        peers=draw(st.integers(1, 3)) if wire_rows is None else 1,
        wire_rows=wire_rows,
        gradient_dtype=draw(st.sampled_from(GRADIENT_DTYPES)),
        error_dtype=draw(st.sampled_from((None, *ERROR_DTYPES))),
        beta=draw(st.sampled_from((0.0, 0.8, 0.9))),
    )


def gradients(case: Case, seed: int, exponent: int = 0, special: float = 0.0) -> Tensor:
    """Normal numbers times 2**exponent, some of them zero, and a share of them special.

    Special are subnormal numbers, outliers, and numbers that are not finite or nearly so.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (case.peers, case.layout.shard_numel)
    x = torch.randn(shape, generator=generator) * 2.0**exponent
    x = torch.where(torch.rand(shape, generator=generator) < 0.1, 0.0, x)
    values = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38, 1e-45, -1e-38, 1e6, -1e-6, -0.0]
    )
    chosen = values[torch.randint(len(values), shape, generator=generator)]
    x = torch.where(torch.rand(shape, generator=generator) < special, chosen, x)
    return x.to(case.gradient_dtype)


def compensated(case: Case, gradient: Tensor, error: ErrorState | None) -> Tensor:
    """Gradient and error, `[peers, shard_numel]` float32."""
    h = eager.to_blocks(gradient.float(), case.table())
    if error is not None:
        h = h + eager.load_error(error)[:, case.table().rows]
    return eager.from_blocks(h, case.table())


@dataclass
class Outcome:
    """Everything that encoding writes."""

    wire: Tensor
    stats: EncodeStats
    error: ErrorState | None

    @classmethod
    def blank(cls, case: Case, peers: int | None = None) -> "Outcome":
        peers = case.peers if peers is None else peers
        table, error = case.table(), None
        wire_rows = peers if case.wire_rows is None else case.wire_rows
        if case.error_dtype is not None:
            error = ErrorState(
                torch.zeros(peers, case.num_rows, case.block_size, dtype=case.error_dtype),
                torch.zeros(peers, case.num_rows),
            )
        return cls(
            torch.full((wire_rows, table.wire.num_bytes), _UNWRITTEN, dtype=torch.uint8),
            EncodeStats(
                torch.full((peers, table.num_blocks, 2), torch.nan),
                torch.zeros(1, dtype=torch.int64),
            ),
            error,
        )

    def copy(self, device: torch.device) -> "Outcome":
        def move(x: Tensor) -> Tensor:
            return x.to(device, copy=True)

        error = None if self.error is None else ErrorState(*map(move, self.error))
        return Outcome(move(self.wire), EncodeStats(*map(move, self.stats)), error)

    def keywords(self) -> dict[str, Tensor]:
        """What launchers take by keyword."""
        error = {}
        if self.error is not None:
            error = {"payload": self.error.payload, "error_scale": self.error.scale}
        return {"squares": self.stats.squares, "nonfinite": self.stats.nonfinite, **error}


def columns(table: BlockTable) -> tuple[Tensor, Tensor, Tensor]:
    """What every launcher that encodes takes by position."""
    return table.starts, table.lengths, table.rows


def place_on_wire(table: BlockTable) -> dict[str, Any]:
    """What launchers take by keyword of a wire."""
    wire = table.wire
    return {"scales_offset": wire.scales_offset, "bits": wire.bits, "block_size": wire.block_size}


def rows_of_wire(table: BlockTable) -> dict[str, Any]:
    """What those take beside it whose wire may hold a part of the blocks in each row."""
    row_starts = None if table.row_starts is None else table.row_starts.to(DEVICE)
    return {"wire_blocks": table.wire.num_blocks, "row_starts": row_starts}


def split_wire(wire: Tensor, table: BlockTable) -> tuple[Tensor, Tensor]:
    """Codes `[peers, num_blocks, block_size]` int8 and scales `[peers, num_blocks]`."""
    packed, scale = eager.read_wire(wire, table)
    return eager.unpack(packed, table.wire.bits), scale


def bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def assert_same(case: Case, h: Tensor, expected: Outcome, actual: Outcome) -> None:
    """8 and 4 bits: the same bits everywhere. 2 and 1 bits: scales within 4 units in the last
    place, codes equal but for elements of `h` on a threshold, errors one unit of their dtype."""
    torch.testing.assert_close(
        actual.stats.squares, expected.stats.squares, rtol=1e-5, atol=1e-37, equal_nan=True
    )
    assert_same_sent(case, h, expected, actual)


def assert_same_sent(case: Case, h: Tensor, expected: Outcome, actual: Outcome) -> None:
    """`assert_same` of all but the squares."""
    assert torch.equal(actual.stats.nonfinite, expected.stats.nonfinite)
    if case.bits >= 4:
        assert torch.equal(actual.wire, expected.wire)
        if actual.error is not None:
            assert torch.equal(bytes_of(actual.error.payload), bytes_of(expected.error.payload))
            assert torch.equal(actual.error.scale, expected.error.scale)
        return
    _assert_near(case, h, expected, actual)


def assert_same_compiled(case: Case, h: Tensor, expected: Outcome, actual: Outcome) -> None:
    """`assert_same`, but that 2 and 1 bits sum the scale in float64, and what is left moves with
    it, by as much as is sent times the precision of float32."""
    if case.bits >= 4:
        return assert_same(case, h, expected, actual)
    assert_same_sent(case, h, expected, actual)
    ours, theirs = actual.stats.squares, expected.stats.squares
    torch.testing.assert_close(ours[..., 0], theirs[..., 0], rtol=1e-5, atol=1e-37, equal_nan=True)
    sent, left = theirs.sqrt().unbind(-1)
    allowed = 1e-5 * left + 2**-20 * sent + 1e-18
    difference = (ours[..., 1].sqrt() - left).abs()
    assert ((difference <= allowed) | (ours[..., 1] == theirs[..., 1])).all()


def _assert_near(case: Case, h: Tensor, expected: Outcome, actual: Outcome) -> None:
    table = case.table()
    codes, scale = split_wire(actual.wire, table)
    wanted_codes, wanted_scale = split_wire(expected.wire, table)
    assert torch.equal(scale.isnan(), wanted_scale.isnan())
    units = (scale.view(torch.int32) - wanted_scale.view(torch.int32)).abs()
    assert (units[~scale.isnan()] <= 4).all()

    ratio = (eager.to_blocks(h, table) / wanted_scale.unsqueeze(-1)).abs()
    near = ratio < 1e-30  # the sign of what underflows
    if case.bits == 2:
        near |= (ratio - eager.THRESHOLD_2BIT).abs() < 1e-5
    assert torch.equal(codes[~near], wanted_codes[~near])
    if actual.error is not None and expected.error is not None and case.error_dtype is not None:
        new, wanted = (eager.load_error(error) for error in (actual.error, expected.error))
        step = wanted.abs().amax(-1, keepdim=True) * STEP[case.error_dtype]
        # What 4 units of a scale make of the largest element, and one step.
        allowed = step + wanted_scale.nan_to_num().max() * 2**-20
        different = (new - wanted).abs() > allowed
        assert not (different[:, table.rows] & ~near).any()
