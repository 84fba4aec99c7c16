"""LoCoFSDP: what it shards, what it refuses, and that the model stays the user's own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from loco_fsdp import LoCoConfig, LoCoFSDP
from ranks import RankPool, raised
from toy import WIDTH, Mlp, Net, Scale, batch, cpu_mesh, names_of, shard

Ranks = Callable[[int], RankPool]


def step(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


# --- the model stays the user's --------------------------------------------------------------


def wrapped() -> list[Any]:
    model = Net()
    keys = list(model.state_dict())
    result: Any = LoCoFSDP(model, LoCoConfig(bits=8), mesh=cpu_mesh(), wrap=Mlp)
    step(model)
    return [
        result is model,
        isinstance(model, LoCoFSDP) and isinstance(model, FSDPModule) and isinstance(model, Net),
        list(model.state_dict()) == keys,
        [name for name, _ in model.named_parameters()] == keys,
        [(unit.name, unit.bits) for unit in result.loco.units],
        result.loco.stats()["reductions"],
    ]


def test_locofsdp_shards_in_place_and_attaches(ranks: Ranks) -> None:
    units = [("(root)", 8), ("blocks.0", 8), ("blocks.1", 8)]
    assert ranks(2).run(wrapped) == [[True, True, True, True, units, 3]] * 2


def class_names() -> list[Any]:
    ours, stock = LoCoFSDP(Net(), mesh=cpu_mesh()), shard(Net())
    read = [
        (c.__name__, c.__qualname__, c.__module__, c.__doc__) for c in (type(ours), type(stock))
    ]
    saved = [raised(torch.save, model, io.BytesIO()) for model in (ours, stock)]
    return [read, saved, type(ours) is type(stock)]


def test_the_class_reads_as_the_one_of_fully_shard(ranks: Ranks) -> None:
    # What save_pretrained writes as the architecture is this name without "FSDP".
    for (ours, stock), (our_error, stock_error), same_class in ranks(2).run(class_names):
        assert ours == stock
        assert ours[0].removeprefix("FSDP") == "Net"
        assert "pickle" in our_error.lower() and our_error == stock_error
        assert not same_class  # `isinstance(model, LoCoFSDP)` tells them apart


def slices() -> list[str]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Mlp()]), nn.Linear(8, 8))
    LoCoFSDP(model, mesh=cpu_mesh())
    return [type(model[:1]).__name__, type(model).__name__, type(model[1][:1]).__name__]


def test_slicing_gives_plain_containers(ranks: Ranks) -> None:
    assert ranks(2).run(slices) == [["Sequential", "FSDPSequential", "ModuleList"]] * 2


def training(with_loco: bool) -> list[float]:
    """Losses of a small regression, with the gradients reduced in 8 bits or in full."""
    torch.manual_seed(0)
    model = Net()
    config = LoCoConfig(bits=8, min_numel=0 if with_loco else 10**9)
    LoCoFSDP(model, config, mesh=cpu_mesh(), wrap=Mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(60):
        x = torch.randn(32, WIDTH, generator=generator)
        loss = (model(x) - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_trains_as_well_as_in_full_precision(ranks: Ranks) -> None:
    full, low = ranks(2).run(training, False)[0], ranks(2).run(training, True)[0]
    assert low[-1] < 0.7 * low[0]
    assert low[-1] == pytest.approx(full[-1], rel=0.02)
    assert low != full


# --- units that `wrap` and the model name ----------------------------------------------------


def choose(case: str) -> list[str]:
    model: Any = Net()
    wrap: Any = {
        "class": nn.Linear,
        "classes": (Mlp, nn.Linear),
        "function": lambda name, module: name.endswith("1"),
    }.get(case)
    model._no_split_modules = {"named": ["Linear"], "absent": ["Block"]}.get(case)
    return names_of(LoCoFSDP(model, mesh=cpu_mesh(), wrap=wrap))


LINEARS = ["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"]


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("class", LINEARS),
        ("classes", LINEARS),  # the linears hold all parameters of the blocks
        ("function", ["(root)", "blocks.1"]),
        ("named", LINEARS),
        ("absent", ["(root)", "blocks.0", "blocks.1"]),
    ],
)
def test_wrap_and_no_split_modules_choose_the_units(
    ranks: Ranks, case: str, names: list[str]
) -> None:
    assert ranks(2).run(choose, case) == [names] * 2


# --- what is broadcast over replicas ---------------------------------------------------------


class WithIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.scales = nn.ParameterList(torch.empty(3) for _ in range(2))
        self.own = nn.Parameter(torch.empty(3))
        self.norm = Scale()


def broadcast() -> dict[str, list[float]]:
    """First element of each parameter, whose elements are the rank before LoCoFSDP sees them."""
    model = WithIgnored()
    for parameter in model.parameters():
        nn.init.constant_(parameter, dist.get_rank())
    ignored = {model.own, model.blocks[1].up.bias, model.norm.weight}
    LoCoFSDP(model, mesh=cpu_mesh(2, 2), ignored_params=ignored)
    found = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        found[name] = sorted(set(local.flatten().tolist()))
    return found


def test_replicas_get_what_fsdp_shards_and_nothing_else(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(4).run(broadcast)):
        for name, values in found.items():
            # Ranks 0 and 1 are the first replica; of 3 elements the second shard holds one.
            if name in ("own", "blocks.1.up.bias", "norm.weight"):
                assert values == [rank], name
            else:
                assert values == [rank % 2], name
        assert {"scales.0", "blocks.1.up.weight", "blocks.0.down.bias"} < set(found)


# --- what is refused -------------------------------------------------------------------------


def tied_net() -> nn.Module:
    model = Net()
    model.blocks[1].up.weight = model.blocks[0].up.weight
    return model


def wrong_wraps() -> list[str]:
    mesh = cpu_mesh()
    named: Any = Net()
    named.loco = 1
    return [
        raised(LoCoFSDP, shard(Net()), mesh=mesh),
        raised(LoCoFSDP, Net(), mesh=mesh, wrap=nn.Conv2d),
        raised(LoCoFSDP, Net(), mesh=mesh, wrap="Block"),
        raised(LoCoFSDP, "model", mesh=mesh),
        raised(LoCoFSDP, Net(), {"bits": 4}, mesh=mesh),
        raised(LoCoFSDP, named, mesh=mesh),
        raised(LoCoFSDP, tied_net(), mesh=mesh, wrap=Mlp),
    ]


def test_locofsdp_refuses_what_it_cannot_wrap(ranks: Ranks) -> None:
    starts = [
        "ValueError: FSDPNet is sharded already: use attach(model, config)",
        "ValueError: wrap=<class 'torch.nn.modules.conv.Conv2d'> matches no module of Net, which",
        "TypeError: wrap='Block': it must be a module class",
        "TypeError: LoCoFSDP shards an nn.Module, not str",
        "TypeError: config={'bits': 4}",
        "ValueError: Net has an attribute 'loco'",
        "ValueError: wrap=<class 'toy.Mlp'> tears a parameter that modules share: "
        "blocks.0.up.weight and blocks.1.up.weight would be",
    ]
    for messages in ranks(2).run(wrong_wraps):
        for message, start in zip(messages, starts, strict=True):
            assert message.startswith(start)


def tied_and_allowed() -> list[Any]:
    """Modules that share a weight in one unit, or whose shared weight FSDP leaves alone."""
    together: Any = LoCoFSDP(tied_net(), mesh=cpu_mesh(), wrap=lambda name, _: name == "head")
    model = tied_net()
    shared = model.blocks[0].up.weight
    apart: Any = LoCoFSDP(model, mesh=cpu_mesh(), wrap=Mlp, ignored_params={shared})
    return [
        [names_of(m), m.blocks[0].up.weight is m.blocks[1].up.weight] for m in (together, apart)
    ]


def test_shared_weights_stay_shared(ranks: Ranks) -> None:
    expected = [[["(root)", "head"], True], [["(root)", "blocks.0", "blocks.1"], True]]
    assert ranks(2).run(tied_and_allowed) == [expected] * 2


def sharded_elsewhere() -> str:
    """Weights over all ranks, although the mesh has two replicas."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    whole = FSDPMeshInfo(mesh=cpu_mesh(), shard_mesh_dim=0)
    return raised(
        LoCoFSDP,
        Net(),
        mesh=cpu_mesh(2, 2),
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), whole) if p.ndim == 2 else None,
    )


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="parameters of a module on several meshes came with torch 2.13",
)
def test_replicas_that_hold_different_shards_are_refused(ranks: Ranks) -> None:
    (message,) = set(ranks(4).run(sharded_elsewhere))
    assert message.startswith("ValueError: shard_placement_fn shards FSDP unit '")
