"""One compressed exchange of an FSDP unit: its error, and what is measured about it."""

from __future__ import annotations

import torch
from torch import Tensor

from loco_fsdp.codec import BlockTable, EncodeStats, decode, decode_encode, encode
from loco_fsdp.config import LoCoConfig
from loco_fsdp.error_feedback import ErrorBuffer


class Hop:
    """What a unit keeps for one exchange between `peers` ranks.

    Everything is made on the stream that first encodes.

    Args:
        peers: ranks that this one sends to, itself included.
        config: of the unit.
        backend: what runs the codec.
        bits: of a code; None: as `config` says.
    """

    def __init__(
        self, peers: int, config: LoCoConfig, backend: str, bits: int | None = None
    ) -> None:
        self.bits = config.bits if bits is None else bits
        dtype: torch.dtype = getattr(torch, config.error_dtype)
        self.error = ErrorBuffer(peers, config.block_size, dtype)
        self._beta = config.beta
        self._backend = backend
        self._squares: Tensor | None = None
        self._nonfinite: Tensor | None = None
        self._num_measured = 0

    def reserve(self, num_blocks: int, device: torch.device) -> None:
        """Make room to measure a reduction of so many blocks over all peers."""
        if self._squares is None or self._squares.shape[0] < num_blocks:
            self._squares = torch.zeros(num_blocks, 2, device=device)
        if self._nonfinite is None:
            self._nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_measured = num_blocks

    def encode(
        self, gradient: Tensor, wire: Tensor, table: BlockTable, feedback: bool, first: int = 0
    ) -> None:
        """`codec.encode`; the blocks are measured from number `first` of those reserved."""
        encode(
            gradient,
            wire,
            table,
            self._stats(wire.shape[0], table, first),
            self.error.state if feedback else None,
            self._beta,
            backend=self._backend,
        )

    def decode(self, wire: Tensor, output: Tensor, table: BlockTable, factor: float = 1.0) -> None:
        """`codec.decode`."""
        decode(wire, output, table, factor, backend=self._backend)

    def decode_encode(
        self, received: Tensor, wire: Tensor, table: BlockTable, feedback: bool, factor: float
    ) -> None:
        """`codec.decode_encode`."""
        decode_encode(
            received,
            wire,
            table,
            self._stats(1, table, 0),
            self.error.state if feedback else None,
            self._beta,
            factor,
            backend=self._backend,
        )

    def _stats(self, peers: int, table: BlockTable, first: int) -> EncodeStats:
        assert self._squares is not None and self._nonfinite is not None
        num_blocks = peers * table.layout.num_blocks
        squares = self._squares[first : first + num_blocks].view(peers, -1, 2)
        return EncodeStats(squares, self._nonfinite)

    def measured(self) -> tuple[float, float]:
        """Squared norms, in the last reduction, of gradient + error and of what was not sent."""
        if self._squares is None:
            return 0.0, 0.0
        sums = self._squares[: self._num_measured].sum(dim=0, dtype=torch.float64)
        wanted, unsent = sums.tolist()
        return wanted, unsent

    def nonfinite_blocks(self) -> int:
        """Blocks sent as NaN so far."""
        return 0 if self._nonfinite is None else int(self._nonfinite.item())
