"""Models that tests train: one whose gradients are what a test says, and an ordinary one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from loco_fsdp import LoCo, LoCoConfig, attach


class Given(nn.Module):
    """Parameters whose gradients are the tensors that `forward` is given, by name."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, **gradients: Tensor) -> Tensor:
        terms = [
            (getattr(self, name) * gradient.to(getattr(self, name).dtype)).sum()
            for name, gradient in gradients.items()
        ]
        return torch.stack(terms).sum()


def cpu_mesh(*shape: int) -> DeviceMesh:
    """A mesh of all ranks on the CPU; 1-D by default, (replicate, shard) with two sizes."""
    return _cpu_mesh(dist.group.WORLD, shape or (dist.get_world_size(),))


@cache
def _cpu_mesh(world: dist.ProcessGroup, shape: tuple[int, ...]) -> DeviceMesh:
    """Made once while the default group lives: each mesh has groups, with threads of their own."""
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def backward(model: nn.Module, **gradients: Tensor) -> None:
    """One backward that gives these gradients on this rank."""
    model(**gradients).backward()


def reduced(parameter: Tensor) -> Tensor:
    """The whole reduced gradient of a sharded parameter, gathered from all ranks."""
    assert parameter.grad is not None
    return parameter.grad.full_tensor()  # type: ignore[attr-defined, no-any-return]


WIDTH = 16


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Scale(nn.Module):
    """A block with parameters of its own and no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(model: Net, **kwargs: Any) -> Net:
    """Each block an FSDP unit, and the head the root's."""
    kwargs.setdefault("mesh", cpu_mesh())
    for block in model.blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)
    return model


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, LoCo]:
    """The same sharded model twice: stock, and with LoCo in 8 bits."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(build())
    return models[0], models[1], attach(models[1], LoCoConfig(bits=8, block_size=64))


def names_of(model: Any) -> list[str]:
    return [unit.name for unit in model.loco.units]


def batch() -> Tensor:
    """Another input on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def assert_close(stock: nn.Module, low: nn.Module) -> None:
    """Each parameter has the same gradient, up to 8-bit noise, and the noise is there."""
    names = [name for name, parameter in stock.named_parameters() if parameter.grad is not None]
    assert names == [name for name, p in low.named_parameters() if p.grad is not None]
    assert names
    for name in names:
        expected, actual = (reduced(model.get_parameter(name)) for model in (stock, low))
        difference = (actual.double() - expected.double()).abs().max()
        assert difference <= 0.03 * expected.abs().max(), name
        assert difference > 0, name


def same_step(
    stock: nn.Module, low: nn.Module, run: Callable[[nn.Module], None] | None = None
) -> None:
    """One backward of both, and the same gradients."""
    for model in (stock, low):
        if run is None:
            model(batch()).square().mean().backward()
        else:
            run(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # parameters with a .grad are the sharded ones
    assert_close(stock, low)
