"""Attaching, detaching and attaching again, and what must not be held or lost meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from loco_fsdp.frontends.fsdp2 import fsdp_units
from loco_fsdp.reduction.reducer import WITHOUT_FEEDBACK
from ranks import RankPool, heard, raised
from toy import Given, Mlp, Net, backward, batch, cpu_mesh, reduced, shard

Ranks = Callable[[int], RankPool]


def step(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


class Sum:
    """A reduce-scatter of the user's own."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **_: Any
    ) -> None:
        dist.all_reduce(input_tensor, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def own_reduce_scatter() -> list[Any]:
    model = shard(Net())
    loco = attach(model)
    mine = Sum()
    model.set_custom_reduce_scatter(mine)
    warnings = heard(lambda: step(model))
    remarks = [unit.bypass_reason for unit in loco.units]
    loco.detach()
    comms = [unit.reduce_scatter for unit in fsdp_units(model)]
    return [comms[0] is mine, [type(c).__name__ for c in comms[1:]], remarks, warnings]


def test_a_reduce_scatter_set_after_attaching_outlives_detach(ranks: Ranks) -> None:
    reason = "another reduce-scatter was set after attaching"
    for rank, (kept, others, remarks, warnings) in enumerate(ranks(2).run(own_reduce_scatter)):
        assert kept and others == ["DefaultReduceScatter"] * 2
        assert remarks == [reason, None, None]
        assert len(warnings) == (rank == 0)
        assert all(f"FSDP unit '(root)': not compressed: {reason}" in w for w in warnings)


def stale_loco() -> list[Any]:
    """`model.loco` of a model that was detached and attached again, and the old one's state."""
    model = Net()
    LoCoFSDP(model, LoCoConfig(block_size=32), mesh=cpu_mesh(), wrap=Mlp)
    old = model.loco
    step(model)
    old.detach()
    warnings = heard(lambda: old.state_dict())
    new = attach(nn.ModuleDict({"inside": model}), LoCoConfig(block_size=32))
    step(model)
    (blob,) = model.loco.state_dict().values()
    return [model.loco is new, warnings, len(blob) > 3 * 2 * 32, old.stats()["reductions"]]


def test_the_model_knows_its_new_loco_and_the_old_one_says_that_it_holds_nothing(
    ranks: Ranks,
) -> None:
    for rank, (known, warnings, full, reductions) in enumerate(ranks(2).run(stale_loco)):
        assert known and full and reductions == 3
        assert len(warnings) == (rank == 0)
        assert all("a LoCo that is detached holds no errors" in warning for warning in warnings)


def kept_for_statistics(way: str) -> list[Any]:
    model = Net()
    if way == "replicas":
        LoCoFSDP(model, LoCoConfig(block_size=32), mesh=cpu_mesh(2, 1), wrap=Mlp)
        loco = model.loco
    else:
        loco = attach(shard(model), LoCoConfig(block_size=32))
    step(model)
    before = loco.stats(), loco.unit_stats()
    loco.detach()
    gone = [weakref.ref(model), weakref.ref(model.blocks[0].up.weight)]
    del model
    gc.collect()
    stats, units = loco.stats(), loco.units
    zero = ("error_bytes", "error_norm", "table_bytes", "buffer_bytes")
    same = all(stats[name] == before[0][name] for name in stats if name not in zero)
    return [
        [reference() is None for reference in gone],
        same and not any(stats[name] for name in zero),
        set(loco.unit_stats()) == set(before[1]),
        [(unit.name, unit.bypass_reason) for unit in units],
        "detached" in loco.summary(),
        raised(loco.detach),
    ]


@pytest.mark.parametrize("way", ["fsdp", "replicas"])
def test_a_detached_loco_keeps_numbers_and_not_the_model(ranks: Ranks, way: str) -> None:
    names = ["(root)", "blocks.0", "blocks.1"]
    for gone, same, units, infos, says, error in ranks(2).run(kept_for_statistics, way):
        assert gone == [True, True]
        assert same and units and says
        assert infos == [(name, "detached") for name in names]
        assert error.startswith("RuntimeError: this LoCo is detached already")


def detached_inside_of_a_pause() -> float:
    model = shard(Net())
    loco = attach(model)
    with loco.paused():
        loco.detach()
        again = attach(model)
        step(model)
    return again.stats()["reductions"]


def test_detaching_inside_of_a_pause(ranks: Ranks) -> None:
    assert ranks(2).run(detached_inside_of_a_pause) == [3.0] * 2


# --- units that are not where one looks -------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(8, 8)


def unit_across_levels(rank_1_alone: bool) -> list[Any]:
    """One unit of modules from different levels, and an attach that sees a part of it."""
    model = Outer()
    fully_shard([model.inner.norm, model.head], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    partly = model.inner if dist.get_rank() == 1 or not rank_1_alone else model
    message = raised(attach, partly)
    stock = [type(unit.reduce_scatter).__name__ for unit in fsdp_units(model)]
    return [message, stock, [unit.name for unit in attach(model).units]]


def test_a_part_of_a_unit_cannot_be_attached_to(ranks: Ranks) -> None:
    for message, stock, names in ranks(2).run(unit_across_levels, False):
        assert message.startswith(
            "ValueError: FSDP unit 'norm' has parameters outside of the module to attach to "
            "(Linear.weight, Linear.bias): attach to one that holds all of the unit"
        )
        assert stock == ["DefaultReduceScatter"] * 2
        assert names == ["(root)", "inner.norm, head"]
    for message, stock, _ in ranks(2).run(unit_across_levels, True):
        assert message.startswith("ValueError")
        assert stock == ["DefaultReduceScatter"] * 2


def sharded_late() -> list[Any]:
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(block_size=32))
    fully_shard(model, mesh=cpu_mesh())
    warnings = heard(lambda: [step(model), step(model)])
    return [
        warnings,
        [(unit.name, unit.bits, unit.bypass_reason) for unit in loco.units],
        "sharded after attaching" in loco.summary(),
        loco.stats()["reductions"],
    ]


def test_units_that_are_sharded_after_attaching_are_mentioned(ranks: Ranks) -> None:
    reason = "sharded after attaching: detach() and attach the model again"
    for rank, (warnings, units, says, reductions) in enumerate(ranks(2).run(sharded_late)):
        assert len(warnings) == (rank == 0)
        assert all(f"FSDP unit '(root)': not compressed: {reason}" in w for w in warnings)
        assert units[-1] == ("(root)", None, reason)
        assert [unit[1] for unit in units] == [4, 4, None]
        assert says and reductions == 4


# --- what is not compressed is said and counted ------------------------------------------------


def replicated(native_mesh: bool) -> list[Any]:
    model = Given(weight=(8, 8))
    if native_mesh:
        fully_shard(model, mesh=cpu_mesh(2, 1))
    else:
        from torch.distributed._composable.replicate_with_fsdp import replicate

        replicate(model, mesh=cpu_mesh())
    held: dict[str, Any] = {}
    warnings = heard(lambda: held.setdefault("loco", attach(model, LoCoConfig(node_size=1))))
    loco = held["loco"]
    for _ in range(3):
        backward(model, weight=torch.full((8, 8), 1.0 + dist.get_rank()))
        value = reduced(model.weight).unique().item()
        model.zero_grad()
    unit = loco.units[0]
    return [warnings, unit.bits, unit.bypass_reason, unit.remarks, loco.stats(), value]


@pytest.mark.parametrize("native_mesh", [True, False])
def test_replicas_in_full_precision_are_said_and_counted(ranks: Ranks, native_mesh: bool) -> None:
    """Two ranks all-reduced, and the summary said that there was nothing to send."""
    remark = "its all-reduce over 2 replicas stays in full precision"
    for rank, row in enumerate(ranks(2).run(replicated, native_mesh)):
        warnings, bits, reason, remarks, stats, value = row
        assert value == 1.5
        assert bits is None
        assert reason == "not sharded: only the all-reduce of a LoCoFSDP model is compressed"
        assert len(warnings) == (rank == 0)
        assert all(remark in text for text in (*warnings, *remarks))
        # A ring between two sends half of 64 float32 to sum and half of the sums.
        for name in ("wire_bytes", "full_precision_bytes", "inter_node_bytes", "baseline_bytes"):
            assert stats[name] == 3 * 64 * 4, name
        assert stats["bypassed_reductions"] == 3 and stats["reductions"] == 0


def native_hsdp() -> list[Any]:
    model = Given(weight=(64, 8))
    fully_shard(model, mesh=cpu_mesh(2, 2))
    loco = attach(model, LoCoConfig(block_size=32, node_size=2))
    for index in range(2):
        model.set_requires_all_reduce(index == 1)
        backward(model, weight=torch.ones(64, 8))
    return [loco.stats(), loco.units[0].remarks]


def test_the_all_reduce_of_native_hsdp_is_counted(ranks: Ranks) -> None:
    # A shard of 256 elements: 8 blocks of 16 bytes of codes and 4 of scale go to the other rank of
    # the node in each microbatch, 256 float32 to the other node in one.
    for stats, remarks in ranks(4).run(native_hsdp):
        assert stats["full_precision_bytes"] == stats["inter_node_bytes"] == 256 * 4
        assert stats["wire_bytes"] == 2 * 8 * 20 + 256 * 4
        assert stats["reductions"] == 2 and stats["bypassed_reductions"] == 0
        assert len(remarks) == 1


def wrapped_post_backward(how: str) -> list[Any]:
    """Something else takes the place of FSDP2's post_backward, for a profile for example."""
    model = shard(Net())
    group = model.blocks[0]._get_fsdp_state()._fsdp_param_group
    calls: list[str] = []

    def calling(inner: Callable[..., None]) -> Callable[..., None]:
        def post_backward(*args: Any) -> None:
            calls.append("theirs")
            inner(*args)

        return post_backward

    if how == "before":
        group.post_backward = calling(group.post_backward)
    loco = attach(model, LoCoConfig(block_size=32))
    if how == "around":
        group.post_backward = calling(group.post_backward)
    if how == "instead":
        group.post_backward = calling(lambda: type(group).post_backward(group))
    warnings = heard(lambda: [step(model), step(model)])
    stats = loco.stats()
    unit = loco.units[1]
    summary = loco.summary()
    loco.detach()
    step(model)
    left = "post_backward" in vars(group)
    again = attach(model, LoCoConfig(block_size=32))
    step(model)
    return [
        warnings,
        [stats["reductions"], stats["reductions_without_feedback"]],
        unit.error_bytes > 0,
        unit.remarks,
        WITHOUT_FEEDBACK in summary,
        left,
        len(calls),
        again.stats()["reductions"],
    ]


@pytest.mark.parametrize("how", ["before", "around"])
def test_another_post_backward_that_calls_ours_changes_nothing(ranks: Ranks, how: str) -> None:
    for warnings, counts, error, remarks, said, left, calls, again in ranks(2).run(
        wrapped_post_backward, how
    ):
        assert warnings == [] and counts == [6, 0]
        assert error and not remarks and not said
        assert left and again == 3
        assert calls >= 4  # theirs is still called after detach


def test_feedback_that_is_lost_is_said_shown_and_counted(ranks: Ranks) -> None:
    for rank, row in enumerate(ranks(2).run(wrapped_post_backward, "instead")):
        warnings, counts, error, remarks, said, left, calls, again = row
        assert len(warnings) == (rank == 0)
        assert all("FSDP unit 'blocks.0': sent without error feedback" in w for w in warnings)
        assert counts == [6, 2]
        assert not error and remarks == (WITHOUT_FEEDBACK,) and said
        assert left and calls >= 4 and again == 3
