"""What else people do with FSDP2, with LoCo attached, and ranks that do not do the same."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from loco_fsdp import LoCoConfig, attach
from ranks import RankPool, raised
from toy import (
    WIDTH,
    Given,
    Net,
    assert_close,
    backward,
    batch,
    cpu_mesh,
    pair,
    reduced,
    same_step,
    shard,
)

Ranks = Callable[[int], RankPool]


def checkpointed(kind: str) -> list[str]:
    def build() -> nn.Module:
        model = Net()
        for index, block in enumerate(model.blocks):
            if kind == "wrapper":
                model.blocks[index] = checkpoint_wrapper(block)
            else:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        return shard(model)

    stock, low, loco = pair(build)
    same_step(stock, low)
    return [unit.name for unit in loco.units]


@pytest.mark.parametrize("kind", ["wrapper", "function"])
def test_activation_checkpointing(ranks: Ranks, kind: str) -> None:
    assert ranks(2).run(checkpointed, kind) == [["(root)", "blocks.0", "blocks.1"]] * 2


def run_twice() -> float:
    def run(model: nn.Module) -> None:
        x = model.blocks[0](model.blocks[0](batch()))
        model.head(x).square().mean().backward()

    def build() -> nn.Module:
        model = Net()
        fully_shard(model.blocks[0], mesh=cpu_mesh())
        fully_shard(model.head, mesh=cpu_mesh())
        return model

    stock, low, loco = pair(build)
    same_step(stock, low, run)
    return loco.stats()["reductions"]


def test_a_module_that_runs_twice(ranks: Ranks) -> None:
    first, second = ranks(2).run(run_twice)
    assert first == second >= 2


def optimizer_in_backward() -> None:
    def build() -> nn.Module:
        model = shard(Net())
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(_: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        return model

    stock, low, _ = pair(build)
    for model in (stock, low):
        model(batch()).square().mean().backward()
    for a, b in zip(stock.parameters(), low.parameters(), strict=True):
        assert b.grad is None
        torch.testing.assert_close(a.full_tensor(), b.full_tensor(), rtol=0, atol=1e-3)
        assert not torch.equal(a.full_tensor(), b.full_tensor())


def test_an_optimizer_in_the_backward(ranks: Ranks) -> None:
    ranks(2).run(optimizer_in_backward)


def compiled_blocks() -> None:
    def build() -> nn.Module:
        model = Net()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return shard(model)

    stock, low, _ = pair(build)
    same_step(stock, low)
    same_step(stock, low)


def test_compiled_blocks(ranks: Ranks) -> None:
    ranks(2).run(compiled_blocks)


def tensor_parallel() -> int:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> nn.Module:
        model = Net()
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        return shard(model, mesh=mesh["dp"])

    def run(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()

    stock, low, loco = pair(build)
    same_step(stock, low, run)
    return int(loco.stats()["reductions"])


def test_tensor_parallel_below_fsdp(ranks: Ranks) -> None:
    assert ranks(4).run(tensor_parallel) == [3] * 4


def clipping_and_scaler() -> tuple[list[bool], float]:
    stock, low, _ = pair(lambda: shard(Net()))
    same_step(stock, low)
    norms = []
    for model in (stock, low):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        norms.append(norm.full_tensor().item())
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    assert_close(stock, low)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(low.parameters(), lr=0.1)
    before = low.head.weight.full_tensor().clone()
    skipped = []
    for bad in (True, False):
        optimizer.zero_grad()
        loss = low(batch()).square().mean()
        if bad and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(low.head.weight.full_tensor(), before))
    return skipped, scaler.get_scale()


def test_clipping_and_a_gradient_scaler(ranks: Ranks) -> None:
    # The step with an infinite loss on rank 1 is skipped on all ranks, the next one is taken.
    assert ranks(2).run(clipping_and_scaler) == [([True, False], 512.0)] * 2


def loss_scale(reset: bool) -> tuple[float, float]:
    """Largest distance from the mean gradient after a scale of 8 became 4, in units of a step."""
    model = Given(weight=(2, 64))
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(beta=0.0, block_size=64, error_dtype="float32"))
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(2, 64, generator=generator)  # the same on all ranks: so is the mean
    backward(model, weight=8 * gradient)
    left_over = 8 * gradient - reduced(model.weight)
    if reset:
        loco.reset_error()
    model.zero_grad()
    backward(model, weight=4 * gradient)
    wanted = 4 * gradient + (0 if reset else 1) * left_over
    step = wanted.abs().amax(-1, keepdim=True) / 7
    return ((reduced(model.weight) - wanted).abs() / step).max().item(), left_over.norm().item()


@pytest.mark.parametrize("reset", [False, True])
def test_a_loss_scale_that_changes(ranks: Ranks, reset: bool) -> None:
    for distance, left_over in ranks(2).run(loss_scale, reset):
        assert left_over > 0
        assert distance <= 0.5001


def frozen() -> list[tuple[int, ...]]:
    """Frozen, then thawed, then frozen in another way; error bytes of each unit after each."""
    stock, low, loco = pair(lambda: shard(Net()))
    sizes = []
    for trained in (("head",), ("head", "down"), ("up",)):
        for model in (stock, low):
            model.zero_grad()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(any(part in name for part in trained))
        same_step(stock, low)
        sizes.append(tuple(unit.error_bytes for unit in loco.units))
    assert loco.stats()["reductions_without_feedback"] == 0
    return sizes


def test_frozen_and_thawed_parameters(ranks: Ranks) -> None:
    # A shard of the head is 8 x 16 elements in two blocks of 64 float16 and a scale, for 2 ranks;
    # of a block's `down` 8 x 32 weights and 8 biases in 4 + 1 blocks, of `up` 16 x 16 and 16.
    row = 2 * (64 * 2 + 4)
    head, down, both = 2 * row, 5 * row, 10 * row
    assert ranks(2).run(frozen) == [[(head, 0, 0), (head, down, down), (head, both, both)]] * 2


def quantized_base() -> tuple[str | None, dict[str, float]]:
    """A frozen base in integers, first in its unit, and trained parameters beside it."""
    model = Given(a=(4, 32))
    trained = model.a
    del model.a
    model.base = nn.Parameter(torch.ones(4, 32, dtype=torch.uint8), requires_grad=False)
    model.a = trained
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(bits=8, block_size=32))
    backward(model, a=torch.full((4, 32), 127.0 * (dist.get_rank() + 1)))
    assert reduced(model.a).unique().tolist() == [127 * 1.5]
    return loco.units[0].bypass_reason, loco.stats()


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="FSDP2 itself refuses integers in torch 2.9"
)
def test_a_frozen_base_in_integers(ranks: Ranks) -> None:
    for reason, stats in ranks(2).run(quantized_base):
        assert reason is None
        assert stats["reductions"] == 1 and stats["bypassed_reductions"] == 0


# --- ranks that differ -----------------------------------------------------------------------


def different_parameters(equal_sizes: bool) -> str:
    model = Given(a=(4, 32), b=(4, 32) if equal_sizes else (4, 64))
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(check_ranks=True))
    backward(model, a=torch.randn(4, 32))
    before = loco.stats()
    assert before["error_norm"] > 0
    name = "ab"[dist.get_rank()]
    message = raised(backward, model, **{name: torch.randn(getattr(model, name).shape)})
    assert loco.stats() == before
    return message


@pytest.mark.parametrize("equal_sizes", [False, True])
def test_check_ranks_names_both_sides(ranks: Ranks, equal_sizes: bool) -> None:
    for message in ranks(2).run(different_parameters, equal_sizes):
        assert message.startswith("RuntimeError: rank 0 is about to reduce {'unit': '(root)'")
        assert "'parameters': ['a']" in message and "'parameters': ['b']" in message
        assert "set_reduce_scatter_unused_params(True)" in message


def unused_parameters() -> list[float]:
    model = Given(a=(4, 32), b=(4, 32))
    fully_shard(model, mesh=cpu_mesh())
    model.set_reduce_scatter_unused_params(True)
    attach(model, LoCoConfig(bits=8, check_ranks=True))
    name = "ab"[dist.get_rank()]
    backward(model, **{name: torch.full((4, 32), 127.0)})
    return [reduced(model.a).unique().item(), reduced(model.b).unique().item()]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="came with torch 2.13"
)
def test_ranks_may_use_different_parameters_if_fsdp_is_told(ranks: Ranks) -> None:
    assert ranks(2).run(unused_parameters) == [[63.5, 63.5]] * 2
