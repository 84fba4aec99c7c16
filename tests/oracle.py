"""What the codec should do, once more: loops over floats of Python, no code of the library."""

from __future__ import annotations

import math

LEVELS_2BIT = (0.4528, 1.510)
THRESHOLD_2BIT = 0.9816


def quantize_block(h: list[float], bits: int) -> tuple[float, list[float]]:
    """Scale of a block, and the value that each element is sent as."""
    if any(not math.isfinite(x) for x in h):
        return math.nan, [math.nan] * len(h)
    if bits >= 4:
        qmax = 2 ** (bits - 1) - 1
        scale = max(abs(x) for x in h) / qmax
        # Python rounds half to even.
        codes = [max(-qmax, min(qmax, round(x / scale))) if scale else 0 for x in h]
        return scale, [scale * code for code in codes]
    if bits == 2:
        scale = math.sqrt(sum(x * x for x in h) / len(h))
        small, large = LEVELS_2BIT
        return scale, [
            math.copysign(scale * (large if abs(x) > THRESHOLD_2BIT * scale else small), x)
            for x in h
        ]
    scale = sum(abs(x) for x in h) / len(h)
    return scale, [math.copysign(scale, x) for x in h]


def quantize_part(h: list[float], bits: int, block_size: int) -> tuple[list[float], list[float]]:
    """Scale and sent value of each element of one parameter's part, block after block."""
    scales: list[float] = []
    sent: list[float] = []
    for first in range(0, len(h), block_size):
        block = h[first : first + block_size]
        scale, values = quantize_block(block, bits)
        scales += [scale] * len(block)
        sent += values
    return scales, sent


def feedback_step(
    gradient: list[float], error: list[float], bits: int, block_size: int, beta: float
) -> tuple[list[float], list[float]]:
    """What is sent of one parameter's part, and its new error."""
    h = [g + e for g, e in zip(gradient, error, strict=True)]
    _, sent = quantize_part(h, bits, block_size)
    moved = [
        beta * e + (1 - beta) * (x - d) if math.isfinite(d) else 0.0
        for e, x, d in zip(error, h, sent, strict=True)
    ]
    return sent, moved
