"""Ranks that die, differ, or produce what is no number: said on all ranks, and nobody waits."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import loco_fsdp
from loco_fsdp import LoCoConfig, LoCoFSDP, agreement, attach
from ranks import RankPool, raised
from toy import Given, Net, batch, cpu_mesh, reduced, shard

Ranks = Callable[[int], RankPool]


def other_version() -> str:
    """Attach, with another version of the library on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(agreement, "__version__", "9.9")
        return raised(attach, shard(Net()))


def test_ranks_with_other_versions_are_refused(ranks: Ranks) -> None:
    (message,) = set(ranks(2).run(other_version))
    versions = f"loco-fsdp {loco_fsdp.__version__}, torch {torch.__version__}"
    assert message.startswith(f"ValueError: attach did nothing: rank 0 runs {versions}, ")
    assert "and rank 1 loco-fsdp 9.9, torch" in message


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Unreadable(LoCoConfig):
    def to_dict(self) -> dict[str, Any]:
        raise MemoryError("no room for a dict")


def fails_alone(kind: str) -> tuple[str, float]:
    """Attach, with something that only rank 1 stumbles over; then stock FSDP2 trains."""
    model = shard(Net())
    config, select = LoCoConfig(), None
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            if kind == "environment":
                patch.setenv("LOCAL_WORLD_SIZE", "two")
            elif kind == "configuration":
                config = Unreadable()
            elif kind == "exit":
                select = lambda *_: sys.exit(3)  # noqa: E731
            else:
                select = lambda *_: raise_(Unprintable())  # noqa: E731
        try:
            attach(model, config, select=select)
        except BaseException as error:
            message = "".join(traceback.format_exception_only(error)).strip()
        else:
            message = "attached"
    model(batch()).square().mean().backward()
    return message, float(reduced(model.head.weight).norm())


def raise_(error: Exception) -> bool:
    raise error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("environment", "ValueError: invalid literal for int() with base 10: 'two'"),
        ("configuration", "MemoryError: no room for a dict"),
        ("exit", "SystemExit: 3"),
        ("unprintable", "test_faults.Unprintable: <"),
    ],
)
def test_whatever_one_rank_raises_all_ranks_raise(ranks: Ranks, kind: str, error: str) -> None:
    (first, norm), (second, same_norm) = ranks(2).run(fails_alone, kind)
    assert first.startswith(f"ValueError: attach did nothing: rank 1 raised {error}")
    assert second.startswith(error)
    assert norm == same_norm > 0


def other_node_size(topology: str) -> str:
    before = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() < 2 else "1"
    try:
        return raised(attach, shard(Net()), LoCoConfig(topology=topology))  # type: ignore[arg-type]
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = before


def test_ranks_with_another_environment_are_refused(ranks: Ranks) -> None:
    messages = ranks(4).run(other_node_size, "hierarchical")
    assert len(set(messages)) == 1
    assert "nodes have 1 and 2 ranks, they must have as many" in messages[0]


def dies(topology: str, step_of_death: int, directory: Path) -> str:
    options: dict[str, Any] = {"topology": topology, "node_size": 2}
    mesh = cpu_mesh()
    if topology == "HSDP":
        options, mesh = {}, cpu_mesh(2, 2)
    model: Any = LoCoFSDP(Net(), LoCoConfig(**options), mesh=mesh)
    for step in range(3):
        loss = model(batch()).square().mean()
        if step == step_of_death and dist.get_rank() == 3:
            os._exit(1)
        try:
            loss.backward()
        except Exception as error:
            (directory / f"{dist.get_rank()}").write_text(f"{type(error).__name__}: {error}")
            os._exit(1)  # as an exception does that nobody catches: others may wait for this rank
    return "went on"


@pytest.mark.parametrize("topology", ["flat", "HSDP"])
def test_death_of_a_rank_ends_all(topology: str, tmp_path: Path) -> None:
    pool = RankPool(4, timeout_s=6, grace_s=20)
    try:
        with pytest.raises(AssertionError) as failure:
            pool.run(dies, topology, 1, tmp_path)
    finally:
        pool.stop()
    # All have ended, and the others, at the latest by the timeout of the group, with an error.
    assert str(failure.value).split("\n") == [
        line for rank in range(4) for line in (f"rank {rank}:", "died")
    ]
    for rank in range(3):
        assert "Error: " in (tmp_path / f"{rank}").read_text()


def scaled_training(dtype: torch.dtype, bad: float) -> Any:
    """Five steps with a gradient scaler; rank 1 has a bad element in the third."""
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model: Any = LoCoFSDP(
        Given(a=(64,), b=(64,)), LoCoConfig(block_size=32), mesh=cpu_mesh(), mp_policy=policy
    )
    nn.init.ones_(model.a.to_local())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    history = []
    for step in range(5):
        gradient = torch.full((64,), 7.0)
        if step == 2 and dist.get_rank() == 1:
            gradient[40] = bad
        scaler.scale(model(a=gradient, b=torch.full((64,), 7.0))).backward()
        finite = bool(model.a.grad.to_local().isfinite().all())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        stats = model.loco.stats()
        history.append((finite, scaler.get_scale(), stats["error_norm"], stats["nonfinite_blocks"]))
    return history, model.a.full_tensor().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_scaler_sees_what_is_not_finite_and_skips_the_step_everywhere(
    ranks: Ranks, dtype: torch.dtype, bad: float
) -> None:
    results = ranks(2).run(scaled_training, dtype, bad)
    for rank, (history, weights) in enumerate(results):
        # Element 40 of 64 is in the second rank's shard, and the first rank's scaler hears of it.
        assert [finite for finite, *_ in history] == [True, True, rank == 0, True, True]
        assert [scale for _, scale, *_ in history] == [4, 4, 2, 2, 2]
        # Constant sevens leave no error, before or after.
        assert all(norm == 0 for _, _, norm, _ in history)
        assert [blocks for *_, blocks in history] == [0, 0, rank, rank, rank]
        # Four steps of 0.5 * 7 each.
        assert weights == [1 - 4 * 3.5] * 64
