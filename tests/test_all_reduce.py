"""HSDP: gradients reduced in low bits over replicas."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import oracle
from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from loco_fsdp.reduction.all_reduce import summing_replicas
from ranks import RankPool, raised
from toy import Given, Net, backward, batch, cpu_mesh, reduced, shard

Ranks = Callable[[int], RankPool]


# --- which replica sums which blocks ---------------------------------------------------------


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
    st.integers(1, 5),
)
def test_every_block_has_one_replica_whatever_else_is_used(
    numels: list[int], unused: set[int], num_replicas: int
) -> None:
    blocks = [-(-numel // 32) for numel in numels]
    firsts = [sum(blocks[:index]) for index in range(len(blocks))]

    def owners(used: list[int]) -> list[tuple[int, int]]:
        """The number of each block in the unit, and its replica."""
        found = summing_replicas([firsts[i] for i in used], [blocks[i] for i in used], num_replicas)
        numbers = [firsts[i] + block for i in used for block in range(blocks[i])]
        return list(zip(numbers, found.tolist(), strict=True))

    everything = owners(list(range(len(numels))))
    assert everything == [(number, number % num_replicas) for number in range(sum(blocks))]
    assert set(owners([i for i in range(len(numels)) if i not in unused])) <= set(everything)


def test_any_stretch_of_parameters_is_shared_out_evenly() -> None:
    blocks = [3, 1, 1, 5, 2, 1, 8]
    for first in range(len(blocks)):
        for last in range(first + 1, len(blocks) + 1):
            firsts = [sum(blocks[:index]) for index in range(first, last)]
            shared = summing_replicas(firsts, blocks[first:last], 4).bincount(minlength=4)
            assert shared.max() - shared.min() <= 1


# --- what comes out --------------------------------------------------------------------------


def lossless(mesh_shape: tuple[int, int], dtype: torch.dtype, factor: float | None) -> Any:
    model = Given(weight=(8, 8))
    mesh = cpu_mesh(*mesh_shape)
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    LoCoFSDP(model, LoCoConfig(block_size=32), mesh=mesh, mp_policy=policy)
    if factor is not None:
        if mesh_shape[1] > 1:
            model.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        model.set_gradient_divide_factor(factor)
    backward(model, weight=torch.full((8, 8), 7.0 * (dist.get_rank() + 1)))
    return reduced(model.weight).unique().item(), model.loco.stats()


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [None, 8.0])
def test_exact_where_it_can_be(
    ranks: Ranks, mesh_shape: tuple[int, int], dtype: torch.dtype, factor: float | None
) -> None:
    if mesh_shape == (4, 1) and factor is not None:
        if dtype is torch.float16:
            pytest.skip("in float16 and with one rank a shard FSDP2 itself divides twice")
        if torch.__version__.startswith("2.9."):
            pytest.skip("with one rank a shard FSDP2 of torch 2.9 needs NCCL for a factor")
    expected = 17.5 if factor is None else 70 / factor
    for value, stats in ranks(4).run(lossless, mesh_shape, dtype, factor):
        assert value == pytest.approx(expected, rel=1e-6 if dtype is torch.float32 else 0.01)
        assert stats["reductions"] == 1


def seeded(rank: int, step: int) -> Tensor:
    return torch.randn(2 * 210, generator=torch.Generator().manual_seed(1000 * rank + step))


def replicated(config: LoCoConfig) -> list[Tensor]:
    model = Given(a=(2, 130), b=(2, 80))
    LoCoFSDP(model, config, mesh=cpu_mesh(dist.get_world_size(), 1))
    results = []
    for step in range(4):
        model.zero_grad()
        flat = seeded(dist.get_rank(), step)
        backward(model, a=flat[:260].view(2, 130), b=flat[260:].view(2, 80))
        results.append(torch.cat([reduced(model.a).flatten(), reduced(model.b).flatten()]))
    return results


@pytest.mark.parametrize("replicas", [2, 3])
def test_feedback_of_gradients_and_of_sums(ranks: Ranks, replicas: int) -> None:
    """Against the oracle: what each replica sends, and its mean, which three send once more."""
    config = LoCoConfig(block_size=32, error_dtype="float32", reset_interval=3)
    results = ranks(replicas).run(replicated, config)
    lengths = [260, 160]  # 9 + 5 blocks; of three replicas the first two sum 5, the last 4
    zeros = [[0.0] * n for n in lengths]
    errors, sum_errors = [list(zeros) for _ in range(replicas)], list(zeros)
    for step in range(4):
        expected: list[float] = []
        for index, (first, length) in enumerate(zip((0, 260), lengths, strict=True)):
            mean = [0.0] * length
            for rank in range(replicas):
                part = seeded(rank, step)[first : first + length].tolist()
                sent, errors[rank][index] = oracle.feedback_step(
                    part, errors[rank][index], 4, 32, 0.9
                )
                mean = [m + s / replicas for m, s in zip(mean, sent, strict=True)]
            if replicas > 2:
                mean, sum_errors[index] = oracle.feedback_step(mean, sum_errors[index], 4, 32, 0.9)
            expected += mean
        if step == 2:
            errors, sum_errors = [list(zeros) for _ in range(replicas)], list(zeros)
        for rank in range(replicas):
            close = torch.isclose(
                results[rank][step].double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-4
            )
            # A mean on a threshold between two codes may fall on either side in floats.
            assert close.float().mean() > 0.98
            assert torch.equal(results[0][step], results[rank][step])


def replicas_agree(steps: int) -> tuple[list[Tensor], int]:
    torch.manual_seed(dist.get_rank())  # every rank starts elsewhere
    model = Net()
    mesh = cpu_mesh(2, 2)
    LoCoFSDP(model, LoCoConfig(block_size=32), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()
    error_bytes = sum(unit.error_bytes for unit in model.loco.units)
    return [p.full_tensor().detach() for p in model.parameters()], error_bytes


@pytest.mark.parametrize("steps", [0, 5])
def test_replicas_stay_bitwise_equal(ranks: Ranks, steps: int) -> None:
    results = ranks(4).run(replicas_agree, steps)
    for parameters, _ in results[1:]:
        assert all(map(torch.equal, parameters, results[0][0]))


def against_native(paused: bool) -> list[bool]:
    """Whether gradients equal FSDP2's own HSDP, bitwise."""
    models = []
    for low in (False, True):
        torch.manual_seed(0)
        model = Net()
        if low:
            LoCoFSDP(model, mesh=cpu_mesh(2, 2))
        else:
            shard(model, mesh=cpu_mesh(2, 2))
        models.append(model)
    native, ours = models
    native(batch()).square().mean().backward()
    if paused:
        with ours.loco.paused():
            ours(batch()).square().mean().backward()
    else:
        ours(batch()).square().mean().backward()
    close = [
        torch.allclose(reduced(a), reduced(b), rtol=0, atol=0.4 * reduced(a).abs().max().item())
        for a, b in zip(native.parameters(), ours.parameters(), strict=True)
    ]
    equal = [
        torch.equal(reduced(a), reduced(b))
        for a, b in zip(native.parameters(), ours.parameters(), strict=True)
    ]
    return [all(close), all(equal)]


