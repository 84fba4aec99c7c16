"""The compiled codec against its definition, `loco_fsdp.codec.eager`, and how it is built."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from kernel_cases import (
    ERROR_DTYPES,
    GRADIENT_DTYPES,
    Case,
    Outcome,
    assert_same_compiled,
    cases,
    compensated,
    gradients,
    needs_compiler,
    split_wire,
    variants,
)
from loco_fsdp.codec import BlockLayout, ErrorState, compiled, eager, ops
from loco_kernels import cpu_build

CPU = torch.device("cpu")

pytestmark = needs_compiler


def check_encode(case: Case, *steps: Tensor) -> Outcome:
    """Encode the last gradient, with the error that the reference has made of those before."""
    table, expected = case.table(), Outcome.blank(case)
    for gradient in steps:
        actual = expected.copy(CPU)
        h = compensated(case, gradient, expected.error)
        eager.encode(gradient, expected.wire, table, expected.stats, expected.error, case.beta)
    compiled.encode(steps[-1], actual.wire, table, actual.stats, actual.error, case.beta)
    assert_same_compiled(case, h, expected, actual)
    return expected


def check_decode(case: Case, wire: Tensor, factor: float) -> None:
    outputs = torch.empty(2, case.layout.shard_numel, dtype=case.gradient_dtype)
    compiled.decode(wire, outputs[0], case.table(), factor)
    eager.decode(wire, outputs[1], case.table(), factor)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0, equal_nan=True)


def check_decode_encode(case: Case, wires: list[Tensor], factor: float) -> None:
    """Of the last wire, with the error of the sums of those before."""
    table, expected = case.table(), Outcome.blank(case, peers=1)
    for wire in wires:
        actual, total = expected.copy(CPU), torch.empty(1, case.layout.shard_numel)
        eager.decode(wire, total[0], table, factor)
        h = compensated(case, total, expected.error)
        after = (table, expected.stats, expected.error, case.beta)
        eager.decode_encode(wire, expected.wire, *after, factor)
    after = (table, actual.stats, actual.error, case.beta)
    compiled.decode_encode(wires[-1], actual.wire, *after, factor)
    assert_same_compiled(case, h, expected, actual)


def check_all(case: Case, first: Tensor, second: Tensor, factor: float) -> None:
    wires = [check_encode(case, first).wire, check_encode(case, first, second).wire]
    check_decode(case, wires[1], factor)
    if case.wire_rows is None:
        check_decode_encode(case, wires, factor)


@pytest.mark.parametrize("case", variants(), ids=str)
def test_every_variant(case: Case) -> None:
    check_all(case, gradients(case, 0, -10), gradients(case, 1, -9, special=0.002), 1.0)


@settings(max_examples=300)
@given(
    cases(),
    st.integers(0, 2**20),
    st.integers(-140, 120),
    st.sampled_from((0.0, 0.0, 0.01, 0.5, 1.0)),
    st.sampled_from((1.0, 0.5, 1 / 3)),
)
def test_any_gradient(case: Case, seed: int, exponent: int, special: float, factor: float) -> None:
    first = gradients(case, seed, exponent)
    check_all(case, first, gradients(case, seed + 1, exponent, special), factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_gradient(dtype: torch.dtype) -> None:
    """Each alone in its block, so that none hides behind a larger one or one that is no number."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    case = Case(8, 32, (1,) * 2**16, 1, dtype, error_dtype=None)
    check_encode(case, values.unsqueeze(0))


