"""A run with differences that is saved and loaded goes on, bit by bit, as the one that was not."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from loco_fsdp import LoCo, attach
from ranks import RankPool, raised
from weights import Chain, Replicas, config, forward, sharded, train

Ranks = Callable[[int], RankPool]


def start(lr: float = 1e-2) -> tuple[Chain, LoCo, torch.optim.Optimizer]:
    model, loco = sharded(4, options={"bits": 4, "topology": "hierarchical"})
    return model, loco, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def all_of(model: Chain, loco: LoCo, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    draws = [unit._draws.get_state() for unit in model.units]
    return {"state": buffer.getvalue(), "loco": loco.state_dict(), "draws": draws}


def put_back(
    saved: dict[str, Any],
    model: Chain,
    loco: LoCo,
    optimizer: torch.optim.Optimizer,
    model_first: bool = True,
) -> None:
    state = torch.load(io.BytesIO(saved["state"]), weights_only=False)
    if model_first:
        model.load_state_dict(state["model"])
    loco.load_state_dict(saved["loco"], strict=True)
    if not model_first:
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for unit, draws in zip(model.units, saved["draws"], strict=True):
        unit._draws.set_state(draws)


def evaluate(model: Chain) -> None:
    with torch.no_grad():
        forward(model)


def seen(model: Chain) -> list[Tensor]:
    return [value for unit in model.units for value in unit.seen.values()]


def resumed(when: str, model_first: bool) -> None:
    """Save, go on for three steps, and do the same from what was saved, in a new model."""
    model, loco, optimizer = start()
    for _ in range(3):
        train(model, optimizer)
    if when == "after an evaluation":
        evaluate(model)  # which has sent the difference already
    if when == "with a frozen part":  # nothing more is sent of it, whatever is left out
        freeze(model)
        for _ in range(2):
            train(model, optimizer)
    if when == "after a large step":  # what it left out makes the next exchange whole
        optimizer.param_groups[0]["lr"] = 30.0
        train(model, optimizer)
        optimizer.param_groups[0]["lr"] = 1e-2
        train(model, optimizer)
    saved = all_of(model, loco, optimizer)
    runs = []
    for again in (False, True):
        if again:
            model, loco, optimizer = start()
            if when == "into a model that has trained":
                train(model, optimizer)
            put_back(saved, model, loco, optimizer, model_first)
            if when == "with a frozen part":
                freeze(model)
            if when == "twice":  # saved again before anything was gathered
                saved = all_of(model, loco, optimizer)
                model, loco, optimizer = start()
                put_back(saved, model, loco, optimizer, model_first)
        found = []
        for _ in range(3):
            train(model, optimizer)
            found += seen(model)
        parameters = [parameter.detach().to_local().clone() for parameter in model.parameters()]
        runs.append(found + parameters)
    assert all(map(torch.equal, *runs))
    evaluate(model)
    exact = Replicas(model)
    assert not torch.equal(exact.values["0.weight"], model.units[0].seen["weight"])


def freeze(model: Chain) -> None:
    for unit in model.units:
        unit.weight.requires_grad_(False)


MOMENTS = [
    "with a frozen part",
    "after a step",
    "after an evaluation",
    "after a large step",
    "into a model that has trained",
    "twice",
]


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("when", MOMENTS)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    ranks: Ranks, when: str, model_first: bool
) -> None:
    """In whatever order things are loaded: checkpoints go by the names of what is in them."""
    ranks(4).run(resumed, when, model_first)


def through_dcp(directory: str) -> None:
    """Which loads "loco" before "model"."""
    model, loco, optimizer = start()
    for _ in range(3):
        train(model, optimizer)
    dcp.save({"model": model, "loco": loco}, checkpoint_id=directory)
    evaluate(model)
    expected = seen(model)
    model, loco, optimizer = start()
    dcp.load({"model": model, "loco": loco}, checkpoint_id=directory)
    evaluate(model)
    assert all(map(torch.equal, seen(model), expected))
    exact = Replicas(model)
    assert not torch.equal(exact.values["0.weight"], model.units[0].seen["weight"])


def test_through_a_distributed_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(through_dcp, str(tmp_path))


def lacking(what: str) -> None:
    """Where a saved replica does not fit, parameters are sent whole, which loses nothing."""
    model, loco, optimizer = start()
    for _ in range(2):
        train(model, optimizer)
    state = loco.state_dict(error=what != "without errors")
    earlier = {name: value.clone() for name, value in model.state_dict().items()}
    if what == "on some ranks alone" and dist.get_rank() == 2:
        state = {}
    model, loco, optimizer = start()
    model.load_state_dict(earlier)
    loco.load_state_dict(state)
    exact = Replicas(model)
    evaluate(model)
    exact.check()


@pytest.mark.parametrize("what", ["without errors", "on some ranks alone"])
def test_without_a_replica_parameters_are_sent_whole(ranks: Ranks, what: str) -> None:
    ranks(4).run(lacking, what)


def from_another_run(loads_model: bool) -> None:
    """The replica of one moment, and parameters of another."""
    model, loco, optimizer = start()
    train(model, optimizer)
    evaluate(model)
    state = loco.state_dict()
    optimizer.param_groups[0]["lr"] = 1.0
    for _ in range(3):
        train(model, optimizer)
    parameters = {name: value.clone() for name, value in model.state_dict().items()}
    model, loco, optimizer = start()
    loco.load_state_dict(state)
    if loads_model:
        model.load_state_dict(parameters)
    exact = Replicas(model)
    forward(model)
    exact.check()


@pytest.mark.parametrize("loads_model", [True, False])
def test_a_replica_of_other_parameters_is_not_used(ranks: Ranks, loads_model: bool) -> None:
    ranks(4).run(from_another_run, loads_model)


def in_another_shape() -> None:
    model, loco, optimizer = start()
    train(model, optimizer)
    state = loco.state_dict()
    other_model, other_loco = sharded(4, shapes={"weight": (16, 12), "bias": (16,)})
    other_loco.load_state_dict(state)
    exact = Replicas(other_model)
    evaluate(other_model)
    exact.check()
    loco.detach()
    loco = attach(model, config(8))
    loco.load_state_dict(state)
    evaluate(model)


def test_replicas_of_other_shapes_are_left(ranks: Ranks) -> None:
    ranks(4).run(in_another_shape)


def broken() -> str:
    model, loco, optimizer = start()
    train(model, optimizer)
    (key,) = loco.state_dict()
    blob = loco.state_dict()[key]
    state = torch.load(io.BytesIO(blob), weights_only=True)
    del state["replicas"]["units.0"]["row"]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    bad = {key: buffer.getvalue() if dist.get_rank() == 1 else blob}
    message = raised(loco.load_state_dict, bad)
    train(model, optimizer)
    return message


def test_a_damaged_replica_is_refused_on_all_ranks(ranks: Ranks) -> None:
    for message in ranks(4).run(broken):
        assert message.startswith("ValueError: nothing was loaded: rank 1 cannot load")
