"""Which modules of a model become FSDP units beside the root."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TypeAlias

from torch import nn

from loco_fsdp.wrappers import unwrapped

Wrap: TypeAlias = "type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]"

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def units_to_shard(
    module: nn.Module, wrap: Wrap | None, ignored: Collection[nn.Parameter] = ()
) -> list[nn.Module]:
    """The modules below `module` that become FSDP units, in the order of `named_modules`.

    Args:
        wrap: as for `LoCoFSDP`.
        ignored: parameters that FSDP leaves alone.

    Raises:
        ValueError: `wrap` matches no module, or tears a parameter that modules share.
        TypeError: `wrap` is none of what it may be.
    """
    if wrap is None:
        return _without_torn(module, _named_or_repeated(module), ignored)
    matches = _matcher(wrap)
    found = [sub for name, sub in module.named_modules() if name and matches(name, sub)]
    if not found:
        names = sorted({type(sub).__name__ for sub in module.modules()})
        raise ValueError(
            f"wrap={wrap!r} matches no module of {type(module).__name__}, "
            f"which holds {', '.join(names)}"
        )
    torn = next(_torn(module, found, ignored), None)
    if torn is not None:
        raise ValueError(
            f"wrap={wrap!r} tears a parameter that modules share: {' and '.join(torn)} would be in "
            "different FSDP units, and no longer be one. Leave the modules that share it out of "
            "wrap, or put them into one unit"
        )
    return found


def _matcher(wrap: Wrap) -> Callable[[str, nn.Module], bool]:
    classes = wrap if isinstance(wrap, tuple) else (wrap,)
    if all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        return lambda _, sub: isinstance(sub, classes)  # type: ignore[arg-type]
    if callable(wrap) and not isinstance(wrap, type):
        return wrap
    raise TypeError(
        f"wrap={wrap!r}: it must be a module class, a tuple of them, "
        "(name, module) -> bool, or None"
    )


def _named_or_repeated(module: nn.Module) -> list[nn.Module]:
    """What the model names in `_no_split_modules`, else its outermost repeated blocks."""
    names = getattr(module, "_no_split_modules", None) or ()
    submodules = [sub for name, sub in module.named_modules() if name]
    named = [sub for sub in submodules if type(sub).__name__ in names]
    blocks = set(_outermost_blocks(module))
    return named or [sub for sub in submodules if sub in blocks]


def _outermost_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks of the lists in `module`, and of none that is inside of a block.

    A list inside of a block may hold experts: ranks that run different ones would gather, and
    reduce, those of one rank with those of another.
    """
    if isinstance(module, _LISTS) and _repeats(module):
        for block in filter(_may_be_block, module.children()):
            # fully_shard takes no list that is never called: its parts then, but no list in it.
            parts = [block] if _is_called(block) else block.children()
            yield from (part for part in parts if _is_called(part) and _has_parameters(part))
    elif not isinstance(module, nn.ModuleList):  # what is in one is a block, repeated or not
        for name, child in module.named_children():
            if not ("expert" in name.lower() and isinstance(child, _LISTS)):
                yield from _outermost_blocks(child)


def _repeats(modules: nn.Module) -> bool:
    """Whether this list holds blocks, rather than different parts of a model.

    Blocks of several classes, in a hybrid model, come back: more than one is of the same class.
    """
    classes = [type(unwrapped(child)) for child in modules.children() if _may_be_block(child)]
    if isinstance(modules, nn.ModuleList) and len(classes) == 1:
        return True
    repeated = {cls for cls in classes if classes.count(cls) > 1}
    # Several lists beside something else are parts, each with blocks of its own.
    return (len(set(classes)) == 1 and bool(repeated)) or not repeated <= set(_LISTS)


def _may_be_block(module: nn.Module) -> bool:
    """Whether it is more than one layer of torch, such as a `Linear` in a list of heads."""
    module = unwrapped(module)
    single = not any(True for _ in module.children())
    return _has_parameters(module) and not (single and type(module).__module__.startswith("torch."))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_called(module: nn.Module) -> bool:
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return not (is_list and type(module).forward is nn.Module.forward)


def _without_torn(
    module: nn.Module, units: list[nn.Module], ignored: Collection[nn.Parameter]
) -> list[nn.Module]:
    """`units` without those that share a parameter with what is outside: the root holds both."""
    while torn := {unit for places in _torn(module, units, ignored) for unit in places.values()}:
        units = [unit for unit in units if unit not in torn]
    return units


def _torn(
    module: nn.Module, units: list[nn.Module], ignored: Collection[nn.Parameter]
) -> Iterator[dict[str, nn.Module]]:
    """Parameters that are in several units: their names, each with the unit that has it.

    `fully_shard` would make a parameter of its own for each unit, and not say so.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    inside = {module, *units}
    skipped = {id(parameter) for parameter in ignored}
    places: dict[int, dict[str, nn.Module]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        while modules[owner] not in inside:
            owner = owner.rpartition(".")[0]
        if id(parameter) not in skipped:
            places.setdefault(id(parameter), {})[name] = modules[owner]
    yield from (found for found in places.values() if len(set(found.values())) > 1)
