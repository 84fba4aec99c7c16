"""Parameters as 4-bit differences between the owner's and a replica, sent once a step."""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.codec import BlockLayout, BlockTable, WireLayout, decode_rows, encode_difference
from loco_fsdp.gather.fingerprint import fingerprint
from loco_fsdp.gather.gatherer import Gatherer, Moment, SavedReplica
from loco_fsdp.gather.host_flag import HostFlag
from loco_fsdp.reduction.exchange import gather_all_rows, gather_rows
from loco_fsdp.reduction.precision import without_autocast

# Norm of what differences may leave out, over that of the parameters: some three times what
# rounding to bfloat16 does. Steps of an optimizer leave less; other changes may leave more.
_MAX_LEFT_OUT = 2.0**-8

# What ranks tell each other with a difference: send parameters whole the next time, and that
# somebody's had changed while their old ones were used.
_WHOLE, _STALE = 1.0, 2.0

STALE = (
    "parameters were changed by something else than an optimizer, and gathers that came before the "
    "next step used the old ones: call LoCo.refresh_weights() after such a change"
)


class DifferenceGather(Gatherer):
    """The all-gather of one unit from a replica that each node keeps, in closed loop.

    To send differences of weights in 4 bits is what SDP4Bit does (arXiv 2410.15526).

    A rank keeps `replica` `[nodes, shard]`, the shards of all ranks at its place in their nodes, in
    the dtype of the gather. After a step, at the first gather outside of a backward:

    1. Encode the difference between the own shard and the own row of `replica`, of parameters that
       may have changed, in 4 bits.
    2. Exchange of the codes between ranks at the same place in their nodes.
    3. Add what they stand for to all rows, on all ranks alike: what is left out now is a part of
       the next difference, and rows stay bitwise equal.

    Each gather is then one inside the node for every row, straight into `output`.

    **When parameters may have changed.** Reduced gradients announce a step. Nothing else does:
    counters of versions do not see fused optimizers, and somebody may put other tensors in place.
    So `fingerprint` of the shard that was sent last is kept. Where the host may wait, in an
    evaluation and in what follows it, ranks look at it, and if it is another on any of them, all
    send their shards whole. In other gathers it is compared on the device, which the next exchange
    tells of.

    They are also sent whole at first, after `refresh`, and where a difference has left out more
    than a step of an optimizer does or met a number that is not finite: at once if an evaluation
    asked for it, and otherwise by the next exchange.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._replica: Tensor | None = None
        self._fingerprint: Tensor | None = None
        self._told = HostFlag()
        self._due: set[int] = set()
        self._whole = False
        self._after_evaluation = False
        self._had_gradients: frozenset[int] = frozenset()  # in the last gather
        self._changed: Tensor | None = None  # gathers of this rank's old parameters, since it told
        self._num_stale: Tensor | None = None  # all of them
        self._saved: SavedReplica | None = None

    @property
    def _node(self) -> int:
        """The row of this rank's own shard."""
        return self._inter.rank()

    @property
    def _all(self) -> range:
        """All parameters of the unit."""
        return range(len(self.unit.shard_numels))

    @property
    def _inter(self) -> dist.ProcessGroup:
        assert self._hops is not None
        return self._hops.inter

    @property
    def replica_bytes(self) -> int:
        """Bytes of the replica."""
        return 0 if self._replica is None else self._replica.nbytes

    @without_autocast
    def gather(self, output: Tensor, shard: Tensor, moment: Moment) -> None:
        """See `Gatherer.gather`."""
        if not moment.in_backward or not self._fits(shard):
            self._update(shard, moment)
        elif self._after_evaluation and not self._due and self._has_changed(shard):
            self._send_whole(shard)  # one of other parameters came between forward and backward
        self._gather_inside_node(output)

    def gradients_reduced(self, parameters: tuple[int, ...] | None) -> None:
        """See `Gatherer.gradients_reduced`."""
        self._due.update(self._all if parameters is None else parameters)

    def refresh(self) -> None:
        """Send parameters whole the next time; those that come with a saved replica are known."""
        self._whole = self._saved is None

    def free(self) -> None:
        """Free the replica and the tables."""
        super().free()
        self._replica = self._fingerprint = self._saved = None

    def save(self) -> SavedReplica | None:
        """See `Gatherer.save`."""
        if self._saved is not None or self._replica is None or self._fingerprint is None:
            return self._saved
        return SavedReplica(
            self._replica[self._node].to("cpu", copy=True),
            self._fingerprint.cpu(),
            sorted(self._due),
            sorted(self._all if self._after_evaluation else self._had_gradients),
            self._whole or self._told.read() >= _WHOLE,
            dist.get_process_group_ranks(self._inter),
        )

    def load(self, saved: SavedReplica | None) -> None:
        """See `Gatherer.load`."""
        self._saved, self._whole = saved, saved is None

    def fits(self, saved: SavedReplica) -> bool:
        """See `Gatherer.fits`."""
        numels = self.unit.shard_numels
        ranks = dist.get_process_group_ranks(self._inter)
        return (
            saved.ranks == ranks
            and saved.row.shape == (sum(numels),)
            and {*saved.due, *saved.beside} <= set(self._all)
        )

    def _fits(self, shard: Tensor) -> bool:
        replica = self._replica
        return (
            replica is not None
            and replica.shape[1:] == shard.shape
            and (replica.dtype, replica.device) == (shard.dtype, shard.device)
        )

    def _update(self, shard: Tensor, moment: Moment) -> None:
        """Bring replicas up to date, if they may be out of it."""
        may_wait = self._restore(shard.device) or not moment.recording
        if not self._fits(shard) or self._whole:
            self._send_whole(shard)
        elif self._due:
            if self._was_told_to_send_whole():
                self._send_whole(shard)
            else:
                self._send_difference(shard, self._may_have_changed(moment))
                if may_wait and self._was_told_to_send_whole():
                    self._send_whole(shard)
        elif may_wait or self._after_evaluation or self._had_gradients:
            if self._has_changed(shard):
                self._send_whole(shard)
        else:
            self._note_changes(shard)
        self._after_evaluation = not moment.recording
        self._had_gradients = moment.gradients

    def _may_have_changed(self, moment: Moment) -> tuple[int, ...]:
        """Parameters to send a difference of."""
        # Somebody may evaluate other parameters, and put back what was there before.
        if self._after_evaluation or not moment.recording:
            return tuple(self._all)
        # Of those with a gradient the step may have come since it was announced and sent.
        return tuple(sorted(self._due | self._had_gradients | moment.gradients))

    def _restore(self, device: torch.device) -> bool:
        """Make the replica that `load` was given a row of; whether it was."""
        if self._saved is None:
            return False
        saved, self._saved = self._saved, None
        self._fill(saved.row.to(device))
        self._fingerprint = saved.fingerprint.to(device)
        self._due, self._whole = set(saved.due), saved.whole
        self._after_evaluation, self._had_gradients = False, frozenset(saved.beside)
        self._told = HostFlag()
        return True

    def _send_whole(self, shard: Tensor) -> None:
        """Make `replica` of the shards as they are."""
        self._fill(shard)
        assert self._replica is not None
        # All have all rows: nobody needs to be told of numbers that are not finite.
        least, largest = self._replica.aminmax()
        finite = least.isfinite() & largest.isfinite()
        self._told.write((~finite).to(torch.float32).view(1) * _WHOLE)
        self._sent(shard)

    def _fill(self, row: Tensor) -> None:
        with torch.inference_mode(False):
            if not self._fits(row):
                shape = (self._inter.size(), row.numel())
                self._replica = torch.empty(shape, dtype=row.dtype, device=row.device)
        assert self._replica is not None
        with self._stage("exchange"):
            gather_rows(self._replica, row.view(1, -1), self._inter)
        self.counters.refreshes += 1
        self.counters.add(0, row.nbytes * (self._inter.size() - 1))

    def _send_difference(self, shard: Tensor, parameters: tuple[int, ...]) -> None:
        assert self._replica is not None
        table: BlockTable = self._plans(parameters, shard.device)
        num_bytes, num_nodes = table.wire.num_bytes, self._inter.size()
        send = self._workspace.get("difference", (1, num_bytes), shard.device)
        received = self._workspace.get("differences", (num_nodes, num_bytes), shard.device)
        stats = self._stats(table.num_blocks, shard.device)
        own = self._replica[self._node]
        with self._stage("encode"):
            encode_difference(shard, own, send, table, stats, backend=self._backend)
        unsent = stats.squares[..., 1].sum(dtype=torch.float64)
        if len(parameters) < len(self._all):  # the others may have changed as well
            unsent = unsent + self._squared_distance(shard, own, parameters)
        squares = torch.linalg.vector_norm(shard, dtype=torch.float32).double().square()
        self._squares = torch.stack([unsent, squares])
        within = (unsent <= _MAX_LEFT_OUT**2 * squares) & (stats.nonfinite[0] == 0)
        told = (~within).to(torch.float32).view(1) * _WHOLE
        if self._changed is not None:
            told = told.maximum((self._changed > 0).to(torch.float32) * _STALE)
            self._changed = None
        _last_scale(send, table)[0].copy_(told)
        with self._stage("exchange"):
            gather_rows(received, send, self._inter)
        self.counters.add(0, num_bytes * (num_nodes - 1))
        with self._stage("decode"):
            nodes = torch.arange(num_nodes, device=shard.device)
            decode_rows(received, self._replica, table, nodes, add=True, backend=self._backend)
        self._told.write(_last_scale(received, table).max().view(1))
        self._sent(shard)

    def _squared_distance(self, shard: Tensor, row: Tensor, without: tuple[int, ...]) -> Tensor:
        """Of a shard from a row, but for these parameters; a float64 scalar."""
        numels = list(self.unit.shard_numels)
        shards, rows = (
            torch.cat([part for i, part in enumerate(parts) if i not in without])
            for parts in (shard.split_with_sizes(numels), row.split_with_sizes(numels))
        )
        distance: Tensor = torch.linalg.vector_norm(shards - rows, dtype=torch.float32)
        return distance.double().square()

    def _sent(self, shard: Tensor) -> None:
        self._due, self._whole = set(), False
        self._fingerprint = fingerprint(shard)

    def _was_told_to_send_whole(self) -> bool:
        """What ranks told each other with the last exchange."""
        told = self._told.read()
        if told >= _STALE:
            self._notices.say(self.unit.label, [STALE], [self._inter])  # others do not know it
        return told >= _WHOLE

    def _has_changed(self, shard: Tensor) -> bool:
        """Whether anybody's parameters are others than those that were sent. Waits for it."""
        changed = self._differs(shard).to(torch.float32)
        dist.all_reduce(changed, dist.ReduceOp.MAX, group=self._inter)
        return bool(changed.item())

    def _note_changes(self, shard: Tensor) -> None:
        """Keep in mind, on the device, that old parameters are used."""
        changed = self._differs(shard).to(torch.int64)
        self._changed = changed if self._changed is None else self._changed + changed
        self._num_stale = changed if self._num_stale is None else self._num_stale + changed

    def _differs(self, shard: Tensor) -> Tensor:
        assert self._fingerprint is not None
        return (fingerprint(shard) != self._fingerprint).any().view(1)

    def _stale(self) -> Tensor:
        return super()._stale() if self._num_stale is None else self._num_stale

    def _gather_inside_node(self, output: Tensor) -> None:
        assert self._replica is not None and self._hops is not None
        intra = self._hops.intra
        shards = output.view(self._inter.size(), intra.size(), -1)
        with self._stage("gather"):
            gather_all_rows(list(shards), list(self._replica.unsqueeze(1)), intra)
        self.counters.add(self._replica.nbytes * (intra.size() - 1), 0)

    def _make_plan(self, parameters: tuple[int, ...], device: torch.device) -> BlockTable:
        """Blocks of these parameters of a shard. A row of the wire has room for one more, whose
        scale is what ranks tell each other."""
        numels = self.unit.shard_numels
        starts = tuple(accumulate(numels, initial=0))
        layout = BlockLayout(tuple(numels[i] for i in parameters), self.bits, self._block_size)
        with torch.inference_mode(False):
            table = layout.place(
                device, starts=tuple(starts[i] for i in parameters), shard_numel=starts[-1]
            )
        return table._replace(wire=WireLayout(layout.num_blocks + 1, self.bits, self._block_size))


def _last_scale(wire: Tensor, table: BlockTable) -> Tensor:
    """The scale of the last block that each row of the wire has room for, `[rows, 1]` float32."""
    _, scale = table.wire.on_wire(table.wire.num_blocks - 1, table.wire.num_blocks)
    return wire[:, scale].view(torch.float32)
