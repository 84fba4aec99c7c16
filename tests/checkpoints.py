"""What tests of checkpoints share: training for some steps, and looking into a state."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, nn

from toy import batch


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model((step + 1) * batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(state: dict[str, bytes]) -> dict[str, Any]:
    (blob,) = state.values()
    saved: dict[str, Any] = torch.load(io.BytesIO(blob))
    return saved


@torch.no_grad()
def put(values: list[Tensor], model: nn.Module) -> None:
    """Give a sharded model these values, of this rank."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.to_local().copy_(value)  # type: ignore[attr-defined]


def bits_of(tensors: list[Tensor]) -> list[list[int]]:
    return [tensor.contiguous().view(torch.uint8).flatten().tolist() for tensor in tensors]
