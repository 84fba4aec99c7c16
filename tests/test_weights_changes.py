"""Parameters that somebody else than an optimizer changes: nobody computes with the old ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from loco_fsdp import LoCo
from loco_fsdp.gather.differences import STALE
from loco_fsdp.gather.fingerprint import fingerprint
from ranks import RankPool, heard
from weights import Chain, Replicas, forward, sharded, swapped, train, whole

Ranks = Callable[[int], RankPool]


def started(**kwargs: Any) -> tuple[Chain, LoCo, torch.optim.Optimizer, Replicas]:
    """A model after three steps, whose replicas are not its parameters."""
    model, loco = sharded(4, **kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    expected = Replicas(model)
    train(model, optimizer)
    for _ in range(2):
        expected.send_differences()
        train(model, optimizer)
    expected.check(backward=True)
    return model, loco, optimizer, expected


# --- averages of weights ---------------------------------------------------------------------


def averaged(when: str, distance: float) -> None:
    """`distance` from what the parameters are: also so little that it is below bf16 in norm."""
    model, loco, optimizer, expected = started()
    averages = [parameter.detach() * (1 - distance) for parameter in model.parameters()]
    if when == "after a forward":
        expected.send_differences()
        forward(model)
    if when == "before the step":
        forward(model).backward()
    if when == "before the backward":
        loss = forward(model)
    for _ in range(2):
        with swapped(model, averages), torch.no_grad():
            exact = Replicas(model)
            for _ in range(2):
                forward(model)
                exact.check()
    if when == "before the step":
        optimizer.step()
        optimizer.zero_grad()
    exact.send_whole()
    if when == "before the backward":
        loss.backward()
        exact.check(backward=True)
        return
    forward(model).backward()
    exact.check()
    exact.check(backward=True)
    assert loco.stats()["stale_gathers"] == 0


@pytest.mark.parametrize(
    "when", ["after the step", "after a forward", "before the backward", "before the step"]
)
def test_averages_are_evaluated_and_weights_trained(ranks: Ranks, when: str) -> None:
    """A difference in 4 bits would not do: it leaves a fourteenth of the largest element."""
    ranks(4).run(averaged, when, 0.5)


def test_averages_near_the_weights(ranks: Ranks) -> None:
    """They are not taken for the weights because they are near them."""
    ranks(4).run(averaged, "after a forward", 2.0**-7)


# --- loading ---------------------------------------------------------------------------------


def loaded(how: str) -> None:
    model, loco, optimizer, expected = started()
    earlier = {name: value.clone() for name, value in model.state_dict().items()}
    full = {name: value.full_tensor() for name, value in earlier.items()}
    for _ in range(2):
        expected.send_differences()
        train(model, optimizer)
    units = [0, 1]
    if how == "model":
        model.load_state_dict(earlier)
    elif how == "unit":
        units = [1]
        prefix = "units.1."
        model.units[1].load_state_dict(
            {name.removeprefix(prefix): v for name, v in earlier.items() if prefix in name}
        )
    elif how == "distributed checkpoint":
        set_model_state_dict(model, earlier)
        assert get_model_state_dict(model).keys() == full.keys()
    expected.send_differences([0])
    expected.send_whole(units)
    forward(model).backward()
    expected.check()
    expected.check(backward=True)
    for unit in units:
        seen = model.units[unit].seen["weight"]
        assert torch.equal(seen, full[f"units.{unit}.weight"].bfloat16())
    assert loco.stats()["weight_refreshes"] == 2 + len(units)


@pytest.mark.parametrize("how", ["model", "unit", "distributed checkpoint"])
def test_loaded_parameters_are_seen_at_once(ranks: Ranks, how: str) -> None:
    ranks(4).run(loaded, how)


# --- in place --------------------------------------------------------------------------------


def change(model: Chain) -> None:
    """Another sign for everything, on one rank alone."""
    if dist.get_rank() == 1:
        for parameter in model.parameters():
            parameter.detach().to_local().neg_()


def told(tells: bool) -> tuple[float, list[str]]:
    """In a training forward nobody looks, as this would wait for the device."""
    model, loco, optimizer, expected = started()
    expected.send_differences()
    forward(model)
    change(model)
    if tells:
        loco.refresh_weights()
        expected.send_whole()
    forward(model).backward()
    expected.check()
    expected.check(backward=True)
    optimizer.step()
    optimizer.zero_grad()
    expected.send_differences()  # which tells the others
    forward(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    expected.send_differences(ranks=[0, 2])
    if tells:
        expected.send_differences(ranks=[1, 3])
    else:
        expected.send_whole(ranks=[1, 3])  # of the place where it happened
    warnings = heard(lambda: forward(model) and None)
    expected.check()
    return loco.stats()["stale_gathers"], warnings


def test_changes_that_loco_is_told_of(ranks: Ranks) -> None:
    for stale, warnings in ranks(4).run(told, True):
        assert stale == 0
        assert warnings == []


def test_changes_that_nobody_tells_of_are_counted_and_said_and_mended(ranks: Ranks) -> None:
    results = ranks(4).run(told, False)
    assert [stale for stale, _ in results] == [0, 2, 0, 0]  # two units, on rank 1
    # Ranks 1 and 3 are at the same place in their nodes, and the first of them says it, once.
    assert [len(warnings) for _, warnings in results] == [0, 1, 0, 0]
    assert STALE in results[1][1][0]


def looked_after_an_evaluation() -> None:
    model, loco, _, expected = started()
    expected.send_differences()
    with torch.no_grad():
        forward(model)
    change(model)
    expected.send_whole(ranks=[1, 3])
    forward(model)
    expected.check()
    assert loco.stats()["stale_gathers"] == 0


def test_what_was_changed_since_an_evaluation_is_seen(ranks: Ranks) -> None:
    ranks(4).run(looked_after_an_evaluation)


def beside() -> None:
    """A frozen parameter is changed, and the next difference is of the others of its unit."""
    model, loco, optimizer, expected = started()
    for unit in model.units:
        unit.weight.requires_grad_(False)
        unit.weight.grad = None
    expected.send_differences()
    train(model, optimizer)
    expected.check()
    with torch.no_grad():
        for unit in model.units:
            unit.weight.neg_()
    train(model, optimizer)
    assert not torch.equal(
        model.units[0].seen["weight"], whole(model.units[0].weight, torch.bfloat16)
    )
    for _ in range(2):
        train(model, optimizer)
        assert torch.equal(
            model.units[0].seen["weight"], whole(model.units[0].weight, torch.bfloat16)
        )
    assert loco.stats()["weight_refreshes"] == 4


def test_what_is_changed_beside_what_is_trained_is_sent_with_the_next_step(ranks: Ranks) -> None:
    ranks(4).run(beside)


def far(scale: float) -> None:
    """A step that changes everything: the difference leaves too much, the next sends all."""
    model, loco, optimizer, expected = started()
    for group in optimizer.param_groups:
        group["lr"] = scale
    expected.send_differences()
    train(model, optimizer)
    group["lr"] = 1e-3
    expected.send_differences()
    train(model, optimizer)
    expected.check(backward=True)
    expected.send_whole()
    train(model, optimizer)
    expected.check(backward=True)
    expected.send_differences()
    train(model, optimizer)
    expected.check(backward=True)
    assert loco.stats()["weight_refreshes"] == 4


def test_what_4_bits_do_not_reach_is_sent_whole(ranks: Ranks) -> None:
    ranks(4).run(far, 10.0)


# --- what is not finite ----------------------------------------------------------------------


def mended(evaluates: bool) -> None:
    model, _, optimizer, expected = started()
    weight = model.units[0].weight.detach().to_local()
    kept = weight.clone()
    if dist.get_rank() == 2:
        weight[0, 3] = torch.nan  # as if the step had made it
    if evaluates:
        with torch.no_grad():
            forward(model)
        assert model.units[0].seen["weight"].isnan().sum() == 1  # sent whole at once
    loss = forward(model)
    seen = model.units[0].seen["weight"].chunk(4)
    assert [part.isfinite().all().item() for part in seen] == [True, True, False, True]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    weight.copy_(kept)
    expected.send_whole([0], ranks=[0, 2])
    forward(model)
    pairs = zip(
        model.units[0].seen["weight"].chunk(4), expected.values["0.weight"].chunk(4), strict=True
    )
    for part, value in list(pairs)[::2]:
        assert torch.equal(part, value) and part.isfinite().all()


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_nan_does_not_stay(ranks: Ranks, evaluates: bool) -> None:
    """The difference to it is not finite either: replicas would keep it for ever."""
    ranks(4).run(mended, evaluates)


# --- fingerprints ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [1, 5, 1024, 3000])
def test_fingerprints_tell_any_change(dtype: torch.dtype, numel: int) -> None:
    shard = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    first = fingerprint(shard)
    assert torch.equal(first, fingerprint(shard.clone()))
    changed = [shard.clone() for _ in range(3)]
    changed[0][numel // 2] = -changed[0][numel // 2]
    changed[1][-1] = changed[1][-1].nextafter(torch.tensor(9.0, dtype=dtype))
    changed[2] = changed[2].flip(0)  # the same elements in another order
    for other in changed[: 2 if numel == 1 else 3]:
        assert not torch.equal(fingerprint(other), first)
    if numel > 2048:  # rows and columns of the table, exchanged
        rows = shard.clone()
        rows[:1024], rows[1024:2048] = shard[1024:2048], shard[:1024]
        columns = shard.clone()
        columns[0], columns[1] = shard[1], shard[0]
        assert not torch.equal(fingerprint(rows), first)
        assert not torch.equal(fingerprint(columns), first)
