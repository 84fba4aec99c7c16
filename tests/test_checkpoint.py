"""Checkpoints: going on as if nothing had happened, or with what fits and a warning."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from checkpoints import bits_of, contents, put, train
from loco_fsdp import LoCo, LoCoConfig, LoCoFSDP, attach
from ranks import RankPool, heard, raised
from toy import Given, Net, backward, batch, cpu_mesh, shard

Ranks = Callable[[int], RankPool]

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "flat": {"topology": "flat"},
    "hierarchical": {"topology": "hierarchical", "node_size": 2, "intra_node_bits": 8},
    "HSDP": {},
}
ERROR_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")

# A save after 5 steps comes before the reset here, and before the end of the warm-up there.
RESETS = {"warmup_steps": 2, "reset_interval": 6}
CASES = [
    (name, {**options, "error_dtype": dtype, **RESETS})
    for name, options in TOPOLOGIES.items()
    for dtype in ERROR_DTYPES
] + [(name, {**options, "warmup_steps": 7}) for name, options in TOPOLOGIES.items()]
IDS = [f"{name}-{options.get('error_dtype', 'warmup')}" for name, options in CASES]


def build(name: str, options: dict[str, Any]) -> tuple[Net, LoCo, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = cpu_mesh(2, 2) if name == "HSDP" else cpu_mesh()
    model: Any = LoCoFSDP(Net(), LoCoConfig(block_size=32, **options), mesh=mesh)
    return model, model.loco, torch.optim.AdamW(model.parameters(), lr=1e-2)


def save(model: Any, optimizer: torch.optim.Optimizer, path: str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": moments, "loco": model.loco}, checkpoint_id=path)


def load(model: Any, optimizer: torch.optim.Optimizer, path: str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": moments, "loco": model.loco}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def result(model: Any) -> list[Tensor]:
    """Weights and errors of this rank."""
    errors = contents(model.loco.state_dict())["errors"]
    return [
        *(parameter.to_local().detach().clone() for parameter in model.parameters()),
        *(tensor for _, _, _, *tensors in errors for tensor in tensors),
    ]


# --- the same ranks, topology and configuration ----------------------------------------------


def straight_and_saved(directory: str) -> list[Any]:
    results = []
    for index, (name, options) in enumerate(CASES):
        model, loco, optimizer = build(name, options)
        train(model, optimizer, range(5))
        save(model, optimizer, f"{directory}/{index}")
        train(model, optimizer, range(5, 10))
        results.append((bits_of(result(model)), loco.stats()))
    return results


@pytest.fixture(scope="module")
def saved(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[list[Any]]]]:
    """A folder of checkpoints after 5 steps, one per case; what 10 steps gave, by rank and case."""
    directory = tmp_path_factory.mktemp("checkpoints")
    results = ranks(4).run(straight_and_saved, str(directory))
    ranks(4).stop()  # new processes load
    yield directory, results


def resumed(path: str, case: int) -> Any:
    name, options = CASES[case]
    model, loco, optimizer = build(name, options)
    warnings = heard(lambda: load(model, optimizer, path))
    train(model, optimizer, range(5, 10))
    return bits_of(result(model)), loco.stats(), warnings


@pytest.mark.parametrize("case", range(len(CASES)), ids=IDS)
def test_resuming_is_bitwise_as_never_having_stopped(
    ranks: Ranks, saved: tuple[Path, list[list[Any]]], case: int
) -> None:
    directory, straight = saved
    for rank, (tensors, stats, warnings) in enumerate(
        ranks(4).run(resumed, str(directory / str(case)), case)
    ):
        assert warnings == []
        assert tensors == straight[rank][case][0]
        assert stats == straight[rank][case][1]
        assert stats["reductions"] > 0 and stats["error_norm"] > 0
    assert len({str(by_case[case][0]) for by_case in straight}) == 4  # each rank has its own


def asynchronous(directory: str) -> Any:
    model, loco, optimizer = build("flat", {"topology": "flat"})
    train(model, optimizer, range(3))
    before = loco.state_dict()
    # A group of its own, or the saving thread gets in between the collectives of the training.
    group = dist.new_group(backend="gloo")
    future = dcp.async_save({"loco": loco}, checkpoint_id=directory, process_group=group)
    train(model, optimizer, range(3, 6))
    assert future is not None
    future.result()  # type: ignore[union-attr]
    late = loco.state_dict()
    state = {"loco": dict(loco.state_dict())}
    dcp.load(state, checkpoint_id=directory)
    return state["loco"] == before, state["loco"] == late


def test_asynchronous_save_holds_the_moment_of_the_call(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(asynchronous, str(tmp_path)) == [(True, False)] * 2


def usual_norms(old: bool) -> Any:
    """What hops hold to be usual, after it is saved by one LoCo and loaded by another."""
    _, first, _ = build("hierarchical", TOPOLOGIES["hierarchical"])
    model, second, optimizer = build("hierarchical", TOPOLOGIES["hierarchical"])
    train(model, optimizer, range(1))
    learned = usual_of(second)
    for index, reducer in enumerate(second._reducers):
        for number, hop in enumerate(reducer.hops):
            hop.load_usual([index + 0.5, number + 0.25, 2.0 * dist.get_rank()])
    given = usual_of(second)
    state = second.state_dict()
    if old:
        state = {key: without_usual(blob) for key, blob in state.items()}
    before = usual_of(first)
    first.load_state_dict(state, strict=True)
    return learned, given, before, usual_of(first)


def usual_of(loco: LoCo) -> list[list[float]]:
    return [hop.usual_state() for reducer in loco._reducers for hop in reducer.hops]


def without_usual(blob: bytes) -> bytes:
    saved = torch.load(io.BytesIO(blob))
    for unit in saved["units"].values():
        del unit["usual"]
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    return buffer.getvalue()


def test_what_norms_are_usual_comes_back_and_older_checkpoints_lack_it(ranks: Ranks) -> None:
    for rank, (learned, given, before, after) in enumerate(ranks(4).run(usual_norms, False)):
        two_hops = [(0.25, 1.25)] * 3  # of the head, and of two blocks
        expected = [[unit + 0.5, hop, 2.0 * rank] for unit in range(3) for hop in two_hops[unit]]
        assert after == given == expected
        assert learned != given and before != given
    for _, _, before, after in ranks(4).run(usual_norms, True):
        assert after == before


# --- something has changed -------------------------------------------------------------------


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


# --- what is wrong is said on all ranks, and changes nothing ---------------------------------


def bad_states(kind: str) -> Any:
    model, loco, optimizer = build("flat", {})
    train(model, optimizer, range(2))
    good = loco.state_dict()
    train(model, optimizer, range(2, 3))
    before = (bits_of(result(model)), loco.stats())
    (key,) = good
    rank = dist.get_rank()
    bad: dict[str, Any] = {
        "damaged": {key: good[key][:-40] if rank else good[key]},
        "type": {key: "state" if rank else good[key]},
        "step": loco.state_dict() if rank else good,
        "format": {key: other_format(good[key])},
    }[kind]
    message = raised(loco.load_state_dict, bad)
    return message, (bits_of(result(model)), loco.stats()) == before


def other_format(blob: bytes) -> bytes:
    buffer = io.BytesIO()
    torch.save({**torch.load(io.BytesIO(blob)), "format": 99, "loco_fsdp": "9.9"}, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("damaged", "rank 1 cannot load its LoCo state: its"),
        ("type", "rank 1 cannot load its LoCo state: 'rank_1' holds str, not bytes"),
        ("step", "load states of the same step"),
        ("format", "format 99 of loco-fsdp 9.9"),
    ],
)
def test_bad_state_is_refused_on_all_ranks(ranks: Ranks, kind: str, text: str) -> None:
    for message, unchanged in ranks(2).run(bad_states, kind):
        assert message.startswith("ValueError: nothing was loaded: ")
        assert text in message
        assert unchanged


def into_detached() -> str:
    _, loco, _ = build("flat", {})
    loco.detach()
    return raised(loco.load_state_dict, {})


def test_detached_loco_loads_nothing(ranks: Ranks) -> None:
    (message,) = set(ranks(2).run(into_detached))
    assert "RuntimeError: this LoCo is detached" in message


def test_config_is_copied_and_pickled_without_a_process_group() -> None:
    assert not dist.is_initialized()
    config = LoCoConfig(bits=8, error_dtype="int8", guard=0.5)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
