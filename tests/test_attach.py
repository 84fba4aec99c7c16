"""attach and LoCo: which units they find, what they refuse, and how they let go."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from loco_fsdp import LoCoConfig, attach
from loco_fsdp.frontends.fsdp2_hooks import FSDPReduceScatter
from ranks import RankPool, raised
from toy import Given, cpu_mesh, reduced

Ranks = Callable[[int], RankPool]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class Model(nn.Module):
    def __init__(self, embedding: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8) if embedding else nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


def sharded(embedding: bool = False) -> Model:
    model = Model(embedding)
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return model


def step(model: nn.Module) -> None:
    embedding = isinstance(model.embedding, nn.Embedding)
    x = torch.arange(16).view(2, 8) % 16 if embedding else torch.randn(2, 8)
    model(x).sum().backward()


def comms(model: nn.Module) -> list[bool]:
    """For each unit with parameters, whether LoCo is in it."""
    groups = [m._get_fsdp_state()._fsdp_param_group for m in model.modules() if is_sharded(m)]
    return [isinstance(g._reduce_scatter_comm, FSDPReduceScatter) for g in groups if g]


def is_sharded(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule)


# --- every unit ------------------------------------------------------------------------------


def reductions(embedding: bool) -> tuple[list[str], float, float]:
    model = sharded(embedding)
    loco = attach(model)
    step(model)
    return (
        [unit.name for unit in loco.units],
        loco.stats()["reductions"],
        loco.stats()["error_norm"],
    )


@pytest.mark.parametrize("embedding", [False, True])
def test_one_call_reaches_every_unit_with_parameters(ranks: Ranks, embedding: bool) -> None:
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for names, count, error_norm in ranks(2).run(reductions, embedding):
        assert names == (["(root)", *blocks] if embedding else blocks)
        assert count == len(names)
        assert error_norm > 0


def shared_unit() -> tuple[list[str], float]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard([model[1], model[2]], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    loco = attach(model)
    model(torch.randn(2, 8)).sum().backward()
    return [unit.name for unit in loco.units], loco.stats()["reductions"]


def test_modules_that_share_a_unit_are_one_unit(ranks: Ranks) -> None:
    assert ranks(2).run(shared_unit) == [(["(root)", "1, 2"], 2)] * 2


def summarize() -> tuple[str, list[tuple[Any, ...]]]:
    model = sharded(embedding=True)

    def select(name: str, module: nn.Module) -> bool | LoCoConfig:
        assert isinstance(module, FSDPModule)
        if name == "blocks.2":
            return LoCoConfig(bits=8, block_size=32)
        return name != "blocks.0"

    loco = attach(model, LoCoConfig(block_size=32), select=select)
    step(model)
    units = [(u.name, u.numel, u.bits, u.error_bytes, u.bypass_reason) for u in loco.units]
    return loco.summary(), units


def test_select_chooses_and_summary_tells(ranks: Ranks) -> None:
    # On each of 2 ranks the error of a block is for 2 destinations: 4 x 8 weights in a block of
    # 32, 4 biases in another, each with 2 bytes an element and a scale of 4.
    error_bytes = 2 * 2 * (32 * 2 + 4)
    for summary, units in ranks(2).run(summarize):
        assert units == [
            ("(root)", 16 * 8, 4, 2 * 2 * (32 * 2 + 4), None),
            ("blocks.0", 8 * 8 + 8, None, 0, "not selected"),
            ("blocks.1", 8 * 8 + 8, 4, error_bytes, None),
            ("blocks.2", 8 * 8 + 8, 8, error_bytes, None),
        ]
        assert summary.splitlines()[1].split() == [
            "unit", "elements", "bits", "error", "bytes", "remarks"
        ]  # fmt: skip
        row = ["blocks.0", "72", "-", "0", "bypassed:", "not", "selected"]
        assert summary.splitlines()[3].split() == row


def alone(mesh_shape: tuple[int, ...]) -> tuple[bool, list[str | None], int, float]:
    """Shard groups of one rank."""
    models = [nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]
    for model in models:
        fully_shard(model, mesh=cpu_mesh(*mesh_shape))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    loco = attach(models[0])
    x = torch.randn(4, 8)
    for model in models:
        model(x).sum().backward()
    gradients = [reduced(model[0].weight) for model in models]
    units = loco.units
    return (
        torch.equal(*gradients),
        [unit.bypass_reason for unit in units],
        sum(unit.error_bytes for unit in units),
        loco.stats()["wire_bytes"],
    )


def test_a_shard_group_of_one_rank_is_left_alone(ranks: Ranks) -> None:
    reason = "group of one rank: nothing to send"
    assert ranks(1).run(alone, (1,)) == [(True, [reason], 0, 0)]
    # FSDP2 itself all-reduces 64 weights and 8 biases between two replicas, half and half.
    reason = "not sharded: only the all-reduce of a LoCoFSDP model is compressed"
    assert ranks(2).run(alone, (2, 1)) == [(True, [reason], 0, 72 * 4)] * 2


# --- letting go ------------------------------------------------------------------------------


def detached() -> list[Any]:
    model = sharded()
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    before = group._reduce_scatter_comm, group.force_sum_reduction_for_comms
    loco = attach(model)
    step(model)
    loco.detach()
    restored = (group._reduce_scatter_comm, group.force_sum_reduction_for_comms) == before
    unpatched = "post_backward" not in vars(group)
    step(model)
    error = raised(loco.detach)
    attach(model)  # and once more
    return [restored, unpatched, comms(model), error]


def test_detach_gives_back_what_was_there(ranks: Ranks) -> None:
    for restored, unpatched, again, error in ranks(2).run(detached):
        assert restored and unpatched
        assert again == [True] * 3
        assert error.startswith("RuntimeError: this LoCo is detached already")


def cast_later() -> tuple[float, float, str | None, str | None]:
    """The model becomes float64, which the codec does not take, before its first forward."""
    model = sharded()
    loco = attach(model, LoCoConfig(bits=8))
    before = loco.units[0].bypass_reason
    model.double()
    model(torch.randn(2, 8, dtype=torch.float64)).sum().backward()
    assert reduced(model.blocks[0].linear.weight).dtype is torch.float64
    stats = loco.stats()
    reason = loco.units[0].bypass_reason
    return stats["reductions"], stats["bypassed_reductions"], before, reason


def test_a_model_that_is_cast_to_another_dtype(ranks: Ranks) -> None:
    reason = "gradients are reduced in torch.float64"
    assert ranks(2).run(cast_later) == [(0, 3, None, reason)] * 2


def resets() -> list[float]:
    model = sharded()
    loco = attach(model)
    step(model)
    before = loco.stats()["error_norm"]
    loco.reset_error()
    return [before, loco.stats()["error_norm"]]


def test_reset_error(ranks: Ranks) -> None:
    for before, after in ranks(2).run(resets):
        assert before > 0 and after == 0


# --- what is refused, on every rank, with nothing attached ------------------------------------


class Custom:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError


def refused(case: str) -> tuple[str, list[bool]]:
    rank = dist.get_rank()
    model = sharded()
    config = LoCoConfig()
    arguments: dict[str, Any] = {}
    if case == "not sharded":
        model = Model(embedding=False)
    elif case == "configuration of another type":
        arguments["config"] = {"bits": 4}
    elif case == "configuration of another type on rank 1":
        arguments["config"] = "4 bits" if rank == 1 else config
    elif case == "other bits on rank 1":
        arguments["config"] = LoCoConfig(bits=8) if rank == 1 else config
    elif case == "other selection on rank 1":
        arguments["select"] = lambda name, _: not (rank == 1 and name == "blocks.1")
    elif case == "select fails on rank 1":
        arguments["select"] = lambda name, _: {}[name] if rank == 1 else True
    elif case == "select returns nothing":
        arguments["select"] = lambda *_: None
    elif case == "custom reduce-scatter":
        model.blocks[1].set_custom_reduce_scatter(Custom())
    message = raised(attach, model, **arguments)
    step(model) if case not in ("custom reduce-scatter",) else None
    return message, comms(model)


@pytest.mark.parametrize(
    ("case", "on_rank_0", "on_rank_1"),
    [
        (
            "not sharded",
            "TypeError: attach takes a model that torch.distributed.fsdp.fully_shard",
            None,
        ),
        ("configuration of another type", "TypeError: config={'bits': 4}: it must be a LoCo", None),
        (
            "configuration of another type on rank 1",
            "ValueError: attach did nothing: rank 1 raised TypeError: config='4 bits'",
            "TypeError: config='4 bits': it must be a LoCoConfig",
        ),
        (
            "other bits on rank 1",
            "ValueError: attach did nothing: ranks 0 and 1 differ in FSDP unit 'blocks.0': "
            "bits=4 and 8",
            None,
        ),
        (
            "other selection on rank 1",
            "ValueError: attach did nothing: ranks 0 and 1 differ in FSDP unit 'blocks.1': "
            "bypassed=None and 'not selected'",
            None,
        ),
        (
            "select fails on rank 1",
            "ValueError: attach did nothing: rank 1 raised KeyError: 'blocks.0'",
            "KeyError: 'blocks.0'",
        ),
        ("select returns nothing", "TypeError: select('blocks.0', ...) returned None", None),
        ("custom reduce-scatter", "ValueError: FSDP unit 'blocks.1' has a reduce-scatter", None),
    ],
)
def test_a_wrong_attach_raises_on_every_rank(
    ranks: Ranks, case: str, on_rank_0: str, on_rank_1: str | None
) -> None:
    expected = [on_rank_0, on_rank_1 or on_rank_0]
    for (message, attached), start in zip(ranks(2).run(refused, case), expected, strict=True):
        assert message.startswith(start)
        assert not any(attached)


def twice() -> tuple[str, list[bool], float]:
    model = sharded()
    loco = attach(model)
    message = raised(attach, model)
    step(model)
    return message, comms(model), loco.stats()["reductions"]


def test_attaching_twice_is_an_error_and_the_first_goes_on(ranks: Ranks) -> None:
    for message, attached, count in ranks(2).run(twice):
        assert message.startswith("ValueError: FSDP unit 'blocks.0' has LoCo attached already")
        assert attached == [True] * 3
        assert count == 3


def disagree_across_replicas() -> tuple[str, list[bool]]:
    model = Given(weight=(4, 32))
    fully_shard(model, mesh=cpu_mesh(2, 2))
    config = LoCoConfig(bits=8 if dist.get_rank() == 3 else 4)
    return raised(attach, model, config), comms(model)


def test_all_replicas_hear_of_a_rank_that_differs(ranks: Ranks) -> None:
    for message, attached in ranks(4).run(disagree_across_replicas):
        assert "bits=" in message
        assert not any(attached)


def test_attach_without_a_process_group_says_so() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        attach(nn.Linear(2, 2))
