"""The compiled operators of parameters against their definition, `eager_weights`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kernel_cases import GRADIENT_DTYPES, Case, Outcome, needs_compiler
from loco_fsdp.codec import compiled
from weight_cases import (
    check_any_difference,
    check_any_rows,
    check_encode_difference,
    check_ties,
    shards,
    weight_cases,
    wire_of,
    with_gaps,
    wrong_differences,
    wrong_rows,
)

pytestmark = needs_compiler


@settings(max_examples=200)
@given(
    weight_cases(),
    st.integers(0, 2**20),
    st.integers(-140, 120),
    st.sampled_from((0.0, 0.0, 0.01, 0.5, 1.0)),
    st.booleans(),
)
def test_any_parameter(
    drawn: tuple[Case, int], seed: int, exponent: int, special: float, add: bool
) -> None:
    case, gap = drawn
    check_any_difference(compiled, case, gap, seed, exponent, special)
    check_any_rows(compiled, case, gap, seed, exponent, special, add)


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_pair_of_dtypes(bits: int) -> None:
    case = Case(bits, 32, (100, 7), 1, error_dtype=None)
    table = with_gaps(case, 3)
    parameter, replica = shards(case, 2, table.shard_numel, seed=0)
    for dtypes in product(GRADIENT_DTYPES, repeat=2):
        pair = (x.to(dtype) for x, dtype in zip((parameter, replica), dtypes, strict=True))
        check_encode_difference(compiled, case, table, *pair)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_sums_are_rounded_once_half_to_even(dtype: torch.dtype) -> None:
    check_ties(compiled, dtype)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_change_nothing(num_threads: int) -> None:
    case = Case(4, 256, (100_000, 3), 3, torch.bfloat16, error_dtype=None)
    torch.set_num_threads(num_threads)
    check_any_difference(compiled, case, 3, 0, 0, special=1e-5)
    check_any_rows(compiled, case, 3, 0, 0, special=1e-5, add=True)


@pytest.mark.parametrize(("error", "message", "wrong"), [*wrong_differences()])
def test_wrong_arguments_of_a_difference_are_refused_and_nothing_is_written(
    error: type[Exception], message: str, wrong: dict[str, Tensor]
) -> None:
    case = Case(peers=1)
    table, outcome = with_gaps(case, 0), Outcome.blank(case)
    flat, before = torch.zeros(table.shard_numel), outcome.wire.clone()
    right = {"parameter": flat, "replica": flat, "wire": outcome.wire}
    with pytest.raises(error, match=message):
        compiled.encode_difference(table=table, stats=outcome.stats, **{**right, **wrong})
    assert torch.equal(outcome.wire, before)


@pytest.mark.parametrize(("error", "message", "wrong"), [*wrong_rows()])
def test_wrong_arguments_of_rows_are_refused_and_nothing_is_written(
    error: type[Exception], message: str, wrong: dict[str, Tensor]
) -> None:
    case = Case(peers=2)
    table, output = with_gaps(case, 0), torch.zeros(3, case.layout.shard_numel)
    right = {"wire": wire_of(case, 0), "output": output, "output_rows": torch.tensor([2, 0])}
    with pytest.raises(error, match=message):
        compiled.decode_rows(table=table, add=True, **{**right, **wrong})
    assert not output.any()
