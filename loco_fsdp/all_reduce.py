"""The all-reduce of a unit's gradient over replicas, in low bits, in FSDP2's all-reduce hook."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.codec import BlockLayout, BlockTable
from loco_fsdp.codec.quantized_tensor import check_gradient_dtype
from loco_fsdp.config import LoCoConfig
from loco_fsdp.exchange import exchange_pieces
from loco_fsdp.fsdp_compat import FSDPUnit
from loco_fsdp.hop import Hop
from loco_fsdp.reducer import Reducer
from loco_fsdp.topology import remote_peers
from loco_fsdp.workspace import Workspace

_MAX_PLANS = 64  # as in reduce_scatter.py


class BlockRange(NamedTuple):
    """Consecutive blocks of a shard, which one replica sums.

    first, last: their numbers among the blocks of all parameters given, `last` excluded
    parts: for each of its parameters: place among those given, first block, `last` block, elements
    """

    first: int
    last: int
    parts: tuple[tuple[int, int, int, int], ...]


class _Plan(NamedTuple):
    """Where blocks are, and which of them the replicas sum.

    shard: all blocks, with the rows of the errors of this rank's gradient
    own: those that this replica sums, with the rows of the errors of sums
    pieces: codes and scales of each replica's blocks on the wire of the shard
    feedback: whether errors are added
    """

    shard: BlockTable
    own: BlockTable
    pieces: list[tuple[slice, slice]]
    feedback: bool


def split_blocks(
    numels: Sequence[int],
    unit_first_blocks: Sequence[int],
    unit_blocks: int,
    block_size: int,
    num_ranges: int,
) -> list[BlockRange]:
    """Which replica sums which blocks of the parameters with a gradient.

    A block belongs to the same replica whatever other parameters have a gradient, because the error
    of its sum is there.

    Args:
        numels: elements of each parameter's part.
        unit_first_blocks: number of each parameter's first block among all blocks of the unit.
        unit_blocks: blocks of the unit.
        block_size: elements of a block.
        num_ranges: replicas.
    """
    per_range = -(-unit_blocks // num_ranges)
    ranges = []
    first = 0
    for index in range(num_ranges):
        parts = []
        for place, (numel, offset) in enumerate(zip(numels, unit_first_blocks, strict=True)):
            num_blocks = -(-numel // block_size)
            low = min(max(index * per_range - offset, 0), num_blocks)
            high = min(max((index + 1) * per_range - offset, 0), num_blocks)
            if low < high:
                elements = min(high * block_size, numel) - low * block_size
                parts.append((place, low, high, elements))
        last = first + sum(high - low for _, low, high, _ in parts)
        ranges.append(BlockRange(first, last, tuple(parts)))
        first = last
    return ranges


class LoCoAllReduce(Reducer):
    """The all-reduce over replicas of one FSDP unit, whose model is sharded inside of each replica.

    1. Encode: add the error to the shard's gradient, quantize and pack it. Each replica sums some
       of the blocks.
    2. Exchange: each replica gets these blocks from all replicas.
    3. Decode, sum in float32 in the order of replicas and divide; add the error of the sum,
       quantize and pack again.
    4. Exchange: each replica sends its packed sums to all others, and decodes all sums. All
       replicas decode the same bytes: their gradients are bitwise equal.

    FSDP2 calls this object with the shard's gradient `[shard]`, reduced over the shard group, on
    its all-reduce stream. It divides by the number of replicas, unless the user has set a divide
    factor. While `set_requires_all_reduce(False)` holds, gradients are kept here and summed up in
    full precision.
    """

    def __init__(
        self,
        unit: FSDPUnit,
        config: LoCoConfig,
        bypass_reason: str | None,
        *,
        group: dist.ProcessGroup,
        backend: str,
        node_size: int,
        workspace: Workspace,
    ) -> None:
        self._group = group
        super().__init__(unit, config, bypass_reason)
        replicas = dist.get_process_group_ranks(group)
        self._scatter = Hop("replicas", unit.name, replicas, 1, config, backend)
        self._gather = Hop("sums", unit.name, replicas, 1, config, backend)
        self.hops = [self._scatter, self._gather]
        self._node_size = node_size
        self._workspace = workspace
        self._deferred: Tensor | None = None
        self._plan = lru_cache(_MAX_PLANS)(self._make_plan)

    def install(self) -> None:
        """Make FSDP2 call this object."""
        self.unit.all_reduce_hook = self
        self.unit.watch()

    def remove(self) -> None:
        """Leave replicas to reduce in full precision, and free the error buffers.

        The model is sharded inside of each replica only: without a hook they would drift apart.
        """
        self.bypass_reason = "detached"
        self.free_error()

    def forget_tables(self) -> None:
        """Place blocks anew: the width, or the rows of the errors have changed."""
        self._plan.cache_clear()

    def place_of_error(self, hop: Hop, parameter: int) -> tuple[int, ...]:
        """Also which blocks of the unit are the parameter's: replicas share these blocks."""
        place = super().place_of_error(hop, parameter)
        if hop is self._scatter:
            return place
        layout = self._unit_layout()
        return (*place, sum(layout.blocks_per_part[:parameter]), layout.num_blocks)

    def deciding_groups(self) -> list[dist.ProcessGroup]:
        """The shard group, and the replicas."""
        return [*super().deciding_groups(), self._group]

    def _unit_layout(self) -> BlockLayout:
        return BlockLayout(self.unit.shard_numels, self._scatter.bits, self.config.block_size)

    def __call__(self, reduce_output: Tensor) -> None:
        """Average `reduce_output` `[shard]` over replicas, in place.

        Raises:
            TypeError: the gradient has a dtype that the codec does not take.
            RuntimeError: other parameters have a gradient than when it was deferred; or, with
                `check_ranks`, the replicas do not reduce the same.
        """
        if reduce_output.device.type != "cpu":
            # Made on the reduce-scatter stream; FSDP2 may free it before this stream is done.
            reduce_output.record_stream(torch.accelerator.current_stream(reduce_output.device))
        if not self.unit.all_reduce_grads:
            self._defer(reduce_output)
            return
        if self._deferred is not None:
            self._check_deferred(reduce_output)
            reduce_output += self._deferred
            self._deferred = None
        self.check_ranks(reduce_output, self._group)
        replicas = self._group.size()
        ring_bytes = 2 * reduce_output.nbytes * (replicas - 1) // replicas
        factor = 1 / replicas if self.unit.gradient_divide_factor is None else 1.0
        if self.bypassed:
            dist.all_reduce(reduce_output, group=self._group)
            reduce_output *= factor
            self.counters.add_bypassed(ring_bytes, remote_peers(self._group, self._node_size) > 0)
        else:
            check_gradient_dtype(f"FSDP unit {self.unit.name!r}: loco-fsdp", reduce_output.dtype)
            wire_bytes = self._reduce(reduce_output, factor)
            remote = remote_peers(self._group, self._node_size)
            inter_node_bytes = wire_bytes * remote // (replicas - 1)
            self.end_reduction(wire_bytes, inter_node_bytes, ring_bytes)

    def _defer(self, reduce_output: Tensor) -> None:
        """Keep the gradient for the next all-reduce; FSDP2 accumulates zeros meanwhile."""
        if self._deferred is None:
            self._deferred = reduce_output.clone()
        else:
            self._check_deferred(reduce_output)
            self._deferred += reduce_output
        reduce_output.zero_()

    def _check_deferred(self, reduce_output: Tensor) -> None:
        if self._deferred is not None and self._deferred.shape != reduce_output.shape:
            raise RuntimeError(
                f"FSDP unit {self.unit.name!r}: {self._deferred.numel()} elements wait for an "
                f"all-reduce, and now {reduce_output.numel()} have a gradient. Use the same "
                "parameters in all microbatches, or set_reduce_scatter_unused_params(True)"
            )

    def _reduce(self, gradient: Tensor, factor: float) -> int:
        """The four steps; returns the bytes that this rank sent."""
        group, device = self._group, gradient.device
        replicas, rank = group.size(), group.rank()
        plan = self._plan(self.unit.active, gradient.numel(), device)
        shard, own = plan.shard.wire, plan.own.wire
        wire = self._workspace.get("all-reduce wire", (1, shard.num_bytes), device)
        receive = self._workspace.get("all-reduce receive", (replicas, own.num_bytes), device)
        sums = self._workspace.get("all-reduce sums", (1, own.num_bytes), device)
        by_replica = [[wire[0, piece] for piece in pieces] for pieces in plan.pieces]
        own_pieces = own.on_wire(0, own.num_blocks)
        own_sums = [sums[0, piece] for piece in own_pieces]

        self._scatter.reserve(shard.num_blocks, device)
        self._scatter.encode(gradient.view(1, -1), wire, plan.shard, plan.feedback)
        with self._scatter.stage("exchange"):
            received = [[row[piece] for piece in own_pieces] for row in receive]
            exchange_pieces(received, by_replica, group)

        self._gather.reserve(own.num_blocks, device)
        if own.num_blocks:
            self._gather.decode_encode(receive, sums, plan.own, plan.feedback, factor)
        with self._gather.stage("exchange"):
            exchange_pieces(by_replica, [own_sums] * replicas, group)
        self._gather.decode(wire, gradient, plan.shard)

        if self.config.error_feedback and not plan.feedback:
            self.counters.reductions_without_feedback += 1
        sizes = [sum(piece.nbytes for piece in pieces) for pieces in by_replica]
        return sum(sizes) - sizes[rank] + sizes[rank] * (replicas - 1)

    def _make_plan(self, active: tuple[int, ...], numel: int, device: torch.device) -> _Plan:
        """Where the blocks of the parameters with a gradient are."""
        bits, block_size = self._scatter.bits, self.config.block_size
        numels = [self.unit.shard_numels[index] for index in active]
        unit_layout = self._unit_layout()
        firsts = list(accumulate(unit_layout.blocks_per_part, initial=0))
        if known := sum(numels) == numel:
            first_blocks, unit_blocks = [firsts[index] for index in active], firsts[-1]
        else:  # nobody knows whose elements these are: one part, without feedback
            active, numels = (), [numel]
            first_blocks, unit_blocks = [0], -(-numel // block_size)
        ranges = split_blocks(numels, first_blocks, unit_blocks, block_size, self._group.size())
        feedback = known and self.config.error_feedback
        own = ranges[self._group.rank()]
        rows = own_rows = None
        if feedback:
            self._scatter.error.add(
                {index: unit_layout.blocks_per_part[index] for index in active}, device
            )
            rows = self._scatter.error.rows_of(active)
            self._gather.error.add(
                {active[place]: high - low for place, low, high, _ in own.parts}, device
            )
            own_rows = self._gather.error.rows_of(tuple(active[place] for place, *_ in own.parts))
        shard = BlockLayout(tuple(numels), bits, block_size).place(device, rows)
        own_numels = tuple(elements for *_, elements in own.parts)
        return _Plan(
            shard,
            BlockLayout(own_numels, bits, block_size).place(device, own_rows),
            [shard.wire.on_wire(part.first, part.last) for part in ranges],
            feedback,
        )
