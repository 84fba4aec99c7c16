"""The bandwidth lab: what low-bit gradients are worth on a slow link, measured on one machine.

    python scripts/lab.py --rate 500Mb/s                      2 nodes of 1 rank
    python scripts/lab.py --ranks-per-node 2 --plan           ... of 2 ranks, against the planner
    python scripts/lab.py --sweep --plot lab.png              over bandwidths

Makes network namespaces as nodes, joined by links of limited bandwidth, runs ranks in them (gloo,
on CPU), and trains a stack of linear layers by every way of reducing gradients, step by step in
turns. Prints medians: seconds of a step, seconds in the reduction of gradients, and bytes that a
node sent, as counted by its network interface. Needs root and iproute2.

`fsdp-*` and `hsdp-*` are stock FSDP2. gloo reduce-scatters by an all-reduce, which sends twice what
NCCL does; `ring-*` reduces in a ring as NCCL does. `fsdp-alltoall` exchanges 16 bits and sums in
float32.

`*-reshard` has `reshard_after_forward` at the ranks of a node, so that the backward gathers
parameters inside of it; `ring-bf16-reshard` is stock. `loco-int8` has it too, and sends parameters
between nodes in 8 bits; `loco-differences` sends what has changed of them in 4 bits, once a step.
All three of LoCo reduce gradients as `loco-hierarchical` does. With one rank a node there is only
`loco-int8`, without `reshard_after_forward`: both of its gathers send 8 bits.

`ddp-*` is DDP, whose model is whole on every rank; `-bf16` has all of it in 16 bits, and what it
takes to reduce gradients is not known. `megatron-*` is Megatron-LM, all of it in 16 bits, with the
distributed optimizer, `megatron-instances-*` with an instance of it on each node; both need
`pip install 'loco-fsdp[megatron]'`.

`--lean` takes out of a step much of what CPUs and gloo add to it, for stock and LoCo alike:
parameters stay gathered between forward and backward, nodes of `hsdp-*` reduce inside in a ring,
and memory that is freed is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lab_network import INTERFACE, LabError, LabNetwork, check_machine
from lab_rank import COMPUTE, RESHARDED, WEIGHT_BITS, RankSpec
from lab_replicas import MEGATRON, REPLICAS
from lab_report import add_plan, join, plot, summarize, table
from loco_fsdp.planning.quantities import parse_rate, parse_seconds

WAYS = (
    *("fsdp-fp32", "fsdp-bf16", "ring-fp32", "ring-bf16", "ring-bf16-reshard", "fsdp-alltoall"),
    *("loco-flat", "loco-hierarchical", "loco-hierarchical-reshard", "loco-int8"),
    *("loco-differences", "hsdp-fp32", "hsdp-bf16", "hsdp-loco"),
)
SPARING = {*RESHARDED, *WEIGHT_BITS}  # gathers of parameters
OTHER_WAYS = (*REPLICAS, *MEGATRON)
SWEEP = ("100Mb/s", "200Mb/s", "500Mb/s", "1Gb/s", "2Gb/s", "5Gb/s", "10Gb/s")
_MAX_RANKS = 4
_RANK_SCRIPT = Path(__file__).with_name("lab_rank.py")
_ROUNDS = 2  # of steps and a probe by turns: the machine is not always as fast
_POLL_S = 0.05
_END_S = 30.0  # for a killed rank to be gone

# glibc keeps what is freed, in huge pages, as the allocators of GPUs keep it. Else it gives the
# memory of gradients back, and each step takes the time to make the same pages anew.
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


class Ranks:
    """The processes of all ranks, there while it is entered."""

    def __init__(self, network: LabNetwork, spec: RankSpec, directory: Path, deadline: float):
        self._network = network
        self._spec = spec
        self._directory = directory
        self._deadline = deadline
        self._processes: list[subprocess.Popen[bytes]] = []
        self._num_answers = 0

    def __enter__(self) -> Ranks:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "LOCAL_WORLD_SIZE": str(self._spec.ranks_per_node),
            **(_KEEP_MEMORY if self._spec.lean else {}),
        }
        try:
            for rank in range(self._spec.num_nodes * self._spec.ranks_per_node):
                command = self._network.command(
                    rank // self._spec.ranks_per_node,
                    *(sys.executable, str(_RANK_SCRIPT), str(rank), json.dumps(asdict(self._spec))),
                )
                with (
                    self._file(rank, "out").open("wb") as out,
                    self._file(rank, "err").open("wb") as err,
                ):
                    process = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment
                    )
                self._processes.append(process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # the network ends what is left on its nodes
                process.wait(timeout=_END_S)
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # what a dead rank has not read
                process.stdin.close()

    def ask(self, what: str) -> list[Any]:
        """What all ranks answer, in order.

        Raises:
            LabError: a rank died, or the time limit is over.
        """
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{what}\n".encode())
                process.stdin.flush()
            except BrokenPipeError:
                break  # noticed below
        self._num_answers += 1
        answers = [self._answer(rank) for rank in range(len(self._processes))]
        return [json.loads(answer) for answer in answers]

    def _answer(self, asked: int) -> bytes:
        while True:
            lines = self._file(asked, "out").read_bytes().splitlines(keepends=True)
            if len(lines) >= self._num_answers and lines[self._num_answers - 1].endswith(b"\n"):
                return lines[self._num_answers - 1]
            for rank, process in enumerate(self._processes):
                if process.poll() is not None:
                    told = self._file(rank, "err").read_text(errors="replace")[-2000:]
                    raise LabError(f"rank {rank} ended with {process.returncode}:\n{told}")
            if time.monotonic() > self._deadline:
                raise LabError("the time limit is over; raise --time-limit, or ask for less")
            time.sleep(_POLL_S)

    def _file(self, rank: int, ending: str) -> Path:
        return self._directory / f"rank{rank}.{ending}"


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All measurements that are asked for; a dict that can be written as JSON."""
    deadline = time.monotonic() + options.time_limit
    spec_of_run = vars(options).copy()
    rates = SWEEP if options.sweep else [options.rate]
    delay_s = parse_seconds(options.delay)
    runs = []
    with (
        tempfile.TemporaryDirectory(prefix="loco-lab-") as directory,
        LabNetwork(options.nodes) as network,
    ):
        spec = RankSpec(
            num_nodes=options.nodes,
            ranks_per_node=options.ranks_per_node,
            ways=options.ways + [COMPUTE] * options.plan,
            num_layers=options.layers,
            dim=options.dim,
            batch_size=options.batch_size,
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
            lean=options.lean,
            loco={
                "bits": options.bits,
                "block_size": options.block_size,
                "backend": options.backend,
            },
            warmup=options.warmup,
            steps=options.steps,
            timeout_s=options.time_limit,
            store=str(Path(directory) / "store"),
        )
        network.limit(parse_rate(rates[0]), delay_s)
        with Ranks(network, spec, Path(directory), deadline) as ranks:
            for rate in rates:
                network.limit(parse_rate(rate), delay_s)
                measured: dict[str, Any] = {"rate": rate, "bits_per_s": parse_rate(rate)}
                if options.plan:
                    measured |= _measure_and_plan(ranks, spec)
                else:
                    measured["ways"] = summarize(ranks.ask("measure"), spec)
                print(f"\n{rate}\n{table(measured)}", flush=True)
                runs.append(measured)
    return {"options": spec_of_run, "torch": torch.__version__, "runs": runs}


