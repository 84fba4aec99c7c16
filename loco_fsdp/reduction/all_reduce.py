"""The all-reduce of a unit's gradient over replicas, in low bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.codec import BlockLayout, BlockTable
from loco_fsdp.codec.quantized_tensor import check_gradient_dtype
from loco_fsdp.config import LoCoConfig
from loco_fsdp.reduction.collectives import all_gather, reduce_scatters
from loco_fsdp.reduction.exchange import exchange, gather_rows
from loco_fsdp.reduction.groups import Hops
from loco_fsdp.reduction.hop import Hop
from loco_fsdp.reduction.notices import Notices
from loco_fsdp.reduction.packing import RowPacking
from loco_fsdp.reduction.precision import without_autocast
from loco_fsdp.reduction.reducer import Reducer
from loco_fsdp.reduction.topology import remote_peers
from loco_fsdp.reduction.unit import Unit
from loco_fsdp.reduction.workspace import Workspace


class _Plan(NamedTuple):
    """Where blocks are, and which of them the replicas sum.

    shard: all blocks, with the rows of the errors of this rank's gradient; over more than two
        replicas in rows of the wire, one for each replica
    own: those that this replica sums, with the rows of the errors of sums; None with two replicas
    feedback: whether errors are added
    """

    shard: BlockTable
    own: BlockTable | None
    feedback: bool

    @property
    def nbytes(self) -> int:
        return self.shard.nbytes + (0 if self.own is None else self.own.nbytes)


def summing_replicas(
    first_blocks: Sequence[int], num_blocks: Sequence[int], num_replicas: int
) -> Tensor:
    """Which replica sums each block.

    A block belongs to the same replica whatever other parameters are reduced with it, because the
    error of its sum is there. The blocks of a unit go to replicas in turns, so that any stretch of
    parameters is shared out evenly.

    Args:
        first_blocks: number of each parameter's first block among all blocks of the unit.
        num_blocks: blocks of each parameter.
        num_replicas: replicas.

    Returns:
        `[sum(num_blocks)]` int64.
    """
    first, counts = (torch.tensor(n, dtype=torch.int64) for n in (first_blocks, num_blocks))
    shift = first - (counts.cumsum(0) - counts)
    numbers = shift.repeat_interleave(counts) + torch.arange(sum(num_blocks))
    return numbers % num_replicas


def all_reduce_in_full_precision(gradient: Tensor, group: dist.ProcessGroup, factor: float) -> None:
    """Sum `gradient` over `group` in its own dtype, times `factor`, in place.

    In float16, whose largest number is 65,504, part of the division comes first, as in FSDP2: by
    about the square root of what is to be divided by.
    """
    before = 1.0
    if gradient.dtype == torch.float16:
        while before * before * factor < 1:
            before *= 2
        gradient /= before
    dist.all_reduce(gradient, group=group)
    gradient *= factor * before


Stock = Callable[[Tensor, dist.ProcessGroup, float], None]


@dataclass
class _Sent:
    """What a reduction has sent so far: to each other replica, inside the node, and in a ring."""

    compressed: bool
    row_bytes: int = 0
    node_bytes: int = 0
    ring_bytes: int = 0
    without_feedback: bool = False


class LoCoAllReduce(Reducer):
    """The all-reduce of one unit's gradient, or of this rank's shard of it, over replicas.

    Over more than two replicas:

    1. Encode: add the error to the shard's gradient, quantize and pack it, a row of the wire for
       each replica, which sums these blocks.
    2. All-to-all: each replica gets its row from all replicas.
    3. Decode, sum in float32 in the order of replicas and scale; add the error of the sum, quantize
       and pack again.
    4. All-gather: each replica gets the packed sums of all, and decodes them.

    Over two replicas, where as many bytes let each replica see all codes, nothing is quantized
    twice: encode, all-gather, decode and sum.

    All replicas decode the same bytes in the same order: their gradients are bitwise equal.

    Over nodes of several ranks, where `hops` are given: a reduce-scatter inside the node in the
    dtype of the gradient, of an equal part of each parameter for each rank; the steps above, with
    these parts, between ranks at the same place in their nodes; an all-gather inside the node.

    Args:
        group: the replicas.
        hops: the groups inside of nodes and between them.
        stock: all-reduces in full precision while `bypassed` is set: called with the gradient, the
            group and the factor of the sum.
    """

    def __init__(
        self,
        unit: Unit,
        config: LoCoConfig,
        bypass_reason: str | None,
        *,
        group: dist.ProcessGroup,
        backend: str,
        node_size: int,
        workspace: Workspace,
        notices: Notices,
        hops: Hops | None = None,
        topology_reason: str | None = None,
        stock: Stock = all_reduce_in_full_precision,
    ) -> None:
        self._replicas = group
        self._group = group if hops is None else hops.inter
        self._node = None if hops is None else hops.intra
        self._stock = stock
        super().__init__(
            unit,
            config,
            bypass_reason,
            node_size=node_size,
            notices=notices,
            topology_reason=topology_reason,
        )
        self._numels = unit.shard_numels
        if self._node is not None:
            self._numels = tuple(-(-numel // self._node.size()) for numel in self._numels)
        replicas = dist.get_process_group_ranks(self._group)
        self._scatter = Hop("replicas", unit.name, replicas, 1, config, backend)
        self._gather = Hop("sums", unit.name, replicas, 1, config, backend)
        self.hops = [self._scatter, self._gather] if len(replicas) > 2 else [self._scatter]
        self._workspace = workspace
        self._sent = _Sent(compressed=False)

    def place_of_error(self, hop: Hop, parameter: int) -> tuple[int, ...]:
        """Also which blocks of the unit are the parameter's: replicas share these blocks."""
        place = (self._numels[parameter],)
        if hop is self._scatter:
            return place
        blocks = self._unit_layout().blocks_per_part
        return (*place, sum(blocks[:parameter]), sum(blocks))

    def deciding_groups(self) -> list[dist.ProcessGroup]:
        """The shard group, and the replicas."""
        return list(dict.fromkeys((*super().deciding_groups(), self._replicas)))

    def _unit_layout(self) -> BlockLayout:
        return BlockLayout(self._numels, self._scatter.bits, self.config.block_size)

    def reduce(self, gradient: Tensor, factor: float) -> None:
        """Sum `gradient` `[shard]` over replicas, times `factor`, in place.

        Raises:
            TypeError: the gradient has a dtype that the codec does not take.
            RuntimeError: with `check_ranks`, the replicas do not reduce the same.
        """
        self.begin(gradient.device)
        self.reduce_part(gradient, self.unit.active, factor)
        self.end()

    def begin(self, device: torch.device, expected: Sequence[int] = ()) -> None:
        """Begin a reduction that comes in parts, of some parameters each.

        Args:
            device: where gradients are.
            expected: parameters whose errors are made at once, rather than part by part.
        """
        self._sent = _Sent(compressed=not self.bypassed)
        if not self._sent.compressed:
            return
        layout, group = self._unit_layout(), self._group
        self._scatter.begin(layout.num_blocks, device)
        if self._gather in self.hops:
            self._gather.begin(-(-layout.num_blocks // group.size()), device)
        if self.config.error_feedback and expected:
            blocks = [layout.blocks_per_part[index] for index in expected]
            self._scatter.error.add(dict(zip(expected, blocks, strict=True)), device)
            if self._gather in self.hops:
                owners = self._owners(expected, blocks)
                self._gather.error.add(self._own_blocks(expected, blocks, owners), device)

    def _owners(self, active: Sequence[int], blocks: Sequence[int]) -> Tensor:
        """Which replica sums each block of these parameters."""
        firsts = list(accumulate(self._unit_layout().blocks_per_part, initial=0))
        return summing_replicas([firsts[i] for i in active], blocks, self._group.size())

    def _own_blocks(
        self, active: Sequence[int], blocks: Sequence[int], owners: Tensor
    ) -> dict[int, int]:
        """How many blocks of each parameter this replica sums."""
        is_own = (owners == self._group.rank()).split_with_sizes(list(blocks))
        return {index: int(own.sum()) for index, own in zip(active, is_own, strict=True)}

    @without_autocast
    def reduce_part(self, gradient: Tensor, active: tuple[int, ...] | None, factor: float) -> None:
        """Sum the gradients of `active` parameters over replicas, times `factor`, in place.

        Args:
            gradient: of these parameters, one after the other.
            active: which these are, none of them twice in one reduction; None: nobody knows.
            factor: of the sum.
        """
        group, sent = self._replicas, self._sent
        self.check_ranks(gradient, active, group)
        sent.ring_bytes += 2 * gradient.nbytes * (group.size() - 1) // group.size()
        if not sent.compressed:
            self._stock(gradient, group, factor)
            return
        check_gradient_dtype(f"{self.unit.label}: loco-fsdp", gradient.dtype)
        if self._node is None:
            self._reduce_across(gradient, active, factor)
        else:
            self._reduce_over_nodes(gradient, active, factor, self._node)

    def _reduce_over_nodes(
        self,
        gradient: Tensor,
        active: tuple[int, ...] | None,
        factor: float,
        node: dist.ProcessGroup,
    ) -> None:
        """Inside the node, between nodes, and inside again."""
        spans, numels = self.unit.spans, [self.unit.shard_numels[i] for i in active or ()]
        starts = [*accumulate(numels, initial=0)]
        if spans is not None:
            starts = [spans.starts[i] for i in active or ()]
        elif sum(numels) != gradient.numel():
            active, numels, starts = None, [gradient.numel()], [0]
        packing = RowPacking(starts, numels, node.size())
        shape = (node.size(), sum(packing.part_numels))
        rows = self._workspace.get("node rows", shape, gradient.device, gradient.dtype)
        part = self._workspace.get("node part", shape[1:], gradient.device, gradient.dtype)
        packing.pack(gradient, rows)
        reduce_scatters([part], [rows.view(-1)], node)
        self._reduce_across(part, active, factor)
        all_gather(rows.view(-1), part, node)
        packing.unpack(rows, gradient)
        self._sent.node_bytes += 2 * part.nbytes * (node.size() - 1)

    def _reduce_across(
        self, gradient: Tensor, active: tuple[int, ...] | None, factor: float
    ) -> None:
        """The exchanges in low bits."""
        sent, plan = self._sent, self._plans(active, gradient.numel(), gradient.device)
        if plan.own is None:
            sent.row_bytes += self._reduce_in_one_hop(gradient, plan.shard, plan.feedback, factor)
        else:
            sent.row_bytes += self._reduce_in_two_hops(gradient, plan, plan.own, factor)
        sent.without_feedback |= self.config.error_feedback and not plan.feedback

    def end(self) -> None:
        """End what `begin` has begun."""
        group, sent = self._group, self._sent
        if not sent.compressed:
            leaves_node = self.leaves_node(self._replicas)
            self.counters.add_full_precision(sent.ring_bytes, leaves_node, is_whole=True)
            return
        if sent.without_feedback:
            self.end_without_feedback()
        across = sent.row_bytes * (group.size() - 1)
        remote = sent.row_bytes * remote_peers(group, self._node_size)
        self.end_reduction(across + sent.node_bytes, remote, sent.ring_bytes)

    def _reduce_in_one_hop(
        self, gradient: Tensor, table: BlockTable, feedback: bool, factor: float
    ) -> int:
        """Between two replicas; returns the bytes that each other rank gets."""
        device, num_bytes = gradient.device, table.wire.num_bytes
        wire = self._workspace.get("all-reduce wire", (1, num_bytes), device)
        receive = self._workspace.get("all-reduce receive", (self._group.size(), num_bytes), device)
        self._scatter.encode(gradient.view(1, -1), wire, table, feedback)
        with self._scatter.stage("exchange"):
            gather_rows(receive, wire, self._group)
        self._scatter.decode(receive, gradient, table, factor)
        return num_bytes

    def _reduce_in_two_hops(
        self, gradient: Tensor, plan: _Plan, own: BlockTable, factor: float
    ) -> int:
        """Between more than two replicas; returns the bytes that each other rank gets."""
        device, shape = gradient.device, (self._group.size(), own.wire.num_bytes)
        wire = self._workspace.get("all-reduce wire", shape, device)
        receive = self._workspace.get("all-reduce receive", shape, device)
        sums = self._workspace.get("all-reduce sums", (1, own.wire.num_bytes), device)

        self._scatter.encode(gradient.view(1, -1), wire, plan.shard, plan.feedback)
        with self._scatter.stage("exchange"):
            exchange(receive, wire, self._group)

        if own.num_blocks:
            self._gather.decode_encode(receive, sums, own, plan.feedback, factor)
        with self._gather.stage("exchange"):
            gather_rows(wire, sums, self._group)
        self._gather.decode(wire, gradient, plan.shard)
        return 2 * own.wire.num_bytes

    def _make_plan(self, active: tuple[int, ...] | None, numel: int, device: torch.device) -> _Plan:
        """Where the blocks of the parameters with a gradient are, and who sums them."""
        bits, block_size = self._scatter.bits, self.config.block_size
        numels = tuple(self._numels[index] for index in active or ())
        starts = None
        if self.unit.spans is not None and self._node is None:
            starts = tuple(self.unit.spans.starts[index] for index in active or ())
        known = active is not None and (starts is not None or sum(numels) == numel)
        if active is None or not known:
            # Nobody knows whose elements these are: one part, without feedback.
            active, numels = (), (numel,)
        layout = BlockLayout(numels, bits, block_size)
        feedback = known and self.config.error_feedback
        rows = None
        if feedback:
            blocks = dict(zip(active, layout.blocks_per_part, strict=True))
            self._scatter.error.add(blocks, device)
            rows = self._scatter.error.rows_of(active)
        shard = layout.place(device, rows, starts, numel)
        if self._group.size() == 2:
            return _Plan(shard, None, feedback)
        if known:
            owners = self._owners(active, layout.blocks_per_part)
        else:
            owners = summing_replicas([0], layout.blocks_per_part, self._group.size())
        shared = owners.bincount(minlength=self._group.size())
        row_starts = torch.cat([shared.new_zeros(1), shared.cumsum(0)])
        first, last = row_starts[self._group.rank() :][:2].tolist()
        own_rows = torch.arange(last - first)
        if feedback:
            own_blocks = self._own_blocks(active, layout.blocks_per_part, owners)
            self._gather.error.add(own_blocks, device)
            own_rows = self._gather.error.rows_of(tuple(own_blocks))
        shard = shard.take(owners.argsort(stable=True)).in_rows(row_starts)
        return _Plan(shard, shard.part(first, last, own_rows), feedback)
