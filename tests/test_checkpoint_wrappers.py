"""Checkpoints of models that torch.compile or activation checkpointing wraps, or did then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

from checkpoints import bits_of, contents, put, train
from loco_fsdp import LoCoConfig, attach
from loco_fsdp.wrappers import without_wrappers
from ranks import RankPool
from toy import Net, cpu_mesh, shard

Ranks = Callable[[int], RankPool]

# A guard that no width satisfies: 2 bits become 4 after 16 reductions, and 8 after 32.
GUARDED = {"bits": 2, "block_size": 32, "guard": 1e-6}


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def with_blocks(wrapper: Callable[[nn.Module], nn.Module], first: bool) -> nn.Module:
    """Each block wrapped before it is sharded, so that the wrapper is the unit, or after."""
    model = Net()
    if not first:
        shard(model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = wrapper(block)
    return shard(model) if first else model


def with_compiled_root() -> nn.Module:
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    return fully_shard(compiled(model), mesh=cpu_mesh())


def in_one_unit(wrapper: Callable[[nn.Module], nn.Module] | None) -> nn.Module:
    """Both blocks in a unit, whose second one is wrapped."""
    model = Net()
    fully_shard(list(model.blocks), mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    if wrapper is not None:
        model.blocks[1] = wrapper(model.blocks[1])
    return model


BLOCKS = ["(root)", "blocks.0", "blocks.1"]
WRAPPED = ["(root)", "blocks.0._orig_mod", "blocks.1._orig_mod"]
INSIDE = ["(root)", *(f"blocks.{index}._checkpoint_wrapped_module" for index in range(2))]
ROOT = ["_orig_mod", "_orig_mod.blocks.0", "_orig_mod.blocks.1"]
WRAPPINGS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "plain": (lambda: shard(Net()), BLOCKS),
    "compiled blocks": (lambda: with_blocks(compiled, first=True), BLOCKS),
    "blocks in compiled ones": (lambda: with_blocks(compiled, first=False), WRAPPED),
    "checkpointed blocks": (lambda: with_blocks(checkpoint_wrapper, first=True), BLOCKS),
    "blocks in checkpointed ones": (lambda: with_blocks(checkpoint_wrapper, first=False), INSIDE),
    "compiled root": (with_compiled_root, ["(root)", *ROOT[1:]]),
    "root in a compiled one": (lambda: compiled(shard(Net())), ROOT),
    "one unit": (lambda: in_one_unit(None), ["(root)", "blocks.0, blocks.1"]),
    "one unit with a compiled block": (
        lambda: in_one_unit(compiled),
        ["(root)", "blocks.0, blocks.1._orig_mod"],
    ),
}
ANEW = [pair for name in list(WRAPPINGS)[1:7] for pair in (("plain", name), (name, "plain"))]
ANEW += [("one unit", "one unit with a compiled block"), ("compiled blocks", "checkpointed blocks")]


def wrapped_anew(saved: str, loaded: str) -> Any:
    """20 steps, and 14 more: with the same model, and with one that is wrapped in another way."""
    results, names = [], []
    state: dict[str, bytes] = {}
    weights: list[Tensor] = []
    for wrapping in (saved, loaded):
        torch.manual_seed(0)
        model: Any = WRAPPINGS[wrapping][0]()
        loco = attach(model, LoCoConfig(**GUARDED))
        names.append([unit.name for unit in loco.units])
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        if not state:
            train(model, optimizer, range(20))
            state = loco.state_dict()
            weights = [p.to_local().detach().clone() for p in model.parameters()]
        else:
            put(weights, model)
            loco.load_state_dict(state, strict=True)
        bits = [unit.bits for unit in loco.units]
        train(model, optimizer, range(20, 34))
        errors = [tensor for *_, payload, scale in contents(loco.state_dict())["errors"]
                  for tensor in (payload, scale)]  # fmt: skip
        later = [unit.bits for unit in loco.units]
        values = [p.to_local().detach() for p in model.parameters()]
        results.append((bits, later, loco.stats(), bits_of([*errors, *values])))
    return names, results


@pytest.mark.parametrize(("saved", "loaded"), ANEW)
def test_wrappers_change_nothing_in_a_checkpoint(ranks: Ranks, saved: str, loaded: str) -> None:
    for names, (straight, resumed) in ranks(2).run(wrapped_anew, saved, loaded):
        assert names == [WRAPPINGS[saved][1], WRAPPINGS[loaded][1]]
        assert set(straight[0]) == {4} and set(straight[1]) == {8}
        assert resumed == straight


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("_orig_mod", "(root)"),
        ("(root)", "(root)"),
        ("(root) [1]", "(root) [1]"),
        ("_orig_mod [1]", "(root) [1]"),
        ("a._orig_mod._checkpoint_wrapped_module [0]", "a [0]"),
        ("_orig_mod.a.0, b._checkpoint_wrapped_module.c._orig_mod", "a.0, b.c"),
        ("_orig_mod.a._checkpoint_wrapped_module.weight", "a.weight"),
        ("my_orig_mod.a", "my_orig_mod.a"),
    ],
)
def test_names_without_wrappers(name: str, plain: str) -> None:
    assert without_wrappers(name) == plain


def guarded_and_regrouped() -> Any:
    """The guard of one unit for the whole model goes on from that of its first parameter's unit."""
    torch.manual_seed(0)
    old = shard(Net())
    first = attach(old, LoCoConfig(**GUARDED))
    train(old, torch.optim.SGD(old.parameters(), lr=1e-4), range(20))
    state = first.state_dict()
    second = attach(fully_shard(Net(), mesh=cpu_mesh()), LoCoConfig(**GUARDED))
    second.load_state_dict(state, strict=True)
    (unit,) = contents(second.state_dict())["units"].values()
    units = contents(state)["units"].values()
    (saved,) = [old_unit for old_unit in units if unit["parameters"][0] in old_unit["parameters"]]
    before, after = (
        {name: bits_of([payload, scale]) for _, name, _, payload, scale in contents(s)["errors"]}
        for s in (state, second.state_dict())
    )
    return [unit["bits"], saved["bits"]], [unit["guard"], saved["guard"]], before == after


def test_a_guard_goes_on_in_units_wrapped_anew(ranks: Ranks) -> None:
    for bits, (now, saved), same_errors in ranks(2).run(guarded_and_regrouped):
        assert bits == [4, 4]
        assert now == saved and now[0] == 4 and now[1][0] > 0
        assert same_errors
