"""A reduction is the same under any default dtype and under autocast."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from kernel_cases import ERROR_DTYPES, ignore_numpy
from loco_fsdp import LoCoConfig, quantize
from loco_fsdp.codec import BlockLayout, BlockTable
from loco_fsdp.reduction.hop import Hop
from loco_fsdp.reduction.workspace import Workspace

pytestmark = ignore_numpy
CPU = torch.device("cpu")
LAYOUT_NUMELS, BLOCK = (70, 3, 64), 32
TRITON = pytest.param(
    "triton",
    marks=pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, it does not interpret"),
)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocast(dtype: torch.dtype) -> AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=dtype)


SURROUNDINGS = {
    "default bfloat16": (default_dtype, torch.bfloat16),
    "default float64": (default_dtype, torch.float64),
    "autocast bfloat16": (autocast, torch.bfloat16),
    "autocast float16": (autocast, torch.float16),
}


def all_steps(bits: int, backend: str, error_dtype: torch.dtype) -> list[Tensor]:
    """Everything that three reductions make, with a middle as all-reduces have it, in rows that
    hold a part of the blocks; the second is a spike, and a parameter comes late."""
    name = str(error_dtype).removeprefix("torch.")
    config = LoCoConfig(bits=bits, block_size=BLOCK, error_dtype=name)
    workspace, results = Workspace(), []
    first = Hop("replicas", "unit", [0], 1, config, backend)
    second = Hop("sums", "unit", [0], 1, config, backend)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        numels = LAYOUT_NUMELS[: 2 + step // 2]
        layout = BlockLayout(numels, bits, BLOCK)
        blocks = dict(enumerate(layout.blocks_per_part))
        gradient = torch.randn(1, sum(numels), dtype=torch.float32, generator=generator)
        gradient *= 1e4 if step == 2 else 1.0
        for hop in (first, second):
            hop.begin(layout.num_blocks, CPU)
            hop.error.add(blocks, CPU)
        whole = layout.place(CPU, first.error.rows_of(tuple(blocks)))
        table = whole.in_rows(torch.tensor([0, layout.num_blocks]))
        wire = workspace.get("wire", (1, table.wire.num_bytes), CPU)
        sums = workspace.get("sums", (1, table.wire.num_bytes), CPU)
        first.encode(gradient, wire, table, True)
        part: BlockTable = table.part(0, layout.num_blocks, second.error.rows_of(tuple(blocks)))
        second.decode_encode(wire, sums, part, True, 0.5)
        first.end()
        second.end()
        output = torch.empty(sum(numels), dtype=torch.bfloat16)
        first.decode(sums, output, table)
        results += [wire[:, : 16 * bits].clone(), sums[:, : 16 * bits].clone(), output]
        for hop in (first, second):
            assert hop.error.state is not None
            results += [tensor.clone() for tensor in hop.error.state]
            results += [value.clone() for value in hop.measured()]
            results += [hop.error.norm(), torch.tensor(hop.usual_state(), dtype=torch.float64)]
        first.error.load(first.error.by_parameter())
    return results


undisturbed = functools.cache(all_steps)


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("backend", ["eager", "compiled", TRITON])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_reductions_are_the_same(surroundings: str, backend: str, bits: int) -> None:
    # The slower backends take turns: every dtype with some width.
    step = {"compiled": 1, "eager": 3, "triton": 4}[backend]
    for error_dtype in ERROR_DTYPES[bits.bit_length() % step :: step]:
        expected = undisturbed(bits, backend, error_dtype)
        change, dtype = SURROUNDINGS[surroundings]
        with change(dtype):
            found = all_steps(bits, backend, error_dtype)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype is theirs.dtype
            assert torch.equal(
                ours.view(torch.uint8) if ours.ndim else ours,
                theirs.view(torch.uint8) if theirs.ndim else theirs,
            )


@pytest.mark.parametrize("surroundings", SURROUNDINGS)
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_quantize_is_the_same(surroundings: str, bits: int) -> None:
    x = torch.randn(5, 77, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    results = []
    change, dtype = SURROUNDINGS[surroundings]
    for context in (nullcontext(), change(dtype)):
        with context:
            q = quantize(x, bits=bits, block_size=BLOCK)
            results.append((q.codes, q.scale, q.dequantize()))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
