"""What FSDP2 calls to reduce the gradient of a unit: a low-bit all-to-all and a float32 sum."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.codec import BlockLayout, BlockTable, EncodeStats, decode, encode
from loco_fsdp.codec.quantized_tensor import check_gradient_dtype
from loco_fsdp.config import LoCoConfig
from loco_fsdp.error_feedback import ErrorBuffer
from loco_fsdp.fsdp_compat import FSDPUnit
from loco_fsdp.stats import Counters
from loco_fsdp.topology import gather, remote_peers
from loco_fsdp.workspace import Workspace

# Sets of parameters with a gradient whose blocks are kept; a mixture of experts has many.
_MAX_TABLES = 64


class LoCoReduceScatter:
    """The `ReduceScatter` of one FSDP unit over a flat all-to-all.

    1. Encode: add the error to the gradient, quantize and pack it for every rank of the group, and
       update the error.
    2. `all_to_all_single` of the packed bytes: each rank gets what all ranks sent for its shard.
    3. Decode: sum the shard over all ranks in float32, in the order of ranks, and cast it.

    FSDP2 calls `allocate` for `input_tensor` `[world_size * shard]` on the compute stream and for
    `output_tensor` `[shard]` on the reduce-scatter stream, then this object on the latter. The
    object owns the error buffer, made and used on that stream.

    While `bypassed` is set, and during `warmup_steps`, stock FSDP2 reduces: the result is bitwise
    its own.
    """

    def __init__(
        self,
        unit: FSDPUnit,
        config: LoCoConfig,
        workspace: Workspace,
        node_size: int,
        backend: str,
        bypass_reason: str | None = None,
    ) -> None:
        self.unit = unit
        self.config = config
        self.bypass_reason = bypass_reason
        self.paused = False
        self.counters = Counters()
        self.error = ErrorBuffer(
            unit.world_size, config.block_size, getattr(torch, config.error_dtype)
        )
        self.encode_stats: EncodeStats | None = None
        self._squares: Tensor | None = None
        self._nonfinite: Tensor | None = None
        self._stock = unit.reduce_scatter
        self._stock_force_sum = unit.force_sum
        self._workspace = workspace
        self._node_size = node_size
        self._backend = backend
        self._table = lru_cache(_MAX_TABLES)(self._make_table)

    def install(self) -> None:
        """Make FSDP2 call this object."""
        self.unit.reduce_scatter = self
        self.unit.watch()
        self.choose_scaling()

    def remove(self) -> None:
        """Put back what was there before `install`."""
        self.unit.force_sum = self._stock_force_sum
        self.unit.unwatch()
        self.unit.reduce_scatter = self._stock
        self.error.state = None

    @property
    def bypassed(self) -> bool:
        """Whether stock FSDP2 does the next reduction."""
        counters = self.counters
        return (
            self.bypass_reason is not None
            or self.paused
            or counters.reductions + counters.bypassed_reductions < self.config.warmup_steps
        )

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
            RuntimeError: with `check_ranks`, the ranks do not reduce the same.
            TypeError: the gradient has a dtype that the codec does not take.
        """
        world_size = group.size()
        if self.config.check_ranks:
            self._check_ranks(input_tensor, group)
        baseline_bytes = input_tensor.nbytes // world_size * (world_size - 1)
        if self.bypassed:
            work = self._stock(output_tensor, input_tensor, group, op, async_op)
            next_rank = dist.get_process_group_ranks(group)[(group.rank() + 1) % world_size]
            leaves_node = next_rank // self._node_size != dist.get_rank() // self._node_size
            self.counters.add_bypassed(baseline_bytes, leaves_node)
        else:
            self._check(output_tensor, input_tensor, world_size, op, async_op)
            wire_bytes = self._reduce(output_tensor, input_tensor, group)
            remote_bytes = wire_bytes * remote_peers(group, self._node_size)
            self.counters.add(wire_bytes * (world_size - 1), remote_bytes, baseline_bytes)
            work = None
        self.choose_scaling()
        return work

    def _check_ranks(self, input_tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Raise on all ranks if they are about to reduce different things."""
        mine = {
            "FSDP unit": self.unit.name,
            "parameters": [self.unit.parameter_names[index] for index in self.unit.active],
            "elements": input_tensor.numel(),
            "dtype": str(input_tensor.dtype),
            "compressed": not self.bypassed,
        }
        (first_rank, first), *others = gather(mine, group)
        for rank, other in others:
            if other != first:
                raise RuntimeError(
                    f"rank {first_rank} is about to reduce {first}, but rank {rank} {other}. If "
                    "they use different parameters in a step, let them reduce all of them by "
                    "set_reduce_scatter_unused_params(True) (torch 2.13)"
                )

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

    def _reduce(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup) -> int:
        """Encode, exchange, decode; returns the bytes for one rank."""
        world_size, device = group.size(), input_tensor.device
        table, feedback = self._table(self.unit.active, output_tensor.numel(), device)
        layout = table.layout
        send, receive = self._workspace.buffers((world_size, layout.bytes_per_shard), device)
        stats = self._stats_for(world_size, layout, device)
        error = self.error.state if feedback else None
        gradient = input_tensor.view(world_size, -1)
        encode(gradient, send, table, stats, error, self.config.beta, backend=self._backend)
        dist.all_to_all_single(receive, send, group=group)
        decode(receive, output_tensor, table, backend=self._backend)
        if self.config.error_feedback and not feedback:
            self.counters.reductions_without_feedback += 1
        interval = self.config.reset_interval
        if interval is not None and (self.counters.reductions + 1) % interval == 0:
            self.error.reset()
        return layout.bytes_per_shard

    def _make_table(
        self, active: tuple[int, ...], shard_numel: int, device: torch.device
    ) -> tuple[BlockTable, bool]:
        """Blocks and rows of the parameters with a gradient, and whether their errors are used.

        An error belongs to a parameter. Where the parameters do not add up to the gradient, nobody
        knows whose elements these are: they are sent without feedback, as one part.
        """
        bits, block_size = self.config.bits, self.config.block_size
        numels = tuple(self.unit.shard_numels[index] for index in active)
        if sum(numels) != shard_numel:
            return BlockLayout((shard_numel,), bits, block_size).place(device), False
        layout = BlockLayout(numels, bits, block_size)
        if not self.config.error_feedback:
            return layout.place(device), False
        self.error.add(dict(zip(active, layout.blocks_per_part, strict=True)), device)
        return layout.place(device, self.error.rows_of(active)), True

    def _stats_for(self, peers: int, layout: BlockLayout, device: torch.device) -> EncodeStats:
        """Where the codec leaves its sums; the buffer is kept and only grows."""
        numel = peers * layout.num_blocks * 2
        if self._squares is None or self._nonfinite is None or self._squares.numel() < numel:
            self._squares = torch.zeros(numel, device=device)
            if self._nonfinite is None:
                self._nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
        squares = self._squares[:numel].view(peers, layout.num_blocks, 2)
        self.encode_stats = EncodeStats(squares, self._nonfinite)
        return self.encode_stats
