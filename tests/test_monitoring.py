"""What LoCo tells while training: bytes and errors of units, a guard on them, and profiles."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

from loco_fsdp import LoCo, LoCoConfig, LoCoFSDP, attach
from loco_fsdp.reduction.guard import INTERVAL
from ranks import RankPool, heard
from toy import Given, Net, backward, batch, cpu_mesh, reduced, shard

Ranks = Callable[[int], RankPool]

# --- bytes -----------------------------------------------------------------------------------


def storages(dtype: torch.dtype) -> dict[int, int]:
    """Bytes of all storages that tensors of this dtype use in this process, by address."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) is Tensor and o.dtype == dtype]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def allocated(error_dtype: str) -> Any:
    dtypes = [getattr(torch, error_dtype), torch.uint8]
    before = [storages(dtype) for dtype in dtypes]
    model = fully_shard(Given(a=(100,), b=(7, 3)), mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(block_size=32, error_dtype=error_dtype))  # type: ignore[arg-type]
    for _ in range(2):
        backward(model, a=torch.rand(100), b=torch.rand(7, 3))
    after = [storages(dtype) for dtype in dtypes]
    new = [sum(a[p] for p in a.keys() - b.keys()) for a, b in zip(after, before, strict=True)]
    return new, loco.stats(), loco.summary(), [unit.error_bytes for unit in loco.units]


@pytest.mark.parametrize("error_dtype", ["int8", "float8_e4m3fn"])
def test_reported_bytes_are_those_allocated(ranks: Ranks, error_dtype: str) -> None:
    for (payload, buffers), stats, summary, units in ranks(2).run(allocated, error_dtype):
        # Shards of 50 and 4 x 3 elements: 2 + 1 blocks of 32 elements for each of 2 ranks.
        assert payload == 2 * 3 * 32
        assert stats["error_bytes"] == payload + 2 * 3 * 4  # and an fp32 scale each
        assert units == [stats["error_bytes"]]
        # To send and to receive: half a byte an element, and a scale a block, for each rank, up to
        # a multiple of 16 bytes.
        assert 3 * 16 + 3 * 4 == 60
        assert buffers == stats["buffer_bytes"] == 2 * 2 * 64
        assert f"{int(stats['error_bytes'])}" in summary


def unit_by_unit() -> Any:
    model = shard(Net())
    loco = attach(model, LoCoConfig(block_size=32))
    assert set(loco.stats().values()) == {0.0, 1.0}  # the ratio of nothing is 1
    for _ in range(3):
        model(batch()).square().mean().backward()
    return loco.stats(), loco.unit_stats()


def test_units_add_up_to_the_whole(ranks: Ranks) -> None:
    for whole, units in ranks(2).run(unit_by_unit):
        assert set(units) == {"(root)", "blocks.0", "blocks.1"}
        for name in ("wire_bytes", "baseline_bytes", "reductions", "error_bytes"):
            assert sum(unit[name] for unit in units.values()) == whole[name] > 0
        squares = sum(unit["error_norm"] ** 2 for unit in units.values())
        assert squares == pytest.approx(whole["error_norm"] ** 2, rel=1e-6)
        assert all(0 < unit["relative_error"] < 0.2 for unit in units.values())


# --- the guard -------------------------------------------------------------------------------

# One block: 7 and 31 quarters. In 4 bits the scale is 1, and the quarters are not sent.
UNSENT, WANTED = 31 * 0.25**2, 7**2 + 31 * 0.25**2


def uneven_gradient() -> Tensor:
    """Rank 1 loses the quarters; rank 0 has none."""
    block = torch.full((32,), 0.25 * dist.get_rank())
    block[0] = 7
    return block.repeat(2)


def guarded(limit: float, reductions: int, **options: Any) -> Any:
    model = fully_shard(Given(a=(64,)), mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(block_size=32, error_feedback=False, guard=limit, **options))
    widths: list[int | None] = []

    def run() -> None:
        for _ in range(reductions):
            widths.append(loco.units[0].bits)
            backward(model, a=uneven_gradient())
        widths.append(loco.units[0].bits)

    return heard(run), widths


RELATIVE_ERROR = (UNSENT / (WANTED + 49)) ** 0.5  # over both ranks


def test_guard_raises_the_width_on_all_ranks_at_once(ranks: Ranks) -> None:
    for rank, (warnings, widths) in enumerate(
        ranks(2).run(guarded, 0.999 * RELATIVE_ERROR, 3 * INTERVAL)
    ):
        # In 8 bits the scale is 7 / 127: 0.25 is sent as 5 / 127 * 7, and the limit holds.
        assert widths == [4] * INTERVAL + [8] * (2 * INTERVAL + 1)
        assert len(warnings) == (rank == 0)
        if rank == 0:
            assert f"relative error {RELATIVE_ERROR:.3g} over 16 reductions" in warnings[0]
            assert "4 bits become 8" in warnings[0]


def test_guard_leaves_what_is_within_its_limit(ranks: Ranks) -> None:
    for warnings, widths in ranks(2).run(guarded, 1.001 * RELATIVE_ERROR, 2 * INTERVAL):
        assert (warnings, widths) == ([], [4] * (2 * INTERVAL + 1))


