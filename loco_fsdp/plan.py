"""Will it help on my cluster? Bytes, seconds and memory of each way to reduce gradients.

    python -m loco_fsdp.plan --parameters 8e9 --nodes 4 --ranks-per-node 8 \\
        --inter-bandwidth 100Gb/s --intra-bandwidth 3.6Tb/s --compute 2s

With M nodes of L ranks, N = M L, P parameters, b bytes an element in the reduce dtype and w on the
wire of the codec (0.516 at 4 bits and blocks of 256), a step sends, to reduce gradients:

    way               between nodes, by a node         by a rank, all in all
    fsdp-fp32/-bf16   b P (N-1)/N                      b P (N-1)/N
    fsdp-alltoall     2 L P (M-1)/M                    2 P (N-1)/N
    loco-flat         w L P (M-1)/M                    w P (N-1)/N
    loco-hierarchical w P (M-1)/M                      b P (L-1)/L + w P/L (M-1)/M
    hsdp-fp32/-bf16   2 b P (M-1)/M                    b P (L-1)/L + 2 b P/L (M-1)/M
    hsdp-loco         2 w P (M-1)/M                    b P (L-1)/L + 2 w P/L (M-1)/M

FSDP reduces in a ring, which enters and leaves a node once; HSDP shards over the ranks of a node
and all-reduces over nodes in L rings at once. Parameters of p bytes are gathered in the forward and
again in the backward: FSDP sends 2 p P (N-1)/N between nodes and as much by a rank, HSDP nothing
between nodes and 2 p P (L-1)/L by a rank.

Seconds of a transfer are those of the slower link, for hops one after the other their sum. Reducing
in low bits adds the codec. The longer of communication and `overlap` of the computation makes the
step, with the rest of the computation.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from loco_fsdp.codec import BlockLayout
from loco_fsdp.config import LoCoConfig

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATE_BYTES = 16  # of a parameter: itself, its gradient and two moments of Adam, in float32
_MIN_SPEEDUP = 1.05  # less is within what such a model knows
_ENCODING = 0.75  # of the time in which a gradient is encoded and decoded
_NUM_GATHERS = 2  # of parameters in a step, with reshard_after_forward

WAYS = (
    *("fsdp-fp32", "fsdp-bf16", "fsdp-alltoall", "loco-flat", "loco-hierarchical"),
    *("hsdp-fp32", "hsdp-bf16", "hsdp-loco"),
)


@dataclass(frozen=True)
class Cluster:
    """Ranks and links.

    Raises:
        ValueError: a value that cannot be. The message names it and what is allowed.
    """

    num_nodes: int
    """Nodes."""

    ranks_per_node: int
    """Ranks (GPUs) of a node."""

    inter_bandwidth: float
    """Bits/s that a node sends to others, over all its network cards, in each direction."""

    intra_bandwidth: float = 2.4e12
    """Bits/s that a rank sends to others of its node, in each direction."""

    codec_rate: float = 500e9
    """Bytes/s of float32 gradient that a rank encodes and decodes, one after the other."""

    latency_s: float = 0.0
    """Seconds of a message between nodes beside its bytes."""

    stock_factor: float = 1.0
    """Bytes of the stock reduce-scatter over those of a ring: 1 with NCCL, 2 with gloo, which
    all-reduces instead."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            _check_count(name, getattr(self, name))
        for name in ("inter_bandwidth", "intra_bandwidth", "codec_rate", "stock_factor"):
            _check_number(name, getattr(self, name), positive=True)
        _check_number("latency_s", self.latency_s, positive=False)


@dataclass(frozen=True)
class Job:
    """A model and its training step.

    Raises:
        ValueError: a value that cannot be. The message names it and what is allowed.
    """

    num_parameters: int
    """Parameters of the model."""

    compute_s: float
    """Seconds of a step without communication: what one rank computes."""

    param_dtype: str = "bfloat16"
    """What parameters are gathered in."""

    reduce_dtype: str = "float32"
    """What is reduced inside of a node by LoCo, and by stock FSDP today."""

    loco: LoCoConfig = field(default_factory=LoCoConfig)
    """Bits, block size and error dtype."""

    num_units: int = 1
    """FSDP units, each with collectives of its own; counts only with a latency."""

    overlap: float = 1.0
    """Part of the computation, 0 to 1, that communication can run beside."""

    memory_bytes: float = math.inf
    """Bytes of a rank for parameters, gradients, optimizer and errors."""

    def __post_init__(self) -> None:
        _check_count("num_parameters", self.num_parameters)
        _check_count("num_units", self.num_units)
        _check_number("compute_s", self.compute_s, positive=False)
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in _DTYPE_BYTES:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: it must be one of {', '.join(_DTYPE_BYTES)}"
                )
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap!r}: it must be from 0 to 1")
        if not self.memory_bytes > 0:
            raise ValueError(f"memory_bytes={self.memory_bytes!r}: it must be above 0")


