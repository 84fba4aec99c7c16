"""Spikes: a gradient far larger than usual, whose error is not to be sent in later steps.

The error of a gradient 10,000 times too large, which the user clips or whose step is skipped, would
spoil what is sent for dozens of steps. Whether there is a spike is decided on the device, from the
squares that encoding measures anyway:

    w = norm of all that was to be sent, gradient + error, over all peers
    mean = sum of past w**2 / sum of past w, older ones weighing 0.99 less each step
    spike: w > limit * mean, or w is infinite, as the float32 squares have overflowed

The mean weighs each norm by itself, so that steps with little or no gradient do not pull it down.
Before the first w > 0 there is no mean, and no finite w is a spike. Of a spike `limit * mean`
enters the sums (nothing of an infinite one, while there is no mean), so that a lasting jump soon is
usual.
"""

from __future__ import annotations

import torch
from torch import Tensor

DECAY = 0.99
"""Of the weight of a norm from one step to the next."""

USUAL_NUMEL = 3 + 3 + 64
"""Elements of `usual`: three of the state, and then room for kernels to work in."""


def make_usual(device: torch.device, state: list[float] | None = None) -> Tensor:
    """The float64 tensor that `drop_spike` keeps, for a start or to go on from a state of it."""
    usual = torch.zeros(USUAL_NUMEL, dtype=torch.float64, device=device)
    if state is not None:
        usual[:3] = torch.tensor(state, dtype=torch.float64)
    return usual


@torch.no_grad()
def drop_spike(
    squares: Tensor, usual: Tensor, error_scale: Tensor, rows: Tensor, limit: float
) -> None:
    """Set the errors of some rows, of all peers, to 0 if what was encoded last is a spike.

    Waits for nothing.

    squares: `[peers, num_blocks, 2]` float32, as `encode` left them
    usual: `[USUAL_NUMEL]` float64; the sums of w and of w**2, and the number of spikes: updated
    error_scale: `[peers, rows]` float32, of the error; multiplied by 0 in a spike
    rows: `[num_blocks]` int64, those that were encoded
    limit: greater than 1
    """
    total, total_of_squares, spikes = usual[:3].unbind()
    norm = squares[..., 0].sum(dtype=torch.float64).sqrt()
    highest = torch.where(total > 0, limit * (total_of_squares / total), torch.inf)
    spike = (norm > highest) | norm.isinf()
    usual_norm = torch.minimum(norm, highest)
    usual_norm = torch.where(usual_norm.isinf(), 0.0, usual_norm)
    total.mul_(DECAY).add_(usual_norm)
    total_of_squares.mul_(DECAY).add_(usual_norm.square())
    spikes.add_(spike)
    error_scale[:, rows] *= (~spike).to(torch.float32)