def guarded_to_full_precision() -> Any:
    models = [fully_shard(Given(a=(64,)), mesh=cpu_mesh()) for _ in range(2)]
    loco = attach(models[1], LoCoConfig(block_size=32, bits=8, guard=1e-9))
    error_bytes = []
    for step in range(INTERVAL + 2):
        for model in models:
            model.zero_grad()
            backward(model, a=uneven_gradient() * (step + 1) / 3)
        error_bytes.append(loco.stats()["error_bytes"])
    same = torch.equal(*(reduced(model.a) for model in models))
    return error_bytes, same, loco.stats()["bypassed_reductions"], loco.units[0]


def test_guard_ends_in_full_precision_and_frees_the_error(ranks: Ranks) -> None:
    for error_bytes, same, bypassed, unit in ranks(2).run(guarded_to_full_precision):
        assert all(error_bytes[: INTERVAL - 1]) and not any(error_bytes[INTERVAL - 1 :])
        assert same and bypassed == 2
        assert unit.bits is None
        assert unit.bypass_reason == "relative error above guard=1e-09 in 8 bits"


def guarded_hsdp() -> Any:
    model: Any = LoCoFSDP(
        Given(a=(64,)), LoCoConfig(block_size=32, guard=1e-3), mesh=cpu_mesh(2, 2)
    )
    widths = []
    for _ in range(INTERVAL + 1):
        backward(model, a=uneven_gradient() if dist.get_rank() == 1 else torch.zeros(64))
        widths.append(model.loco.units[0].bits)
    return widths


def test_guard_agrees_over_replicas_too(ranks: Ranks) -> None:
    assert ranks(4).run(guarded_hsdp) == [[4] * (INTERVAL - 1) + [8, 8]] * 4


def guarded_over_a_save() -> Any:
    def run(loco: LoCo, model: Any, reductions: int) -> list[int | None]:
        widths = []
        for _ in range(reductions):
            backward(model, a=uneven_gradient())
            widths.append(loco.units[0].bits)
        return widths

    config = LoCoConfig(block_size=32, guard=0.01)
    first_model = fully_shard(Given(a=(64,)), mesh=cpu_mesh())
    first = attach(first_model, config)
    run(first, first_model, 10)
    early = first.state_dict()
    run(first, first_model, 6)
    late = first.state_dict()
    results = []
    for state in (early, late):
        model = fully_shard(Given(a=(64,)), mesh=cpu_mesh())
        loco = attach(model, config)
        loco.load_state_dict(state)
        results.append(run(loco, model, 7))
    return results


def test_guard_goes_on_after_loading(ranks: Ranks) -> None:
    for early, late in ranks(2).run(guarded_over_a_save):
        assert early == [4] * 5 + [8] * 2
        assert late == [8] * 7


# --- profiles --------------------------------------------------------------------------------


def profiled(name: str, options: dict[str, Any]) -> set[str]:
    meshes = {"HSDP, two replicas": (2, 2), "HSDP, four replicas": (4, 1)}
    mesh = cpu_mesh(*meshes.get(name, ()))
    model: Any = LoCoFSDP(Net(), LoCoConfig(block_size=32, **options), mesh=mesh)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(batch()).square().mean().backward()
    return {event.key for event in profiler.key_averages() if "LoCo::" in event.key}


@pytest.mark.parametrize(
    ("name", "options", "stages"),
    [
        ("flat", {"topology": "flat"}, ["encode flat", "exchange flat", "decode flat"]),
        (
            "hierarchical",
            {"node_size": 2, "intra_node_bits": 8},
            [
                f"{s} {hop}-node"
                for s in ("encode", "exchange", "decode")
                for hop in ("intra", "inter")
            ],
        ),
        (
            "HSDP, two replicas",
            {},
            ["encode replicas", "exchange replicas", "decode replicas"],
        ),
        (
            "HSDP, four replicas",
            {},
            [
                *("encode replicas", "exchange replicas", "decode and encode sums"),
                *("exchange sums", "decode sums"),
            ],
        ),
    ],
)
def test_profile_names_stage_hop_and_unit(
    ranks: Ranks, name: str, options: dict[str, Any], stages: list[str]
) -> None:
    units = ["(root)", "blocks.0", "blocks.1"]
    expected = {f"LoCo::{stage} ({unit})" for stage in stages for unit in units}
    assert ranks(4).run(profiled, name, options) == [expected] * 4


# --- tables ----------------------------------------------------------------------------------


def tables() -> list[float]:
    """Bytes of tables after 0, 1, 2 and 70 sets of parameters, and when they are forgotten."""
    names = [f"p{index}" for index in range(7)]
    model = fully_shard(Given(**{name: (100,) for name in names}), mesh=cpu_mesh())
    loco = attach(model, LoCoConfig(block_size=32))
    counts = [loco.stats()["table_bytes"]]
    for number in range(1, 71):
        used = [name for bit, name in enumerate(names) if number >> bit & 1]
        backward(model, **{name: torch.ones(100) for name in used})
        if number in (1, 2, 70):
            counts.append(loco.unit_stats()["(root)"]["table_bytes"])
    loco.detach()
    return [*counts, loco.stats()["table_bytes"]]


def test_tables_of_blocks_are_counted(ranks: Ranks) -> None:
    # A shard of 50 elements has 2 blocks; start, length and row of each are 8 bytes.
    one = 2 * 3 * 8
    kept = sum(number.bit_count() for number in range(7, 71)) * one  # the last 64 sets
    assert ranks(2).run(tables) == [[0, one, 2 * one, kept, 0]] * 2