@dataclass(frozen=True)
class Prediction:
    """One way to reduce gradients.

    Attributes:
        way: one of `WAYS`.
        reduce_inter_node_bytes: bytes of gradient that a node sends to others in a step.
        inter_node_bytes: the same, with the parameters that are gathered.
        rank_bytes: bytes that a rank sends in a step, all in all.
        reduce_s: seconds in the reduction of gradients, codec included.
        gather_s: seconds in the all-gathers of parameters.
        step_s: seconds of a step.
        error_bytes_per_parameter: bytes of a rank's error buffer, over the parameters of the model.
        state_bytes: bytes of a rank for parameters, gradients, Adam and errors.
    """

    way: str
    reduce_inter_node_bytes: float
    inter_node_bytes: float
    rank_bytes: float
    reduce_s: float
    gather_s: float
    step_s: float
    error_bytes_per_parameter: float
    state_bytes: float


class _Hop(NamedTuple):
    """One exchange: bytes that a node sends to others, that a rank sends, messages in a row.

    bytes_inside: bytes that a rank sends inside its node
    """

    inter_node_bytes: float
    rank_bytes: float
    bytes_inside: float
    messages: int


def wire_bytes_per_element(config: LoCoConfig, shard_numel: int) -> float:
    """Bytes of an element on the wire of the codec, in shards of `shard_numel` elements."""
    layout = BlockLayout((shard_numel,), config.bits, config.block_size)
    return layout.bytes_per_shard / shard_numel


def predict(way: str, cluster: Cluster, job: Job) -> Prediction:
    """Bytes, seconds and memory of one of `WAYS`."""
    if way not in WAYS:
        raise ValueError(f"way={way!r}: it must be one of {', '.join(WAYS)}")
    nodes, local = cluster.num_nodes, cluster.ranks_per_node
    shards = local if way.startswith("hsdp") else nodes * local
    hops, codec_elements = _reduction(way, cluster, job)
    gather_bytes = _NUM_GATHERS * _DTYPE_BYTES[job.param_dtype] * job.num_parameters
    gather = _ring(cluster, gather_bytes, inside=way.startswith("hsdp"), times=_NUM_GATHERS)
    gather_s = _seconds(gather, cluster, job)
    reduce_s = sum(_seconds(hop, cluster, job) for hop in hops)
    reduce_s += 4 * codec_elements / cluster.codec_rate
    communication_s = gather_s + reduce_s
    error_bytes = _error_bytes(way, cluster, job.loco)
    reduce_bytes = sum(hop.inter_node_bytes for hop in hops)
    return Prediction(
        way=way,
        reduce_inter_node_bytes=reduce_bytes,
        inter_node_bytes=reduce_bytes + gather.inter_node_bytes,
        rank_bytes=gather.rank_bytes + sum(hop.rank_bytes for hop in hops),
        reduce_s=reduce_s,
        gather_s=gather_s,
        step_s=(1 - job.overlap) * job.compute_s
        + max(job.overlap * job.compute_s, communication_s),
        error_bytes_per_parameter=error_bytes,
        state_bytes=(_STATE_BYTES / shards + error_bytes) * job.num_parameters,
    )


def predict_all(cluster: Cluster, job: Job) -> list[Prediction]:
    """Every one of `WAYS`, in that order."""
    return [predict(way, cluster, job) for way in WAYS]


