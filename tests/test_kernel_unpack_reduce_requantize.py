"""The kernel in the middle of an all-reduce, against `eager.decode_encode`."""

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
    cases,
    columns,
    gradients,
    ignore_numpy,
    place_on_wire,
    variants,
)
from loco_fsdp.codec import eager
from loco_kernels.unpack_reduce_requantize import unpack_reduce_requantize

pytestmark = ignore_numpy


def check_against_eager(case: Case, steps: list[Tensor], factor: float = 1.0) -> None:
    """Send the last sum on, with the error that the reference has made of those before."""
    case = case.alone()
    table, expected = case.table(), Outcome.blank(case, peers=1)
    for gradient in steps:
        sent = Outcome.blank(case)
        eager.encode(gradient, sent.wire, table, sent.stats)
        total = torch.empty(1, case.layout.shard_numel)
        eager.decode(sent.wire, total[0], table, factor)
        h = eager.to_blocks(total, table)
        if expected.error is not None:
            h = h + eager.load_error(expected.error)[:, table.rows]
        before = expected
        expected = before.copy(torch.device("cpu"))
        eager.decode_encode(
            sent.wire, expected.wire, table, expected.stats, expected.error, case.beta, factor
        )
    actual = before.copy(DEVICE)
    unpack_reduce_requantize(
        sent.wire.to(DEVICE),
        actual.wire,
        *(column.to(DEVICE) for column in columns(table)),
        **place_on_wire(table),
        beta=case.beta,
        factor=factor,
        **actual.keywords(),
    )
    assert_same(case, eager.from_blocks(h, table), expected, actual.copy(torch.device("cpu")))


# The dtype of the gradient plays no part.
@pytest.mark.parametrize(
    "case",
    [case for case in variants() if case.gradient_dtype == torch.float32 and case.peers > 1],
    ids=str,
)
def test_every_variant(case: Case) -> None:
    check_against_eager(case, [gradients(case, 0), gradients(case, 1, 1, special=0.002)], 0.5)


@hypothesis_settings(max_examples=30)
@given(
    cases(),
    st.integers(0, 2**20),
    st.integers(-140, 120),
    st.sampled_from((0.0, 0.01, 1.0)),
    st.sampled_from((1.0, 1 / 3)),
)
def test_any_wire(case: Case, seed: int, exponent: int, special: float, factor: float) -> None:
    steps = [gradients(case, seed, exponent), gradients(case, seed + 1, exponent, special)]
    check_against_eager(case, steps, factor)


def test_one_wire_is_sent_on() -> None:
    case = Case(peers=2)
    outcome, table = Outcome.blank(case), case.table()
    with pytest.raises(ValueError, match=r"wire must have shape \[1, num_bytes\], got \[2, "):
        unpack_reduce_requantize(
            outcome.wire,
            outcome.wire,
            *columns(table),
            **place_on_wire(table),
            **outcome.keywords(),
        )
