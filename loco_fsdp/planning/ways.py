"""What each way to train sends, and what it keeps: collectives of a step, and memory of a rank.

With M nodes of L ranks, N = M L, P parameters, b bytes an element in the reduce dtype and w on the
wire of the codec (0.516 at 4 bits and blocks of 256), a step sends, to reduce gradients:

    way               between nodes, by a node         by a rank, all in all
    fsdp-fp32/-bf16   b P (N-1)/N                      b P (N-1)/N
    fsdp-bf16-reshard: as fsdp-bf16
    fsdp-alltoall     2 L P (M-1)/M                    2 P (N-1)/N
    loco-flat         w L P (M-1)/M                    w P (N-1)/N
    loco-hierarchical w P (M-1)/M                      b P (L-1)/L + w P/L (M-1)/M
    loco-hierarchical-reshard, loco-int8, loco-differences: as loco-hierarchical
    hsdp-fp32/-bf16   2 b P (M-1)/M                    b P (L-1)/L + 2 b P/L (M-1)/M
    hsdp-loco         2 w P (M-1)/M                    b P (L-1)/L + 2 w P/L (M-1)/M
    ddp-fp32/-bf16    2 b P (N-1)/N                    2 b P (N-1)/N
    ddp-loco          2 w P (M-1)/M                    2 b P (L-1)/L + 2 w P/L (M-1)/M

Of Megatron-LM with its distributed optimizer, megatron-bf16 sends what fsdp-bf16 does,
megatron-loco what loco-hierarchical does (loco-flat, with one rank a node), and with an instance of
the optimizer in each node megatron-instances-bf16 and -loco what hsdp-bf16 and -loco do.

FSDP reduces in a ring, which enters and leaves a node once; HSDP shards over the ranks of a node
and all-reduces over nodes in L rings at once; DDP all-reduces over all ranks, with LoCo after a
reduce-scatter inside of each node and before an all-gather there.

Parameters of p bytes are gathered in the forward and again in the backward of each of K
microbatches. With w8 and w4 bytes on the wire of the codec at 8 and 4 bits (1.016 and 0.516):

    way               between nodes, by a node         by a rank, all in all
    fsdp-*, loco-flat, loco-hierarchical
                      2 K p P (N-1)/N                  2 K p P (N-1)/N
    *-reshard         K p P (N-1)/N                    K p P (N-1)/N + K p P (L-1)/L
    loco-int8         K w8 P (M-1)/M                   K w8 P/L (M-1)/M + K (w8 + p) P (L-1)/L
    loco-differences  w4 P (M-1)/M                     w4 P/L (M-1)/M + 2 K p P (L-1)/L
    hsdp-*            0                                2 K p P (L-1)/L

- fsdp-bf16-reshard and loco-hierarchical-reshard keep parameters sharded over the node between
  forward and backward (`reshard_after_forward=L`), so that the backward gathers inside of it: p P/L
  bytes more a rank.
- loco-int8 does so too, and gathers codes of 8 bits in the forward, first over equal places of
  nodes, then inside of them (`weight_bits=8`). With one rank a node both gathers are of codes, over
  all ranks, and nothing is kept.
- loco-differences keeps a copy of the parameters in each node, p P/L bytes more a rank, from which
  all gathers are (`weight_bits=4`). Once in a step nodes exchange by how much it is behind.

Megatron-LM gathers once in a step what its optimizer has stepped, and DDP nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from loco_fsdp.codec import BlockLayout
from loco_fsdp.config import LoCoConfig
from loco_fsdp.planning.cluster import DTYPE_BYTES, Cluster, Job

ENCODING = 0.75  # of the time in which a gradient is encoded and decoded
_MOMENTS_BYTES = 8  # of a parameter: two moments of Adam, in float32
_NUM_GATHERS = 2  # of parameters in a microbatch, with reshard_after_forward
_LOW_BIT_PARAMETERS = ("loco-int8", "loco-differences")
_RESHARDED = ("fsdp-bf16-reshard", "loco-hierarchical-reshard", "loco-int8")
_HIERARCHICAL = ("loco-hierarchical", "loco-hierarchical-reshard", *_LOW_BIT_PARAMETERS)


class Transfer(NamedTuple):
    """A collective of every unit.

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


class Phase(NamedTuple):
    """What a step does with gradients, or with parameters.

    transfers: the collectives, one after the other
    passes: of the codec, in a step
    elements: that a rank encodes and decodes in each pass
    """

    transfers: list[Transfer]
    passes: float = 0.0
    elements: float = 0.0


def wire_bytes_per_element(config: LoCoConfig, shard_numel: int) -> float:
    """Bytes of an element on the wire of the codec, in shards of `shard_numel` elements."""
    layout = BlockLayout((shard_numel,), config.bits, config.block_size)
    return layout.bytes_per_shard / shard_numel


