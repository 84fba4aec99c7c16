"""Bytes that the codec moves per second, against the device's own copy of the same gradient.

A rate is what the operation must read and write, counted once, over its median time:

    encode   gradient read; error read and written, with its scales; wire written
    decode   wire of all peers read; shard written
    copy     gradient read and written: `Tensor.clone` on the CPU (fresh memory each time, as stock
             FSDP2 has it), `copy_` on a GPU

The operation and the copy alternate, so that both see the same machine. Prints a table, writes
`bench_codec.json` and, where matplotlib is there, `bench_codec.png`: the ratio against the size.

    python scripts/bench_codec.py --quick --threads 1
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from loco_fsdp.codec import BlockLayout, EncodeStats, ErrorState, choose_backend, get_backend

KIB, MIB, GIB = 2**10, 2**20, 2**30
BETA = 0.9
# An eager codec makes many temporaries of the size of the gradient in float32.
MAX_EAGER_BYTES = 64 * MIB


@dataclass(frozen=True)
class Result:
    """One operation on one gradient."""

    operation: str
    backend: str
    bits: int
    dtype: str
    gradient_bytes: int
    num_bytes: int
    seconds: float
    copy_seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second of the operation."""
        return self.num_bytes / self.seconds

    @property
    def copy_rate(self) -> float:
        """Bytes per second of the copy."""
        return 2 * self.gradient_bytes / self.copy_seconds

    @property
    def ratio(self) -> float:
        """Of the two rates; 1 is as fast as a copy."""
        return self.rate / self.copy_rate


