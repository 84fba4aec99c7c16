"""A small residual convolutional network, for images of one channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from train_config import ModelConfig

NUM_CLASSES = 10
GROUPS = 4  # of channels that a norm takes together


class ConvBlock(nn.Module):
    """Two 3x3 convolutions with group norms, beside what goes in."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(GROUPS, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ConvNet(nn.Module):
    """Images `[batch, 1, height, width]` in, logits `[batch, NUM_CLASSES]` out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, config.dim, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(config.dim) for _ in range(config.num_layers))
        self.head = nn.Linear(config.dim, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


def build_convnet(config: ModelConfig, seed: int) -> ConvNet:
    """A model on the CPU whose weights depend on `config` and `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ConvNet(config)
