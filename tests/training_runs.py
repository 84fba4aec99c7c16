"""Short runs of scripts/train.py on two ranks, for the tests of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"

SMALL = [
    *("--model.dim", "128", "--model.num_layers", "2", "--model.hidden_dim", "256"),
    *("--data.seq_len", "32", "--optim.warmup_steps", "4"),
    *("--train.steps", "16", "--train.eval_interval", "8", "--train.eval_batches", "2"),
]


def command(tmp_path: Path, *argv: str, script: str = "train.py") -> list[str]:
    """Runs one of scripts/ on their own source text; metrics go to metrics.jsonl."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(file.read_bytes() for file in sorted(SCRIPTS.glob("*.py"))))
    metrics = str(tmp_path / "metrics.jsonl")
    return torchrun(script, *SMALL, "--data.path", str(text), *argv, "--train.metrics", metrics)


def torchrun(script: str, *argv: str) -> list[str]:
    """Runs one of scripts/ on two ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*run, str(SCRIPTS / script), *argv]


def environment() -> dict[str, str]:
    """This tree's code, no GPU, and one thread for each rank."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "CUDA_VISIBLE_DEVICES": "",
    }


def run_on_two_ranks(
    tmp_path: Path, *argv: str, script: str = "train.py"
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Runs it to the end; returns its metrics and its summary."""
    output_of(command(tmp_path, *argv, script=script))
    *steps, summary = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    return steps, summary


def output_of(command: list[str]) -> str:
    """What a command prints that has to succeed."""
    result = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
