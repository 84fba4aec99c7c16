"""The error of one FSDP unit: what this rank could not send, by parameter."""

from __future__ import annotations

import torch
from torch import Tensor

from loco_fsdp.codec import ErrorState

_NORM_ELEMENTS = 2**20  # of the error that are widened to float32 at a time


class ErrorBuffer:
    """The stored error of the parameters of one FSDP unit, for every destination.

    A parameter owns a range of rows of `[peers, rows, block_size]`, one row a block. An error
    belongs to its parameter: a reduction that leaves a parameter out leaves its rows alone. Rows
    are made when a parameter is first reduced, so that frozen parameters cost nothing; they start
    at 0, or with what `load` was given.

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
        self._loaded: dict[int, ErrorState] = {}

    @property
    def num_rows(self) -> int:
        """Blocks of all parameters that have rows."""
        return sum(map(len, self.rows.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of payload and scales."""
        return 0 if self.state is None else self.state.payload.nbytes + self.state.scale.nbytes

    def add(self, blocks: dict[int, int], device: torch.device) -> None:
        """Make rows for the parameters that have none yet.

        Args:
            blocks: blocks of each parameter, by its index.
            device: where the gradient is.
        """
        new: dict[int, range] = {}
        num_rows = self.num_rows
        for parameter, num_blocks in blocks.items():
            if parameter not in self.rows:
                new[parameter] = range(num_rows, num_rows + num_blocks)
                num_rows += num_blocks
        self.rows |= new
        if not any(new.values()):
            return
        # One allocation that errors are copied into: concatenating would take twice the memory.
        before, self.state = self.state, self._zeros(num_rows, device)
        if before is not None:
            _copy_rows(before, self.state, range(before.scale.shape[1]))
        for parameter, rows in new.items():
            if (loaded := self._loaded.pop(parameter, None)) is not None:
                _copy_rows(loaded, self.state, rows)

    def _zeros(self, num_rows: int, device: torch.device) -> ErrorState:
        shape = (self.peers, num_rows)
        return ErrorState(
            torch.zeros(*shape, self.block_size, dtype=self.dtype, device=device),
            torch.zeros(shape, dtype=torch.float32, device=device),
        )

    def rows_of(self, parameters: tuple[int, ...]) -> Tensor:
        """The rows of the blocks of these parameters, one after the other, `[blocks]` int64."""
        device = None if self.state is None else self.state.scale.device
        ranges = [self.rows[parameter] for parameter in parameters]
        first, count = (
            torch.tensor(values, dtype=torch.int64).to(device)
            for values in ([rows.start for rows in ranges], [len(rows) for rows in ranges])
        )
        num_blocks = sum(map(len, ranges))
        # Row minus place among the blocks is the same within a parameter.
        shift = first - (count.cumsum(0) - count)
        place = torch.arange(num_blocks, dtype=torch.int64, device=device)
        return shift.repeat_interleave(count, output_size=num_blocks) + place

    def by_parameter(self) -> dict[int, ErrorState]:
        """A copy on the CPU of each parameter's error, `[peers, blocks, ...]`, by its index."""
        errors = dict(self._loaded)
        if self.state is not None:
            for parameter, rows in self.rows.items():
                selected = (tensor[:, rows.start : rows.stop] for tensor in self.state)
                errors[parameter] = ErrorState(*(part.to("cpu", copy=True) for part in selected))
        return errors

    def load(self, errors: dict[int, ErrorState]) -> None:
        """Forget all rows; parameters whose errors are given start with these when next reduced.

        Not before: memory is to be made on the stream that reduces, and for no frozen parameter.
        """
        self.free()
        self._loaded = errors

    def free(self) -> None:
        """Forget all rows and errors, and free their memory."""
        self.rows, self.state, self._loaded = {}, None, {}

    def norm(self) -> Tensor:
        """Euclidean norm of the error, float32 scalar, with little memory beside the error's."""
        if self.state is None:
            return torch.zeros((), dtype=torch.float32)
        payload, scale = self.state.payload.flatten(0, 1), self.state.scale.flatten()
        per_block = torch.empty_like(scale)
        num_rows = max(1, _NORM_ELEMENTS // self.block_size)
        for first in range(0, scale.numel(), num_rows):
            rows = slice(first, first + num_rows)
            widened = payload[rows].to(torch.float32)
            torch.linalg.vector_norm(widened, dim=-1, out=per_block[rows])
        norm: Tensor = torch.linalg.vector_norm(per_block.mul_(scale))
        return norm

    def reset(self) -> None:
        """Set the error to 0."""
        self._loaded.clear()
        if self.state is not None:
            self.state.payload.zero_()
            self.state.scale.zero_()


def _copy_rows(source: ErrorState, target: ErrorState, rows: range) -> None:
    """Copy all of `source` into these rows of `target`."""
    for given, tensor in zip(source, target, strict=True):
        tensor[:, rows.start : rows.stop].copy_(given)
