"""A run of scripts/train.py that is killed goes on from its last complete checkpoint."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse", reason="needs the train extra")
pytest.importorskip("rich", reason="needs the train extra")

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from training_runs import command, environment, run_on_two_ranks

ROUNDS = int(os.environ.get("LOCO_KILL_ROUNDS", "3"))
# Enough steps that a run is killed somewhere before its end.
STEPS = 16 + 2 * ROUNDS
SAVING = [
    *("--train.steps", str(STEPS), "--train.checkpoint_interval", "2"),
    *("--loco.reset_interval", "7", "--loco.warmup_steps", "3"),
]


def final_weights(tmp_path: Path) -> dict[str, Tensor]:
    whole = tmp_path / "whole.pt"
    dcp_to_torch_save(tmp_path / "checkpoints" / f"step-{STEPS}", whole)
    weights: dict[str, Tensor] = torch.load(whole, weights_only=False)["training"]["model"]
    return weights


def saving(tmp_path: Path) -> list[str]:
    return [*SAVING, "--train.checkpoints", str(tmp_path / "checkpoints")]


def kill_at_random(tmp_path: Path, seconds: random.Random) -> None:
    """Kill all processes of a run at a moment after its first new step, unless it ends before."""
    metrics = tmp_path / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else -1
    process = subprocess.Popen(
        command(tmp_path, *saving(tmp_path)),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    # The file shrinks to the step of the checkpoint first, and then grows.
    while process.poll() is None and (not metrics.exists() or metrics.stat().st_size == size):
        try:
            process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
    try:
        process.wait(timeout=seconds.uniform(0, 1.5))
    except subprocess.TimeoutExpired:
        ranks = children(process.pid)
        for pid in [process.pid, *ranks]:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def children(pid: int) -> list[int]:
    """Processes started by this one; torchrun starts each rank in a session of its own."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_killed_run_ends_with_the_weights_of_one_that_never_was(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir()
    killed.mkdir()
    expected_steps, _ = run_on_two_ranks(straight, *saving(straight))
    seconds = random.Random(0)
    for _ in range(ROUNDS):
        kill_at_random(killed, seconds)
    if not (killed / "checkpoints" / f"step-{STEPS}").exists():
        run_on_two_ranks(killed, *saving(killed))
    expected, actual = final_weights(straight), final_weights(killed)
    assert expected.keys() == actual.keys() and expected
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name
    lines = (killed / "metrics.jsonl").read_text().splitlines()
    steps: list[dict[str, Any]] = [m for m in map(json.loads, lines) if "step" in m]
    assert [m["step"] for m in steps] == list(range(1, STEPS + 1))
    for name in ("loss", "grad_norm", "lr", "gradient_bytes_sent"):
        assert [m[name] for m in steps] == [m[name] for m in expected_steps]
    names = sorted(path.name for path in (killed / "checkpoints").iterdir())
    assert names == sorted([f"step-{STEPS - 2}", f"step-{STEPS}"])


def test_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    argv = ["--train.steps", "2", "--train.checkpoints", str(tmp_path / "checkpoints")]
    steps, summary = run_on_two_ranks(tmp_path, *argv)
    assert run_on_two_ranks(tmp_path, *argv) == (steps, summary)
    more, _ = run_on_two_ranks(tmp_path, *argv, "--train.steps", "3")
    assert more[:2] == steps and more[2]["step"] == 3
    units = more[2]["loco_units"]
    assert set(units) == {"(root)", "blocks.0", "blocks.1"}
    assert all(0 < unit["relative_error"] < 1 for unit in units.values())
    assert all(unit["error_norm"] > 0 for unit in units.values())
