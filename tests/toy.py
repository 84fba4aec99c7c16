"""A model whose gradients are what a test says they are."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


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
    names = ("replicate", "shard")[-len(shape) :] if shape else ("shard",)
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def backward(model: nn.Module, **gradients: Tensor) -> None:
    """One backward that gives these gradients on this rank."""
    model(**gradients).backward()


def reduced(parameter: Tensor) -> Tensor:
    """The whole reduced gradient of a sharded parameter, gathered from all ranks."""
    assert parameter.grad is not None
    return parameter.grad.full_tensor()  # type: ignore[attr-defined, no-any-return]
