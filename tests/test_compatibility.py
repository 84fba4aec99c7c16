"""Arguments and methods of FSDP2 with LoCo attached: rows of docs/compatibility.md.

Gradients are reduced in 8 bits here, and compared with stock FSDP2 on the same model: a wrong
factor, a lost reduction or an error added to the wrong parameter is far outside of 8-bit noise.
Where the result can be exact, it has to be.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from loco_fsdp import LoCoConfig, attach
from ranks import RankPool, raised
from toy import WIDTH, Given, Mlp, Net, backward, batch, cpu_mesh, pair, reduced, same_step, shard

Ranks = Callable[[int], RankPool]

# --- arguments of fully_shard ----------------------------------------------------------------


def with_arguments(case: str) -> int:
    kwargs: dict[str, Any] = {
        "reshard True": {"reshard_after_forward": True},
        "reshard False": {"reshard_after_forward": False},
        "reshard 2": {"reshard_after_forward": 2},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        "shard dim 1": {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 1 else None},
        "bf16 parameters": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        "fp32 reduce": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "fp16 reduce": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float16)},
        "hsdp": {"mesh": cpu_mesh(2, 2)},
    }[case]
    stock, low, loco = pair(lambda: shard(Net(), **kwargs))
    for _ in range(2):  # gradients accumulate in .grad
        same_step(stock, low)
    return int(loco.stats()["reductions"])


@pytest.mark.parametrize(
    "case",
    [
        "reshard True",
        "reshard False",
        "reshard 2",
        "offload",
        "shard dim 1",
        "bf16 parameters",
        "fp32 reduce",
        "fp16 reduce",
        "hsdp",
    ],
)
def test_arguments_of_fully_shard(ranks: Ranks, case: str) -> None:
    assert ranks(4).run(with_arguments, case) == [6] * 4  # two steps of three units


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def mixed_precision(param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> list[Tensor]:
    """Reduced gradients of 7e6 and of 7e-6 everywhere."""
    results = []
    for value in (7e6, 7e-6):
        model = Given(weight=(4, 64))
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype)
        fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
        loco = attach(model)
        backward(model, weight=torch.full((4, 64), value))
        assert loco.stats()["reductions"] == 1
        results.append(reduced(model.weight))
        assert results[-1].dtype is torch.float32
    return results


@pytest.mark.parametrize("reduce_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("param_dtype", DTYPES, ids=str)
def test_every_pair_of_dtypes_keeps_magnitudes(
    ranks: Ranks, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    # 7e-6 is 117.4 units of the smallest float16, which FSDP2 divides by 2 before and after.
    half = torch.float16 in (param_dtype, reduce_dtype)
    for large, small in ranks(2).run(mixed_precision, param_dtype, reduce_dtype):
        torch.testing.assert_close(small, torch.full_like(small, 7e-6), rtol=0.02, atol=0)
        if half:
            assert not large.isfinite().any()  # 7e6 is infinite in float16: seen, not hidden
        else:
            torch.testing.assert_close(large, torch.full_like(large, 7e6), rtol=5e-3, atol=0)


def ignored() -> bool:
    def build() -> nn.Module:
        model = Net()
        fully_shard(model, mesh=cpu_mesh(), ignored_params={model.blocks[0].up.weight})
        return model

    stock, low, _ = pair(build)
    for model in (stock, low):
        model(batch()).square().mean().backward()
    ours = [model.blocks[0].up.weight.grad for model in (stock, low)]
    return torch.equal(*ours) and low.head.weight.grad is not None


def test_ignored_parameters_are_left_alone(ranks: Ranks) -> None:
    assert ranks(2).run(ignored) == [True] * 2


def on_meta() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            model = Net()
        return shard(model)

    stock, low, _ = pair(build)
    for model in (stock, low):
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.2)
    same_step(stock, low)


def test_a_model_sharded_on_the_meta_device(ranks: Ranks) -> None:
    ranks(2).run(on_meta)


def several_groups() -> list[tuple[str, str | None]]:
    """Parameters of one module on two meshes, as experts are."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    inner = FSDPMeshInfo(mesh=mesh["inner"], shard_mesh_dim=0)
    whole = cpu_mesh()

    def place(parameter: nn.Parameter) -> Any:
        is_expert = parameter.shape == (2 * WIDTH, WIDTH)
        return ShardPlacementResult(Shard(0), inner) if is_expert else None

    def build() -> nn.Module:
        model = Mlp()
        fully_shard(model, mesh=whole, shard_placement_fn=place)
        return model

    stock, low, loco = pair(build)
    same_step(stock, low)
    assert loco.stats()["reductions"] == 2
    return [(unit.name, unit.bypass_reason) for unit in loco.units]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="parameters of a module on several meshes came with torch 2.13",
)
def test_a_module_with_several_parameter_groups(ranks: Ranks) -> None:
    names = [("(root) [0]", None), ("(root) [1]", None)]
    assert ranks(4).run(several_groups) == [names] * 4


# --- methods of FSDPModule -------------------------------------------------------------------


def accumulate(mode: str) -> tuple[float, dict[str, float]]:
    """Four microbatches of a lossless gradient; what arrives, and how often it was sent."""
    mesh_shape = (2, 2) if mode == "all-reduce" else (4,)
    model = Given(weight=(8, 8))
    fully_shard(model, mesh=cpu_mesh(*mesh_shape))
    loco = attach(model, LoCoConfig(reset_interval=None))
    for microbatch in range(4):
        last = microbatch == 3
        if mode == "sync":
            model.set_requires_gradient_sync(last)
        elif mode == "all-reduce":
            model.set_requires_all_reduce(last)
        elif mode == "last backward":
            model.set_is_last_backward(last)
        backward(model, weight=torch.full((8, 8), 7.0 * (dist.get_rank() + 1)))
    return reduced(model.weight).unique().item(), loco.stats()


