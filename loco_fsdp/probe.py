"""Measures this cluster, and feeds `loco_fsdp.plan` with it. On every node:

    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 \\
        -m loco_fsdp.probe --parameters 8e9 --compute 2s

All ranks send at once, as in training: to ranks of other nodes only, then inside of their nodes;
then all of them encode and decode gradients, compute and wait for one another, and call the
collectives of a step, each with tensors as large as those of an FSDP unit: give its `--units`.
NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from loco_fsdp.codec import BlockLayout, choose_backend
from loco_fsdp.plan import add_job_options, job_from_options, report
from loco_fsdp.planning.cluster import Cluster, Job
from loco_fsdp.planning.rates import line_through, measure_rates
from loco_fsdp.planning.timing import seconds_from_barrier, seconds_in_loop, waiting_seconds
from loco_fsdp.planning.ways import collectives_of_unit
from loco_fsdp.reduction.exchange import exchange
from loco_fsdp.reduction.hop import Hop
from loco_fsdp.reduction.topology import ranks_per_node

_CODEC_UNITS = 8  # at most: more would not be further from the cache


def measure_cluster(
    job: Job, device: torch.device, *, max_bytes: int = 64_000_000, repeats: int = 5
) -> Cluster:
    """The `Cluster` that these ranks are, as `job` would use it. A collective of all ranks.

    Args:
        job: whose units are sent and encoded; `node_size` is that of its `LoCoConfig`.
        device: where gradients are.
        max_bytes: of a tensor; what larger ones take is told from smaller ones.
        repeats: of each measurement; the median counts.

    Raises:
        ValueError: there is one rank, or ranks do not fill nodes.
    """
    world_size, node_size = dist.get_world_size(), ranks_per_node(job.loco.node_size)
    if world_size == 1:
        raise ValueError("world_size=1: nothing is sent; start at least two ranks with torchrun")
    if world_size % node_size:
        raise ValueError(
            f"node_size={node_size!r}: {world_size} ranks do not fill nodes of that size; "
            "set LOCAL_WORLD_SIZE, or start as many ranks on each node"
        )
    nodes = world_size // node_size
    unit_bytes = min(max_bytes, 4 * -(-job.num_parameters // job.num_units))
    inter = intra = None
    if nodes > 1:
        seconds = _exchange_seconds(device, unit_bytes, node_size, repeats, inside=False)
        inter = 8 * unit_bytes * node_size / seconds
    if node_size > 1:
        seconds = _exchange_seconds(device, unit_bytes, node_size, repeats, inside=True)
        intra = 8 * unit_bytes / seconds
    # A link that is not there has no bytes to carry: any number will do.
    inter_bandwidth, intra_bandwidth = inter or intra, intra or inter
    assert inter_bandwidth is not None and intra_bandwidth is not None
    large, small = (  # elements that a rank encodes of a unit, with one hop and with two
        (4 * numel, _codec_seconds(job, device, numel, world_size, repeats))
        for numel in (unit_bytes // 4, unit_bytes // 4 // max(node_size, 2))
    )
    codec_latency_s, codec_rate = line_through(small, large)
    cluster = Cluster(
        num_nodes=nodes,
        ranks_per_node=node_size,
        inter_bandwidth=inter_bandwidth,
        intra_bandwidth=intra_bandwidth,
        codec_rate=codec_rate,
        codec_latency_s=max(codec_latency_s, 0.0),
        wait_s=waiting_seconds(
            job.compute_s / (job.num_units * collectives_of_unit(job)), device, repeats
        ),
        stock_factor=2.0 if dist.get_backend() == "gloo" else 1.0,
    )
    rates = measure_rates(cluster, job, device, max_bytes=max_bytes, repeats=repeats)
    return replace(cluster, rates=rates)


def _exchange_seconds(
    device: torch.device, num_bytes: int, node_size: int, repeats: int, *, inside: bool
) -> float:
    """Seconds in which each rank sends `num_bytes`, inside of its node or to other nodes."""
    world_size, node = dist.get_world_size(), dist.get_rank() // node_size
    peers = [
        rank
        for rank in range(world_size)
        if rank != dist.get_rank() and (rank // node_size == node) == inside
    ]
    part_bytes = -(-num_bytes // len(peers))
    sizes = [part_bytes if rank in peers else 0 for rank in range(world_size)]
    send = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)
    world = dist.group.WORLD
    assert world is not None
    return seconds_from_barrier(lambda: exchange(receive, send, world, sizes), device, repeats)


def _codec_seconds(job: Job, device: torch.device, numel: int, peers: int, repeats: int) -> float:
    """Seconds in which a rank encodes `numel` elements for `peers` and decodes as many.

    It goes through several units, as a step does, or a cache would hold the one.
    """
    config, dtype = job.loco, getattr(torch, job.reduce_dtype)
    backend = choose_backend(config.backend, device)
    shard = -(-numel // peers)
    layout = BlockLayout((shard,), config.bits, config.block_size)
    table = layout.place(device)
    output = torch.empty(shard, dtype=dtype, device=device)
    wire = torch.zeros(peers, layout.bytes_per_shard, dtype=torch.uint8, device=device)
    num_units = min(job.num_units, _CODEC_UNITS)
    gradients = torch.randn(num_units, peers, shard, device=device).to(dtype)
    hops = []
    for unit in range(num_units):
        hop = Hop("flat", f"unit {unit}", list(range(peers)), peers, config, backend)
        if config.error_feedback:
            hop.error.add({0: layout.num_blocks}, device)
        hops.append(hop)

    def encode_and_decode() -> None:
        for gradient, hop in zip(gradients, hops, strict=True):
            hop.begin(peers * layout.num_blocks, device)
            hop.encode(gradient, wire, table, config.error_feedback)
            hop.end()
            hop.decode(wire, output, table)

    return seconds_in_loop(encode_and_decode, device, repeats) / num_units


def describe(cluster: Cluster) -> str:
    """What was measured, in units that people use."""
    lines = [f"{cluster.num_nodes} nodes of {cluster.ranks_per_node} ranks"]
    if cluster.num_nodes > 1:
        lines.append(f"between nodes: {cluster.inter_bandwidth / 1e9:.4g} Gb/s a node")
    if cluster.ranks_per_node > 1:
        lines.append(f"inside a node: {cluster.intra_bandwidth / 1e9:.4g} Gb/s a rank")
    lines.append(f"codec: {cluster.codec_rate / 1e9:.4g} GB/s of float32 gradient a rank")
    lines.append(f"ranks wait {1e3 * cluster.wait_s:.3g} ms for one another")
    lines += [
        f"{name}: {rate / 1e9:.3g} GB/s"
        + f", and {1e3 * latency_s:.3g} ms a call" * (latency_s != 0)
        for name, (latency_s, rate) in sorted(cluster.rates.items())
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser("-m loco_fsdp.probe", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--max-mb", type=float, default=64.0, help="of a tensor that is sent")
    parser.add_argument("--repeats", type=int, default=5)
    add_job_options(parser)
    options = parser.parse_args(argv)
    try:
        job = job_from_options(options)
    except ValueError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        parser.error("RANK is not set: start the probe with torchrun")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    try:
        cluster = measure_cluster(
            job, device, max_bytes=int(options.max_mb * 1e6), repeats=options.repeats
        )
        if dist.get_rank() == 0:
            print(f"{describe(cluster)}\n\n{report(cluster, job)}", flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
