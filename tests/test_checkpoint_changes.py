"""Checkpoints after something has changed: what fits is taken, and a warning says what was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.fsdp import fully_shard

from checkpoints import TOPOLOGIES, bits_of, build, contents, load, put, result, save, train
from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from ranks import RankPool, heard, raised
from toy import Given, Net, backward, batch, cpu_mesh, shard

Ranks = Callable[[int], RankPool]


def saved_by(path: str, name: str, options: dict[str, Any]) -> Any:
    model, loco, optimizer = build(name, options)
    train(model, optimizer, range(5))
    save(model, optimizer, path)
    return loco.stats()["reductions"], loco.stats()["error_norm"]


def loaded_by(path: str, name: str, options: dict[str, Any]) -> Any:
    model, loco, optimizer = build(name, options)
    warnings = heard(lambda: load(model, optimizer, path))
    train(model, optimizer, range(5, 6))
    return loco.stats()["reductions"], warnings


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 8}, "bits=4, now 8"),
        ({"block_size": 64}, "block_size=32, now 64"),
        ({"error_dtype": "int8"}, "error_dtype='float16', now 'int8'"),
        ({"error_feedback": False}, "has error_feedback=False"),
        ({"min_numel": 10**6}, "is bypassed: fewer than min_numel"),
        (TOPOLOGIES["hierarchical"], "saved for a 'flat' exchange, there are 'inter-node'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_that_do_not_fit_start_at_0_with_one_warning(
    ranks: Ranks, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    options = {"block_size": 32, "topology": "flat"}
    results = ranks(4).run(changed, str(tmp_path), options, {**options, **change})
    for rank, (warnings, before, after, norm) in enumerate(results):
        assert after == before == 3 * 5
        assert norm == 0
        assert len(warnings) == (rank == 0)
    assert reason in results[0][0][0]


def changed(path: str, old: dict[str, Any], new: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    first: Any = LoCoFSDP(Net(), LoCoConfig(**old), mesh=cpu_mesh())
    train(first, torch.optim.SGD(first.parameters(), lr=0.1), range(5))
    dcp.save({"loco": first.loco}, checkpoint_id=path)
    second: Any = LoCoFSDP(Net(), LoCoConfig(**new), mesh=cpu_mesh())
    warnings = heard(lambda: dcp.load({"loco": second.loco}, checkpoint_id=path))
    before, after = first.loco.stats(), second.loco.stats()
    return warnings, before["reductions"], after["reductions"], after["error_norm"]


@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4)])
def test_other_number_of_ranks_keeps_all_but_the_errors(
    ranks: Ranks, tmp_path: Path, before: int, now: int
) -> None:
    options = {"topology": "flat"}
    counts = ranks(before).run(saved_by, str(tmp_path), "flat", options)
    assert all(count == 15 and norm > 0 for count, norm in counts)
    load_with = resized if now > before else loaded_by
    results = ranks(now).run(load_with, str(tmp_path), "flat", options)
    assert [reductions for reductions, _ in results] == [18] * now
    assert [len(warnings) for _, warnings in results] == [1] + [0] * (now - 1)
    assert f"saved by {before} ranks, there are {now} now" in results[0][1][0]


def resized(path: str, name: str, options: dict[str, Any]) -> Any:
    """As docs/checkpointing.md says for more ranks than before."""
    model, loco, optimizer = build(name, options)

    def partly() -> None:
        dcp.load(
            {"loco": loco},
            checkpoint_id=path,
            planner=DefaultLoadPlanner(allow_partial_load=True),
        )

    warnings = heard(partly)
    train(model, optimizer, range(5, 6))
    return loco.stats()["reductions"], warnings


def guarded(path: str, steps: range) -> Any:
    model, loco, optimizer = build("flat", {"topology": "flat", "bits": 2, "guard": 1e-6})
    if steps.start == 0:
        train(model, optimizer, steps)
        save(model, optimizer, path)
    else:
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"loco": loco}, checkpoint_id=path, planner=planner)
        train(model, optimizer, steps)
    return loco.stats()["reductions"], [unit.bits for unit in loco.units]


def test_ranks_that_are_new_decide_together_with_the_others(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(guarded, str(tmp_path), range(5)) == [(15, [2, 2, 2])] * 2
    # 5 of the 16 reductions up to a decision were before the save.
    assert ranks(4).run(guarded, str(tmp_path), range(5, 15)) == [(45, [2, 2, 2])] * 4
    assert ranks(4).run(guarded, str(tmp_path), range(5, 16)) == [(48, [4, 4, 4])] * 4


def without_state(from_rank: int) -> Any:
    """Load what holds no state from this rank on, as it is and strictly."""
    model, loco, optimizer = build("flat", {})
    train(model, optimizer, range(2))
    state = loco.state_dict() if dist.get_rank() < from_rank else {}
    before = loco.stats()
    error = raised(loco.load_state_dict, state, strict=True)
    unchanged = loco.stats() == before
    warnings = heard(lambda: loco.load_state_dict(state))
    return error, unchanged, warnings


def test_no_state_is_a_warning_or_an_error_under_strict(ranks: Ranks) -> None:
    for from_rank, warning in [(0, "the checkpoint holds no LoCo state"), (1, "has no 'rank_1'")]:
        results = ranks(2).run(without_state, from_rank)
        for error, unchanged, warnings in results:
            missing = f"nothing was loaded: the checkpoint has no 'rank_{from_rank}'; strict=False"
            assert error.startswith(f"ValueError: {missing}")
            assert unchanged
            assert len(warnings) <= 1
        assert warning in results[0][2][0] and results[1][2] == []


def from_before_the_first_step(path: str, error: bool) -> Any:
    """Saved before the first step, and loaded by a training that is two steps ahead."""
    model, loco, _ = build("flat", {})
    start = [parameter.to_local().clone() for parameter in model.parameters()]
    state = {"loco": loco.state_dict(error=error)}
    dcp.save(state, checkpoint_id=path)
    model, loco, optimizer = build("flat", {})
    results = []
    for _ in range(2):
        dcp.load(state, checkpoint_id=path)
        loco.load_state_dict(state["loco"], strict=True)
        put(start, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = loco.stats()["reductions"], loco.stats()["error_norm"]
        train(model, optimizer, range(2))
        results.append((before, loco.stats(), bits_of(result(model))))
    return results


@pytest.mark.parametrize("error", [True, False])
def test_a_state_from_before_the_first_step_is_whole(
    ranks: Ranks, tmp_path: Path, error: bool
) -> None:
    for first, second in ranks(2).run(from_before_the_first_step, str(tmp_path), error):
        assert first == second
        assert first[0] == (0, 0)
        assert first[1]["reductions"] == 6 and first[1]["error_norm"] > 0


def one_rank_from_before_the_first_step() -> Any:
    model, loco, optimizer = build("flat", {})
    blank = loco.state_dict()
    train(model, optimizer, range(2))
    state = blank if dist.get_rank() == 1 else loco.state_dict()
    error = raised(loco.load_state_dict, state, strict=True)
    return error, heard(lambda: loco.load_state_dict(state))


def test_one_rank_with_a_state_from_before_the_first_step_lacks_its_errors(ranks: Ranks) -> None:
    text = "a rank has a state without any reduction, while others have more"
    (first, warnings), (second, silent) = ranks(2).run(one_rank_from_before_the_first_step)
    assert text in first and text in second
    assert text in warnings[0] and silent == []


def without_errors() -> Any:
    model, loco, optimizer = build("flat", {})
    train(model, optimizer, range(2))
    small, whole = loco.state_dict(error=False), loco.state_dict()
    warnings = heard(lambda: loco.load_state_dict(small))
    stats = loco.stats()
    error_bytes = sum(
        tensor.nbytes for _, _, _, *tensors in contents(whole)["errors"] for tensor in tensors
    )
    sizes = [len(next(iter(state.values()))) for state in (small, whole)]
    return warnings, stats["reductions"], stats["error_norm"], sizes[1] - sizes[0] > error_bytes


def test_saving_without_errors_keeps_the_counters(ranks: Ranks) -> None:
    (first, *rest), (second, *_) = ranks(2).run(without_errors)
    assert rest == [6, 0.0, True]
    assert "saved without errors" in first[0] and second == []


def frozen_and_wrapped_anew(path: str) -> Any:
    torch.manual_seed(0)
    config = LoCoConfig(block_size=32)
    gradients = {name: batch().flatten()[:40] * 0.37 for name in "ab"}
    old = fully_shard(Given(a=(40,), b=(40,)), mesh=cpu_mesh())
    first = attach(old, config)
    backward(old, **gradients)
    dcp.save({"loco": first}, checkpoint_id=path)

    renamed = fully_shard(Given(c=(40,)), mesh=cpu_mesh())
    other = attach(renamed, config)
    mismatch = heard(lambda: dcp.load({"loco": other}, checkpoint_id=path))

    frozen = Given(a=(40,), b=(40,))
    frozen.a.requires_grad_(False)
    fully_shard(frozen, mesh=cpu_mesh())
    third = attach(frozen, config)
    messages = heard(lambda: dcp.load({"loco": third}, checkpoint_id=path))
    before = third.stats()["error_bytes"]
    backward(frozen, b=gradients["b"])
    backward(old, b=gradients["b"])
    ours, theirs = (
        {name: payload for _, name, _, payload, _ in contents(loco.state_dict())["errors"]}
        for loco in (third, first)
    )
    same = [torch.equal(ours[name], theirs[name]) for name in "ab"]
    return mismatch, messages, before, same, float(ours["a"].float().norm()) > 0


def test_parameter_frozen_since_the_save_keeps_its_error(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(frozen_and_wrapped_anew, str(tmp_path))
    assert first[1:] == second[1:] == ([], 0.0, [True, True], True)
    assert "the model has no parameter 'a'" in first[0][0] and second[0] == []


def nothing_in_common() -> Any:
    """Saved after a step by a model of which the present one has no unit and no parameter."""
    old, loco, optimizer = build("flat", {})
    train(old, optimizer, range(1))
    new = nn.Sequential(fully_shard(nn.Linear(8, 8), mesh=cpu_mesh()))
    other = attach(new, LoCoConfig(block_size=32))
    error = raised(other.load_state_dict, loco.state_dict(), strict=True)
    return error, heard(lambda: other.load_state_dict(loco.state_dict()))


def test_a_checkpoint_of_another_model_is_not_taken_for_an_early_one(ranks: Ranks) -> None:
    (first, warnings), (second, silent) = ranks(2).run(nothing_in_common)
    assert "nothing was loaded: the model has no parameter 'head.weight'" in first == second
    assert "the model has no parameter 'head.weight'" in warnings[0] and silent == []


def regrouped(path: str) -> Any:
    """Saved with a unit per block, loaded with one unit for the whole model."""
    torch.manual_seed(0)
    config = LoCoConfig(block_size=32)
    old = shard(Net())
    first = attach(old, config)
    backward_of(old)
    dcp.save({"loco": first}, checkpoint_id=path)
    new = fully_shard(Net(), mesh=cpu_mesh())
    second = attach(new, config)
    messages = heard(lambda: dcp.load({"loco": second}, checkpoint_id=path))
    ours, theirs = (
        {name: payload for _, name, _, payload, _ in contents(loco.state_dict())["errors"]}
        for loco in (second, first)
    )
    assert ours.keys() == theirs.keys() == dict(new.named_parameters()).keys()
    same = all(torch.equal(ours[name], theirs[name]) for name in ours)
    return messages, second.stats()["reductions"], same


def backward_of(model: nn.Module) -> None:
    model(batch()).square().mean().backward()


def test_units_wrapped_anew_take_over_errors_by_parameter(ranks: Ranks, tmp_path: Path) -> None:
    # One reduction of each of 3 units was one reduction of what is a single unit now.
    assert ranks(2).run(regrouped, str(tmp_path)) == [([], 1.0, True)] * 2
