"""Parameters in 8 bits: every gather quantizes them anew, and nothing is kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from loco_fsdp.codec import BlockLayout, BlockTable, decode_rows, encode
from loco_fsdp.gather.gatherer import Gatherer, Moment
from loco_fsdp.reduction.exchange import gather_rows
from loco_fsdp.reduction.precision import without_autocast
from loco_fsdp.reduction.topology import remote_peers


class _Plan(NamedTuple):
    """The blocks of a shard, and the rank that each row of codes comes from."""

    table: BlockTable
    ranks: Tensor

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.ranks.nbytes


class QuantizedGather(Gatherer):
    """The all-gather of one unit in 8 bits, rounded to nearest.

    1. Encode the own shard, in blocks of `block_size` elements of one parameter.
    2. Exchange of the codes, over all ranks; or, where nodes have several ranks, between ranks at
       the same place in their nodes, and of what came from there inside the node.
    3. Decode all shards, the own one too, in one launch into `output`: all ranks compute with the
       same parameters.
    """

    @without_autocast
    def gather(self, output: Tensor, shard: Tensor, moment: Moment) -> None:
        """See `Gatherer.gather`."""
        plan: _Plan = self._plans(shard.device)
        table, device = plan.table, shard.device
        send = self._workspace.get("parameters", (1, table.wire.num_bytes), device)
        stats = self._stats(table.num_blocks, device)
        with self._stage("encode"):
            encode(shard.view(1, -1), send, table, stats, backend=self._backend)
        wanted, unsent = stats.squares.sum(dim=(0, 1), dtype=torch.float64).unbind()
        self._squares = torch.stack([unsent, wanted])
        with self._stage("exchange"):
            received = self._exchange(send)
        with self._stage("decode"):
            rows = output.view(self._group.size(), -1)
            decode_rows(received, rows, table, plan.ranks, add=False, backend=self._backend)

    def _exchange(self, send: Tensor) -> Tensor:
        """The codes of all ranks, `[ranks, num_bytes]`, in the order of the plan."""
        num_bytes, world_size = send.shape[1], self._group.size()
        received = self._workspace.get("all parameters", (world_size, num_bytes), send.device)
        if self._hops is None:
            gather_rows(received, send, self._group)
            remote = remote_peers(self._group, self._node_size)
            self.counters.add(num_bytes * (world_size - 1 - remote), num_bytes * remote)
            return received
        inter, intra = self._hops.inter, self._hops.intra
        across = self._workspace.get("parameters across", (inter.size(), num_bytes), send.device)
        gather_rows(across, send, inter)
        gather_rows(received.view(intra.size(), -1), across.view(1, -1), intra)
        self.counters.add(across.nbytes * (intra.size() - 1), num_bytes * (inter.size() - 1))
        return received

    def _make_plan(self, device: torch.device) -> _Plan:
        layout = BlockLayout(self.unit.shard_numels, self.bits, self._block_size)
        ranks = torch.arange(self._group.size())
        if self._hops is not None:  # from each rank of the node, what it has from all nodes
            ranks = ranks.view(-1, self._hops.intra.size()).T.flatten()
        with torch.inference_mode(False):
            return _Plan(layout.place(device), ranks.to(device))
