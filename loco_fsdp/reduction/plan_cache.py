"""Plans of reductions, kept for the sets of parameters that were reduced last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

_MAX_PLANS = 64  # sets of parameters with a gradient; a mixture of experts has many


class Plan(Protocol):
    """Where the blocks of a reduction are."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tables."""


PlanT = TypeVar("PlanT", bound=Plan)


class PlanCache(Generic[PlanT]):
    """What `make` returned for the last keys; the oldest go first.

    Args:
        make: the plan for a key, which is its arguments.
    """

    def __init__(self, make: Callable[..., PlanT]) -> None:
        self._make = make
        self._plans: OrderedDict[tuple[Hashable, ...], PlanT] = OrderedDict()

    def __call__(self, *key: Hashable) -> PlanT:
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make(*key)
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    @property
    def nbytes(self) -> int:
        """Bytes of the tables of all plans."""
        return sum(plan.nbytes for plan in self._plans.values())

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()