class Case:
    """A gradient, and what it is encoded into and decoded from."""

    def __init__(
        self, gradient_bytes: int, dtype: torch.dtype, bits: int, arguments: argparse.Namespace
    ) -> None:
        device = torch.device(arguments.device)
        peers, block_size = arguments.peers, arguments.block_size
        shard_numel = gradient_bytes // dtype.itemsize // peers
        layout = BlockLayout((shard_numel,), bits, block_size)
        num_blocks = layout.num_blocks
        self.table = layout.place(device)
        self.gradient = torch.empty(peers, shard_numel, dtype=dtype, device=device).normal_()
        self.copy = torch.empty_like(self.gradient) if device.type != "cpu" else None
        self.output = torch.empty(shard_numel, dtype=dtype, device=device)
        self.wire = torch.zeros(peers, layout.bytes_per_shard, dtype=torch.uint8, device=device)
        self.stats = EncodeStats(
            torch.zeros(peers, num_blocks, 2, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        error_dtype = getattr(torch, arguments.error_dtype)
        payload = torch.zeros(peers, num_blocks, block_size, dtype=error_dtype, device=device)
        self.error = ErrorState(payload, torch.zeros(peers, num_blocks, device=device))

    def operations(self, backend: str) -> dict[str, tuple[Callable[[], object], int]]:
        """The operations of a backend by name, each with the bytes that it must move."""
        codec = get_backend(backend)
        gradient, wire, table, error = self.gradient, self.wire, self.table, self.error
        error_bytes = 2 * (error.payload.nbytes + error.scale.nbytes)
        return {
            "encode": (
                lambda: codec.encode(gradient, wire, table, self.stats, error, BETA),
                gradient.nbytes + error_bytes + wire.nbytes,
            ),
            "decode": (
                lambda: codec.decode(wire, self.output, table),
                wire.nbytes + self.output.nbytes,
            ),
        }

    def copy_gradient(self) -> Tensor:
        """The device's own copy."""
        return self.gradient.clone() if self.copy is None else self.copy.copy_(self.gradient)


def seconds_of(function: Callable[[], object], device: str) -> float:
    """Of one call: of the device, or of the CPU, without what other programs took of it."""
    if device == "cpu":
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        function()
        return clock() - start
    start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start_event.record()
    function()
    end_event.record()
    end_event.synchronize()
    return start_event.elapsed_time(end_event) / 1e3


def alternate(
    function: Callable[[], object], copy: Callable[[], object], device: str, budget_s: float
) -> tuple[float, float]:
    """Median seconds of both, called in turn for `budget_s`, and at least five times."""
    for _ in range(2):  # compiles, and allocates what is kept
        function()
        copy()
    times: list[tuple[float, float]] = []
    end = time.perf_counter() + budget_s
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        times.append((seconds_of(function, device), seconds_of(copy, device)))
    ours, copies = zip(*times, strict=True)
    return statistics.median(ours), statistics.median(copies)


def gradient_sizes(arguments: argparse.Namespace) -> Iterator[int]:
    """Bytes of the gradients: 64 KiB, 256 KiB, ... and the largest."""
    largest = 64 * MIB if arguments.quick else 512 * MIB if arguments.device == "cpu" else GIB
    size = 64 * KIB
    while size < largest:
        yield size
        size *= 4
    yield largest


def measure(arguments: argparse.Namespace) -> Iterator[Result]:
    """Every backend that runs on the device, with every width, dtype and size."""
    backends = [name for name in arguments.backends if can_run(name, arguments.device)]
    for bits in arguments.bits:
        for dtype in arguments.dtypes:
            for size in gradient_sizes(arguments):
                case = Case(size, getattr(torch, dtype), bits, arguments)
                for backend in backends:
                    if backend == "eager" and size > MAX_EAGER_BYTES:
                        continue
                    for name, (operation, num_bytes) in case.operations(backend).items():
                        seconds, copy_seconds = alternate(
                            operation, case.copy_gradient, arguments.device, arguments.budget_s
                        )
                        yield Result(
                            name, backend, bits, dtype, size, num_bytes, seconds, copy_seconds
                        )


def can_run(backend: str, device: str) -> bool:
    """Whether the backend runs there, and not only for the sake of a test."""
    if backend == "triton" and device == "cpu":
        return False
    try:
        choose_backend(backend, torch.device(device))
    except ValueError:
        return False
    return True


def describe_machine(device: str) -> dict[str, object]:
    """What has to be known to compare a result with another."""
    name = platform.processor() or platform.machine()
    if device == "cpu" and Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(": ")[1] for x in lines if x.startswith("model name")), name)
    return {
        "device": name if device == "cpu" else torch.cuda.get_device_name(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "platform": platform.platform(),
    }


def bytes_to_text(num_bytes: int) -> str:
    """A power of two in its unit."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes // KIB} KiB"


COLUMNS = ("operation", "backend", "bits", "dtype", "gradient", "ms", "GB/s", "copy GB/s", "ratio")


def cells(result: Result) -> tuple[str, ...]:
    """The row of the table."""
    return (
        result.operation,
        result.backend,
        str(result.bits),
        result.dtype,
        bytes_to_text(result.gradient_bytes),
        f"{result.seconds * 1e3:.3f}",
        f"{result.rate / 1e9:.2f}",
        f"{result.copy_rate / 1e9:.2f}",
        f"{result.ratio:.2f}",
    )


def print_table(results: Iterable[Result]) -> None:
    """With rich where it is installed, else as plain columns."""
    rows = [cells(result) for result in results]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in (COLUMNS, *rows):
            print(" ".join(f"{cell:>10}" for cell in row))
        return
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def plot(results: list[Result], title: str, path: Path) -> None:
    """Ratio against size, one line for each operation, backend, width and dtype."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    for axes, operation in zip(
        figure.subplots(1, 2, sharey=True), ("encode", "decode"), strict=True
    ):
        lines: dict[str, list[Result]] = {}
        for result in results:
            if result.operation == operation:
                key = f"{result.backend}, {result.bits} bits, {result.dtype}"
                lines.setdefault(key, []).append(result)
        for label, line in lines.items():
            axes.plot([x.gradient_bytes for x in line], [x.ratio for x in line], "o-", label=label)
        axes.axhline(1, color="0.7", zorder=0)
        axes.set(xscale="log", yscale="log", title=operation, xlabel="bytes of the gradient")
        axes.legend(fontsize="x-small")
    figure.supylabel("byte rate / that of a copy")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--device", default=device, choices=["cpu", "cuda"])
    add("--backends", nargs="+", default=["triton", "compiled", "eager"])
    add("--bits", nargs="+", type=int, default=[8, 4, 2, 1], choices=[8, 4, 2, 1])
    add("--dtypes", nargs="+", default=["float32", "bfloat16"])
    add("--error-dtype", default="float16")
    add("--block-size", type=int, default=256)
    add("--peers", type=int, default=4, help="ranks that the gradient is for")
    add("--threads", type=int, help="of the CPU; default: what torch takes")
    add("--budget-s", type=float, default=0.5, help="seconds for each line of the table")
    add("--quick", action="store_true", help="gradients up to 64 MiB only")
    add("--output", type=Path, default=Path("runs/bench_codec"), help="folder of the results")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    machine = describe_machine(arguments.device)
    print(", ".join(f"{key}: {value}" for key, value in machine.items()), flush=True)
    results = list(measure(arguments))
    print_table(results)
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = [
        asdict(x) | {"rate": x.rate, "copy_rate": x.copy_rate, "ratio": x.ratio} for x in results
    ]
    settings = {key: str(value) for key, value in vars(arguments).items()}
    report = {"machine": machine, "settings": settings, "results": rows}
    (arguments.output / "bench_codec.json").write_text(json.dumps(report, indent=1))
    title = f"{machine['device']}, {machine['threads']} CPU threads, torch {machine['torch']}"
    plot(results, title, arguments.output / "bench_codec.png")


if __name__ == "__main__":
    main()
