"""What gathers in low bits have in common: what is sent, counted and measured."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.codec import GRADIENT_DTYPES, EncodeStats
from loco_fsdp.config import LoCoConfig
from loco_fsdp.reduction.groups import Hops
from loco_fsdp.reduction.notices import Notices
from loco_fsdp.reduction.plan_cache import PlanCache
from loco_fsdp.reduction.profiling import stage
from loco_fsdp.reduction.unit import Unit
from loco_fsdp.reduction.workspace import Workspace


@dataclass
class GatherCounters:
    """Plain integers of one unit; bytes are those that this rank sent to others.

    Attributes:
        wire_bytes: of parameters, in low bits or not.
        inter_node_bytes: those of them that went to other nodes.
        refreshes: times that replicas were sent whole.
    """

    wire_bytes: int = 0
    inter_node_bytes: int = 0
    refreshes: int = 0

    def add(self, inside: int, across: int) -> None:
        """Count bytes sent to ranks of this node, and to those of others."""
        self.wire_bytes += inside + across
        self.inter_node_bytes += across

    def __add__(self, other: GatherCounters) -> GatherCounters:
        return GatherCounters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Moment(NamedTuple):
    """When parameters are gathered.

    in_backward: a backward runs: it computes with the parameters of its forward
    recording: autograd records what is computed with them; false in an evaluation
    gradients: parameters with a reduced gradient, which an optimizer may not have applied yet, or
        may apply again
    """

    in_backward: bool
    recording: bool
    gradients: frozenset[int]


class SavedReplica(NamedTuple):
    """What a rank has to keep of a replica to go on bitwise.

    row: this rank's own row of it, `[shard]`, on the CPU
    fingerprint: of the parameters that were sent last
    due: parameters that may have changed since
    beside: those that go with the next difference, as nobody knows
    whole: whether they have to be sent whole
    ranks: global ranks that have the replica, in the order of its rows
    """

    row: Tensor
    fingerprint: Tensor
    due: list[int]
    beside: list[int]
    whole: bool
    ranks: list[int]


class Gatherer:
    """One unit's gathers of parameters, whoever calls them.

    Attributes:
        unit: whose parameters are gathered.
        bits: of a parameter between nodes.
        counters: what was sent so far.
    """

    def __init__(
        self,
        unit: Unit,
        config: LoCoConfig,
        *,
        group: dist.ProcessGroup,
        hops: Hops | None,
        backend: str,
        node_size: int,
        workspace: Workspace,
        notices: Notices,
    ) -> None:
        assert config.weight_bits is not None
        self.unit = unit
        self.bits = config.weight_bits
        self.counters = GatherCounters()
        self._block_size = config.block_size
        self._group = group
        self._hops = hops
        self._backend = backend
        self._node_size = node_size
        self._workspace = workspace
        self._notices = notices
        self._nonfinite: Tensor | None = None
        self._squares: Tensor | None = None
        self._plans: PlanCache[Any] = PlanCache(self._make_plan)

    def takes(self, shard: Tensor) -> bool:
        """Whether `shard` holds the unit's parameters, in a dtype that the codec takes."""
        return shard.dtype in GRADIENT_DTYPES and shard.numel() == sum(self.unit.shard_numels)

    def gather(self, output: Tensor, shard: Tensor, moment: Moment) -> None:
        """Gather the parameters of all ranks.

        Args:
            output: `[ranks * shard]`, in the order of ranks, written.
            shard: `[shard]`, this rank's parameters; it may be the part of `output` that is theirs.
            moment: when; the same on all ranks.
        """
        raise NotImplementedError

    def gradients_reduced(self, parameters: tuple[int, ...] | None) -> None:
        """An optimizer is going to change these parameters; None: any of them."""

    def refresh(self) -> None:
        """Parameters were changed by somebody else than an optimizer. On all ranks."""

    def save(self) -> SavedReplica | None:
        """What a checkpoint needs; None if nothing is kept. Waits for the device."""
        return None

    def load(self, saved: SavedReplica | None) -> None:
        """Go on from `save()`; None: send parameters whole. All ranks give one, or none does."""

    def fits(self, saved: SavedReplica) -> bool:
        """Whether `saved` is of these parameters and ranks."""
        return False

    def free(self) -> None:
        """Free what is kept between gathers."""
        self._plans.clear()

    @property
    def replica_bytes(self) -> int:
        """Bytes of the copies of other nodes' parameters."""
        return 0

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of blocks."""
        return self._plans.nbytes

    def _make_plan(self, *key: Any) -> Any:
        """Where the blocks of a gather are."""
        raise NotImplementedError

    def measured(self) -> Tensor:
        """Of the last gather that sent in low bits: squared norms of what was left out, and of
        this rank's parameters, `[2]` float64; and how many gathers used old parameters."""
        squares = torch.zeros(2, dtype=torch.float64) if self._squares is None else self._squares
        return torch.cat([squares, self._stale().to(squares)])

    def _stale(self) -> Tensor:
        """Gathers that used parameters which had changed since, `[1]`."""
        return torch.zeros(1)

    def _stats(self, num_blocks: int, device: torch.device) -> EncodeStats:
        """Where encoding `num_blocks` blocks is measured."""
        if self._nonfinite is None or self._nonfinite.device != device:
            with torch.inference_mode(False):
                self._nonfinite = torch.zeros(1, dtype=torch.int64, device=device)
        shape = (1, num_blocks, 2)
        squares = self._workspace.get("weight squares", shape, device, torch.float32)
        return EncodeStats(squares, self._nonfinite.zero_())

    def _stage(self, name: str) -> AbstractContextManager[None]:
        """A range of a profile."""
        return stage(name, "parameters", self.unit.name)
