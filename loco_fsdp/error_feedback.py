"""The error of one FSDP unit: what this rank could not send, by parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from loco_fsdp.codec import ErrorState


class ErrorBuffer:
    """The stored error of the parameters of one FSDP unit, for every destination.

    A parameter owns a range of rows of `[peers, rows, block_size]`, one row a block. An error
    belongs to its parameter: a reduction that leaves a parameter out leaves its rows alone. Rows
    are made when a parameter is first reduced, so that frozen parameters cost nothing.

    Args:
        peers: destinations, that is ranks of the group that the unit is reduced over.
        block_size: elements of a block.
        dtype: of the payload.
    """

    def __init__(self, peers: int, block_size: int, dtype: torch.dtype) -> None:
        self.peers = peers
        self.block_size = block_size
        self.dtype = dtype
        self.rows: dict[int, range] = {}
        self.state: ErrorState | None = None

    @property
    def num_rows(self) -> int:
        """Blocks of all parameters that have rows."""
        return sum(map(len, self.rows.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of payload and scales."""
        return 0 if self.state is None else self.state.payload.nbytes + self.state.scale.nbytes

    def add(self, blocks: dict[int, int], device: torch.device) -> None:
        """Make rows, with error 0, for the parameters that have none yet.

        Args:
            blocks: blocks of each parameter, by its index.
            device: where the gradient is.
        """
        for parameter, num_blocks in blocks.items():
            if parameter not in self.rows:
                self.rows[parameter] = range(self.num_rows, self.num_rows + num_blocks)
        old = self.state
        added = self.num_rows - (0 if old is None else old.payload.shape[1])
        if not added:
            return
        fresh = ErrorState(
            torch.zeros(self.peers, added, self.block_size, dtype=self.dtype, device=device),
            torch.zeros(self.peers, added, dtype=torch.float32, device=device),
        )
        if old is not None:
            fresh = ErrorState(*(torch.cat(pair, dim=1) for pair in zip(old, fresh, strict=True)))
        self.state = fresh

    def rows_of(self, parameters: tuple[int, ...]) -> list[int]:
        """The rows of the blocks of these parameters, one after the other."""
        return [row for parameter in parameters for row in self.rows[parameter]]

    def norm(self) -> Tensor:
        """Euclidean norm of the error, float32 scalar."""
        if self.state is None:
            return torch.zeros(())
        per_block = torch.linalg.vector_norm(self.state.payload.to(torch.float32), dim=-1)
        norm: Tensor = torch.linalg.vector_norm(per_block * self.state.scale)
        return norm

    def reset(self) -> None:
        """Set the error to 0."""
        if self.state is not None:
            self.state.payload.zero_()
            self.state.scale.zero_()
