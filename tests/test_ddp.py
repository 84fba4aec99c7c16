"""DDP: gradients averaged in low bits, whatever buckets they come in."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from checkpoints import bits_of, contents
from definition import all_reduced, all_reduced_over_nodes
from loco_fsdp import LoCoConfig, attach
from ranks import RankPool, heard, raised
from toy import WIDTH, Given, Net, backward, batch

Ranks = Callable[[int], RankPool]

BLOCK, STEPS = 32, 5
WAYS: dict[str, dict[str, Any]] = {
    "flat": {"topology": "flat"},
    "two hops": {"topology": "hierarchical", "node_size": 2},
}
SIZES = [("flat", 2), ("flat", 4), ("two hops", 4)]
# Odd sizes, a parameter of less than a rank's part, and one of several blocks; buckets of a few.
SHAPES = {"a": (7, 11), "b": (3,), "c": (300,), "d": (1,), "e": (65, 3)}


def wrap(module: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(module, bucket_cap_mb=0.001, **options)


def config(way: str, **options: Any) -> LoCoConfig:
    return LoCoConfig(**{"block_size": BLOCK, **WAYS[way], **options})


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def given_steps(way: str, bits: int, ddp_options: dict[str, Any]) -> Any:
    """The result of each step, and of errors by hop and parameter, scaled to be added to it."""
    model = wrap(Given(**SHAPES), **ddp_options)
    loco = attach(model, config(way, bits=bits, error_dtype="float32", spike_limit=None))
    results = []
    for step in range(STEPS):
        model.zero_grad()
        backward(model, **gradients(dist.get_rank(), step))
        results.append({name: getattr(model.module, name).grad.clone() for name in SHAPES})
    state = contents(loco.state_dict())["errors"]
    errors = [
        (kind, name, payload * scale.unsqueeze(-1)) for kind, name, _, payload, scale in state
    ]
    return results, errors, loco.stats()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("way", "world_size"), SIZES)
def test_the_first_step_is_the_definition(
    ranks: Ranks, way: str, world_size: int, bits: int
) -> None:
    found = ranks(world_size).run(given_steps, way, bits, {})
    given = [gradients(rank, 0) for rank in range(world_size)]
    for results, _, _ in found:
        for name in SHAPES:
            pieces = [one[name] for one in given]
            if way == "flat":
                right = all_reduced(pieces, 1 / world_size, bits, BLOCK)
            else:
                right = all_reduced_over_nodes(pieces, 2, bits, BLOCK, 1 / world_size)
            assert torch.equal(results[0][name].flatten(), right)


def unsent(errors: list[Any], kind: str, name: str) -> Tensor:
    """What a parameter's errors of one hop owe, error / (1 - beta), block by block."""
    for found_kind, found_name, blocks in errors:
        if (found_kind, found_name) == (kind, name):
            return blocks[0].double() / 0.1  # type: ignore[no-any-return]
    return torch.zeros(0, BLOCK, dtype=torch.float64)


