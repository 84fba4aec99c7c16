"""Reductions of FSDP2 over several ranks, against values worked out by hand or by the oracle."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import oracle
from loco_fsdp import LoCoConfig, attach
from loco_fsdp.frontends.fsdp2_hooks import FSDPReduceScatter
from ranks import RankPool
from toy import Given, backward, cpu_mesh, reduced

Ranks = Callable[[int], RankPool]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def lossless(rank: int, shape: tuple[int, ...] = (8, 8)) -> Tensor:
    """A gradient that 4 bits can hold: one value, whose scale is the integer rank + 1."""
    return torch.full(shape, 7.0 * (rank + 1))


def seeded(rank: int, name: str, shape: tuple[int, ...], step: int = 0) -> Tensor:
    """A signed gradient that every process can work out for any rank."""
    seed = hash((rank, sum(name.encode()), step)) % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- who divides -----------------------------------------------------------------------------


def divide(mesh_shape: tuple[int, ...], reduce_dtype: torch.dtype, set_up: str) -> float:
    model = Given(weight=(8, 8))
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    fully_shard(model, mesh=cpu_mesh(*mesh_shape), mp_policy=policy)
    if set_up == "factor before":
        model.set_gradient_divide_factor(8)
    if set_up == "sum before":
        model.set_force_sum_reduction_for_comms(True)
    attach(model)
    if set_up == "factor after":
        model.set_gradient_divide_factor(8)
    if set_up == "sum after":
        model.set_force_sum_reduction_for_comms(True)
    backward(model, weight=lossless(dist.get_rank()))
    (value,) = reduced(model.weight).unique().tolist()
    return value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=["fsdp", "hsdp"])
def test_fsdp_divides(ranks: Ranks, mesh_shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # (7 + 14 + 21 + 28) / 4, or / 8 where the user says so
    for set_up, expected in [
        ("default", 17.5),
        ("factor before", 8.75),
        ("factor after", 8.75),
        ("sum before", 17.5),
        ("sum after", 17.5),
    ]:
        assert ranks(4).run(divide, mesh_shape, dtype, set_up) == [expected] * 4, set_up


def mean_of_one_and_three() -> float:
    model = Given(weight=(2, 32))
    fully_shard(model, mesh=cpu_mesh())
    attach(model)
    backward(model, weight=torch.full((2, 32), 1.0 + 2 * dist.get_rank()))
    (value,) = reduced(model.weight).unique().tolist()
    return value


def test_the_result_is_a_mean_whatever_gloo_makes_of_avg(ranks: Ranks) -> None:
    # 1 and 3 are the largest value of their block: code 7 times a scale rounded once
    assert ranks(2).run(mean_of_one_and_three) == [pytest.approx(2.0, rel=3e-7)] * 2


def unsupported(case: str) -> str:
    model = Given(weight=(8, 8))
    fully_shard(model, mesh=cpu_mesh())
    attach(model)
    comm = model._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm
    assert isinstance(comm, FSDPReduceScatter)
    full, shard = torch.zeros(64), torch.zeros(32)
    group = dist.group.WORLD
    arguments: dict[str, Any] = {
        "min": (shard, full, group, dist.ReduceOp.MIN),
        "max": (shard, full, group, dist.ReduceOp.MAX),
        "async": (shard, full, group, dist.ReduceOp.SUM, True),
        "size": (torch.zeros(31), full, group, dist.ReduceOp.SUM),
        "dtype": (shard.double(), full.double(), group, dist.ReduceOp.SUM),
    }
    try:
        comm(*arguments[case])
    except (ValueError, TypeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("min", "it was asked for RedOpType.MIN"),
        ("max", "it was asked for RedOpType.MAX"),
        ("async", "async_op=True is not supported"),
        ("size", "64 gradient elements are not 2 shards of 31"),
        ("dtype", "not torch.float64"),
    ],
)
def test_what_cannot_be_done_raises(ranks: Ranks, case: str, message: str) -> None:
    for answer in ranks(2).run(unsupported, case):
        assert message in answer
        assert "FSDP unit" in answer


# --- sizes -----------------------------------------------------------------------------------

SHARD_NUMELS = [1, 2, 3, 31, 32, 33, 127, 128, 129, 1023]


def reduce_sizes(bits: int) -> dict[str, Tensor]:
    world_size = dist.get_world_size()
    shapes = {f"p{numel}": (numel * world_size,) for numel in SHARD_NUMELS}
    model = Given(**shapes)
    fully_shard(model, mesh=cpu_mesh())
    attach(model, LoCoConfig(bits=bits, block_size=64))
    model.set_gradient_divide_factor(1)
    rank = dist.get_rank()
    backward(model, **{name: seeded(rank, name, shape) for name, shape in shapes.items()})
    return {name: reduced(getattr(model, name)) for name in shapes}


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_any_size_on_any_number_of_ranks(ranks: Ranks, world_size: int, bits: int) -> None:
    for result in ranks(world_size).run(reduce_sizes, bits):
        for numel in SHARD_NUMELS:
            name = f"p{numel}"
            total = [0.0] * (numel * world_size)
            for rank in range(world_size):
                gradient = seeded(rank, name, (numel * world_size,)).tolist()
                for first in range(0, len(gradient), numel):
                    _, sent = oracle.quantize_part(gradient[first : first + numel], bits, 64)
                    for i, value in enumerate(sent):
                        total[first + i] += value
            torch.testing.assert_close(
                result[name].double(), torch.tensor(total).double(), rtol=1e-5, atol=1e-5
            )


def uneven(dim0: int, fill: float) -> tuple[Tensor, bool]:
    model = Given(weight=(dim0, 40))
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(block_size=32))
    comm = model._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm

    def allocate(size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(size, fill, dtype=dtype, device=device)

    comm.allocate = allocate
    for step in range(3):
        model.zero_grad()
        backward(model, weight=seeded(dist.get_rank(), "weight", (dim0, 40), step))
    finite = math.isfinite(loco.stats()["error_norm"])
    return reduced(model.weight), finite


@pytest.mark.parametrize("dim0", [5, 2])
def test_what_lies_in_padding_reaches_nothing(ranks: Ranks, dim0: int) -> None:
    # dim 0 of 5 on 4 ranks: shards of 2, 2, 1 and 0 rows
    clean = ranks(4).run(uneven, dim0, 0.0)
    for (expected, _), (result, finite) in zip(
        clean, ranks(4).run(uneven, dim0, math.nan), strict=True
    ):
        assert finite
        assert result.isfinite().all()
        assert torch.equal(result, expected)


# --- what is in the numbers ------------------------------------------------------------------


def reduce_given(gradients: list[list[list[float]]], config: LoCoConfig) -> list[list[float]]:
    """One reduction a step, of a parameter of as many elements; the sums by step."""
    rank = dist.get_rank()
    model = Given(weight=(len(gradients[0][0]),))
    fully_shard(model, mesh=cpu_mesh())
    attach(model, config)
    model.set_gradient_divide_factor(1)
    results = []
    for step in gradients:
        model.zero_grad()
        backward(model, weight=torch.tensor(step[rank]))
        results.append(reduced(model.weight).tolist())
    return results


def test_zero_gradients_and_zero_blocks_stay_zero(ranks: Ranks) -> None:
    # Shards of 64: two blocks of 32 a rank, the first all zero.
    block = [0.0] * 32
    part = block + [7.0, -7.0] * 16
    gradient = part + part
    (zero, mixed) = ranks(2).run(
        reduce_given, [[[0.0] * 128] * 2, [gradient] * 2], LoCoConfig(block_size=32)
    )[0]
    assert zero == [0.0] * 128
    assert mixed == (block + [14.0, -14.0] * 16) * 2


def inject(bad: float) -> tuple[list[Tensor], list[float], dict[str, float]]:
    """Three good steps, a bad element on rank 1 at the fourth, and one more."""
    rank = dist.get_rank()
    model = Given(weight=(128,))
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(block_size=32, error_dtype="float32"))
    model.set_gradient_divide_factor(1)
    results, norms = [], []
    for step in range(5):
        gradient = seeded(rank, "weight", (128,), step)
        if step == 3 and rank == 1:
            gradient[40] = bad
        model.zero_grad()
        backward(model, weight=gradient)
        results.append(reduced(model.weight))
        norms.append(loco.stats()["error_norm"])
    return results, norms, loco.stats()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_non_finite_gradient_is_seen_and_leaves_nothing_behind(ranks: Ranks, bad: float) -> None:
    world_size, numel, block_size = 2, 128, 32
    expected: list[list[float]] = []
    errors = [[0.0] * numel for _ in range(world_size)]
    for step in range(5):
        total = [0.0] * numel
        for rank in range(world_size):
            gradient = seeded(rank, "weight", (numel,), step).tolist()
            if step == 3 and rank == 1:
                gradient[40] = bad
            # Shards of 64 are two blocks: parts and blocks have the same bounds here.
            sent, errors[rank] = oracle.feedback_step(gradient, errors[rank], 4, block_size, 0.9)
            total = [a + b for a, b in zip(total, sent, strict=True)]
        expected.append(total)
    for rank, (results, norms, stats) in enumerate(ranks(2).run(inject, bad)):
        assert results[3][32:64].isnan().all()  # the owner's block, on every rank after gathering
        for result, values in zip(results, expected, strict=True):
            torch.testing.assert_close(
                result, torch.tensor(values), rtol=1e-4, atol=1e-4, equal_nan=True
            )
        assert all(map(math.isfinite, norms))
        assert stats["nonfinite_blocks"] == (1 if rank == 1 else 0)


# --- an error belongs to a parameter ---------------------------------------------------------


def in_turn() -> list[dict[str, Tensor]]:
    """Equal-sized parameters, used in turn."""
    rank = dist.get_rank()
    model = Given(a=(4, 32), b=(4, 32))
    fully_shard(model, mesh=cpu_mesh())
    attach(model, LoCoConfig(block_size=32, error_dtype="float32"))
    model.set_gradient_divide_factor(1)
    results = []
    for step, names in enumerate(["a", "b", "ab", "b", "a", "ab"]):
        model.zero_grad()
        backward(model, **{name: seeded(rank, name, (4, 32), step) for name in names})
        results.append({name: reduced(getattr(model, name)) for name in names})
    return results


def test_a_parameter_that_sits_out_keeps_its_error_to_itself(ranks: Ranks) -> None:
    errors = {(name, rank): [0.0] * 128 for name in "ab" for rank in range(2)}
    results = ranks(2).run(in_turn)[0]
    for step, names in enumerate(["a", "b", "ab", "b", "a", "ab"]):
        for name in names:
            total = torch.zeros(128, dtype=torch.float64)
            for rank in range(2):
                gradient = seeded(rank, name, (128,), step).tolist()
                sent, errors[name, rank] = oracle.feedback_step(
                    gradient, errors[name, rank], 4, 32, 0.9
                )
                total += torch.tensor(sent, dtype=torch.float64)
            torch.testing.assert_close(
                results[step][name].flatten().double(), total, rtol=1e-4, atol=1e-4
            )


def feedback_over_steps(config: LoCoConfig, steps: int) -> list[Tensor]:
    rank = dist.get_rank()
    model = Given(weight=(2, 64))
    fully_shard(model, mesh=cpu_mesh())
    attach(model, config)
    model.set_gradient_divide_factor(1)
    results = []
    for step in range(steps):
        model.zero_grad()
        backward(model, weight=seeded(rank, "weight", (2, 64), step))
        results.append(reduced(model.weight).flatten())
    return results


@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("reset_interval", [None, 3])
def test_feedback_and_reset_follow_the_definition(
    ranks: Ranks, beta: float, reset_interval: int | None
) -> None:
    config = LoCoConfig(
        block_size=32, beta=beta, reset_interval=reset_interval, error_dtype="float32"
    )
    results = ranks(2).run(feedback_over_steps, config, 8)[0]
    errors = [[0.0] * 128] * 2
    for step, result in enumerate(results):
        total = torch.zeros(128, dtype=torch.float64)
        for rank in range(2):
            gradient = seeded(rank, "weight", (128,), step).tolist()
            sent, errors[rank] = oracle.feedback_step(gradient, errors[rank], 4, 32, beta)
            total += torch.tensor(sent, dtype=torch.float64)
        if reset_interval is not None and (step + 1) % reset_interval == 0:
            errors = [[0.0] * 128] * 2
        torch.testing.assert_close(result.double(), total, rtol=1e-4, atol=1e-4)


# --- what stock FSDP2 does -------------------------------------------------------------------


def against_stock(config: LoCoConfig, steps: int, paused: bool) -> bool:
    """Whether every step equals stock FSDP2 bitwise; 3 ranks make averages inexact."""
    rank = dist.get_rank()
    models = []
    for _ in range(2):
        model = nn.Sequential(Given(weight=(7, 32)))
        fully_shard(model[0], mesh=cpu_mesh())
        fully_shard(model, mesh=cpu_mesh())
        models.append(model)
    loco = attach(models[1], config)
    equal = True
    for step in range(steps):
        gradient = seeded(rank, "weight", (7, 32), step)
        for model in models:
            model.zero_grad()
        backward(models[0][0], weight=gradient)
        if paused:
            with loco.paused():
                backward(models[1][0], weight=gradient)
        else:
            backward(models[1][0], weight=gradient)
        equal = equal and torch.equal(reduced(models[0][0].weight), reduced(models[1][0].weight))
    if equal:
        assert loco.stats()["error_norm"] == 0
        assert [unit.error_bytes for unit in loco.units] == [0]
        assert loco.stats()["bypassed_reductions"] == steps
        assert loco.stats()["compression_ratio"] == 1
    return equal


@pytest.mark.parametrize(
    ("config", "paused", "equal"),
    [
        (LoCoConfig(), False, False),
        (LoCoConfig(), True, True),
        (LoCoConfig(warmup_steps=3), False, True),
        (LoCoConfig(min_numel=7 * 32 + 1), False, True),
        (LoCoConfig(min_numel=7 * 32), False, False),
    ],
    ids=["compressed", "paused", "warm-up", "too small", "large enough"],
)
def test_a_bypassed_unit_equals_stock_fsdp_bitwise(
    ranks: Ranks, config: LoCoConfig, paused: bool, equal: bool
) -> None:
    assert ranks(3).run(against_stock, config, 3, paused) == [equal] * 3


def after_warm_up() -> list[float]:
    model = Given(weight=(8, 8))
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(warmup_steps=2))
    values = []
    for _ in range(4):
        model.zero_grad()
        backward(model, weight=lossless(dist.get_rank()))
        values.append(reduced(model.weight).unique().item())
    stats = loco.stats()
    return [*values, stats["reductions"], stats["bypassed_reductions"]]


def test_warm_up_ends_and_scaling_stays_right(ranks: Ranks) -> None:
    assert ranks(2).run(after_warm_up) == [[10.5] * 4 + [2, 2]] * 2


def count_bytes(bits: int) -> tuple[int, dict[str, float]]:
    """Bytes that leave this rank at the collective, and what `stats` says."""
    sent = 0
    import loco_fsdp.reduction.reduce_scatter as module

    original = module.exchange

    def counting(receive: Tensor, send: Tensor, group: dist.ProcessGroup) -> None:
        nonlocal sent
        assert send.dtype is torch.uint8
        sent += send.nbytes // group.size() * (group.size() - 1)
        original(receive, send, group)

    model = Given(weight=(64, 96))
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(bits=bits, node_size=2, topology="flat"))
    module.exchange = counting
    try:
        backward(model, weight=torch.ones(64, 96))
    finally:
        module.exchange = original
    return sent, loco.stats()


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_bytes_are_those_of_the_wire_layout(ranks: Ranks, bits: int) -> None:
    # A shard of 16 * 96 = 1536 elements is 6 blocks of 256: 32 * bits bytes of codes and 4 of
    # scale each; 24 bytes of scales take 32 on the wire. Three of four shards leave the rank, two
    # of them the node.
    shard_bytes = 6 * 32 * bits + 32
    for sent, stats in ranks(4).run(count_bytes, bits):
        assert sent == 3 * shard_bytes == stats["wire_bytes"]
        assert stats["inter_node_bytes"] == 2 * shard_bytes
        assert stats["baseline_bytes"] == 3 * 1536 * 4
        assert stats["compression_ratio"] == 1536 * 4 / shard_bytes