def _reduction(way: str, cluster: Cluster, job: Job) -> tuple[list[_Hop], float]:
    """The exchanges that reduce gradients, and the elements that a rank encodes and decodes."""
    nodes, local = cluster.num_nodes, cluster.ranks_per_node
    world, numel = nodes * local, job.num_parameters
    stock_bytes = 4 if way.endswith("fp32") else 2
    if way in ("fsdp-fp32", "fsdp-bf16"):
        return [_ring(cluster, stock_bytes * numel * cluster.stock_factor)], 0
    if way == "fsdp-alltoall":  # its sum costs about what decoding does
        return [_all_to_all(cluster, 2.0 * numel)], (1 - _ENCODING) * numel
    if way == "loco-flat" or (way == "loco-hierarchical" and nodes == 1):
        wire_bytes = wire_bytes_per_element(job.loco, -(-numel // world))
        return [_all_to_all(cluster, wire_bytes * numel)], numel
    reduce_bytes = _DTYPE_BYTES[job.reduce_dtype] if "loco" in way else stock_bytes
    inside = _ring(cluster, reduce_bytes * numel * cluster.stock_factor, inside=True)
    sent = (nodes - 1) / nodes
    if way in ("hsdp-fp32", "hsdp-bf16"):
        to_nodes = 2 * stock_bytes * numel * sent
        return [inside, _Hop(to_nodes, to_nodes / local, 0, 2 * (nodes - 1))], 0
    wire_bytes = wire_bytes_per_element(job.loco, -(-numel // world))
    hops = 1 if way == "loco-hierarchical" else 2
    to_nodes = hops * wire_bytes * numel * sent
    # HSDP encodes a shard, decodes it twice and encodes its part of the sum.
    passes = 1.0 if hops == 1 else _ENCODING * (1 + 1 / nodes) + (1 - _ENCODING) * 2
    codec_elements = passes * numel / local if nodes > 1 else 0
    return [inside, _Hop(to_nodes, to_nodes / local, 0, hops)], codec_elements


def _ring(cluster: Cluster, num_bytes: float, *, inside: bool = False, times: int = 1) -> _Hop:
    """A ring over all ranks, or inside of each node, of `num_bytes` in `times` collectives."""
    ranks = cluster.ranks_per_node * (1 if inside else cluster.num_nodes)
    sent = num_bytes * (ranks - 1) / ranks
    if inside or cluster.num_nodes == 1:
        return _Hop(0, sent, sent, 0)
    return _Hop(sent, sent, sent if cluster.ranks_per_node > 1 else 0, times * (ranks - 1))


def _all_to_all(cluster: Cluster, num_bytes: float) -> _Hop:
    """An all-to-all over all ranks, each with `num_bytes` for all of them together."""
    nodes, local = cluster.num_nodes, cluster.ranks_per_node
    away, sent = num_bytes * (nodes - 1) / nodes, num_bytes * (1 - 1 / (nodes * local))
    return _Hop(away * local, sent, sent - away, 1 if nodes > 1 else 0)


def _seconds(hop: _Hop, cluster: Cluster, job: Job) -> float:
    between = 8 * hop.inter_node_bytes / cluster.inter_bandwidth
    inside = 8 * hop.bytes_inside / cluster.intra_bandwidth
    return max(between, inside) + hop.messages * job.num_units * cluster.latency_s


def _error_bytes(way: str, cluster: Cluster, config: LoCoConfig) -> float:
    """Bytes of a rank's error buffers per parameter: payload, and a float32 scale a block."""
    if "loco" not in way or not config.error_feedback:
        return 0.0
    dtype: torch.dtype = getattr(torch, config.error_dtype)
    one = dtype.itemsize + 4 / config.block_size
    if way == "loco-flat" or (way == "loco-hierarchical" and cluster.num_nodes == 1):
        return one
    return one / cluster.ranks_per_node * (1 + 1 / cluster.num_nodes if "hsdp" in way else 1)


def recommend(predictions: Sequence[Prediction], cluster: Cluster, job: Job) -> str:
    """What to use, in a few sentences; also "Do not use LoCo"."""
    fitting = [p for p in predictions if p.state_bytes <= job.memory_bytes]
    if not fitting:
        least = min(predictions, key=lambda p: p.state_bytes)
        return (
            f"Nothing fits: {least.way} needs the least memory, {_size(least.state_bytes)} a rank, "
            f"and there are {_size(job.memory_bytes)}. Use more ranks."
        )
    stock = min(
        (p for p in fitting if "loco" not in p.way and "alltoall" not in p.way),
        key=lambda p: p.step_s,
        default=None,
    )
    loco = min((p for p in fitting if "loco" in p.way), key=lambda p: p.step_s, default=None)
    if loco is None or stock is None:
        way = min(fitting, key=lambda p: p.step_s).way
        return f"Use {way}: others do not fit into {_size(job.memory_bytes)} a rank."
    speedup = stock.step_s / loco.step_s
    if cluster.num_nodes == 1 and speedup < 2 * _MIN_SPEEDUP:
        return (
            f"Do not use LoCo: there is one node, and nothing crosses a slow link. Use {stock.way}."
        )
    if speedup < _MIN_SPEEDUP:
        hidden = stock.step_s < _MIN_SPEEDUP * job.compute_s
        reason = (
            "the step waits for computation, and communication runs beside it"
            if hidden
            else "the reduction of gradients is not what the step waits for"
        )
        return f"Do not use LoCo: {reason}. Use {stock.way} ({_time(stock.step_s)} a step)."
    text = (
        f"Use {loco.way}: {_time(loco.step_s)} a step, {speedup:.2f}x as fast as {stock.way}, the "
        f"fastest stock way; {_size(loco.error_bytes_per_parameter * job.num_parameters)} of "
        "errors a rank."
    )
    if "hsdp" in loco.way and math.isinf(job.memory_bytes):
        sharded = min((p for p in fitting if "hsdp" not in p.way), key=lambda p: p.step_s)
        text += (
            f" Each node then holds all of the model, {_size(loco.state_bytes)} a rank with Adam; "
            f"if that does not fit, {sharded.way}: {_time(sharded.step_s)} a step, "
            f"{_size(sharded.state_bytes)} a rank."
        )
    return text


def table(predictions: Sequence[Prediction], job: Job) -> str:
    """The predictions as text; bytes and seconds are of one step, "(!)" is what does not fit."""
    header = "way,node sends,of gradient,rank sends,reduction,step,error B/param,memory/rank"
    rows = [header.split(",")]
    for p in predictions:
        sizes = (p.inter_node_bytes, p.reduce_inter_node_bytes, p.rank_bytes)
        times, error = (_time(p.reduce_s), _time(p.step_s)), f"{p.error_bytes_per_parameter:.3f}"
        memory = _size(p.state_bytes) + (" (!)" if p.state_bytes > job.memory_bytes else "")
        rows.append([p.way, *map(_size, sizes), *times, error, memory])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows
    )


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


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: it must be an integer of 1 or more")


def _check_number(name: str, value: float, *, positive: bool) -> None:
    if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
        raise ValueError(f"{name}={value!r}: it must be a number {'above' if positive else '>='} 0")


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.95:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe a `Job`, which `loco_fsdp.probe` has too."""
    default = LoCoConfig()
    parser.add_argument("--parameters", required=True, help="of the model: 8e9 or 8B")
    parser.add_argument("--compute", required=True, help="of a step, no communication: 1.2s, 300ms")
    parser.add_argument("--param-dtype", default="bfloat16", choices=_DTYPE_BYTES)
    parser.add_argument("--reduce-dtype", default="float32", choices=_DTYPE_BYTES)
    parser.add_argument("--bits", type=int, default=default.bits)
    parser.add_argument("--block-size", type=int, default=default.block_size)
    parser.add_argument("--error-dtype", default=default.error_dtype)
    parser.add_argument("--units", type=int, default=1, help="FSDP units of the model")
    parser.add_argument("--overlap", type=float, default=1.0, help="0 to 1 (default %(default)s)")
    parser.add_argument("--memory", help="of a rank for the model's state: 60GB")


def job_from_options(options: argparse.Namespace) -> Job:
    """The `Job` of these options; ValueError names what is wrong."""
    memory_bytes = math.inf
    if options.memory is not None:
        memory_bytes = parse_count(options.memory.strip().removesuffix("B") or "?")
    return Job(
        num_parameters=parse_count(options.parameters),
        compute_s=parse_seconds(options.compute),
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        loco=LoCoConfig(
            bits=options.bits, block_size=options.block_size, error_dtype=options.error_dtype
        ),
        num_units=options.units,
        overlap=options.overlap,
        memory_bytes=memory_bytes,
    )


def report(cluster: Cluster, job: Job) -> str:
    """Table and recommendation."""
    predictions = predict_all(cluster, job)
    return f"{table(predictions, job)}\n\n{recommend(predictions, cluster, job)}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser("python -m loco_fsdp.plan", description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--inter-bandwidth", required=True, help="of a node: 100Gb/s")
    parser.add_argument("--intra-bandwidth", default="2.4Tb/s", help="of a rank in its node")
    parser.add_argument("--codec-rate", default="500GB/s", help="float32 gradient; see the probe")
    parser.add_argument("--latency", default="0s", help="of a message between nodes: 20us")
    add_job_options(parser)
    options = parser.parse_args(argv)
    try:
        cluster = Cluster(
            num_nodes=options.nodes,
            ranks_per_node=options.ranks_per_node,
            inter_bandwidth=parse_rate(options.inter_bandwidth),
            intra_bandwidth=parse_rate(options.intra_bandwidth),
            codec_rate=parse_rate(options.codec_rate) / 8,
            latency_s=parse_seconds(options.latency),
        )
        print(report(cluster, job_from_options(options)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