def test_paused_equals_native_hsdp(ranks: Ranks) -> None:
    assert ranks(4).run(against_native, True) == [[True, True]] * 4
    assert ranks(4).run(against_native, False) == [[True, False]] * 4


def deferred() -> tuple[float, dict[str, float]]:
    model = Given(weight=(8, 8))
    LoCoFSDP(model, LoCoConfig(block_size=32), mesh=cpu_mesh(2, 2))
    for microbatch in range(4):
        model.set_requires_all_reduce(microbatch == 3)
        backward(model, weight=torch.full((8, 8), 7.0 * (dist.get_rank() + 1)))
    return reduced(model.weight).unique().item(), model.loco.stats()


def test_a_deferred_all_reduce_happens_once(ranks: Ranks) -> None:
    for value, stats in ranks(4).run(deferred):
        assert value == pytest.approx(4 * 17.5, rel=1e-6)
        assert stats["reductions"] == 1


def taking_turns(order: list[str]) -> list[float | None]:
    """Microbatches of one window, in which parameters of one size take turns; 7 of each."""
    model = Given(a=(4, 32), b=(4, 32), c=(4, 32))
    LoCoFSDP(model, LoCoConfig(block_size=32), mesh=cpu_mesh(2, 2))
    for index, names in enumerate(order):
        model.set_requires_all_reduce(index == len(order) - 1)
        backward(model, **{name: torch.full((4, 32), 7.0) for name in names})
        if index < len(order) - 1:
            assert all(parameter.grad is None for parameter in model.parameters())
    return [
        None if p.grad is None else reduced(p).unique().item() for p in (model.a, model.b, model.c)
    ]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (["a", "b"], [7, 7, None]),
        (["ab", "b"], [7, 14, None]),
        (["a", "bc", "ab", "c"], [14, 14, 14]),
        (["c", "c", "a", "a"], [14, None, 14]),
    ],
)
def test_deferred_gradients_belong_to_parameters(
    ranks: Ranks, order: list[str], expected: list[float | None]
) -> None:
    """One's gradient was added to the other's, and who sits out at the end got nothing."""
    assert ranks(4).run(taking_turns, order) == [expected] * 4


def unused_in_turn() -> list[float]:
    """Parameters used in turn: each keeps its errors; lossless gradients stay exact."""
    model = Given(a=(2, 96), b=(2, 96), c=(2, 7))
    LoCoFSDP(model, LoCoConfig(block_size=32), mesh=cpu_mesh(2, 1))
    values = []
    for names in ("abc", "b", "ac", "c", "abc"):
        model.zero_grad()
        shapes = {name: getattr(model, name).shape for name in names}
        value = 14.0 * dist.get_rank()
        backward(model, **{name: torch.full(shape, value) for name, shape in shapes.items()})
        values += [reduced(getattr(model, name)).unique().item() for name in names]
    stats = model.loco.stats()
    assert stats["reductions_without_feedback"] == 0
    return values