def owed_to(name: str, way: str, errors: list[Any]) -> Tensor:
    """What all ranks owe to the mean of a parameter's gradients."""
    numel, world_size = torch.Size(SHAPES[name]).numel(), len(errors)
    own = [unsent(one, "replicas", name) for one in errors]
    if way == "two hops":  # ranks 0 and 2 share the first half of each parameter, 1 and 3 the other
        part = -(-numel // 2)
        halves = [(own[first] + own[first + 2]).flatten()[:part] for first in (0, 1)]
        return torch.cat(halves)[:numel] / world_size
    total = torch.stack(own).sum(0) / world_size
    if world_size > 2:  # block b of all is summed by replica b modulo 4, which has an error of it
        first = sum(-(-torch.Size(SHAPES[n]).numel() // BLOCK) for n in SHAPES if n < name)
        sums = [list(unsent(one, "sums", name)) for one in errors]
        for block in range(len(total)):
            total[block] += sums[(first + block) % world_size].pop(0)
        assert not any(sums)
    return total.flatten()[:numel]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("way", "world_size"), SIZES)
def test_what_did_not_come_yet_is_in_the_errors(
    ranks: Ranks, way: str, world_size: int, bits: int, options: dict[str, Any]
) -> None:
    """Also where buckets change after the first step."""
    found = ranks(world_size).run(given_steps, way, bits, options)
    for name in SHAPES:
        total = torch.stack([result[name].double().flatten() for result in found[0][0]]).sum(0)
        wanted = sum(
            gradients(rank, step)[name].double().flatten() / world_size
            for rank in range(world_size)
            for step in range(STEPS)
        )
        owed = owed_to(name, way, [errors for _, errors, _ in found])
        assert owed.abs().max() > 1e-4 or name == "d"  # one element is its own scale
        torch.testing.assert_close(total + owed, wanted, rtol=0, atol=1e-6)


def train(way: str, ddp_options: dict[str, Any], steps: range, **options: Any) -> Any:
    torch.manual_seed(0)
    model = wrap(Net(), **ddp_options)
    loco = attach(model, config(way, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in steps:
        one_step(model, optimizer, step)
    return model, loco, optimizer


def one_step(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model((step + 1) * batch()).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> list[list[int]]:
    return bits_of([parameter.detach() for parameter in model.parameters()])


def with_options(way: str, ddp_options: dict[str, Any]) -> Any:
    model, loco, _ = train(way, ddp_options, range(4))
    return weights(model), loco.stats()["reductions"]


@pytest.mark.parametrize(("way", "world_size"), SIZES)
def test_buckets_and_switches_of_ddp_change_nothing(
    ranks: Ranks, way: str, world_size: int
) -> None:
    expected, *others = ranks(world_size).run(with_options, way, {})
    assert expected[1] == 4
    assert others == [expected] * (world_size - 1)  # replicas are equal, bitwise
    for options in (
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ):
        assert ranks(world_size).run(with_options, way, options) == [expected] * world_size


def resumed(way: str, path: str) -> Any:
    straight, straight_loco, _ = train(way, {}, range(6))
    model, loco, optimizer = train(way, {}, range(3))
    dcp.save({"loco": loco}, checkpoint_id=path)
    saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    other, other_loco, other_optimizer = train(way, {}, range(0))
    other.load_state_dict(saved[0])
    other_optimizer.load_state_dict(saved[1])
    warnings = heard(lambda: dcp.load({"loco": other_loco}, checkpoint_id=path))
    for step in range(3, 6):
        one_step(other, other_optimizer, step)
    same = [
        straight_loco.stats()[key] == other_loco.stats()[key]
        for key in ("reductions", "error_norm", "relative_error")
    ]
    return weights(straight) == weights(other), all(same), warnings


@pytest.mark.parametrize(("way", "world_size"), SIZES)
def test_a_checkpoint_resumes_bitwise(
    ranks: Ranks, tmp_path: Any, way: str, world_size: int
) -> None:
    assert ranks(world_size).run(resumed, way, str(tmp_path)) == [(True, True, [])] * world_size


def stock(ddp_options: dict[str, Any], accumulate: bool) -> Any:
    """Weights after steps by stock DDP, with LoCo paused, and after it was detached."""
    results = []
    for way in ("stock", "paused", "detached"):
        torch.manual_seed(0)
        model = wrap(Net(), **ddp_options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loco = None if way == "stock" else attach(model, LoCoConfig())
        if loco is not None and way == "detached":
            loco.detach()
        for step in range(3):
            optimizer.zero_grad()
            pause = loco.paused() if loco is not None and way == "paused" else None
            if pause is not None:
                pause.__enter__()
            if accumulate:
                with model.no_sync():
                    model(batch()).square().mean().backward()
            model((step + 2) * batch()).square().mean().backward()
            if pause is not None:
                pause.__exit__(None, None, None)
            optimizer.step()
        results.append(weights(model))
    return results[0] == results[1], results[0] == results[2]


@pytest.mark.parametrize("accumulate", [False, True])
def test_paused_and_detached_it_is_stock_ddp(ranks: Ranks, accumulate: bool) -> None:
    assert ranks(4).run(stock, {}, accumulate) == [(True, True)] * 4


def accumulated() -> Any:
    model = wrap(Given(weight=(8, 8)))
    loco = attach(model, LoCoConfig(block_size=32, topology="flat"))
    with model.no_sync():
        backward(model, weight=torch.full((8, 8), 7.0))
    backward(model, weight=torch.full((8, 8), 7.0 * (1 + dist.get_rank())))
    stats = loco.stats()
    return model.module.weight.grad.unique().item(), stats["reductions"], stats["wire_bytes"]


def test_accumulation_sends_once(ranks: Ranks) -> None:
    # 7 + 7 and 7 + 14: 17.5 in the mean. 64 elements are 32 bytes of codes and 16 of scales.
    assert ranks(2).run(accumulated) == [(17.5, 1, 48)] * 2


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.first, self.second)[which](x)  # type: ignore[no-any-return]


def unused() -> Any:
    torch.manual_seed(0)
    alone = Unused()
    model = wrap(copy.deepcopy(alone), find_unused_parameters=True)
    loco = attach(model, LoCoConfig(bits=8, block_size=32, topology="flat"))
    differences = []
    for step in range(4):
        model.zero_grad()
        which = (step + dist.get_rank()) % 2
        model(batch(), which).square().mean().backward()
        alone.zero_grad()
        alone(batch(), which).square().mean().backward()
        ours = [parameter.grad for parameter in model.parameters()]
        for parameter, grad in zip(alone.parameters(), ours, strict=True):
            own = torch.zeros_like(grad) if parameter.grad is None else parameter.grad
            dist.all_reduce(own)
            largest = own.abs().max().item() / dist.get_world_size()
            error = (grad - own / dist.get_world_size()).abs().max().item()
            differences.append(error / largest)
    return max(differences), loco.stats()["reductions"]


def test_parameters_that_some_ranks_do_not_use(ranks: Ranks) -> None:
    for difference, reductions in ranks(2).run(unused):
        assert difference < 0.02 and reductions == 4


def told() -> Any:
    model = wrap(Net())
    loco = attach(model, LoCoConfig(block_size=32))
    backward_of(model)
    (unit,) = loco.units
    before = (unit.name, unit.numel, unit.bits, unit.error_bytes > 0)
    summary = loco.summary()
    again = raised(attach, model)
    loco.detach()
    attach(model).detach()  # the hook that torch keeps serves the next one, too
    reference = weakref.ref(model)
    del model
    gc.collect()
    return before, "parameters in float32" in summary, again, reference() is None


def backward_of(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


def test_it_is_the_same_loco(ranks: Ranks) -> None:
    numel = sum(parameter.numel() for parameter in Net().parameters())
    for before, in_summary, again, is_gone in ranks(2).run(told):
        assert before == ("parameters in float32", numel, 4, True)
        assert in_summary and is_gone
        assert "call detach() on that LoCo first" in again


def refused() -> list[str]:
    hooked = wrap(Net())
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    return [
        raised(attach, hooked),
        raised(attach, wrap(Net()), LoCoConfig(intra_node_bits=8)),
        raised(attach, nn.Linear(2, 2)),
    ]


def test_what_cannot_be_served_is_refused_by_name(ranks: Ranks) -> None:
    for hook, intra, other in ranks(2).run(refused):
        assert "has the communication hook" in hook
        assert "intra_node_bits=8: DDP" in intra
        assert "attach takes" in other and "Linear" in other