@pytest.mark.parametrize("dtype", ERROR_DTYPES, ids=str)
def test_every_payload_of_an_error(dtype: torch.dtype) -> None:
    """Read, and rounded to again. Of the two wider dtypes some: those with few bits set."""
    bits = 8 * dtype.itemsize
    patterns = torch.arange(2 ** min(bits, 16), dtype=torch.int64) << (bits - min(bits, 16))
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
    payload = patterns.to(integer).view(dtype)
    payload = payload[payload.float().isfinite() & (payload.float().abs() < 2**16)]
    payload = payload[: len(payload) // 32 * 32].view(1, -1, 32)
    case = Case(4, 32, (payload.numel(),), 1, error_dtype=dtype, beta=0.5)
    table = case.layout.place(CPU)
    for scale in (2.0**-126, 2.0**-20, 1.0, 2.0**60):
        written = []
        for codec in (compiled, eager):
            side = Outcome.blank(case)
            error = ErrorState(payload.clone(), torch.full(payload.shape[:2], scale))
            zeros = torch.zeros(1, payload.numel())
            codec.encode(zeros, side.wire, table, side.stats, error, case.beta)
            written.append((side.wire, error.payload.float(), error.scale))
        for ours, theirs in zip(*written, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_every_size_of_a_sum_is_rounded_alike(dtype: torch.dtype) -> None:
    """Scales with all exponents, and mantissas that end in ties of the narrower dtypes."""
    exponents = 2.0 ** torch.arange(-126, 128, dtype=torch.float64)
    mantissas = 1 + torch.arange(0, 2**12, 2**5 - 1, dtype=torch.float64) / 2**12
    scales = (exponents.unsqueeze(1) * mantissas).flatten().to(torch.float32)
    layout = BlockLayout((32 * len(scales),), bits=8, block_size=32)
    table = layout.place(CPU)
    wire = torch.arange(layout.bytes_per_shard).to(torch.uint8).unsqueeze(0)
    wire[0, layout.wire.on_wire(0, layout.num_blocks)[1]] = scales.view(torch.uint8)
    outputs = torch.empty(2, layout.shard_numel, dtype=dtype)
    for codec, output in zip((compiled, eager), outputs, strict=True):
        codec.decode(wire, output, table)
    assert outputs[0].isinf().any()
    assert torch.equal(outputs[0], outputs[1])


def test_peers_are_summed_in_the_order_of_their_ranks() -> None:
    case = Case(4, 256, (1000, 7), peers=4, error_dtype=None)
    # Sizes so different that another order gives another sum.
    sizes = torch.tensor([[1.0], [3e7], [-3e7], [1e3]])
    x = torch.randn(4, case.layout.shard_numel) * sizes
    check_decode(case, check_encode(case, x).wire, 1.0)


@pytest.mark.parametrize("k", [-60, -7, 60])
def test_powers_of_two_change_no_code(k: int) -> None:
    case = Case()
    plain, scaled = Outcome.blank(case), Outcome.blank(case)
    for seed in range(3):
        x = gradients(case, seed)
        for side, gradient in ((plain, x), (scaled, x * 2.0**k)):
            compiled.encode(gradient, side.wire, case.table(), side.stats, side.error, case.beta)
        (codes, scales), (other_codes, other_scales) = (
            split_wire(side.wire, case.table()) for side in (plain, scaled)
        )
        assert torch.equal(codes, other_codes)
        assert torch.equal(scales * 2.0**k, other_scales)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_change_nothing(num_threads: int) -> None:
    case = Case(4, 256, (200_000, 3), peers=2)
    x = gradients(case, 0)
    x[:, ::30_000] = torch.nan
    torch.set_num_threads(num_threads)
    wire = check_encode(case, gradients(case, 1), x).wire
    check_decode(case, wire, 0.5)
    check_decode_encode(case, [wire, wire], 0.5)


def run_all(case: Case, dtype: torch.dtype = torch.float32) -> None:
    side, total = Outcome.blank(case), Outcome.blank(case, peers=1)
    table = case.table()
    x = torch.randn(case.peers, case.layout.shard_numel).to(dtype)
    compiled.encode(x, side.wire, table, side.stats, side.error, case.beta)
    compiled.decode(side.wire, x[0], table)
    compiled.decode_encode(side.wire, total.wire, table, total.stats, total.error, case.beta)
    if case.wire_rows is None:
        compiled.encode_difference(x[0], x[-1], total.wire, table, total.stats)
        compiled.decode_rows(total.wire, x, table, torch.tensor([0]), add=True)


def test_nothing_is_allocated() -> None:
    case = Case(4, 256, (2**18, 2**18 + 3), gradient_dtype=torch.bfloat16)
    side, total = Outcome.blank(case), Outcome.blank(case, peers=1)
    table, x, output_rows = case.table(), gradients(case, 0), torch.tensor([1, 0])

    def largest_allocation(codec: object) -> int:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profiler:
            codec.encode(x, side.wire, table, side.stats, side.error, case.beta)
            codec.decode(side.wire, x[0], table)
            codec.decode_encode(side.wire, total.wire, table, total.stats, total.error, case.beta)
            codec.encode_difference(x[0], x[1], total.wire, table, total.stats)
            codec.decode_rows(side.wire, x, table, output_rows, add=True)
        return max((event.self_cpu_memory_usage for event in profiler.events()), default=0)

    assert largest_allocation(compiled) == 0
    assert largest_allocation(eager) >= x.nbytes


def test_it_runs_compiled_where_fsdp2_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the thread of backward, below an operator, and where dynamo is disabled."""
    case = Case()
    x, table = gradients(case, 0), case.table()
    expected = Outcome.blank(case)
    eager.encode(x, expected.wire, table, expected.stats, expected.error, case.beta)
    monkeypatch.delattr(eager, "encode")
    checks = []

    def check() -> None:
        side = Outcome.blank(case)
        arguments = (x, side.wire, table, side.stats, side.error, case.beta)
        ops.encode(*arguments, backend="compiled")
        checks.append(torch.equal(side.wire, expected.wire))

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

    check()
    torch._dynamo.disable(check)()
    in_backward()
    thread = threading.Thread(target=in_backward)
    thread.start()
    thread.join()
    assert checks == [True] * 4


def test_other_threads_run_meanwhile() -> None:
    """The library is loaded in the way that releases the interpreter's lock."""
    assert isinstance(compiled._library(), ctypes.CDLL)
    assert not isinstance(compiled._library(), ctypes.PyDLL)


def wrong_arguments() -> Iterator[tuple[type[Exception], str, dict[str, object]]]:
    case = Case()
    shard_numel, layout = case.layout.shard_numel, case.layout
    doubles = torch.zeros(2, shard_numel, dtype=torch.float64)
    yield TypeError, "gradient must be .* got torch.float64", {"gradient": doubles}
    short = torch.zeros(2, shard_numel - 1)
    yield ValueError, rf"gradient must have shape \[2, {shard_numel}\]", {"gradient": short}
    strided = torch.zeros(shard_numel, 2).T
    yield ValueError, "gradient must be contiguous", {"gradient": strided}
    elsewhere = torch.zeros(2, shard_numel, device="meta")
    yield ValueError, "gradient must be on cpu .* got meta", {"gradient": elsewhere}
    long = torch.zeros(2, layout.bytes_per_shard + 16, dtype=torch.uint8)
    yield ValueError, "wire must have shape", {"wire": long}
    payload = torch.zeros(2, case.num_rows, 64)
    yield ValueError, "payload must have", {"error": ErrorState(payload, payload[..., 0])}
    yield ValueError, "beta must be in", {"beta": 1.5}


@pytest.mark.parametrize(
    ("error", "message", "wrong"),
    [*wrong_arguments()],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_arguments_are_refused_and_nothing_is_written(
    error: type[Exception], message: str, wrong: dict[str, object]
) -> None:
    case = Case()
    side = Outcome.blank(case)
    right = {"gradient": gradients(case, 0), "wire": side.wire, "error": side.error, "beta": 0.9}
    before = side.copy(CPU)
    with pytest.raises(error, match=message):
        compiled.encode(table=case.table(), stats=side.stats, **{**right, **wrong})
    assert torch.equal(side.wire, before.wire)
    assert side.error is not None and not side.error.payload.any()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, ...]]]:
    """An empty cache, and the commands that are run while the test lasts."""
    commands: list[tuple[str, ...]] = []
    run = cpu_build._run

    def recorded(*command: str) -> str:
        commands.append(command)
        return run(*command)

    def forget() -> None:
        cpu_build.load_library.cache_clear()
        compiled._library.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_build, "_run", recorded)
    forget()
    yield commands
    forget()


