"""What FSDP2 calls to reduce the gradient of a unit: a low-bit all-to-all and a float32 sum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from loco_fsdp.codec import BlockLayout, BlockTable
from loco_fsdp.codec.quantized_tensor import check_gradient_dtype
from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.fsdp2 import FSDPUnit
from loco_fsdp.reduction.collectives import reduce_scatters
from loco_fsdp.reduction.exchange import exchange
from loco_fsdp.reduction.groups import Hops
from loco_fsdp.reduction.hop import Hop
from loco_fsdp.reduction.notices import Notices
from loco_fsdp.reduction.precision import without_autocast
from loco_fsdp.reduction.reducer import Reducer
from loco_fsdp.reduction.topology import remote_peers
from loco_fsdp.reduction.workspace import Workspace


class _Plan(NamedTuple):
    """The blocks of a reduction, and whether their errors are used."""

    table: BlockTable
    feedback: bool

    @property
    def nbytes(self) -> int:
        return self.table.nbytes


class LoCoReduceScatter(Reducer):
    """The `ReduceScatter` of one FSDP unit.

    Flat, over the shard group:

    1. Encode: add the error to the gradient, quantize and pack it for every rank of the group, and
       update the error.
    2. Exchange of the packed bytes: each rank gets what all ranks sent for its shard.
    3. Decode: sum the shard over all ranks in float32, in the order of ranks, scale and cast it.

    Hierarchical, where `groups` are given: first a reduce-scatter inside the node in the dtype of
    the gradient, one for each node that the result is for, or with `intra_node_bits` the three
    steps above inside the node; then the three steps with the node's sum instead of the gradient,
    between ranks at the same place in their nodes.

    What goes over the wire are parts of sums, and the sum is scaled as FSDP2 asks in each call: by
    AVG, SUM or PREMUL_SUM. So compressed reductions and those of stock FSDP2, which reduces while
    `bypassed` is set, give gradients of the same scale, and may take turns in an accumulation.

    FSDP2 calls `allocate` for `input_tensor` `[world_size * shard]` on the compute stream and for
    `output_tensor` `[shard]` on the reduce-scatter stream, then this object on the latter. The
    object owns the error buffer, made and used on that stream.
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
        self._stock = unit.reduce_scatter

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
        self.unit.watch(self)

    def remove(self) -> None:
        """Put back what was there before `install`, and free the error buffers."""
        self.unit.unwatch()
        if self.unit.reduce_scatter is self:  # else the user has set another one since
            self.unit.reduce_scatter = self._stock
        self.bypass_reason = "detached"
        self.free_error()

    @property
    def inactive_reason(self) -> str | None:
        """Why this unit is not compressed; a later `set_custom_reduce_scatter` wins."""
        if self.bypass_reason is None and self.unit.reduce_scatter is not self:
            return "another reduce-scatter was set after attaching"
        return super().inactive_reason

    @property
    def remarks(self) -> list[str]:
        """Also that another reduce-scatter has taken over."""
        if self.bypass_reason is None and self.unit.reduce_scatter is not self:
            return ["not compressed: another reduce-scatter was set after attaching"]
        return super().remarks

    def owed(self) -> tuple[int, ...]:
        """Nobody: no gradient waits here."""
        return ()

    def after_reduction(self) -> None:
        """Count what FSDP2 has sent between replicas, where it reduces over them itself."""
        group = self.unit.replicate_group
        if group is not None and self.unit.all_reduce_grads:
            numel = sum(self.unit.shard_numels[index] for index in self.unit.active or ())
            num_bytes = numel * self.unit.reduce_dtype.itemsize
            ring_bytes = 2 * num_bytes * (group.size() - 1) // group.size()
            self.counters.add_full_precision(
                ring_bytes, self.leaves_node(group), is_whole=self.unit.world_size == 1
            )
        self.unit.forget_active()

    def forget_iteration(self) -> None:
        """Nothing: what FSDP2 accumulates it forgets itself."""

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for the input or the output of a reduction, as stock FSDP2 makes it."""
        return self._stock.allocate(size, dtype=dtype, device=device)

    @without_autocast
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
            ValueError: `op` is none of SUM, AVG and PREMUL_SUM, `async_op` is set, or the sizes do
                not fit the group.
            TypeError: the gradient has a dtype that the codec does not take.
            RuntimeError: with `check_ranks`, the ranks do not reduce the same.
        """
        self.check_ranks(input_tensor, self.unit.active, group)
        world_size = group.size()
        baseline_bytes = input_tensor.nbytes // world_size * (world_size - 1)
        if self.bypassed:
            self.counters.add_full_precision(baseline_bytes, self.leaves_node(group), is_whole=True)
            return self._stock(output_tensor, input_tensor, group, op, async_op)
        factor = self._factor(op, world_size)
        self._check(output_tensor, input_tensor, world_size, async_op)
        rows = input_tensor.view(world_size, -1)
        if self._groups is None:
            row_bytes = self._exchange(rows, output_tensor, group, factor)
            remote = remote_peers(group, self._node_size)
            self.end_reduction(row_bytes * (world_size - 1), row_bytes * remote, baseline_bytes)
        else:
            intra, inter = self._groups.intra, self._groups.inter
            node_sum, intra_bytes = self._reduce_inside_node(rows, intra)
            inter_bytes = self._exchange(node_sum, output_tensor, inter, factor)
            inter_bytes *= inter.size() - 1
            self.end_reduction(inter_bytes + intra_bytes, inter_bytes, baseline_bytes)
        return None

    def _factor(self, op: Any, world_size: int) -> float:
        """What FSDP2 wants the sum to be multiplied by."""
        if op == dist.ReduceOp.SUM:
            return 1.0
        if op == dist.ReduceOp.AVG:
            return 1 / world_size
        divisor = self.unit.gradient_divide_factor
        if op == dist.ReduceOp.PREMUL_SUM and divisor is not None:
            return 1 / divisor  # which it is made of, and does not tell
        raise ValueError(
            f"FSDP unit {self.unit.name!r}: loco-fsdp sums and averages, but it was asked for {op}"
        )

    def _check(
        self, output_tensor: Tensor, input_tensor: Tensor, world_size: int, async_op: bool
    ) -> None:
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

    def _exchange(
        self, gradient: Tensor, output_tensor: Tensor, group: dist.ProcessGroup, factor: float
    ) -> int:
        """Encode `gradient` `[peers, shard]`, exchange, decode; returns the bytes for one peer."""
        table, feedback, send, receive = self._encode(self._hop, gradient, output_tensor.numel())
        with self._hop.stage("exchange"):
            exchange(receive, send, group)
        self._hop.decode(receive, output_tensor, table, factor)
        if self.config.error_feedback and not feedback:
            self.end_without_feedback()
        return table.wire.num_bytes

    def _encode(
        self, hop: Hop, gradient: Tensor, shard_numel: int
    ) -> tuple[BlockTable, bool, Tensor, Tensor]:
        """Encode `gradient` `[peers, shard]`; its blocks, and buffers to send and to receive."""
        device = gradient.device
        table, feedback = self._plans(hop, self.unit.active, shard_numel, device)
        shape = (gradient.shape[0], table.wire.num_bytes)
        send = self._workspace.get("send", shape, device)
        receive = self._workspace.get("receive", shape, device)
        hop.reserve(gradient.shape[0] * table.num_blocks, device)
        hop.encode(gradient, send, table, feedback)
        return table, feedback, send, receive

    def _make_plan(
        self, hop: Hop, active: tuple[int, ...] | None, shard_numel: int, device: torch.device
    ) -> _Plan:
        """Blocks and rows of the parameters with a gradient, and whether their errors are used.

        An error belongs to a parameter. Where the parameters do not add up to the gradient, nobody
        knows whose elements these are: they are sent without feedback, as one part.
        """
        bits, block_size = hop.bits, self.config.block_size
        numels = tuple(self.unit.shard_numels[index] for index in active or ())
        if active is None or sum(numels) != shard_numel:
            return _Plan(BlockLayout((shard_numel,), bits, block_size).place(device), False)
        layout = BlockLayout(numels, bits, block_size)
        if not self.config.error_feedback:
            return _Plan(layout.place(device), False)
        hop.error.add(dict(zip(active, layout.blocks_per_part, strict=True)), device)
        return _Plan(layout.place(device, hop.error.rows_of(active)), True)
