"""The reduce-scatter of a unit's gradient in low bits: an all-to-all and a float32 sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from loco_fsdp.codec.quantized_tensor import check_gradient_dtype
from loco_fsdp.config import LoCoConfig
from loco_fsdp.reduction.collectives import reduce_scatters
from loco_fsdp.reduction.exchange import exchange
from loco_fsdp.reduction.groups import Hops
from loco_fsdp.reduction.hop import Hop
from loco_fsdp.reduction.notices import Notices
from loco_fsdp.reduction.placement import Placement, place_parts, place_pieces
from loco_fsdp.reduction.precision import without_autocast
from loco_fsdp.reduction.reducer import Reducer
from loco_fsdp.reduction.topology import remote_peers
from loco_fsdp.reduction.unit import Unit
from loco_fsdp.reduction.workspace import Workspace

StockT = TypeVar("StockT")


class LoCoReduceScatter(Reducer):
    """The reduce-scatter of one unit over its shard group.

    Flat:

    1. Encode: add the error to the gradient, quantize and pack it for every rank of the group, and
       update the error.
    2. Exchange of the packed bytes: each rank gets what all ranks sent for its shard.
    3. Decode: sum the shard over all ranks in float32, in the order of ranks, scale and cast it.

    Hierarchical, where `groups` are given: first a reduce-scatter inside the node in the dtype of
    the gradient, one for each node that the result is for, or with `intra_node_bits` the three
    steps above inside the node; then the three steps with the node's sum instead of the gradient,
    between ranks at the same place in their nodes.

    What goes over the wire are parts of sums, and the sum is scaled as each call asks. So
    compressed reductions and those of the framework, which reduces while `bypassed` is set, give
    gradients of the same scale, and may take turns in an accumulation.

    The object owns the error buffers, made and used on the stream that `reduce` runs on.
    """

    def __init__(
        self,
        unit: Unit,
        config: LoCoConfig,
        bypass_reason: str | None,
        *,
        backend: str,
        groups: Hops | None,
        node_size: int,
        workspace: Workspace,
        notices: Notices,
        topology_reason: str | None = None,
    ) -> None:
        super().__init__(
            unit,
            config,
            bypass_reason,
            node_size=node_size,
            notices=notices,
            topology_reason=topology_reason,
        )
        self._groups = groups
        self._hop, self._intra_hop = self._make_hops(backend)
        self.hops = [hop for hop in (self._hop, self._intra_hop) if hop is not None]
        self._workspace = workspace

    def _make_hops(self, backend: str) -> tuple[Hop, Hop | None]:
        """The exchange that is always there, and the one inside the node."""
        name, config, world_size = self.unit.name, self.config, self.unit.world_size

        def make(kind: str, ranks: list[int], shards: int, bits: int | None = None) -> Hop:
            peers = shards if self.unit.spans is None else 1
            return Hop(kind, name, ranks, peers, config, backend, bits)

        if self._groups is None:
            groups = self.unit.process_groups[:1]
            ranks = [rank for group in groups for rank in dist.get_process_group_ranks(group)]
            return make("flat", ranks, world_size), None
        inter = dist.get_process_group_ranks(self._groups.inter)
        hop = make("inter-node", inter, len(inter))
        if config.intra_node_bits is None:
            return hop, None
        intra = dist.get_process_group_ranks(self._groups.intra)
        return hop, make("intra-node", intra, world_size, config.intra_node_bits)

    @without_autocast
    def reduce(
        self,
        output: Tensor,
        gradient: Tensor,
        group: dist.ProcessGroup,
        factor: Callable[[], float],
        stock: Callable[[], StockT],
    ) -> StockT | None:
        """Sum `gradient` `[ranks * shard]` over ranks, times `factor`, into `output` `[shard]`.

        Args:
            output: this rank's shard. It may be a part of `gradient`, which is not read any more
                when `output` is written.
            gradient: of the active parameters.
            group: the shard group.
            factor: gives the factor of the sum, or raises if there is none for it.
            stock: reduces in full precision, as the framework does; its result is returned then.

        Raises:
            ValueError: the sizes do not fit the group.
            TypeError: the gradient has a dtype that the codec does not take.
            RuntimeError: with `check_ranks`, the ranks do not reduce the same.
        """
        self.check_ranks(gradient, self.unit.active, group)
        world_size = group.size()
        baseline_bytes = gradient.nbytes // world_size * (world_size - 1)
        if self.bypassed:
            self.counters.add_full_precision(baseline_bytes, self.leaves_node(group), is_whole=True)
            return stock()
        scale = factor()
        self._check(output, gradient, world_size)
        if self._groups is None:
            row_bytes = self._exchange(gradient, output, group, scale)
            remote = remote_peers(group, self._node_size)
            self.end_reduction(row_bytes * (world_size - 1), row_bytes * remote, baseline_bytes)
        else:
            inter = self._groups.inter
            node_sum, intra_bytes = self._reduce_inside_node(gradient, self._groups.intra)
            inter_bytes = self._exchange(node_sum, output, inter, scale) * (inter.size() - 1)
            self.end_reduction(inter_bytes + intra_bytes, inter_bytes, baseline_bytes)
        return None

    def _check(self, output: Tensor, gradient: Tensor, world_size: int) -> None:
        if gradient.numel() != world_size * output.numel():
            raise ValueError(
                f"{self.unit.label}: {gradient.numel()} gradient elements are not "
                f"{world_size} shards of {output.numel()}"
            )
        check_gradient_dtype(f"{self.unit.label}: loco-fsdp", gradient.dtype)

    def _reduce_inside_node(self, gradient: Tensor, intra: dist.ProcessGroup) -> tuple[Tensor, int]:
        """Sums of this node's ranks for all ranks at the same place in theirs, `[node, shard]`.

        Also returns the bytes that this rank sent.
        """
        num_nodes = self.unit.world_size // intra.size()
        shape = (num_nodes, gradient.numel() // self.unit.world_size)
        node_sum = self._workspace.get("node sum", shape, gradient.device, gradient.dtype)
        if self._intra_hop is None:
            by_node = gradient.view(num_nodes, -1)
            reduce_scatters(list(node_sum), list(by_node), intra)
            return node_sum, node_sum.nbytes * (intra.size() - 1)
        placement, send, receive = self._encode(self._intra_hop, gradient)
        by_node = rearrange(send, "(node local) byte -> node local byte", node=num_nodes)
        received = rearrange(receive, "(node local) byte -> node local byte", node=num_nodes)
        for node in range(num_nodes):
            with self._intra_hop.stage("exchange"):
                exchange(received[node], by_node[node], intra)
            self._intra_hop.decode(received[node], node_sum[node], placement.received[node])
        return node_sum, num_nodes * placement.sent.wire.num_bytes * (intra.size() - 1)

    def _exchange(
        self, gradient: Tensor, output: Tensor, group: dist.ProcessGroup, factor: float
    ) -> int:
        """Encode `gradient`, exchange, decode `output`; returns the bytes for one peer."""
        placement, send, receive = self._encode(self._hop, gradient)
        with self._hop.stage("exchange"):
            exchange(receive, send, group)
        if placement.padded:
            output.zero_()
        self._hop.decode(receive, output, placement.received[0], factor)
        if self.config.error_feedback and not placement.feedback:
            self.end_without_feedback()
        return placement.sent.wire.num_bytes

    def _encode(self, hop: Hop, gradient: Tensor) -> tuple[Placement, Tensor, Tensor]:
        """Encode shards one after the other; where blocks are, and buffers to send and receive."""
        device, num_shards = gradient.device, len(self._shards(hop))
        placement = self._plans(hop, self.unit.active, gradient.numel() // num_shards, device)
        table = placement.sent
        shape = (num_shards, table.wire.num_bytes)
        send = self._workspace.get("send", shape, device)
        receive = self._workspace.get("receive", shape, device)
        hop.begin(placement.peers * table.num_blocks, device)
        hop.encode(gradient.view(placement.peers, -1), send, table, placement.feedback)
        return placement, send, receive

    def _shards(self, hop: Hop) -> range:
        """Shards of the unit that a hop is given, of those of the shard group in order."""
        world_size = self.unit.world_size
        if hop.kind != "inter-node":
            return range(world_size)
        assert self._groups is not None
        return range(self._groups.intra.rank(), world_size, self._groups.intra.size())

    def _own(self, hop: Hop) -> range:
        """Places among `_shards` of those that this rank gets, as sums of the hop's ranks."""
        if hop.kind == "intra-node":
            assert self._groups is not None
            return range(self._groups.intra.rank(), self.unit.world_size, self._groups.intra.size())
        group = self.unit.process_groups[0] if self._groups is None else self._groups.inter
        return range(group.rank(), group.rank() + 1)

    def _make_plan(
        self, hop: Hop, active: tuple[int, ...] | None, shard_numel: int, device: torch.device
    ) -> Placement:
        """Where the blocks of a hop are, and whether their errors are used.

        An error belongs to a parameter. Where the parameters do not add up to the gradient, nobody
        knows whose elements these are: they are sent without feedback, as one part.
        """
        unit, config, shards = self.unit, self.config, self._shards(hop)
        if unit.spans is not None:
            own, cut = self._own(hop), unit.spans.cut(unit.world_size, shards)
            return place_pieces(hop, config, cut, shard_numel, own, device)
        parts = None if active is None else {i: unit.shard_numels[i] for i in active}
        if parts is not None and sum(parts.values()) != shard_numel:
            parts = None
        return place_parts(hop, config, parts, shard_numel, len(shards), device)

    def place_of_error(self, hop: Hop, parameter: int) -> tuple[int, ...]:
        """Elements of the parameter in a shard, or in each of its pieces."""
        if self.unit.spans is None:
            return super().place_of_error(hop, parameter)
        cut = self.unit.spans.cut(self.unit.world_size, self._shards(hop))
        return tuple(
            piece.numel for pieces in cut for piece in pieces if piece.parameter == parameter
        )
