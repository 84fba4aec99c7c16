"""One compressed exchange of an FSDP unit: its error, and what is measured about it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from loco_fsdp.codec import (
    BlockTable,
    EncodeStats,
    ErrorState,
    decode,
    decode_encode,
    drop_spike,
    encode,
    make_usual,
)
from loco_fsdp.config import LoCoConfig
from loco_fsdp.reduction.error_feedback import ErrorBuffer
from loco_fsdp.reduction.profiling import stage


class Measured(NamedTuple):
    """What a hop measured, as float64 scalars on its device; sums can be added up.

    wanted: squared norm of gradient + error in the last reduction
    unsent: squared norm of what was not sent then
    error: squared norm of the error buffer
    nonfinite_blocks: sent as NaN so far
    spikes: reductions so far whose error was dropped
    """

    wanted: Tensor
    unsent: Tensor
    error: Tensor
    nonfinite_blocks: Tensor
    spikes: Tensor


class Hop:
    """What a unit keeps for one exchange between ranks.

    Everything is made on the stream that first encodes.

    Args:
        kind: which exchange of the unit: "flat", "intra-node", "inter-node", "replicas" or "sums".
        unit_name: the FSDP unit, for profiles.
        ranks: global ranks of the group that exchanges, in its order.
        peers: rows of what is encoded at once.
        config: of the unit.
        backend: what runs the codec.
        bits: of a code; None: as `config` says.
    """

    def __init__(
        self,
        kind: str,
        unit_name: str,
        ranks: list[int],
        peers: int,
        config: LoCoConfig,
        backend: str,
        bits: int | None = None,
    ) -> None:
        self.kind = kind
        self.ranks = ranks
        self.bits = config.bits if bits is None else bits
        dtype: torch.dtype = getattr(torch, config.error_dtype)
        self.error = ErrorBuffer(peers, config.block_size, dtype)
        self._unit_name = unit_name
        self._beta = config.beta
        self._spike_limit = config.spike_limit
        self._backend = backend
        self._squares: Tensor | None = None
        self._nonfinite: Tensor | None = None
        self._nonfinite_before = 0
        self._usual: Tensor | None = None
        self._usual_before = [0.0, 0.0, 0.0]
        self._num_measured = 0
        self._rows: list[Tensor] = []

    def begin(self, num_blocks: int, device: torch.device) -> None:
        """Begin a reduction, with room to measure so many blocks over all peers.

        What is encoded until `end` belongs to it. It may come in several calls if there is one
        peer.
        """
        if self._squares is None or self._squares.shape[0] < num_blocks:
            self._squares = torch.zeros(num_blocks, 2, dtype=torch.float32, device=device)
        if self._nonfinite is None:
            self._nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
        if self._usual is None:
            self._usual = make_usual(device, self._usual_before)
        self._num_measured = 0
        self._rows = []

    def end(self) -> None:
        """Forget the errors of what was encoded since `begin` if it was a spike."""
        if self._spike_limit is None or self.error.state is None or not self._rows:
            return
        assert self._squares is not None and self._usual is not None
        rows = self._rows[0] if len(self._rows) == 1 else torch.cat(self._rows)
        squares = self._squares[: self._num_measured].view(self.error.peers, -1, 2)
        scale = self.error.state.scale
        drop_spike(squares, self._usual, scale, rows, self._spike_limit, backend=self._backend)

    def encode(self, gradient: Tensor, wire: Tensor, table: BlockTable, feedback: bool) -> None:
        """`codec.encode`."""
        with self.stage("encode"):
            error, stats = self._take_part(gradient.shape[0], table, feedback)
            encode(gradient, wire, table, stats, error, self._beta, backend=self._backend)

    def decode(self, wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0) -> None:
        """`codec.decode`."""
        with self.stage("decode"):
            decode(wire, output, table, factor, backend=self._backend)

    def decode_encode(
        self, received: Tensor, wire: Tensor, table: BlockTable, feedback: bool, factor: float
    ) -> None:
        """`codec.decode_encode`."""
        with self.stage("decode and encode"):
            error, stats = self._take_part(1, table, feedback)
            after = (table, stats, error, self._beta, factor)
            decode_encode(received, wire, *after, backend=self._backend)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A range of a profile for a stage of this exchange."""
        return stage(name, self.kind, self._unit_name)

    def _take_part(
        self, peers: int, table: BlockTable, feedback: bool
    ) -> tuple[ErrorState | None, EncodeStats]:
        """What a part of a reduction is encoded with, and where it is measured."""
        assert self._squares is not None and self._nonfinite is not None
        first = self._num_measured
        self._num_measured += peers * table.num_blocks
        squares = self._squares[first : self._num_measured].view(peers, -1, 2)
        if feedback:
            self._rows.append(table.rows)
        return self.error.state if feedback else None, EncodeStats(squares, self._nonfinite)

    def measured(self) -> Measured:
        """What was measured so far; nothing is read from the device."""
        wanted, unsent = self.last_squares()
        error = self.error.norm().to(wanted).square()
        nonfinite = torch.zeros_like(error) if self._nonfinite is None else self._nonfinite[0]
        spikes = torch.full_like(error, self._usual_before[2])
        return Measured(
            wanted,
            unsent,
            error,
            nonfinite.to(error) + self._nonfinite_before,
            spikes if self._usual is None else self._usual[2],
        )

    def last_squares(self) -> Tensor:
        """`wanted` and `unsent` of `Measured`, `[2]`."""
        if self._squares is None:
            return torch.zeros(2, dtype=torch.float64)
        return self._squares[: self._num_measured].sum(dim=0, dtype=torch.float64)

    @property
    def nonfinite_blocks(self) -> int:
        """Blocks sent as NaN so far. Waits for the device. Set it to go on from a checkpoint."""
        return self._nonfinite_before + (
            0 if self._nonfinite is None else int(self._nonfinite.item())
        )

    @nonfinite_blocks.setter
    def nonfinite_blocks(self, count: int) -> None:
        self._nonfinite_before, self._nonfinite = count, None

    def usual_state(self) -> list[float]:
        """What norms are usual and the number of spikes, for a checkpoint. Waits for the device."""
        return self._usual_before if self._usual is None else self._usual[:3].tolist()

    def load_usual(self, state: list[float]) -> None:
        """Go on from `usual_state`.

        Raises:
            ValueError: `state` is not three numbers.
        """
        if len(state) != 3:
            raise ValueError(f"usual_state() is three numbers, got {state!r}")
        self._usual_before, self._usual = [float(number) for number in state], None
