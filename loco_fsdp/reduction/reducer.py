"""What the reductions of LoCo have in common: when they compress, and what they count."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from loco_fsdp.codec import GRADIENT_DTYPES
from loco_fsdp.config import LoCoConfig
from loco_fsdp.reduction.guard import WIDTHS, Guard
from loco_fsdp.reduction.hop import Hop
from loco_fsdp.reduction.notices import Notices
from loco_fsdp.reduction.plan_cache import PlanCache
from loco_fsdp.reduction.stats import Counters
from loco_fsdp.reduction.topology import gather, leaves_node
from loco_fsdp.reduction.unit import Unit

WITHOUT_FEEDBACK = (
    "sent without error feedback: its parameters cannot be told apart, because something has taken "
    "the place of FSDP2's post_backward, or this torch has another one"
)


def unsupported_dtype(unit: Unit) -> str | None:
    """Why gradients in the unit's reduce dtype cannot be compressed; None if they can."""
    if unit.reduce_dtype in GRADIENT_DTYPES:
        return None
    return f"gradients are reduced in {unit.reduce_dtype}"


class Reducer:
    """One unit's part in LoCo, whoever calls it.

    Attributes:
        unit: what is reduced.
        config: how it is compressed.
        bits: of a code now, which a guard may have raised; None: full precision.
        bypass_reason: why it never is; None if it is.
        topology_reason: why it is reduced over another topology than one would expect.
        pauses: how many of `LoCo.paused()` are open.
        counters: what was done so far.
        hops: its compressed exchanges, each with its error.
        guard: what raises its width; None if nothing does.
    """

    def __init__(
        self,
        unit: Unit,
        config: LoCoConfig,
        bypass_reason: str | None,
        *,
        node_size: int,
        notices: Notices,
        topology_reason: str | None = None,
    ) -> None:
        self.unit = unit
        self.config = config
        self.bits: int | None = config.bits
        self.bypass_reason = bypass_reason
        self.topology_reason = topology_reason
        self.pauses = 0
        self.counters = Counters()
        self.hops: list[Hop] = []
        self.guard: Guard | None = None
        self._node_size = node_size
        self._notices = notices
        self._plans: PlanCache[Any] = PlanCache(self._make_plan)
        if config.guard is not None and bypass_reason is None:
            self.guard = Guard(config.guard, unit.label, self.deciding_groups())

    def deciding_groups(self) -> list[dist.ProcessGroup]:
        """Groups whose ranks all have to do the same: choose a width, or load a state."""
        return self.unit.process_groups

    @property
    def bypassed(self) -> bool:
        """Whether the next reduction is in full precision."""
        counters = self.counters
        return (
            self.bypass_reason is not None
            or self.bits is None
            or unsupported_dtype(self.unit) is not None
            or self.pauses > 0
            or counters.reductions + counters.bypassed_reductions < self.config.warmup_steps
        )

    @property
    def inactive_reason(self) -> str | None:
        """Why this unit is not compressed now; None if it is. The model may have been cast."""
        if self.bits is None:
            return f"relative error above guard={self.config.guard} in {WIDTHS[-1]} bits"
        return self.bypass_reason or self.unit.lost_reason or unsupported_dtype(self.unit)

    @property
    def remarks(self) -> list[str]:
        """What nobody has asked for: why it is not compressed as well as the user may think."""
        if self.bypass_reason is None and self.unit.lost_reason is not None:
            return [f"not compressed: {self.unit.lost_reason}"]
        remarks = []
        if self.bypass_reason is None and (reason := unsupported_dtype(self.unit)):
            remarks.append(f"in full precision: {reason}")
        if self.topology_reason is not None:
            remarks.append(f"over a flat all-to-all: {self.topology_reason}")
        if self.counters.reductions_without_feedback:
            remarks.append(WITHOUT_FEEDBACK)
        return [*remarks, *self.unit.remarks]

    @property
    def error_bytes(self) -> int:
        """Bytes of all error buffers."""
        return sum(hop.error.nbytes for hop in self.hops)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables of blocks."""
        return self._plans.nbytes

    def retire(self) -> None:
        """Reduce in full precision for good, and free the error buffers."""
        self.bypass_reason = "detached"
        self.free_error()

    def before_reduction(self) -> None:
        """The unit is about to be reduced."""
        self._notices.say_late()
        self._notices.say(self.unit.label, self.remarks, self.deciding_groups())

    def reset_error(self) -> None:
        """Set the errors to 0."""
        for hop in self.hops:
            hop.error.reset()

    def set_bits(self, bits: int | None) -> None:
        """Go on in another width, or in full precision, which has no error. On all ranks."""
        self.bits = bits
        if bits is None:
            self.free_error()
        else:
            for hop in self.hops:
                if hop.kind != "intra-node":
                    hop.bits = bits
        self.forget_plans()

    def free_error(self) -> None:
        """Forget the errors, and free their memory."""
        for hop in self.hops:
            hop.error.free()
        self.forget_plans()

    def forget_plans(self) -> None:
        """Place blocks anew: the width, or the rows of the errors have changed."""
        self._plans.clear()

    def _make_plan(self, *key: Any) -> Any:
        """Where the blocks of a reduction are."""
        raise NotImplementedError

    def place_of_error(self, hop: Hop, parameter: int) -> tuple[int, ...]:
        """What makes the rows of a parameter's error mean what they mean, beside the hop."""
        return (self.unit.shard_numels[parameter],)

    def end_reduction(self, wire_bytes: int, inter_node_bytes: int, baseline_bytes: int) -> None:
        """Count a compressed reduction, and decide on errors: spikes, resets and the guard."""
        for hop in self.hops:
            hop.end()
        self.counters.add(wire_bytes, inter_node_bytes, baseline_bytes)
        interval = self.config.reset_interval
        if interval is not None and self.counters.reductions % interval == 0:
            self.reset_error()
        if self.guard is not None and self.bits is not None:
            bits = self.guard.next_width(self.hops, self.bits)
            if bits != self.bits:
                self.set_bits(bits)

    def end_without_feedback(self) -> None:
        """Count a compressed reduction whose parameters could not be told apart."""
        self.counters.reductions_without_feedback += 1
        self._notices.say(self.unit.label, [WITHOUT_FEEDBACK], self.deciding_groups())

    def leaves_node(self, group: dist.ProcessGroup) -> bool:
        """Whether what this rank sends around a ring of `group` goes to another node."""
        return leaves_node(group, self._node_size)

    def check_ranks(
        self, tensor: Tensor, active: tuple[int, ...] | None, group: dist.ProcessGroup
    ) -> None:
        """With `LoCoConfig.check_ranks`, raise on all ranks if they reduce different things."""
        if not self.config.check_ranks:
            return
        names = self.unit.parameter_names
        mine = {
            "unit": self.unit.name,
            "parameters": None if active is None else [names[index] for index in active],
            "elements": tensor.numel(),
            "dtype": str(tensor.dtype),
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
