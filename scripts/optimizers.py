"""The optimizers that scripts/train.py can be told to use.

Each works on the sharded parameters of FSDP2. torch.optim.Adafactor does not: up to torch 2.13 its
norms over rows and columns fail on DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from train_config import OptimConfig

ADAM_BETAS = (0.9, 0.95)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the model, AdamW for all else.

    Muon's steps are scaled to the size of AdamW's, so that one learning rate serves both. State
    and parameter groups are this optimizer's own; the two it is made of borrow them in each step.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        matrices, others = [], []
        for name, parameter in model.named_parameters():
            is_inside = name.startswith("blocks.") and parameter.ndim == 2
            (matrices if is_inside else others).append(parameter)
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self._parts = (
            torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
            torch.optim.AdamW(others, betas=ADAM_BETAS, fused=True, **options),
        )
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of both."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


def build_optimizer(config: OptimConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that `config` names."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "muon":
        return MuonWithAdamW(model, **options)
    if config.name == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=config.momentum, **options)
    # Fused, because dispatching each small DTensor alone is slow; DTensor has no fused SGD.
    adam = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.name]
    return adam(model.parameters(), betas=ADAM_BETAS, fused=True, **options)
