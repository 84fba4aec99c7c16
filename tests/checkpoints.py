"""What tests of checkpoints share: a model that trains, is saved and loaded, and its state."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from loco_fsdp import LoCo, LoCoConfig, LoCoFSDP
from toy import Net, batch, cpu_mesh

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "flat": {"topology": "flat"},
    "hierarchical": {"topology": "hierarchical", "node_size": 2, "intra_node_bits": 8},
    "HSDP": {},
}


def build(name: str, options: dict[str, Any]) -> tuple[Net, LoCo, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = cpu_mesh(2, 2) if name == "HSDP" else cpu_mesh()
    model: Any = LoCoFSDP(Net(), LoCoConfig(block_size=32, **options), mesh=mesh)
    return model, model.loco, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(model: Any, optimizer: torch.optim.Optimizer, path: str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "loco": model.loco}, checkpoint_id=path)


def load(model: Any, optimizer: torch.optim.Optimizer, path: str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": moments, "loco": model.loco}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model((step + 1) * batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(state: dict[str, bytes]) -> dict[str, Any]:
    (blob,) = state.values()
    saved: dict[str, Any] = torch.load(io.BytesIO(blob))
    return saved


def result(model: Any) -> list[Tensor]:
    """Weights and errors of this rank."""
    errors = contents(model.loco.state_dict())["errors"]
    return [
        *(parameter.to_local().detach().clone() for parameter in model.parameters()),
        *(tensor for _, _, _, *tensors in errors for tensor in tensors),
    ]


@torch.no_grad()
def put(values: list[Tensor], model: nn.Module) -> None:
    """Give a sharded model these values, of this rank."""
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.to_local().copy_(value)  # type: ignore[attr-defined]


def bits_of(tensors: list[Tensor]) -> list[list[int]]:
    return [tensor.contiguous().view(torch.uint8).flatten().tolist() for tensor in tensors]