def collectives_of_unit(job: Job) -> int:
    """Collectives of a unit in a step of stock FSDP: its gathers, and a reduction."""
    return _NUM_GATHERS * job.microbatches + 1


def refusal(way: str, cluster: Cluster) -> str | None:
    """Why a way cannot be on a cluster, and what to take instead; None: it can."""
    if way not in (*_RESHARDED, "loco-differences"):
        return None
    is_stock = "loco" not in way
    if cluster.num_nodes == 1:
        other = "fsdp-bf16" if is_stock else "loco-flat"
        return f"way={way!r} spares the links between nodes, and there is one node: use {other}"
    if cluster.ranks_per_node == 1 and way != "loco-int8":
        other = "loco-int8, or loco-hierarchical for exact parameters"
        return (
            f"way={way!r} gathers parameters inside of nodes, which have one rank each: "
            f"use {'fsdp-bf16' if is_stock else other}"
        )
    return None


def gathering(way: str, cluster: Cluster, job: Job) -> Phase:
    """The collectives that gather parameters, and the codec's part in them."""
    nodes, local, numel = cluster.num_nodes, cluster.ranks_per_node, job.num_parameters
    num_bytes, forwards = DTYPE_BYTES[job.param_dtype] * numel, job.microbatches
    gathers = _NUM_GATHERS * forwards
    if way.startswith("ddp"):
        return Phase([])
    if way == "loco-differences":
        codes = numel * _wire_bytes_of_parameter(4, cluster, job)
        elements = ENCODING * numel / (nodes * local) + (1 - ENCODING) * numel / local
        across = _all_gather("across", codes / local, 1)
        return Phase([across, _all_gather("node", num_bytes, gathers)], 1, elements)
    if way == "loco-int8":
        codes = numel * _wire_bytes_of_parameter(8, cluster, job)
        elements = ENCODING * numel / (nodes * local) + (1 - ENCODING) * numel
        if local == 1:
            return Phase([_all_gather("all", codes, gathers)], gathers, elements)
        forward = [
            _all_gather("across", codes / local, forwards),
            _all_gather("node", codes, forwards),
        ]
        backward = _all_gather("node", num_bytes, forwards)
        return Phase([*forward, backward], forwards, elements)
    if way.endswith("-reshard"):
        scopes = ("all", "node")
        return Phase([_all_gather(scope, num_bytes, forwards) for scope in scopes])
    calls = 1 if way.startswith("megatron") else gathers
    return Phase([_all_gather("node" if is_sharded_inside(way) else "all", num_bytes, calls)])


def _all_gather(scope: str, num_bytes: float, calls: int) -> Transfer:
    """`calls` in a step, each of a whole tensor of `num_bytes`."""
    return Transfer("all-gather", scope, calls * num_bytes, calls)


