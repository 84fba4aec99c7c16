"""Compares a stock and a LoCo run of scripts/train.py in a table and a picture.

python scripts/demo_report.py STOCK.jsonl LOCO.jsonl PICTURE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

SMOOTHED_STEPS = 15
# Stock is drawn wide and pale under LoCo, thin and dark: where they agree, both stay visible.
COLORS = ("#9db7d5", "#b3400e")
LINE_WIDTHS = (5.0, 1.5)
MARKERS = ({"marker": "s", "markersize": 10, "markeredgecolor": "#47688f"}, {"marker": "x"})


class Run(NamedTuple):
    """One run's metrics."""

    label: str
    steps: list[dict[str, Any]]
    summary: dict[str, Any]

    @property
    def megabytes_sent(self) -> float:
        """Gradient sent by a rank in the whole run, in 10^6 bytes."""
        return self.summary["gradient_bytes_sent"] / 1e6


def read_run(path: Path) -> Run:
    """Reads what scripts/train.py wrote to `path`.

    Raises:
        ValueError: the run did not reach its end.
    """
    *steps, summary = [json.loads(line) for line in path.read_text().splitlines()] or [{}]
    if "summary" not in summary:
        raise ValueError(f"{path} holds no finished run: its last line is no summary; run it again")
    bits = summary["bits"]
    return Run(f"LoCo, {bits} bits" if bits else "stock FSDP2, fp32", steps, summary)


def comparison_table(stock: Run, loco: Run) -> Table:
    """What was gained and what it cost."""
    table = Table(
        title=f"{loco.summary['num_parameters']:,} parameters, {loco.summary['world_size']} ranks, "
        f"{loco.summary['steps']} steps",
        caption="The ranks share this machine: the step time here shows what the codec costs, "
        "not what it saves on a network.",
    )
    table.add_column("gradients")
    for name in (
        "validation loss\n(nats/byte)",
        "sent per rank\n(MB)",
        "ratio",
        "median step\n(ms)",
    ):
        table.add_column(name, justify="right")
    for run in (stock, loco):
        table.add_row(
            run.label,
            f"{run.summary['val_loss']:.4f}",
            f"{run.megabytes_sent:.1f}",
            f"{stock.megabytes_sent / run.megabytes_sent:.2f}x",
            f"{run.summary['median_step_ms']:.0f}",
        )
    return table


def draw_comparison(stock: Run, loco: Run, path: Path) -> None:
    """Loss curves on the left, bytes as bars on the right."""
    figure, (loss_axes, bytes_axes) = plt.subplots(
        1, 2, figsize=(10, 4.2), width_ratios=(2.4, 1), layout="constrained"
    )
    _draw_losses(loss_axes, (stock, loco))
    _draw_bytes(bytes_axes, (stock, loco))
    for axes in (loss_axes, bytes_axes):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_losses(axes: Axes, runs: tuple[Run, Run]) -> None:
    for run, color, line_width in zip(runs, COLORS, LINE_WIDTHS, strict=True):
        losses = np.array([metrics["loss"] for metrics in run.steps])
        width = min(SMOOTHED_STEPS, len(losses))
        smoothed = np.convolve(losses, np.full(width, 1 / width), mode="valid")
        steps = np.arange(width, len(losses) + 1)
        axes.plot(
            steps, smoothed, label=f"{run.label}, training", color=color, linewidth=line_width
        )
    for run, color, marker in zip(runs, COLORS, MARKERS, strict=True):
        evals = [metrics for metrics in run.steps if "val_loss" in metrics]
        axes.plot(
            [metrics["step"] for metrics in evals],
            [metrics["val_loss"] for metrics in evals],
            label=f"{run.label}, validation: {run.summary['val_loss']:.4f} at the end",
            color=color,
            linestyle="none",
            zorder=3,
            **marker,
        )
    difference = runs[1].summary["val_loss"] - runs[0].summary["val_loss"]
    axes.set_title(f"Validation loss differs by {difference:+.4f} nats at the end")
    axes.set_xlabel(f"step (training: mean of {SMOOTHED_STEPS})")
    axes.set_ylabel("loss (nats/byte)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def _draw_bytes(axes: Axes, runs: tuple[Run, Run]) -> None:
    labels = [run.label.replace(", ", "\n") for run in runs]
    megabytes = [run.megabytes_sent for run in runs]
    bars = axes.bar(labels, megabytes, color=COLORS, width=0.6)
    axes.bar_label(bars, fmt="%.0f MB", padding=3)
    axes.margins(y=0.12)
    axes.set_title(f"{megabytes[0] / megabytes[1]:.1f} times fewer bytes")
    axes.set_ylabel("gradient sent per rank (MB)")


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    stock_path, loco_path, picture_path = map(Path, sys.argv[1:])
    stock, loco = read_run(stock_path), read_run(loco_path)
    Console().print(comparison_table(stock, loco))
    draw_comparison(stock, loco, picture_path)
    print(f"Picture: {picture_path.resolve()}")


if __name__ == "__main__":
    main()
