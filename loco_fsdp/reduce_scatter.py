"""What FSDP2 calls to reduce the gradient of a unit: a low-bit all-to-all and a float32 sum."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from loco_fsdp.codec import BlockLayout, BlockTable
from loco_fsdp.codec.quantized_tensor import check_gradient_dtype
from loco_fsdp.config import LoCoConfig
from loco_fsdp.exchange import exchange
from loco_fsdp.fsdp_compat import FSDPUnit, reduce_scatters
from loco_fsdp.hop import Hop
from loco_fsdp.reducer import Reducer
from loco_fsdp.topology import Hops, remote_peers
from loco_fsdp.workspace import Workspace

# Sets of parameters with a gradient whose blocks are kept; a mixture of experts has many.
_MAX_TABLES = 64


class LoCoReduceScatter(Reducer):
    """The `ReduceScatter` of one FSDP unit.

    Flat, over the shard group:

    1. Encode: add the error to the gradient, quantize and pack it for every rank of the group, and
       update the error.
    2. Exchange of the packed bytes: each rank gets what all ranks sent for its shard.
    3. Decode: sum the shard over all ranks in float32, in the order of ranks, and cast it.

    Hierarchical, where `groups` are given: first a reduce-scatter inside the node in the dtype of
    the gradient, one for each node that the result is for, or with `intra_node_bits` the three
    steps above inside the node; then the three steps with the node's sum instead of the gradient,
    between ranks at the same place in their nodes.

    FSDP2 calls `allocate` for `input_tensor` `[world_size * shard]` on the compute stream and for
    `output_tensor` `[shard]` on the reduce-scatter stream, then this object on the latter. The
    object owns the error buffer, made and used on that stream.

    While `bypassed` is set stock FSDP2 reduces: the result is bitwise its own.
    """

    def __init__(
        self,
        unit: FSDPUnit,
        config: LoCoConfig,
        bypass_reason: str | None,
        *,
        backend: str,
        groups: Hops | None,
        node_size: int,
        workspace: Workspace,
    ) -> None:
        super().__init__(unit, config, bypass_reason)
        self._groups = groups
        self._hop, self._intra_hop = self._make_hops(backend)
        self.hops = [hop for hop in (self._hop, self._intra_hop) if hop is not None]
        self._node_size = node_size
        self._workspace = workspace
        self._stock = unit.reduce_scatter
        self._stock_force_sum = unit.force_sum
        self._table = lru_cache(_MAX_TABLES)(self._make_table)

    def _make_hops(self, backend: str) -> tuple[Hop, Hop | None]:
        """The exchange that is always there, and the one inside the node."""
        name, config, world_size = self.unit.name, self.config, self.unit.world_size
        if self._groups is None:
            ranks = [
                rank
                for group in self.unit.process_groups[:1]
                for rank in dist.get_process_group_ranks(group)
            ]
            return Hop("flat", name, ranks, world_size, config, backend), None
        inter = dist.get_process_group_ranks(self._groups.inter)
        hop = Hop("inter-node", name, inter, len(inter), config, backend)
        if config.intra_node_bits is None:
            return hop, None
        intra = dist.get_process_group_ranks(self._groups.intra)
        return hop, Hop(
            "intra-node", name, intra, world_size, config, backend, config.intra_node_bits
        )

    def install(self) -> None:
        """Make FSDP2 call this object."""
        self.unit.reduce_scatter = self
        self.unit.watch()
        self.choose_scaling()

    def remove(self) -> None:
        """Put back what was there before `install`, and free the error buffers."""
        self.unit.force_sum = self._stock_force_sum
        self.unit.unwatch()
        self.unit.reduce_scatter = self._stock
        self.bypass_reason = "detached"
        self.free_error()

    def forget_tables(self) -> None:
        """Place blocks anew: the width, or the rows of the errors have changed."""
        self._table.cache_clear()

    @property
    def inactive_reason(self) -> str | None:
        """Why this unit is not compressed; a later `set_custom_reduce_scatter` wins."""
        if self.bypass_reason is None and self.unit.reduce_scatter is not self:
            return "another reduce-scatter was set after attaching"
        return super().inactive_reason

    def choose_scaling(self) -> None:
        """Let FSDP2 divide, and only sum here; its own way where its own reduce-scatter runs."""
        self.unit.force_sum = self._stock_force_sum if self.bypassed else True

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for the input or the output of a reduction, as stock FSDP2 makes it."""
        return self._stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce `input_tensor` `[world_size * shard]` into `output_tensor` `[shard]`.

        Raises:
            ValueError: `op` is not SUM, `async_op` is set, or the sizes do not fit the group.
            TypeError: the gradient has a dtype that the codec does not take.
            RuntimeError: with `check_ranks`, the ranks do not reduce the same.
        """
        self.check_ranks(input_tensor, group)
        world_size = group.size()
        baseline_bytes = input_tensor.nbytes // world_size * (world_size - 1)
        work = None
        if self.bypassed:
            work = self._stock(output_tensor, input_tensor, group, op, async_op)
            next_rank = dist.get_process_group_ranks(group)[(group.rank() + 1) % world_size]
            leaves_node = next_rank // self._node_size != dist.get_rank() // self._node_size
            self.counters.add_bypassed(baseline_bytes, leaves_node)
        else:
            self._check(output_tensor, input_tensor, world_size, op, async_op)
            rows = input_tensor.view(world_size, -1)
            if self._groups is None:
                wire_bytes = self._exchange(rows, output_tensor, group)
                sent, sent_to_nodes = world_size - 1, remote_peers(group, self._node_size)
                self.end_reduction(wire_bytes * sent, wire_bytes * sent_to_nodes, baseline_bytes)
            else:
                intra, inter = self._groups.intra, self._groups.inter
                node_sum, intra_bytes = self._reduce_inside_node(rows, intra)
                wire_bytes = self._exchange(node_sum, output_tensor, inter) * (inter.size() - 1)
                self.end_reduction(wire_bytes + intra_bytes, wire_bytes, baseline_bytes)
        self.choose_scaling()
        return work

    def _check(
        self, output_tensor: Tensor, input_tensor: Tensor, world_size: int, op: Any, async_op: bool
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(
                f"FSDP unit {self.unit.name!r}: loco-fsdp sums and FSDP2 divides, but it was asked "
                f"for {op}. Do not call set_force_sum_reduction_for_comms(False) after attaching; "
                "set_gradient_divide_factor sets another factor"
            )
        if async_op:
            raise ValueError(f"FSDP unit {self.unit.name!r}: async_op=True is not supported")
        if input_tensor.numel() != world_size * output_tensor.numel():
            raise ValueError(
                f"FSDP unit {self.unit.name!r}: {input_tensor.numel()} gradient elements are not "
                f"{world_size} shards of {output_tensor.numel()}"
            )
        check_gradient_dtype(f"FSDP unit {self.unit.name!r}: loco-fsdp", input_tensor.dtype)

    def _reduce_inside_node(self, rows: Tensor, intra: dist.ProcessGroup) -> tuple[Tensor, int]:
        """Sums of this node's ranks for all ranks at the same place in theirs, `[node, shard]`.

        Also returns the bytes that this rank sent.
        """
        num_nodes = rows.shape[0] // intra.size()
        shape = (num_nodes, rows.shape[1])
        node_sum = self._workspace.get("node sum", shape, rows.device, rows.dtype)
        if self._intra_hop is None:
            by_node = rearrange(rows, "(node local) shard -> node (local shard)", node=num_nodes)
            reduce_scatters(list(node_sum), list(by_node), intra)
            return node_sum, node_sum.nbytes * (intra.size() - 1)
        table, _, send, receive = self._encode(self._intra_hop, rows, rows.shape[1])
        by_node = rearrange(send, "(node local) byte -> node local byte", node=num_nodes)
        received = rearrange(receive, "(node local) byte -> node local byte", node=num_nodes)
        for node in range(num_nodes):
            with self._intra_hop.stage("exchange"):
                exchange(received[node], by_node[node], intra)
            self._intra_hop.decode(received[node], node_sum[node], table)
        return node_sum, num_nodes * table.wire.num_bytes * (intra.size() - 1)

    def _exchange(self, gradient: Tensor, output_tensor: Tensor, group: dist.ProcessGroup) -> int:
        """Encode `gradient` `[peers, shard]`, exchange, decode; returns the bytes for one peer."""
        table, feedback, send, receive = self._encode(self._hop, gradient, output_tensor.numel())
        with self._hop.stage("exchange"):
            exchange(receive, send, group)
        self._hop.decode(receive, output_tensor, table)
        if self.config.error_feedback and not feedback:
            self.counters.reductions_without_feedback += 1
        return table.wire.num_bytes

    def _encode(
        self, hop: Hop, gradient: Tensor, shard_numel: int
    ) -> tuple[BlockTable, bool, Tensor, Tensor]:
        """Encode `gradient` `[peers, shard]`; its blocks, and buffers to send and to receive."""
        device = gradient.device
        table, feedback = self._table(hop, self.unit.active, shard_numel, device)
        shape = (gradient.shape[0], table.wire.num_bytes)
        send = self._workspace.get("send", shape, device)
        receive = self._workspace.get("receive", shape, device)
        hop.reserve(gradient.shape[0] * table.num_blocks, device)
        hop.encode(gradient, send, table, feedback)
        return table, feedback, send, receive

    def _make_table(
        self, hop: Hop, active: tuple[int, ...], shard_numel: int, device: torch.device
    ) -> tuple[BlockTable, bool]:
        """Blocks and rows of the parameters with a gradient, and whether their errors are used.

        An error belongs to a parameter. Where the parameters do not add up to the gradient, nobody
        knows whose elements these are: they are sent without feedback, as one part.
        """
        bits, block_size = hop.bits, self.config.block_size
        numels = tuple(self.unit.shard_numels[index] for index in active)
        if sum(numels) != shard_numel:
            return BlockLayout((shard_numel,), bits, block_size).place(device), False
        layout = BlockLayout(numels, bits, block_size)
        if not self.config.error_feedback:
            return layout.place(device), False
        hop.error.add(dict(zip(active, layout.blocks_per_part, strict=True)), device)
        return layout.place(device, hop.error.rows_of(active)), True
