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

from checkpoints import TOPOLOGIES, bits_of, build, load, result, save, train
from loco_fsdp import LoCo, LoCoConfig
from ranks import RankPool, heard, raised

Ranks = Callable[[int], RankPool]

ERROR_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")

# A save after 5 steps comes before the reset here, and before the end of the warm-up there.
RESETS = {"warmup_steps": 2, "reset_interval": 6}
CASES = [
    (name, {**options, "error_dtype": dtype, **RESETS})
    for name, options in TOPOLOGIES.items()
    for dtype in ERROR_DTYPES
] + [(name, {**options, "warmup_steps": 7}) for name, options in TOPOLOGIES.items()]
IDS = [f"{name}-{options.get('error_dtype', 'warmup')}" for name, options in CASES]


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
