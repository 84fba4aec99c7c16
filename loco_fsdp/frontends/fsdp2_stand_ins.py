"""What stands in for methods of FSDP2's parameter groups, and tells of the calls.

Instances are changed, not classes: other groups are as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """What is told when FSDP2 reduces a unit."""

    def owed(self) -> Collection[int]:
        """Parameters that have to take part in the next reduction, with or without a gradient."""

    def before_reduction(self) -> None:
        """The unit's gradients are about to be packed."""

    def after_reduction(self) -> None:
        """Its sharded gradients are there, or those of an accumulation are put by."""

    def forget_iteration(self) -> None:
        """The user gives up the iteration: `FSDPModule.reset_iter_state`."""


class _StandIn:
    """Stands in for methods of one parameter group, until it is taken away."""

    def __init__(self, group: Any, *names: str) -> None:
        """Each method of these names that the group's class has: `post_backward` for example is
        `self._post_backward` from now on."""
        self._group = group
        self._before = {name: vars(group).get(name) for name in names if hasattr(type(group), name)}
        for name in self._before:
            setattr(group, name, self._own(name))

    def _own(self, name: str) -> Any:
        return getattr(self, f"_{name.lstrip('_')}")

    def _put_back(self) -> None:
        """What was there. What somebody else has put over it since stays, and calls us."""
        for name, before in self._before.items():
            if vars(self._group).get(name) != self._own(name):
                continue
            if before is None:
                delattr(self._group, name)
            else:
                setattr(self._group, name, before)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        before = self._before[name]
        if before is not None:
            return before(*args, **kwargs)
        # Not bound when this was made: somebody may replace the method of the class.
        return getattr(type(self._group), name)(self._group, *args, **kwargs)


class Watched(_StandIn):
    """Stands in for two methods of one parameter group, until `stop`.

    Attributes:
        watcher: who is told of reductions.
        active: parameters in the gradient that is being reduced.
    """

    def __init__(self, group: Any, watcher: Watcher) -> None:
        self.watcher: Watcher | None = watcher
        self.active: tuple[int, ...] | None = None
        super().__init__(group, "post_backward", "_reset_iter_state")  # the latter: torch 2.13
        group._loco_watched = self

    def stop(self) -> None:
        """Put back what was there."""
        self.watcher = self.active = None
        del self._group._loco_watched
        self._put_back()

    def _post_backward(self, *unused: Any) -> Any:
        watcher = self.watcher
        if watcher is None or not self._group.reduce_grads:
            return self._call("post_backward", *unused)
        if not self._note_active(watcher.owed()):
            return self._call("post_backward", *unused)
        watcher.before_reduction()
        result = self._call("post_backward", *unused)
        watcher.after_reduction()
        return result

    def _note_active(self, owed: Collection[int]) -> bool:
        """Find out who takes part in the next reduction; whether anybody does."""
        params = self._group.fsdp_params
        active = [i for i, param in enumerate(params) if _has_gradient(self._group, param)]
        if missing := sorted(set(owed).difference(active)):
            _add_zero_gradients(params, missing, active)
            active = sorted((*active, *missing))
        self.active = tuple(active)
        return bool(active)

    def _reset_iter_state(self) -> None:
        if self.watcher is not None:
            self.watcher.forget_iteration()
        self._call("_reset_iter_state")


class Gathering(_StandIn):
    """Stands in for `unshard` of one parameter group, until `stop`.

    Attributes:
        comm: what gathers its parameters.
        stock: what did before.
        records: whether autograd was on in the last call. Off where something else has taken the
            place of `unshard`.
    """

    def __init__(self, group: Any, loaded: Callable[[], None], comm: Any, stock: Any) -> None:
        self.comm, self.stock = comm, stock
        self.records = False
        self._handles = [
            module.register_load_state_dict_post_hook(lambda *_: loaded())
            for module in {param._module_info.module: None for param in group.fsdp_params}
        ]
        super().__init__(group, "unshard")

    def stop(self) -> None:
        """Put back what was there."""
        for handle in self._handles:
            handle.remove()
        self._put_back()

    def _unshard(self, *args: Any, **kwargs: Any) -> Any:
        self.records = torch.is_grad_enabled()
        try:
            return self._call("unshard", *args, **kwargs)
        finally:
            self.records = False


def _has_gradient(group: Any, param: Any) -> bool:
    """Whether `FSDPParamGroup.post_backward` is about to pack this parameter's gradient."""
    if not hasattr(param, "_unsharded_param"):
        return False
    unsharded = param._unsharded_param
    return (
        param.unsharded_accumulated_grad is not None
        or unsharded.grad is not None
        or (getattr(group, "reduce_scatter_unused_params", False) and unsharded.requires_grad)
    )


def _add_zero_gradients(params: list[Any], missing: list[int], active: list[int]) -> None:
    accumulated = [params[index].unsharded_accumulated_grad for index in active]
    dtype = next((grad.dtype for grad in accumulated if grad is not None), None)
    for index in missing:
        unsharded = params[index]._unsharded_param
        if dtype is None:
            unsharded.grad = torch.zeros_like(unsharded)
        else:  # FSDP2 wants all gradients of a reduction in one dtype
            params[index].unsharded_accumulated_grad = torch.zeros_like(unsharded, dtype=dtype)


def in_backward() -> bool:
    """Whether this is called from a backward."""
    return bool(torch._C._current_graph_task_id() != -1)
