"""Host time of the collectives of packed bytes, over up to 256 ranks, none of which is there.

torch's fake backend returns at once, so that what is left is what a rank's Python and torch do for
one call: with standard collectives the same however many ranks there are, and with messages between
pairs, which CPUs use over gloo, more for each rank.

    python scripts/bench_host.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from loco_fsdp.reduction import exchange

ROW_BYTES = 64


def median_ms(function: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def measure(ranks: int, repeats: int) -> list[float]:
    """Milliseconds of an all-to-all, an all-gather, and messages between pairs."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    send = torch.zeros(ranks, ROW_BYTES, dtype=torch.uint8)
    receive, row = torch.empty_like(send), send[:1]
    # The stand-in copies the row once for each rank, which no host does on a GPU.
    copies = median_ms(lambda: group._allgather_base(receive.view(-1), row.view(-1)), repeats)
    times = [
        median_ms(lambda: exchange.exchange(receive, send, group), repeats),
        median_ms(lambda: exchange.gather_rows(receive, row, group), repeats) - copies,
        median_ms(
            lambda: exchange._exchange_messages(receive.unbind(0), send.unbind(0), group),
            1 + repeats // 10,
        ),
    ]
    dist.destroy_process_group()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16, 64, 256])
    parser.add_argument("--repeats", type=int, default=300)
    arguments = parser.parse_args()
    print(f"{'ranks':>5}  {'all-to-all ms':>13}  {'all-gather ms':>13}  {'messages ms':>11}")
    for ranks in arguments.ranks:
        times = measure(ranks, arguments.repeats)
        print(f"{ranks:>5}  {times[0]:>13.3f}  {times[1]:>13.3f}  {times[2]:>11.3f}", flush=True)


if __name__ == "__main__":
    main()
