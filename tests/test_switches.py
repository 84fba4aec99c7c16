"""What a user switches in the middle of a training: nobody's gradient may change its scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from loco_fsdp import LoCo, LoCoConfig, LoCoFSDP, attach
from loco_fsdp.reduction.guard import INTERVAL
from ranks import RankPool
from toy import Given, backward, cpu_mesh, reduced

Ranks = Callable[[int], RankPool]

SHAPE = (8, 8)


def build(way: str, **options: Any) -> tuple[nn.Module, LoCo]:
    """A model of one weight on all ranks: "fsdp", native "hsdp", or "replicas" of `LoCoFSDP`."""
    model = Given(weight=SHAPE)
    config = LoCoConfig(block_size=32, **options)
    if way == "replicas":
        LoCoFSDP(model, config, mesh=cpu_mesh(2, 2))
        return model, model.loco
    fully_shard(model, mesh=cpu_mesh(2, 2) if way == "hsdp" else cpu_mesh())
    return model, attach(model, config)


def value_of(model: nn.Module) -> float:
    (value,) = reduced(model.weight).unique().tolist()
    return value


WAYS = ["fsdp", "hsdp", "replicas"]

# --- windows ---------------------------------------------------------------------------------


def window(way: str, case: str, defer: bool) -> list[float]:
    """Two microbatches of 7 on all ranks, with something switched between or around them."""
    options: dict[str, Any] = {}
    if case == "warm-up":
        options["warmup_steps"] = 1
    if case.startswith("guard"):
        options["bits"], options["guard"] = 8, 1e-9  # far below what 8 bits reach
    model, loco = build(way, **options)
    if case == "guard":  # it decides after the reduction of the first microbatch
        for _ in range(INTERVAL - 1):
            noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(dist.get_rank()))
            backward(model, weight=noise)
            model.zero_grad()
    values = []
    seven = torch.full(SHAPE, 7.0)
    for _ in range(2):
        for microbatch in range(2):
            model.set_requires_all_reduce(microbatch == 1 or not defer)
            around = case in ("paused first", "paused last")
            paused = around and (microbatch == 0) == (case == "paused first")
            with loco.paused() if paused else nullcontext():
                backward(model, weight=seven)
            if microbatch == 0 and case == "detach" and loco.attached:
                loco.detach()
            elif microbatch == 0 and case == "detach":
                loco = attach(model, LoCoConfig(block_size=32))
        values += [value.item() for value in reduced(model.weight).aminmax()]
        model.zero_grad()
    return values


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["warm-up", "paused first", "paused last", "guard", "detach"])
def test_compression_may_start_and_stop_inside_a_window(ranks: Ranks, way: str, case: str) -> None:
    """Sums in one half of a window and means in the other gave 10.5 and 21 instead of 14."""
    for defer in (True, False):
        for values in ranks(4).run(window, way, case, defer):
            tolerance = 0.01 if case == "guard" else 1e-6  # its error is spent meanwhile
            assert values == [pytest.approx(14.0, rel=tolerance)] * 4


def scales(way: str, dtype: torch.dtype, factor: float | None) -> list[float]:
    """One gradient, compressed and paused; then with sums forced, and not any more."""
    model = Given(weight=SHAPE)
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    if way == "replicas":
        LoCoFSDP(model, LoCoConfig(block_size=32), mesh=cpu_mesh(2, 2), mp_policy=policy)
        loco = model.loco
    else:
        mesh = cpu_mesh(2, 2) if way == "hsdp" else cpu_mesh()
        fully_shard(model, mesh=mesh, mp_policy=policy)
        loco = attach(model, LoCoConfig(block_size=32))
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    values = []
    for force in (False, True, False):
        model.set_force_sum_reduction_for_comms(force)
        if factor is not None and not force and way == "replicas":
            continue  # inside of a replica stock FSDP2 reduces, and scales sums in NCCL alone
        for paused in (False, True) if factor is None or force else (False,):
            with loco.paused() if paused else nullcontext():
                backward(model, weight=torch.full(SHAPE, 7.0 * (dist.get_rank() + 1)))
            values.append(value_of(model))
            model.zero_grad()
    return values


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_whoever_divides_the_result_is_the_same(ranks: Ranks, way: str, dtype: torch.dtype) -> None:
    for factor, expected in ((None, 17.5), (8.0, 8.75)):
        for values in ranks(4).run(scales, way, dtype, factor):
            assert values == [pytest.approx(expected, rel=0.01)] * len(values)
            assert len(values) == (6 if factor is None else 2 if way == "replicas" else 4)


# --- hooks -----------------------------------------------------------------------------------


def hooked(way: str, paused: bool) -> tuple[list[float], float, int]:
    """A hook that is not linear: what it sees, and what comes out."""
    model, loco = build(way)
    seen = []

    def clamp(gradient: Tensor) -> None:
        seen.append(gradient.max().item())
        gradient.clamp_(-0.5, 0.5)

    model.set_all_reduce_hook(clamp)
    with loco.paused() if paused else nullcontext():
        for _ in range(2):
            model.zero_grad()
            backward(model, weight=torch.full(SHAPE, 0.7 if dist.get_rank() % 2 else 1.1))
    bits = loco.units[0].bits
    return seen, value_of(model), bits


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("paused", [False, True])
def test_a_hook_sees_what_stock_shows_it(ranks: Ranks, way: str, paused: bool) -> None:
    """It saw 3.6 instead of 0.9, or took the place of the all-reduce over replicas."""
    for seen, value, bits in ranks(4).run(hooked, way, paused):
        assert seen == [pytest.approx(0.9, rel=1e-6)] * 2
        assert value == 0.5
        assert bits == 4


def hook_after_hook() -> list[Any]:
    """Hooks set one after the other, over detaching and attaching, on replicas."""
    model, loco = build("replicas")
    calls: list[str] = []
    gradient = torch.full(SHAPE, 7.0 * (1 + dist.get_rank()))
    values = []

    def step() -> None:
        model.zero_grad()
        backward(model, weight=gradient)
        values.append(value_of(model))

    model.set_all_reduce_hook(lambda _: calls.append("first"))
    step()
    model.set_all_reduce_hook(lambda _: calls.append("second"))
    loco.detach()
    step()
    loco = attach(model, LoCoConfig(block_size=32))
    step()
    model.set_all_reduce_hook(None)  # type: ignore[arg-type]
    step()
    return [values, calls, loco.stats()["reductions"]]


def test_hooks_come_and_go_and_replicas_stay_equal(ranks: Ranks) -> None:
    expected = [[17.5] * 4, ["first", "second", "second"], 2]
    assert ranks(4).run(hook_after_hook) == [expected] * 4


def hook_while_deferred() -> tuple[list[float], float]:
    model, _ = build("replicas")
    seen: list[float] = []
    model.set_all_reduce_hook(lambda gradient: seen.append(gradient.max().item()))
    for microbatch in range(3):
        model.set_requires_all_reduce(microbatch == 2)
        backward(model, weight=torch.full(SHAPE, 7.0))
    return seen, value_of(model)


def test_a_hook_is_not_called_while_gradients_wait(ranks: Ranks) -> None:
    assert ranks(4).run(hook_while_deferred) == [([21.0], 21.0)] * 4


# --- gradients that wait ---------------------------------------------------------------------


def forgotten(how: str) -> float:
    """70 wait for the all-reduce when the iteration is given up; then comes one of 7."""
    model, loco = build("replicas")
    saved = loco.state_dict()
    if how == "reset after detach":
        loco.detach()
    model.set_requires_all_reduce(False)
    backward(model, weight=torch.full(SHAPE, 70.0))
    if how == "load":
        loco.load_state_dict(saved)
    else:
        model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model.zero_grad()
    backward(model, weight=torch.full(SHAPE, 7.0))
    return value_of(model)


@pytest.mark.parametrize("how", ["reset", "reset after detach", "load"])
def test_gradients_that_wait_are_given_up_with_the_iteration(ranks: Ranks, how: str) -> None:
    """They were added to the next step: 77 instead of 7."""
    if how != "load" and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("torch 2.13")
    assert ranks(4).run(forgotten, how) == [7.0] * 4


class TwoParts(nn.Module):
    """Two units that may run or not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Given(weight=SHAPE), Given(weight=SHAPE)

    def forward(self, names: str, gradient: Tensor) -> Tensor:
        return torch.stack([getattr(self, name)(weight=gradient) for name in names]).sum()


