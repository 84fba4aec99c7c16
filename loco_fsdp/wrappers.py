"""What `torch.compile` and activation checkpointing put around a module, and into names.

Both hold what they wrap under a private name of torch (2.9 to 2.14), which becomes a part of the
names of parameters and modules.
"""

from __future__ import annotations

from torch import nn

_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def unwrapped(module: nn.Module) -> nn.Module:
    """What `torch.compile` and activation checkpointing have wrapped, or `module` itself."""
    children = dict(module.named_children())
    while len(children) == 1 and (name := next(iter(children))) in _WRAPPED:
        module = children[name]
        children = dict(module.named_children())
    return module


def without_wrappers(name: str) -> str:
    """The name of a parameter or of an FSDP unit, as it is where nothing is wrapped.

    A unit's name may be several names, joined by commas, and end in the number of its group.
    """
    names, bracket, group = name.partition(" [")
    cleaned = [
        ".".join(part for part in member.split(".") if part not in _WRAPPED) or "(root)"
        for member in names.split(", ")
    ]
    return ", ".join(cleaned) + bracket + group
