"""What each way to reduce gradients costs: bytes, seconds and memory.

`loco_fsdp.planning.ways` has the bytes of each way.

Seconds of a collective are those that were measured of it (`Cluster.rates`), or else its bytes over
the slower of the links it uses. Ranks do not come to it together, and wait for one another
(`Cluster.wait_s`). Collectives one after the other add up. Low bits add the codec. The longer of
communication and `overlap` of the computation makes the step, with the rest of the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from loco_fsdp.planning.cluster import FRAMEWORKS, WAYS, Cluster, Job
from loco_fsdp.planning.ways import (
    Phase,
    Transfer,
    error_bytes,
    gathering,
    reduction,
    refusal,
    state_bytes,
)


@dataclass(frozen=True)
class Prediction:
    """One way to train.

    Attributes:
        way: one of `WAYS`.
        reduce_inter_node_bytes: bytes of gradient that a node sends to others in a step.
        inter_node_bytes: the same, with the parameters that are gathered.
        rank_bytes: bytes that a rank sends in a step, all in all.
        reduce_s: seconds in the reduction of gradients, codec included.
        gather_s: seconds in the all-gathers of parameters, codec included.
        step_s: seconds of a step.
        error_bytes_per_parameter: bytes of a rank's error buffer, over the parameters of the model.
        state_bytes: bytes of a rank for parameters, also those that its node keeps to gather them,
            gradients, Adam and errors.
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


class Traffic(NamedTuple):
    """Bytes that a node sends to others, that a rank sends, and inside its node; messages in a
    row."""

    inter_node_bytes: float
    rank_bytes: float
    bytes_inside: float
    messages: int


def rate_key(collective: str, scope: str, dtype: str = "uint8") -> str:
    """The name of a collective in `Cluster.rates`."""
    return f"{collective} {dtype} {scope}"


def predict(way: str, cluster: Cluster, job: Job) -> Prediction:
    """Bytes, seconds and memory of one of `WAYS`.

    Raises:
        ValueError: there is no such way, or not on this cluster.
    """
    if way not in WAYS:
        raise ValueError(f"way={way!r}: it must be one of {', '.join(WAYS)}")
    if (reason := refusal(way, cluster)) is not None:
        raise ValueError(reason)
    reducing, gathers = reduction(way, cluster, job), gathering(way, cluster, job)
    gather_hops = [_traffic(transfer, cluster) for transfer in gathers.transfers]
    hops = [_traffic(transfer, cluster) for transfer in reducing.transfers]
    gather_s = _phase_seconds(gathers, cluster, job)
    reduce_s = _phase_seconds(reducing, cluster, job)
    errors = error_bytes(way, cluster, job.loco)
    return Prediction(
        way=way,
        reduce_inter_node_bytes=sum(hop.inter_node_bytes for hop in hops),
        inter_node_bytes=sum(hop.inter_node_bytes for hop in (*hops, *gather_hops)),
        rank_bytes=sum(hop.rank_bytes for hop in (*gather_hops, *hops)),
        reduce_s=reduce_s,
        gather_s=gather_s,
        step_s=(1 - job.overlap) * job.compute_s
        + max(job.overlap * job.compute_s, gather_s + reduce_s),
        error_bytes_per_parameter=errors,
        state_bytes=(state_bytes(way, cluster, job) + errors) * job.num_parameters,
    )


def predict_all(cluster: Cluster, job: Job) -> list[Prediction]:
    """Every way of the framework of `job` that can be, in the order of `WAYS`."""
    return [predict(way, cluster, job) for way in _possible_ways(cluster, job)]


def _possible_ways(cluster: Cluster, job: Job) -> list[str]:
    return [way for way in FRAMEWORKS[job.framework] if refusal(way, cluster) is None]


def measurable_calls(cluster: Cluster, job: Job) -> dict[Transfer, list[int]]:
    """What a probe has to measure for `Cluster.rates`: the bytes of each call of its ways.

    The transfers differ in collective, scope or dtype; `num_bytes` and `calls` of a step are 0.
    """
    found: dict[Transfer, set[int]] = {}
    for way in _possible_ways(cluster, job):
        phases = (gathering(way, cluster, job), reduction(way, cluster, job))
        for transfer in (transfer for phase in phases for transfer in phase.transfers):
            scope, size = _scope(transfer, cluster)
            if size > 1:
                one = Transfer(transfer.collective, scope, 0, 0, transfer.dtype)
                call_bytes = int(transfer.num_bytes / (job.num_units * transfer.calls))
                found.setdefault(one, set()).add(call_bytes)
    return {transfer: sorted(sizes) for transfer, sizes in found.items()}


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


def _phase_seconds(phase: Phase, cluster: Cluster, job: Job) -> float:
    codec_s = 4 * phase.elements / cluster.codec_rate + job.num_units * cluster.codec_latency_s
    seconds = sum(_seconds(transfer, cluster, job) for transfer in phase.transfers)
    return seconds + phase.passes * codec_s


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