def builds(commands: list[tuple[str, ...]]) -> int:
    return sum("-o" in command for command in commands)


def test_one_build_serves_everything_and_the_next_process(fresh: list[tuple[str, ...]]) -> None:
    for case in variants()[::7]:
        run_all(case, case.gradient_dtype)
    assert builds(fresh) == 1
    before = len(fresh)
    cpu_build.load_library.cache_clear()  # as a new process is
    compiled._library.cache_clear()
    run_all(Case())
    assert builds(fresh[before:]) == 0


def test_processes_that_build_at_once_do_not_meet(
    fresh: list[tuple[str, ...]], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(3) as pool:
        libraries = list(pool.map(lambda _: cpu_build.load_library.__wrapped__(), range(3)))
    assert len({library._name for library in libraries}) == 1
    assert [file.suffix for file in (tmp_path / "cache" / "loco_fsdp").iterdir()] == [".so"]


def broken_compiler(tmp_path: Path) -> Path:
    """Says its version, and cannot compile."""
    path = tmp_path / "c++"
    path.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo out of luck >&2; exit 1; }\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("fault", ["no compiler", "broken compiler", "cache is a file"])
def test_where_it_cannot_be_built_the_definition_runs_after_one_warning(
    fault: str, fresh: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {
        "no compiler": "no C\\+\\+ compiler '/nowhere/g\\+\\+'.*Install g\\+\\+, or set CXX",
        "broken compiler": "out of luck",
        "cache is a file": "set XDG_CACHE_HOME",
    }[fault]
    if fault == "no compiler":
        monkeypatch.setenv("CXX", "/nowhere/g++")
    elif fault == "broken compiler":
        monkeypatch.setenv("CXX", str(broken_compiler(tmp_path)))
    else:
        (tmp_path / "cache").write_text("")
    case = Case()
    ours, theirs = Outcome.blank(case), Outcome.blank(case)
    table, x = case.table(), gradients(case, 0)
    eager.encode(x, theirs.wire, table, theirs.stats, theirs.error, case.beta)
    with pytest.warns(UserWarning, match=f"(?s){said}"):
        compiled.encode(x, ours.wire, table, ours.stats, ours.error, case.beta)
    assert torch.equal(ours.wire, theirs.wire)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_all(case)
