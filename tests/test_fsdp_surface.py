"""docs/compatibility.md names all that FSDP2 offers; here is what has no test elsewhere."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

from loco_fsdp import LoCoConfig, attach
from ranks import RankPool, raised
from toy import WIDTH, Given, Mlp, Net, assert_close, batch, cpu_mesh, pair, same_step, shard

Ranks = Callable[[int], RankPool]
ROOT = Path(__file__).parent.parent
TABLE = (ROOT / "docs" / "compatibility.md").read_text()


def test_the_table_names_every_public_method_and_argument() -> None:
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    arguments = [name for name in inspect.signature(fully_shard).parameters if name != "module"]
    functions = ["register_fsdp_forward_method", "share_comm_ctx"]
    fields = [*inspect.signature(MixedPrecisionPolicy).parameters, "CPUOffloadPolicy"]
    names = [*methods, *arguments, *fields, *(f for f in functions if hasattr(fsdp, f))]
    assert [name for name in names if f"`{name}`" not in TABLE] == []


def test_every_row_names_a_test_that_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    rows = [line for line in TABLE.splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        for name in named:
            assert f"def {name}(" in tests, name


def replaced() -> tuple[str | None, float]:
    class Sum:
        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **_: Any
        ) -> None:
            dist.all_reduce(input_tensor, group=group)
            output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])

    model = Net()
    shard(model)
    loco = attach(model)
    model.set_custom_reduce_scatter(Sum())
    model(batch()).sum().backward()
    return loco.units[0].bypass_reason, loco.stats()["reductions"]


def test_a_reduce_scatter_set_later_takes_over_and_is_reported(ranks: Ranks) -> None:
    reason = "another reduce-scatter was set after attaching"
    assert ranks(2).run(replaced) == [(reason, 2)] * 2


def custom_all_gather() -> int:
    class AllGather:
        calls = 0

        def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        def __call__(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
        ) -> Any:
            AllGather.calls += 1
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)

    def build() -> nn.Module:
        model = shard(Net())
        model.set_custom_all_gather(AllGather())
        return model

    stock, low, _ = pair(build)
    same_step(stock, low)
    return AllGather.calls


def test_a_custom_all_gather(ranks: Ranks) -> None:
    assert all(calls >= 2 for calls in ranks(2).run(custom_all_gather))


def symmetric_memory() -> str:
    model = Given(weight=(8, 8))
    fully_shard(model, mesh=cpu_mesh())
    attach(model)
    # The all-gather's memory needs NCCL: leave it out to see what the reduce-scatter says.
    memory = type("Memory", (), {"__init__": lambda self, *_: None})
    with patch("torch.distributed.fsdp._fully_shard._fsdp_param_group.SymmMemAllGather", memory):
        return raised(model.set_symm_mem_for_comm)


@pytest.mark.skipif(not hasattr(FSDPModule, "set_symm_mem_for_comm"), reason="torch 2.12")
def test_symmetric_memory_is_refused_by_fsdp2(ranks: Ranks) -> None:
    for message in ranks(2).run(symmetric_memory):
        assert message.startswith("AssertionError") and "custom" in message


def iteration_state() -> None:
    stock, low, _ = pair(lambda: shard(Net()))
    for model in (stock, low):
        model(batch())  # a forward whose backward never comes
        model.reset_iter_state()
    same_step(stock, low)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13")
def test_reset_iter_state(ranks: Ranks) -> None:
    ranks(2).run(iteration_state)


class TwoMethods(Net):
    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


def forward_method() -> None:
    def build() -> nn.Module:
        model = TwoMethods()
        shard(model)
        fsdp.register_fsdp_forward_method(model, "loss")
        return model

    stock, low, _ = pair(build)
    same_step(stock, low, lambda model: model.loss(batch()).backward())


def test_a_registered_forward_method(ranks: Ranks) -> None:
    ranks(2).run(forward_method)


def two_roots() -> float:
    """Two FSDP roots, as in pipeline parallelism, that share their streams."""
    stock, low = [], []
    for models in (stock, low):
        torch.manual_seed(0)
        models += [shard(Net()), shard(Net())]
        if hasattr(fsdp, "share_comm_ctx"):
            fsdp.share_comm_ctx(models)
    loco = attach(nn.ModuleList(low), LoCoConfig(bits=8, block_size=64))
    for first, second in (stock, low):
        second(first(batch())).square().mean().backward()
    assert_close(nn.ModuleList(stock), nn.ModuleList(low))
    return loco.stats()["reductions"]


def test_two_roots_that_share_streams(ranks: Ranks) -> None:
    assert ranks(2).run(two_roots) == [6] * 2


def spmd_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def replicate(_: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter, mesh, [Replicate(), Replicate()])
            module.register_parameter(name, nn.Parameter(placed))

    def build() -> nn.Module:
        model = Net()
        distribute_module(model, mesh, replicate)
        dims = fsdp.DataParallelMeshDims(shard="dp")
        return shard(model, mesh=mesh, dp_mesh_dims=dims)

    def run(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
        x = torch.randn(4, WIDTH, generator=generator)
        placed = DTensor.from_local(x, mesh, [Shard(0), Replicate()])
        model(placed).square().mean().backward()

    stock, low, _ = pair(build)
    same_step(stock, low, run)


@pytest.mark.skipif(not hasattr(fsdp, "DataParallelMeshDims"), reason="torch 2.13")
def test_parameters_on_a_mesh_of_all_dimensions(ranks: Ranks) -> None:
    ranks(4).run(spmd_mesh)


def output_dtype() -> list[torch.dtype]:
    dtypes = []

    def build() -> nn.Module:
        policy = MixedPrecisionPolicy(
            torch.bfloat16, torch.float32, output_dtype=torch.float32, cast_forward_inputs=True
        )
        model = Mlp()
        fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)
        return model

    def run(model: nn.Module) -> None:
        output = model(batch())
        dtypes.append(output.dtype)
        output.square().mean().backward()

    stock, low, _ = pair(build)
    same_step(stock, low, run)
    return dtypes


def test_dtypes_of_inputs_and_outputs(ranks: Ranks) -> None:
    assert ranks(2).run(output_dtype) == [[torch.float32] * 2] * 2