def unit_sits_out() -> list[float]:
    """A unit that does not run at all in the last microbatch of a window."""
    model = TwoParts()
    LoCoFSDP(model, LoCoConfig(block_size=32), mesh=cpu_mesh(2, 2), wrap=Given)
    seven = torch.full(SHAPE, 7.0)
    for index, names in enumerate(["ab", "b"]):
        model.set_requires_all_reduce(index == 1)
        model(names, seven).backward()
    return [value_of(model.a), value_of(model.b)]


def test_a_unit_that_sits_out_at_the_end_gets_its_gradient(ranks: Ranks) -> None:
    assert ranks(4).run(unit_sits_out) == [[7.0, 14.0]] * 4


# --- full precision --------------------------------------------------------------------------


def large_halves(way: str) -> float:
    model = Given(weight=SHAPE)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    mesh = cpu_mesh(4, 1)
    if way == "native":
        fully_shard(model, mesh=mesh, mp_policy=policy)
        backward(model, weight=torch.full(SHAPE, 30_000.0))
        return value_of(model)
    LoCoFSDP(model, mesh=mesh, mp_policy=policy)
    with model.loco.paused() if way == "paused" else nullcontext():
        backward(model, weight=torch.full(SHAPE, 30_000.0))
    return value_of(model)


@pytest.mark.parametrize("way", ["native", "paused", "compressed"])
def test_float16_does_not_overflow_in_a_sum_over_replicas(ranks: Ranks, way: str) -> None:
    """Four of 30,000 are more than float16 holds: divide before, as FSDP2 does."""
    assert ranks(4).run(large_halves, way) == [pytest.approx(30_000, rel=1e-3)] * 4