def _measure_and_plan(ranks: Ranks, spec: RankSpec) -> dict[str, Any]:
    """Steps by turns with probes, from which the planner predicts them."""
    rounds, probed = [], []
    for _ in range(_ROUNDS):
        rounds.append(ranks.ask("measure"))
        compute_s = summarize(rounds[-1], spec)[COMPUTE]["step_s"]
        probed.append(ranks.ask(f"probe {compute_s}")[0])
    rows = summarize(join(rounds), spec)
    del rows[COMPUTE]
    measured = {"ways": rows}
    add_plan(measured, probed, spec)
    return measured


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=int, default=2)
    add("--ranks-per-node", type=int, default=1)
    add("--rate", default="500Mb/s", help="of each link, both ways (default %(default)s)")
    add("--delay", default="0s", help="of each link, one way; needs the kernel module sch_netem")
    ways = (*WAYS, *OTHER_WAYS)
    add("--ways", nargs="+", choices=ways, metavar="WAY", help=f"of {', '.join(ways)}; FSDP's")
    add("--sweep", action="store_true", help=f"over {', '.join(SWEEP)}")
    add("--plan", action="store_true", help="compare with loco_fsdp.plan, after probing")
    add("--layers", type=int, default=8, help="linear layers, an FSDP unit each (default 8)")
    add("--dim", type=int, default=1024, help="of a layer, dim x dim (default 1024)")
    add("--batch-size", type=int, default=4)
    add("--param-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--reduce-dtype", default="bfloat16", choices=("bfloat16", "float32"), help="with LoCo")
    add("--lean", action="store_true", help="leave little but the links to wait for; see above")
    add("--bits", type=int, default=4)
    add("--block-size", type=int, default=256)
    add("--backend", default="auto", help="of the codec (default %(default)s)")
    add("--warmup", type=int, default=2, help="steps before those that count (default 2)")
    add("--steps", type=int, default=7, help="that count (default 7); with --plan, twice so many")
    add("--time-limit", type=float, default=1800.0, help="seconds of all (default 1800)")
    add("--json", type=Path, help="file for all results, step by step")
    add("--plot", type=Path, help="file for a plot of a sweep; needs matplotlib")
    options = parser.parse_args(argv)
    for name in ("nodes", "ranks_per_node", "layers", "dim", "batch_size", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: it must be above 0")
    num_ranks = options.nodes * options.ranks_per_node
    if options.nodes < 2 or num_ranks > _MAX_RANKS:
        parser.error(f"{options.nodes} nodes, {num_ranks} ranks: 2 nodes or more, up to 4 ranks")
    if options.plot and not options.sweep:
        parser.error("--plot draws a sweep: add --sweep")
    if options.lean and options.plan:
        parser.error("--plan predicts whole steps: leave --lean or --plan away")
    other = [way for way in options.ways or () if way in OTHER_WAYS]
    if options.plan and not any(
        set(options.ways or WAYS) <= set(family) for family in (WAYS, REPLICAS, MEGATRON)
    ):
        parser.error(f"--plan takes ways of one framework, not {' '.join(options.ways)}")
    if set(other) & set(MEGATRON) and find_spec("megatron") is None:
        parser.error("ways of Megatron-LM need megatron-core: pip install 'loco-fsdp[megatron]'")
    refused = _refused(options)
    if options.ways is None:
        options.ways = [way for way in WAYS if way not in refused]
    for way in options.ways:
        if way in refused:
            parser.error(f"{way} {refused[way]}")
    try:
        parse_rate(options.rate)
        parse_seconds(options.delay)
    except ValueError as error:
        parser.error(str(error))
    return options


def _refused(options: argparse.Namespace) -> dict[str, str]:
    """Ways that make no sense with these options, and why."""
    refused = {}
    if options.ranks_per_node == 1:
        inside = "needs --ranks-per-node 2: it gathers parameters inside of nodes"
        refused = {way: inside for way in SPARING if way != "loco-int8"}
        refused["loco-hierarchical"] = "needs --ranks-per-node 2: with one rank a node it is flat"
    if options.lean:
        refused |= dict.fromkeys(SPARING, "spares gathers that --lean leaves out: leave it away")
    return refused


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # cleaning up is not interrupted
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see the module."""
    options = parse_options(argv)
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _terminate)
    try:
        if options.plot:
            import matplotlib  # noqa: F401 - missing: say so before measuring
        check_machine()
        results = run(options)
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'loco-fsdp[plot]'") from None
    except LabError as error:
        raise SystemExit(f"lab: {error}") from None
    if options.json:
        options.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    if options.plot:
        print(plot(results, options.plot))


if __name__ == "__main__":
    main()
