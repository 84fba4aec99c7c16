"""Metrics of a run: a JSONL file, a progress bar, and TensorBoard where it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from train_config import TrainConfig


class Reporter:
    """Metrics to files and a progress bar to the terminal, on rank 0; nothing elsewhere.

    Args:
        config: of the run.
        rank: of this process.
        first_step: steps that an earlier run made. What it reported about later ones, after its
            last checkpoint, is dropped.
    """

    def __init__(self, config: TrainConfig, rank: int, first_step: int) -> None:
        self.is_active = rank == 0
        self.path = Path(config.metrics)
        self.tensorboard = None
        if self.is_active:
            lines = self.path.read_text().splitlines() if first_step else []
            self.path.write_text("".join(f"{line}\n" for line in _up_to(first_step, lines)))
            if config.tensorboard is not None:
                from torch.utils.tensorboard import SummaryWriter

                self.tensorboard = SummaryWriter(config.tensorboard, purge_step=first_step + 1)
        self.progress = Progress(
            TextColumn(config.reduce),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=Console(quiet=not self.is_active),
        )
        self.bar = self.progress.add_task("", total=config.steps, completed=first_step, loss="")

    def __enter__(self) -> Reporter:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.tensorboard is not None:
            self.tensorboard.close()

    def say(self, line: str) -> None:
        """A line above the bar."""
        self.progress.console.print(line)

    def write(self, metrics: dict[str, Any]) -> None:
        """Appends one line to the file."""
        if self.is_active:
            with self.path.open("a") as file:
                print(json.dumps(metrics, allow_nan=False), file=file)

    def step(self, metrics: dict[str, Any]) -> None:
        """Writes the metrics of a step and moves the bar."""
        self.write(metrics)
        if self.tensorboard is not None:
            for name, value in _flat(metrics):
                self.tensorboard.add_scalar(name, value, metrics["step"])
        self.progress.update(self.bar, advance=1, loss=f"loss {metrics['loss']:.4f}")
        if "val_loss" in metrics:
            self.say(f"step {metrics['step']}: validation loss {metrics['val_loss']:.4f}")


def _up_to(step: int, lines: list[str]) -> Iterator[str]:
    """Lines about steps up to this one; a killed run may have left its last one unfinished."""
    for line in lines:
        try:
            metrics = json.loads(line)
        except json.JSONDecodeError:
            return
        if metrics.get("step", step + 1) <= step:
            yield line


def _flat(metrics: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