@pytest.mark.parametrize(
    ("mode", "reductions"),
    [("default", 4), ("sync", 1), ("all-reduce", 4), ("last backward", 4)],
)
def test_accumulation(ranks: Ranks, mode: str, reductions: int) -> None:
    for value, stats in ranks(4).run(accumulate, mode):
        assert value == 4 * 17.5
        assert stats["reductions"] == reductions
        assert stats["error_norm"] == 0  # lossless: nothing was left over


def counters_under_accumulation() -> list[float]:
    """Resets and warm-up count reductions, not microbatches."""
    model = Given(weight=(2, 64))
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(reset_interval=2, warmup_steps=1))
    norms = []
    for step in range(4):
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            backward(model, weight=torch.randn(2, 64, generator=generator))
        norms.append(loco.stats()["error_norm"])
    return [*norms, loco.stats()["reductions"], loco.stats()["bypassed_reductions"]]


def test_reset_and_warm_up_count_reductions(ranks: Ranks) -> None:
    for first, second, third, fourth, *counts in ranks(2).run(counters_under_accumulation):
        assert first == 0 and second > 0 and third == 0 and fourth > 0
        assert counts == [3, 1]


def fresh_and_accumulated() -> tuple[list[str], bool]:
    """bf16 parameters, fp32 reduction, and a parameter first used in the last microbatch."""
    messages = []
    recovered = False
    for with_loco in (False, True):
        model = Given(a=(4, 32), b=(4, 32))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
        loco = attach(model, LoCoConfig(bits=8)) if with_loco else None
        one = torch.ones(4, 32)
        model.set_requires_gradient_sync(False)
        backward(model, a=one)
        model.set_requires_gradient_sync(True)
        messages.append(raised(backward, model, a=one, b=one))
        if loco is None or not hasattr(model, "reset_iter_state"):
            continue
        assert loco.stats()["reductions"] == 0 and loco.stats()["error_norm"] == 0
        model.reset_iter_state()
        model.zero_grad()
        backward(model, a=one, b=one)
        (value,) = reduced(model.a).unique().tolist()
        recovered = math.isclose(value, 1.0, rel_tol=1e-6)
    return messages, recovered


def test_an_error_of_fsdp2_itself_reaches_the_user_and_leaves_no_trace(ranks: Ranks) -> None:
    for (stock, ours), recovered in ranks(2).run(fresh_and_accumulated):
        assert "uniform gradient dtype" in stock
        assert ours == stock
        assert recovered or not hasattr(FSDPModule, "reset_iter_state")


def with_method(case: str) -> None:
    def build() -> nn.Module:
        model = shard(Net())
        first, second = model.blocks
        if case == "set_modules_to_forward_prefetch":
            first.set_modules_to_forward_prefetch([second])
        elif case == "set_modules_to_backward_prefetch":
            second.set_modules_to_backward_prefetch([first])
        elif case == "set_reshard_after_forward":
            model.set_reshard_after_forward(False)
        elif case == "set_reshard_after_backward":
            model.set_reshard_after_backward(False)
        elif case == "unshard":
            model.unshard()
        elif case == "set_unshard_in_backward":
            first.set_unshard_in_backward(True)
        elif case == "set_gradient_divide_factor":
            for module in (model, first, second):
                module.set_force_sum_reduction_for_comms(True)  # else stock FSDP2 needs NCCL
                module.set_gradient_divide_factor(3.0)
        elif case == "set_separate_reduce_scatter_group":
            model.set_separate_reduce_scatter_group(True)
        elif case == "set_reduce_scatter_max_input_buffers":
            model.set_reduce_scatter_max_input_buffers(2)
        elif case == "set_all_reduce_hook":
            first.set_all_reduce_hook(lambda gradient: gradient.mul_(2))
        elif case == "set_reduce_scatter_unused_params":
            model.set_reduce_scatter_unused_params(True)
        else:
            raise AssertionError(case)
        return model

    stock, low, _ = pair(build)
    same_step(stock, low)
    same_step(stock, low)


@pytest.mark.parametrize(
    "method",
    [
        "set_modules_to_forward_prefetch",
        "set_modules_to_backward_prefetch",
        "set_reshard_after_forward",
        "set_reshard_after_backward",
        "unshard",
        "set_unshard_in_backward",
        "set_gradient_divide_factor",
        "set_separate_reduce_scatter_group",
        "set_reduce_scatter_max_input_buffers",
        "set_all_reduce_hook",
        "set_reduce_scatter_unused_params",
    ],
)
def test_methods_of_fsdp_modules(ranks: Ranks, method: str) -> None:
    if not hasattr(FSDPModule, method):
        pytest.skip(f"this torch has no {method}")
    ranks(4).run(with_method, method)


def memory_setters() -> str:
    """A setter that FSDP2 itself refuses beside a custom reduce-scatter; before, it is kept."""
    late, early = Given(weight=(8, 8)), Given(weight=(8, 8))
    for model in (late, early):
        fully_shard(model, mesh=cpu_mesh())
    attach(late)
    early.set_allocate_memory_from_process_group_for_comm(True)
    attach(early)
    return raised(late.set_allocate_memory_from_process_group_for_comm, True)


def test_memory_of_the_process_group(ranks: Ranks) -> None:
    for message in ranks(2).run(memory_setters):
        assert "custom" in message
