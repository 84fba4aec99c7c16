"""What each way to reduce gradients costs: bytes, seconds and memory.

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

Seconds of a collective are those that were measured of it (`Cluster.rates`), or else its bytes over
the slower of the links it uses. Ranks do not come to it together, and wait for one another
(`Cluster.wait_s`). Collectives one after the other add up. Low bits add the codec. The longer of
communication and `overlap` of the computation makes the step, with the rest of the computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from loco_fsdp.codec import BlockLayout
from loco_fsdp.config import LoCoConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STATE_BYTES = 16  # of a parameter: itself, its gradient and two moments of Adam, in float32
_ENCODING = 0.75  # of the time in which a gradient is encoded and decoded
_NUM_GATHERS = 2  # of parameters in a step, with reshard_after_forward
COLLECTIVES_OF_UNIT = _NUM_GATHERS + 1  # in a step: a reduction, too

WAYS = (
    *("fsdp-fp32", "fsdp-bf16", "fsdp-alltoall", "loco-flat", "loco-hierarchical"),
    *("hsdp-fp32", "hsdp-bf16", "hsdp-loco"),
)


class Transfer(NamedTuple):
    """A collective of every FSDP unit.

    collective: "reduce-scatter", "all-gather", "all-reduce" or "exchange"; a ring, but the last
    scope: its ranks: "all", those of a "node", or "across" nodes, at the same place in theirs
    num_bytes: of the whole tensor on a rank, in a step, of all units and calls together
    calls: in a step, of each unit
    dtype: of what is summed; bytes otherwise
    """

    collective: str
    scope: str
    num_bytes: float
    calls: int = 1
    dtype: str = "uint8"


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
    """Bytes/s of float32 gradient that a rank encodes and decodes, one after the other; of 16-bit
    gradients, twice their own bytes."""

    codec_latency_s: float = 0.0
    """Seconds of encoding and decoding a unit beside its elements."""

    latency_s: float = 0.0
    """Seconds of a message between nodes beside its bytes."""

    wait_s: float = 0.0
    """Seconds that a rank waits for the others in each collective: all come to it from work of
    their own."""

    stock_factor: float = 1.0
    """Bytes of the stock reduce-scatter over those of a ring: 1 with NCCL, 2 with gloo, which
    all-reduces instead."""

    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Measured collectives, by `rate_key`: seconds beside the bytes, below 0 where the first bytes
    pass faster than the rest, and bytes/s of the whole tensor."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "ranks_per_node"):
            _check_count(name, getattr(self, name))
        for name in ("inter_bandwidth", "intra_bandwidth", "codec_rate", "stock_factor"):
            _check_number(name, getattr(self, name), positive=True)
        for name in ("latency_s", "codec_latency_s", "wait_s"):
            _check_number(name, getattr(self, name), positive=False)


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
    """FSDP units of one size, each with collectives of its own."""

    overlap: float = 1.0
    """Part of the computation, 0 to 1, that communication can run beside."""

    memory_bytes: float = math.inf
    """Bytes of a rank for parameters, gradients, optimizer and errors."""

    def __post_init__(self) -> None:
        _check_count("num_parameters", self.num_parameters)
        _check_count("num_units", self.num_units)
        _check_number("compute_s", self.compute_s, positive=False)
        for name in ("param_dtype", "reduce_dtype"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: it must be one of {', '.join(DTYPE_BYTES)}"
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


class Reduction(NamedTuple):
    """How gradients are reduced: collectives, and `passes` of the codec over `elements` each."""

    transfers: list[Transfer]
    passes: float = 0.0
    elements: float = 0.0


class Traffic(NamedTuple):
    """Bytes that a node sends to others, that a rank sends, and inside its node; messages in a
    row."""

    inter_node_bytes: float
    rank_bytes: float
    bytes_inside: float
    messages: int


def wire_bytes_per_element(config: LoCoConfig, shard_numel: int) -> float:
    """Bytes of an element on the wire of the codec, in shards of `shard_numel` elements."""
    layout = BlockLayout((shard_numel,), config.bits, config.block_size)
    return layout.bytes_per_shard / shard_numel


def rate_key(collective: str, scope: str, dtype: str = "uint8") -> str:
    """The name of a collective in `Cluster.rates`."""
    return f"{collective} {dtype} {scope}"


def predict(way: str, cluster: Cluster, job: Job) -> Prediction:
    """Bytes, seconds and memory of one of `WAYS`."""
    if way not in WAYS:
        raise ValueError(f"way={way!r}: it must be one of {', '.join(WAYS)}")
    shards = cluster.ranks_per_node * (1 if way.startswith("hsdp") else cluster.num_nodes)
    reduction, gathering = _reduction(way, cluster, job), _gathering(way, job)
    gather, gather_s = _traffic(gathering, cluster), _seconds(gathering, cluster, job)
    hops = [_traffic(transfer, cluster) for transfer in reduction.transfers]
    reduce_s = sum(_seconds(transfer, cluster, job) for transfer in reduction.transfers)
    codec_s = 4 * reduction.elements / cluster.codec_rate + job.num_units * cluster.codec_latency_s
    reduce_s += reduction.passes * codec_s
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


def measurable_calls(cluster: Cluster, job: Job) -> dict[Transfer, list[int]]:
    """What a probe has to measure for `Cluster.rates`: the bytes of each call of these `WAYS`.

    The transfers differ in collective, scope or dtype; `num_bytes` and `calls` of a step are 0.
    """
    found: dict[Transfer, set[int]] = {}
    for way in WAYS:
        for transfer in (*_reduction(way, cluster, job).transfers, _gathering(way, job)):
            scope, size = _scope(transfer, cluster)
            if size > 1:
                one = Transfer(transfer.collective, scope, 0, 0, transfer.dtype)
                call_bytes = int(transfer.num_bytes / (job.num_units * transfer.calls))
                found.setdefault(one, set()).add(call_bytes)
    return {transfer: sorted(sizes) for transfer, sizes in found.items()}


def _gathering(way: str, job: Job) -> Transfer:
    """The collectives that gather parameters."""
    num_bytes = _NUM_GATHERS * DTYPE_BYTES[job.param_dtype] * job.num_parameters
    scope = "node" if way.startswith("hsdp") else "all"
    return Transfer("all-gather", scope, num_bytes, _NUM_GATHERS)


def _reduction(way: str, cluster: Cluster, job: Job) -> Reduction:
    nodes, local, numel = cluster.num_nodes, cluster.ranks_per_node, job.num_parameters
    dtype = "float32" if way.endswith("fp32") else "bfloat16"
    if "loco" in way:
        dtype = job.reduce_dtype
    num_bytes = DTYPE_BYTES[dtype] * numel
    wire_bytes = numel * wire_bytes_per_element(job.loco, -(-numel // (nodes * local)))
    if way in ("fsdp-fp32", "fsdp-bf16"):
        return Reduction([Transfer("reduce-scatter", "all", num_bytes, 1, dtype)])
    if way == "fsdp-alltoall":  # its sum costs about what decoding does
        return Reduction([Transfer("exchange", "all", num_bytes)], 1 - _ENCODING, numel)
    if way == "loco-flat" or (way == "loco-hierarchical" and nodes == 1):
        return Reduction([Transfer("exchange", "all", wire_bytes)], 1, numel)
    # Hierarchical reduces inside the node for each node that the result is for, one by one.
    calls = nodes if way == "loco-hierarchical" else 1
    inside = Transfer("reduce-scatter", "node", num_bytes, calls, dtype)
    if way in ("hsdp-fp32", "hsdp-bf16"):
        return Reduction([inside, Transfer("all-reduce", "across", num_bytes / local, 1, dtype)])
    exchange = Transfer("exchange", "across", wire_bytes / local)
    if way == "loco-hierarchical":
        return Reduction([inside, exchange], 1, numel / local)
    if nodes == 1:
        return Reduction([inside, exchange, exchange], 0, numel / local)
    if nodes == 2:  # each sends the other all its codes, and decodes both
        both = Transfer("exchange", "across", 2 * wire_bytes / local)
        return Reduction([inside, both], _ENCODING + (1 - _ENCODING) * 2, numel / local)
    # HSDP encodes a shard, decodes it twice and encodes its part of the sum.
    passes = _ENCODING * (1 + 1 / nodes) + (1 - _ENCODING) * 2
    return Reduction([inside, exchange, exchange], passes, numel / local)


def _scope(transfer: Transfer, cluster: Cluster) -> tuple[str, int]:
    """Scope, "all" where it is as much, and its ranks."""
    nodes, local = cluster.num_nodes, cluster.ranks_per_node
    size = {"all": nodes * local, "node": local, "across": nodes}[transfer.scope]
    return ("all" if size == nodes * local else transfer.scope), size


def _traffic(transfer: Transfer, cluster: Cluster) -> Traffic:
    """Bytes of a collective, and messages between nodes one after the other."""
    nodes, local = cluster.num_nodes, cluster.ranks_per_node
    scope, size = _scope(transfer, cluster)
    sent, rounds = transfer.num_bytes * (size - 1) / size, size - 1
    if transfer.collective == "exchange":
        rounds = min(rounds, 1)
    elif transfer.collective == "all-reduce":
        sent, rounds = 2 * sent, 2 * rounds
    elif transfer.collective == "reduce-scatter":
        sent *= cluster.stock_factor
    if scope == "node" or nodes == 1:
        return Traffic(0, sent, sent, 0)
    rounds *= transfer.calls
    if scope == "across":
        return Traffic(sent * local, sent, 0, rounds)
    if transfer.collective == "exchange":
        away = transfer.num_bytes * (nodes - 1) / nodes
        return Traffic(away * local, sent, sent - away, rounds)
    return Traffic(sent, sent, sent if local > 1 else 0, rounds)  # a ring enters a node once


def _seconds(transfer: Transfer, cluster: Cluster, job: Job) -> float:
    scope, size = _scope(transfer, cluster)
    if size == 1:
        return 0.0
    calls = job.num_units * transfer.calls
    wait_s = calls * cluster.wait_s
    key = rate_key(transfer.collective, scope, transfer.dtype)
    if key in cluster.rates:
        latency_s, bytes_per_s = cluster.rates[key]
        return wait_s + max(0.0, calls * latency_s + transfer.num_bytes / bytes_per_s)
    traffic = _traffic(transfer, cluster)
    between = 8 * traffic.inter_node_bytes / cluster.inter_bandwidth
    inside = 8 * traffic.bytes_inside / cluster.intra_bandwidth
    return wait_s + max(between, inside) + traffic.messages * job.num_units * cluster.latency_s


def _error_bytes(way: str, cluster: Cluster, config: LoCoConfig) -> float:
    """Bytes of a rank's error buffers per parameter: payload, and a float32 scale a block."""
    if "loco" not in way or not config.error_feedback:
        return 0.0
    dtype: torch.dtype = getattr(torch, config.error_dtype)
    one = dtype.itemsize + 4 / config.block_size
    if way == "loco-flat" or (way == "loco-hierarchical" and cluster.num_nodes == 1):
        return one
    # Over more than two replicas the sums that a replica sends have an error, too.
    sums = 1 / cluster.num_nodes if "hsdp" in way and cluster.num_nodes > 2 else 0
    return one / cluster.ranks_per_node * (1 + sums)


def _check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: it must be an integer of 1 or more")


def _check_number(name: str, value: float, *, positive: bool) -> None:
    if not (math.isfinite(value) and (value > 0 if positive else value >= 0)):
        raise ValueError(f"{name}={value!r}: it must be a number {'above' if positive else '>='} 0")
