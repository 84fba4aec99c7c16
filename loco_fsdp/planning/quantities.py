"""Bandwidths, times, counts and sizes as people write them."""

from __future__ import annotations

import math
import re

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}


def parse_rate(text: str) -> float:
    """Bits/s of "100Gb/s", "12.5GB/s" (B: bytes), "500Mbit/s", or of a plain number."""
    value, unit = _split(text, "([kKmMgGtT]?(?:b|bit|B)(?:/s|ps))?")
    if not 0 < value < math.inf:
        raise ValueError(f"bandwidth {text!r}: write it as 100Gb/s or 12.5GB/s, above 0")
    prefix = unit[0].lower() if unit and unit[0] not in "bB" else ""
    return value * _PREFIXES[prefix] * (8 if "B" in unit else 1)


def parse_seconds(text: str) -> float:
    """Seconds of "2s", "350ms", "20us", or of a plain number."""
    value, unit = _split(text, "(s|ms|us)?")
    if not 0 <= value < math.inf:
        raise ValueError(f"time {text!r}: write it as 2s, 350ms or 20us, 0 or more")
    return value * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit or "s"]


def parse_count(text: str) -> int:
    """A count such as "8e9", "8B", "350M" or "8388608"."""
    value, unit = _split(text, "([kKmMbBgGtT])?")
    if not 1 <= value < math.inf:
        raise ValueError(f"count {text!r}: write it as 8e9, 8B or 350M, 1 or more")
    return round(value * _PREFIXES[unit.lower()])


def _split(text: str, unit: str) -> tuple[float, str]:
    """Number and unit; the number is nan if it is none, or the unit is another."""
    match = re.fullmatch(r"(\d*\.?\d*(?:[eE][+-]?\d+)?)\s*" + unit, text.strip())
    try:
        return (math.nan, "") if match is None else (float(match[1]), match[2] or "")
    except ValueError:
        return math.nan, ""


def format_size(num_bytes: float) -> str:
    """Bytes, as "12.5 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.95:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def format_time(seconds: float) -> str:
    """Seconds, as "350 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
