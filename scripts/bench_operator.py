"""Host time of the codec's operators: what every call costs, however little it encodes.

The backend does nothing, so that what is left is the way from `loco_fsdp.codec` through the
operators of torch to a backend, on the CPU. Each parameter has 8 elements. With `--backend` the
work of a backend is in it. Prints a table of medians, and the time to place blocks as a table.

    python scripts/bench_operator.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from loco_fsdp.codec import (
    BlockLayout,
    EncodeStats,
    ErrorState,
    decode,
    decode_encode,
    drop_spike,
    encode,
    make_usual,
    ops,
)

CPU = torch.device("cpu")
BITS, BLOCK_SIZE, BETA, LIMIT, NUMEL = 4, 256, 0.9, 10.0, 8


def nothing(*_: object) -> None:
    pass


def median_us(function: Callable[[], object], repeats: int) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def calls(num_parameters: int, backend: str) -> dict[str, Callable[[], object]]:
    """The operators by name, on one peer's gradient of so many parameters."""
    layout = BlockLayout((NUMEL,) * num_parameters, BITS, BLOCK_SIZE)
    table, num_blocks = layout.place(CPU), layout.num_blocks
    gradient = torch.zeros(1, layout.shard_numel, dtype=torch.float32)
    wire = torch.zeros(1, layout.bytes_per_shard, dtype=torch.uint8)
    squares = torch.zeros(1, num_blocks, 2, dtype=torch.float32)
    stats = EncodeStats(squares, torch.zeros(1, dtype=torch.int64))
    payload = torch.zeros(1, num_blocks, BLOCK_SIZE, dtype=torch.float16)
    error = ErrorState(payload, torch.zeros(1, num_blocks, dtype=torch.float32))
    usual = make_usual(CPU)
    return {
        "encode": lambda: encode(gradient, wire, table, stats, error, BETA, backend=backend),
        "decode": lambda: decode(wire, gradient[0], table, backend=backend),
        "decode_encode": lambda: decode_encode(
            wire, wire, table, stats, error, BETA, backend=backend
        ),
        "drop_spike": lambda: drop_spike(
            squares, usual, error.scale, table.rows, LIMIT, backend=backend
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", nargs="+", type=int, default=[1, 100, 1000, 10_000])
    parser.add_argument("--blocks", type=int, default=257_000, help="of the table that is placed")
    parser.add_argument("--repeats", type=int, default=500)
    parser.add_argument("--backend", help='"compiled" or "eager"; default: one that does nothing')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.backend is None:
        idle = SimpleNamespace(
            encode=nothing, decode=nothing, decode_encode=nothing, drop_spike=nothing
        )
        ops.get_backend = lambda name: idle
    print(f"torch {torch.__version__}, backend: {arguments.backend or 'does nothing'}")
    print(f"{'parameters':>13}  {'us a call':>10}")
    for num_parameters in arguments.parameters:
        for name, call in calls(num_parameters, arguments.backend or "eager").items():
            call()
            us = median_us(call, arguments.repeats)
            print(f"{num_parameters:>13}  {us:>10.1f}  {name}", flush=True)
    for num_parts in (1, 1000):
        numels = (arguments.blocks // num_parts * BLOCK_SIZE,) * num_parts
        place = BlockLayout(numels, BITS, BLOCK_SIZE).place
        place(CPU)
        us = median_us(lambda place=place: place(CPU), max(1, arguments.repeats // 50))
        print(f"{num_parts:>13}  {us:>10.1f}  table of {arguments.blocks} blocks")


if __name__ == "__main__":
    main()