def test_parameters_that_sit_out(ranks: Ranks) -> None:
    assert ranks(2).run(unused_in_turn) == [[7.0] * 10] * 2


def recorded(model: Any, *names: str) -> list[tuple[str, int]]:
    """Calls of the codec and of exchanges in two reductions, with the bytes of rows sent."""
    import loco_fsdp.reduction.all_reduce
    import loco_fsdp.reduction.hop

    called: list[tuple[str, int]] = []
    modules = dict.fromkeys(("exchange", "gather_rows"), loco_fsdp.reduction.all_reduce)
    modules |= dict.fromkeys(("encode", "decode", "decode_encode"), loco_fsdp.reduction.hop)

    def recording(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            sent = args[1].nbytes if modules[name] is loco_fsdp.reduction.all_reduce else 0
            called.append((name, sent))
            function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, module in modules.items():
            wrapped = recording(name, getattr(module, name))
            stack.enter_context(patch.object(module, name, wrapped))
        for _ in range(2):
            backward(model, **{name: torch.ones(getattr(model, name).shape) for name in names})
    return called


def bytes_sent() -> Any:
    model = Given(weight=(64, 100))
    LoCoFSDP(model, LoCoConfig(node_size=1), mesh=cpu_mesh(dist.get_world_size(), 1))
    return recorded(model, "weight"), model.loco.stats()


# 6400 elements are 25 blocks of 256, each of 128 bytes of codes and 4 of scale; scales fill up 16.
ALL_BLOCKS = 25 * 128 + 112
# The fullest replica of four has 7.
ROW = 7 * 128 + 32


def test_two_replicas_see_all_codes_once(ranks: Ranks) -> None:
    for called, stats in ranks(2).run(bytes_sent):
        assert called == 2 * [("encode", 0), ("gather_rows", ALL_BLOCKS), ("decode", 0)]
        assert stats["wire_bytes"] == stats["inter_node_bytes"] == 2 * ALL_BLOCKS
        assert stats["baseline_bytes"] == 2 * 6400 * 4  # of a ring: twice half of it
        assert stats["error_bytes"] == 25 * (2 * 256 + 4)


def test_equal_rows_in_one_call_each_over_more_replicas(ranks: Ranks) -> None:
    for called, stats in ranks(4).run(bytes_sent):
        assert called == 2 * [
            ("encode", 0),
            ("exchange", 4 * ROW),
            ("decode_encode", 0),
            ("gather_rows", ROW),
            ("decode", 0),
        ]
        assert stats["wire_bytes"] == stats["inter_node_bytes"] == 2 * 2 * 3 * ROW
        assert stats["baseline_bytes"] == 2 * 2 * 6400 * 4 * 3 // 4


def notes() -> list[Any]:
    native = Given(weight=(8, 8))
    fully_shard(native, mesh=cpu_mesh(2, 2))
    loco = attach(native)
    unnamed = init_device_mesh("cpu", (2, 2))
    ours = Given(weight=(8, 8))
    LoCoFSDP(ours, mesh=cpu_mesh(2, 2))
    return [
        loco.summary(),
        raised(LoCoFSDP, Given(weight=(8, 8)), mesh=unnamed),
        raised(LoCoFSDP, Given(w=(8, 8)), LoCoConfig(topology="flat"), mesh=cpu_mesh(2, 2)),
        isinstance(ours, FSDPModule) and "replicas" not in ours.loco.summary(),
        raised(attach, ours),
    ]


def test_what_users_are_told(ranks: Ranks) -> None:
    for note, unnamed, flat, silent, twice in ranks(4).run(notes):
        assert "its all-reduce over 2 replicas stays in full precision: shard" in note
        assert "mesh_dim_names" in unnamed
        assert "topology='flat': on a 2-D mesh it must be \"auto\"" in flat
        assert silent
        assert "has LoCo attached already" in twice


def after_detach() -> list[Any]:
    model = Given(weight=(8, 8))
    LoCoFSDP(model, LoCoConfig(block_size=32), mesh=cpu_mesh(2, 2))
    gradient = torch.full((8, 8), 7.0 * (1 + dist.get_rank()))
    first = model.loco
    first.detach()
    backward(model, weight=gradient)
    values = [reduced(model.weight).unique().item()]
    second = attach(model, LoCoConfig(block_size=32))
    model.zero_grad()
    backward(model, weight=gradient)
    values.append(reduced(model.weight).unique().item())
    return [values, first.stats()["reductions"], second.stats()["reductions"], model.loco is second]


def test_after_detach_replicas_are_reduced_and_attach_compresses_again(ranks: Ranks) -> None:
    assert ranks(4).run(after_detach) == [[[17.5, 17.5], 0, 1, True]] * 4