def _wire_bytes_of_parameter(bits: int, cluster: Cluster, job: Job) -> float:
    num_ranks = cluster.num_nodes * cluster.ranks_per_node
    return wire_bytes_per_element(replace(job.loco, bits=bits), -(-job.num_parameters // num_ranks))


def reduction(way: str, cluster: Cluster, job: Job) -> Phase:
    """The collectives that reduce gradients, and the codec's part in them."""
    nodes, local, numel = cluster.num_nodes, cluster.ranks_per_node, job.num_parameters
    dtype = _reduce_dtype(way, job)
    num_bytes = DTYPE_BYTES[dtype] * numel
    wire_bytes = numel * wire_bytes_per_element(job.loco, -(-numel // (nodes * local)))
    if way in ("fsdp-fp32", "fsdp-bf16", "fsdp-bf16-reshard", "megatron-bf16"):
        return Phase([Transfer("reduce-scatter", "all", num_bytes, 1, dtype)])
    if way in ("ddp-fp32", "ddp-bf16"):
        return Phase([Transfer("all-reduce", "all", num_bytes, 1, dtype)])
    if way == "fsdp-alltoall":  # its sum costs about what decoding does
        return Phase([Transfer("exchange", "all", num_bytes)], 1 - ENCODING, numel)
    if _is_flat(way, cluster):
        if way == "ddp-loco":
            return _low_bit_all_reduce("all", nodes * local, wire_bytes, numel)
        return Phase([Transfer("exchange", "all", wire_bytes)], 1, numel)
    # Hierarchical reduces inside the node for each node that the result is for, one by one.
    is_hierarchical = way in (*_HIERARCHICAL, "megatron-loco")
    inside = Transfer("reduce-scatter", "node", num_bytes, nodes if is_hierarchical else 1, dtype)
    if way.endswith(("fp32", "bf16")):
        return Phase([inside, Transfer("all-reduce", "across", num_bytes / local, 1, dtype)])
    if is_hierarchical:
        exchange = Transfer("exchange", "across", wire_bytes / local)
        return Phase([inside, exchange], 1, numel / local)
    across = _low_bit_all_reduce("across", nodes, wire_bytes / local, numel / local)
    after = [Transfer("all-gather", "node", num_bytes)] if way == "ddp-loco" else []
    return across._replace(transfers=[inside, *across.transfers, *after])


def _low_bit_all_reduce(scope: str, size: int, wire_bytes: float, numel: float) -> Phase:
    if size == 1:
        return Phase([])
    if size == 2:  # each sends the other all its codes, and decodes both
        both = Transfer("exchange", scope, 2 * wire_bytes)
        return Phase([both], ENCODING + (1 - ENCODING) * 2, numel)
    # A rank encodes all, decodes it twice and encodes its part of the sum.
    passes = ENCODING * (1 + 1 / size) + (1 - ENCODING) * 2
    exchange = Transfer("exchange", scope, wire_bytes)
    return Phase([exchange, exchange], passes, numel)


def error_bytes(way: str, cluster: Cluster, config: LoCoConfig) -> float:
    """Bytes of a rank's error buffers per parameter: payload, and a float32 scale a block."""
    if "loco" not in way or not config.error_feedback:
        return 0.0
    dtype: torch.dtype = getattr(torch, config.error_dtype)
    one = dtype.itemsize + 4 / config.block_size
    is_flat = _is_flat(way, cluster)
    peers = cluster.num_nodes * (cluster.ranks_per_node if is_flat else 1)
    # Over more than two ranks the sums that a rank of an all-reduce sends have an error, too.
    is_all_reduce = way in ("hsdp-loco", "ddp-loco", "megatron-instances-loco")
    sums = 1 / peers if is_all_reduce and peers > 2 else 0
    return one / (1 if is_flat else cluster.ranks_per_node) * (1 + sums)


def state_bytes(way: str, cluster: Cluster, job: Job) -> float:
    """Bytes of a rank per parameter, without errors: itself, its gradient, Adam in float32.

    FSDP shards all of it, in float32, and DDP nothing; to it comes what is kept to be gathered
    (`kept_bytes`), but not the whole gradients that FSDP2 accumulates over several microbatches.
    Megatron-LM keeps parameters and gradients whole, in the dtype of parameters, and shards moments
    and the float32 copies of parameters.
    """
    if way.startswith("ddp"):
        return 4 + 4 + _MOMENTS_BYTES
    shards = cluster.ranks_per_node * (1 if is_sharded_inside(way) else cluster.num_nodes)
    if way.startswith("megatron"):
        param_bytes = DTYPE_BYTES[job.param_dtype]
        copies = 4 if param_bytes < 4 else 0
        return 2 * param_bytes + (copies + _MOMENTS_BYTES) / shards
    return (4 + 4 + _MOMENTS_BYTES) / shards + kept_bytes(way, cluster, job)


def kept_bytes(way: str, cluster: Cluster, job: Job) -> float:
    """Bytes of a rank per parameter, of parameters that each node keeps in order to gather them."""
    if way == "loco-differences" or is_resharded(way, cluster):
        return DTYPE_BYTES[job.param_dtype] / cluster.ranks_per_node
    return 0.0


def _reduce_dtype(way: str, job: Job) -> str:
    """Of gradients where they are reduced in full precision."""
    if way.startswith("megatron") or way.endswith(("bf16", "bf16-reshard", "alltoall")):
        return "bfloat16"
    return job.reduce_dtype if "loco" in way and way != "ddp-loco" else "float32"


def is_sharded_inside(way: str) -> bool:
    """Whether each node has all of the optimizer's state."""
    return way.startswith(("hsdp", "megatron-instances"))


def is_resharded(way: str, cluster: Cluster) -> bool:
    """Whether `reshard_after_forward` is the ranks of a node."""
    return way in _RESHARDED and cluster.ranks_per_node > 1


def has_low_bit_parameters(way: str) -> bool:
    """Whether parameters cross nodes in low bits, and so are not exact."""
    return way in _LOW_BIT_PARAMETERS


def _is_flat(way: str, cluster: Cluster) -> bool:
    """Whether LoCo sends straight to all ranks."""
    is_one_hop = cluster.num_nodes == 1 or cluster.ranks_per_node == 1
    if way in _HIERARCHICAL:  # asked for by name
        return cluster.num_nodes == 1
    return way == "loco-flat" or (way in ("ddp-loco", "megatron-loco") and is_one_hop)