def nested_pauses() -> list[float]:
    model, loco = build("fsdp")
    counts = []
    with loco.paused():
        with loco.paused():
            pass
        backward(model, weight=torch.ones(SHAPE))
        counts.append(loco.stats()["bypassed_reductions"])
    backward(model, weight=torch.ones(SHAPE))
    return [*counts, loco.stats()["bypassed_reductions"], loco.stats()["reductions"]]


def test_an_inner_pause_does_not_end_the_outer_one(ranks: Ranks) -> None:
    assert ranks(4).run(nested_pauses) == [[1, 1, 1]] * 4


def cast_before_the_first_step() -> tuple[str | None, str | None, list[float], float]:
    model = Given(weight=SHAPE).double()
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(block_size=32))
    before = loco.units[0].bypass_reason
    model.float()
    values = []
    for _ in range(2):
        backward(model, weight=torch.full(SHAPE, 7.0 * (dist.get_rank() + 1)))
        values.append(value_of(model))
        model.zero_grad()
    return before, loco.units[0].bypass_reason, values, loco.stats()["reductions"]


def test_a_model_that_is_cast_from_float64_to_float32(ranks: Ranks) -> None:
    """The error spoke of a switch that nobody had touched."""
    expected = ("gradients are reduced in torch.float64", None, [17.5] * 2, 2)
    assert ranks(4).run(cast_before_the_first_step) == [expected] * 4


# --- autocast --------------------------------------------------------------------------------


def under_autocast(way: str, error_dtype: str, dtype: torch.dtype) -> list[bool]:
    """Gradients and errors of two steps, with and without autocast around the backward."""
    results = []
    for enabled in (False, True):
        model = Given(a=(40, 8), b=(3, 50))
        config = LoCoConfig(block_size=32, error_dtype=error_dtype)  # type: ignore[arg-type]
        if way == "replicas":
            LoCoFSDP(model, config, mesh=cpu_mesh(4, 1))
            loco = model.loco
        else:
            fully_shard(model, mesh=cpu_mesh())
            loco = attach(model, config)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(3):
            model.zero_grad()
            gradients = {
                n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()
            }
            loss = model(**gradients)
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                loss.backward()
                stats = loco.stats()
                loco.load_state_dict(loco.state_dict())
        results.append([*(reduced(p) for p in model.parameters()), torch.tensor([*stats.values()])])
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("way", ["fsdp", "replicas"])
@pytest.mark.parametrize("error_dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
def test_a_backward_inside_of_autocast(ranks: Ranks, way: str, error_dtype: str) -> None:
    """Autocast knows no 8-bit numbers, and on CPUs no float16: nothing of ours may meet it."""
    for dtype in (torch.bfloat16, torch.float16):
        for equal in ranks(4).run(under_autocast, way, error_dtype, dtype):
            assert equal == [True] * 3
