"""What FSDP2 calls to gather the parameters of a unit in low bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from loco_fsdp.config import LoCoConfig
from loco_fsdp.frontends.candidate import Parts, Plan
from loco_fsdp.frontends.fsdp2 import FSDPUnit
from loco_fsdp.frontends.fsdp2_stand_ins import in_backward
from loco_fsdp.gather.differences import DifferenceGather
from loco_fsdp.gather.gatherer import Gatherer, Moment
from loco_fsdp.gather.quantized import QuantizedGather
from loco_fsdp.reduction.notices import Notices
from loco_fsdp.reduction.reducer import Reducer
from loco_fsdp.reduction.topology import remote_peers


class FSDPAllGather:
    """The `AllGather` of one FSDP unit.

    FSDP2 calls `allocate` for `output_tensor` `[world_size * shard]`, copies this rank's shard, all
    parameters with their padding in the dtype of the gather, into its place there, and calls this
    object. It does so before a forward, before a backward, and wherever somebody unshards; a
    backward gathers as its forward did.

    Where it gathers over another group (`reshard_after_forward` as a number), it gathers what a
    forward has gathered already: those are left to FSDP2.
    """

    def __init__(
        self, unit: FSDPUnit, gatherer: Gatherer, reducer: Reducer, notices: Notices
    ) -> None:
        self.gatherer = gatherer
        self._unit = unit
        self._reducer = reducer
        self._notices = notices
        self._stock = unit.all_gather
        self._was_paused = False  # in the last forward that a backward may come to

    def install(self) -> None:
        """Make FSDP2 call this object."""
        self._stock = self._unit.install_all_gather(self, self.gatherer.refresh)

    def remove(self) -> None:
        """Put back what was there before."""
        self._unit.uninstall_all_gather()
        self.gatherer.free()

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for the parameters of all ranks, as stock FSDP2 makes it."""
        return self._stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather `input_tensor` `[shard]` of all ranks into `output_tensor` `[ranks * shard]`.

        With `async_op` it is done as well before the stream goes on: there is nothing to wait for.
        """
        moment = Moment(in_backward(), self._unit.records, self._unit.with_gradient)
        paused = self._was_paused if moment.in_backward else self._reducer.pauses > 0
        if moment.recording and not moment.in_backward:
            self._was_paused = paused
        is_other_group = group.size() != self._unit.world_size
        if paused or is_other_group or not self._takes(input_tensor):
            return self._stock(output_tensor, input_tensor, group, async_op)
        self.gatherer.gather(output_tensor, input_tensor, moment)
        return None

    def _takes(self, shard: Tensor) -> bool:
        """Whether these are parameters; extensions of FSDP2 gather what they like."""
        if self.gatherer.takes(shard):
            return True
        reason = f"parameters in full precision: they are gathered as {shard.dtype}"
        self._notices.say(self._unit.label, [reason], self._unit.process_groups)
        return False


def check_weight_bits(unit: FSDPUnit, config: LoCoConfig) -> None:
    """Raise a ValueError if `reshard_after_forward` gathers in another way."""
    ranks = unit.post_forward_ranks
    if config.weight_bits == 4 and ranks is not None:
        raise ValueError(
            f"weight_bits=4: {unit.label} has reshard_after_forward={ranks}, which keeps a second "
            "copy of what each node has already: leave it True, or use weight_bits=8"
        )


def make_all_gather(
    unit: FSDPUnit, plan: Plan, parts: Parts, reducer: Reducer
) -> FSDPAllGather | None:
    """What gathers a unit as planned; None where FSDP2 does. A collective of its shard group.

    Raises:
        ValueError: `weight_bits=4` where nodes have one rank, or are not equal.
    """
    config = plan.config
    if config.weight_bits is None or plan.bypass_reason is not None:
        return None
    group = unit.process_groups[0]
    route = parts.groups.through_nodes(group, config.node_size)
    if config.weight_bits == 4:
        if remote_peers(group, plan.node_size) == 0:
            return None
        problem = route.reason or "each node has one rank, which would have to keep the whole model"
        if route.hops is None:
            raise ValueError(f"weight_bits=4: {problem}. Use weight_bits=8, or None")
    kind = QuantizedGather if config.weight_bits == 8 else DifferenceGather
    gatherer = kind(
        unit,
        config,
        group=group,
        hops=route.hops,
        backend=plan.backend,
        node_size=plan.node_size,
        workspace=parts.workspace,
        notices=parts.notices,
    )
    return FSDPAllGather(unit, gatherer, reducer, parts.notices)
