"""What is a unit where nobody names one: the outermost repeated blocks of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from loco_fsdp import LoCoConfig, LoCoFSDP
from ranks import RankPool, heard
from toy import WIDTH, Mlp, Scale, batch, cpu_mesh, names_of, reduced

Ranks = Callable[[int], RankPool]


class Expert(Mlp):
    pass


class MixtureOfExperts(nn.Module):
    """Rank r uses expert r only."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) + self.parts[dist.get_rank() % 2](x)


class Hybrid(MixtureOfExperts):
    pass


class Parts(nn.Module):
    """Modules by name, beside a head."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.head = nn.Linear(WIDTH, WIDTH)


def list_of(*modules: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(modules)


def attention_and_mlp() -> nn.ModuleDict:
    return nn.ModuleDict({"attention": nn.Linear(WIDTH, WIDTH), "mlp": Mlp()})


def with_experts() -> nn.ModuleDict:
    return nn.ModuleDict({"attention": Mlp(), "experts": list_of(Expert(), Expert())})


def tied(*modules: Any) -> nn.ModuleList:
    for module in modules[1:]:
        module.up.weight = modules[0].up.weight
    return nn.ModuleList(modules)


def repeated(module: nn.Module) -> nn.ModuleList:
    return nn.ModuleList([module] * 3)


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "list": (lambda: Parts(layers=list_of(Mlp(), Mlp())), ["layers.0", "layers.1"]),
    "dict": (lambda: Parts(h=nn.ModuleDict({"a": Mlp(), "b": Mlp()})), ["h.a", "h.b"]),
    "sequential": (lambda: Parts(body=nn.Sequential(Mlp(), Mlp())), ["body.0", "body.1"]),
    "root is a sequential": (lambda: nn.Sequential(Mlp(), Mlp(), Mlp()), ["0", "1", "2"]),
    "root with embedding and head": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Mlp(), nn.Dropout(), Mlp(), nn.Identity()),
        ["(root)", "1", "3"],
    ),
    "one block": (lambda: Parts(layers=list_of(MixtureOfExperts())), ["layers.0"]),
    "blocks without layers": (
        lambda: Parts(layers=list_of(Scale(), Scale())),
        ["layers.0", "layers.1"],
    ),
    "experts in blocks": (
        lambda: Parts(layers=list_of(MixtureOfExperts(), MixtureOfExperts())),
        ["layers.0", "layers.1"],
    ),
    "blocks of two classes": (
        lambda: Parts(layers=list_of(MixtureOfExperts(), Hybrid(), MixtureOfExperts())),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "one of each class": (lambda: Parts(layers=list_of(MixtureOfExperts(), Hybrid())), []),
    "list of experts outside of lists": (
        lambda: Parts(moe=Parts(experts=list_of(Expert(), Expert()))),
        [],
    ),
    "list of heads": (
        lambda: Parts(
            layers=list_of(Mlp(), Mlp()), heads=list_of(nn.Linear(8, 8), nn.Linear(8, 8))
        ),
        ["layers.0", "layers.1"],
    ),
    "encoder and decoder": (
        lambda: Parts(
            encoder=Parts(layers=list_of(Mlp(), Mlp())), decoder=Parts(layers=list_of(Expert()))
        ),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0"],
    ),
    "parts in a dict": (  # as in nanoGPT
        lambda: Parts(
            transformer=nn.ModuleDict(
                {
                    "wte": nn.Embedding(8, WIDTH),
                    "wpe": nn.Embedding(8, WIDTH),
                    "h": list_of(Mlp(), Mlp()),
                    "norm": Scale(),
                }
            )
        ),
        ["transformer.h.0", "transformer.h.1"],
    ),
    "stages": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
            Parts(layers=nn.Sequential(Mlp(), Mlp())),
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        ),
        ["(root)", "1.layers.0", "1.layers.1"],
    ),
    "list of dicts": (
        lambda: Parts(layers=list_of(attention_and_mlp(), attention_and_mlp())),
        ["layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"],
    ),
    "list of lists": (
        lambda: Parts(down=list_of(list_of(Mlp(), Mlp()), list_of(Mlp(), Mlp()))),
        ["down.0.0", "down.0.1", "down.1.0", "down.1.1"],
    ),
    "list of dicts with experts": (
        lambda: Parts(layers=list_of(with_experts(), with_experts())),
        ["layers.0.attention", "layers.1.attention"],
    ),
    "one block three times": (lambda: Parts(layers=repeated(Mlp())), ["layers.0"]),
    "blocks that share a weight": (
        lambda: Parts(layers=list_of(*tied(Mlp(), Mlp()), Mlp())),
        ["layers.2"],
    ),
    "compiled blocks": (
        lambda: Parts(layers=list_of(compiled(Mlp()), compiled(Mlp()))),
        ["layers.0", "layers.1"],
    ),
    "checkpointed blocks": (
        lambda: Parts(layers=list_of(*map(checkpoint_wrapper, (Mlp(), Mlp())))),
        ["layers.0", "layers.1"],
    ),
    "wrapped twice, of two classes": (
        lambda: Parts(
            layers=list_of(
                *(compiled(checkpoint_wrapper(block)) for block in (Mlp(), Expert(), Mlp()))
            )
        ),
        ["layers.0", "layers.1", "layers.2"],
    ),
    "wrapped, one of each class": (
        lambda: Parts(layers=list_of(*map(checkpoint_wrapper, (MixtureOfExperts(), Hybrid())))),
        [],
    ),
    "compiled root": (
        lambda: compiled(Parts(layers=list_of(Mlp(), Mlp()))),
        ["_orig_mod.layers.0", "_orig_mod.layers.1"],
    ),
    "no blocks": (lambda: Parts(a=Mlp(), b=Mlp()), []),
    "one layer": (lambda: nn.Linear(8, 8), []),
}
WITHOUT_ROOT = {"root is a sequential"}


def find(case: str) -> tuple[list[str], list[str]]:
    model = MODELS[case][0]()
    warnings = heard(lambda: LoCoFSDP(model, mesh=cpu_mesh()))
    return names_of(model), warnings


@pytest.mark.parametrize("case", MODELS)
def test_the_outermost_repeated_blocks_are_units(ranks: Ranks, case: str) -> None:
    blocks = MODELS[case][1]
    root = [] if blocks[:1] == ["(root)"] or case in WITHOUT_ROOT else ["(root)"]
    for rank, (names, warnings) in enumerate(ranks(2).run(find, case)):
        assert names == root + blocks
        assert len(warnings) == (rank == 0 and not blocks and case != "one layer")
        assert all("are in one FSDP unit, (root)" in w and "with wrap" in w for w in warnings)


def routed() -> list[Any]:
    """A rank's output and gradients with other experts than the other rank's, and without FSDP."""
    models: list[Any] = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(*(MixtureOfExperts() for _ in range(2))))
    plain, sharded = models
    LoCoFSDP(sharded, LoCoConfig(bits=8, block_size=32), mesh=cpu_mesh())
    outputs = [model(batch()) for model in models]
    if hasattr(sharded, "set_reduce_scatter_unused_params"):
        for block in sharded:
            block.set_reduce_scatter_unused_params(True)
        for output in outputs:
            output.square().mean().backward()
        for expert in range(2):  # half of the ranks use it
            weight = plain[1].parts[expert].up.weight
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad)
            ours = reduced(sharded[1].parts[expert].up.weight)
            torch.testing.assert_close(
                ours, weight.grad / 2, rtol=0, atol=0.02 * float(ours.abs().max())
            )
    return [names_of(sharded), torch.equal(*outputs)]


def test_ranks_that_use_different_experts_of_a_block(ranks: Ranks) -> None:
    assert ranks(2).run(routed) == [[["0", "1"], True]] * 2
