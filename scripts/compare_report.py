"""What a loss study gave: a table of differences to its baseline, and two plots.

python scripts/compare_report.py configs/compare_paths.toml --out docs/benchmarks/loss
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import matplotlib
from rich import box
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from study import CurvePoint, ResultFiles, Run, Study, full_name, load_study

_LINEAR = 10  # thousandths of a nat, beyond which an axis is logarithmic


class Comparison(NamedTuple):
    """A path in a setting against the baseline in that setting, over the seeds that have both."""

    setting: str
    path: str
    val_losses: list[float]
    differences: list[float]
    """To the baseline with the same seed, in nats; positive: worse."""

    bytes_ratio: float
    """Bytes of gradient that the baseline sent, over those of this path."""

    @property
    def name(self) -> str:
        """What the path is called where settings are side by side."""
        return full_name(self.setting, self.path)

    @property
    def mean_difference(self) -> float:
        """nan if a run of either diverged."""
        return mean(self.differences)

    @property
    def standard_error(self) -> float:
        """Of the mean difference; nan with a single seed."""
        return standard_error(self.differences)


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of `values`, or nan if it cannot be told."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return stdev(values) / math.sqrt(len(values))


def compare(study: Study, files: ResultFiles) -> list[Comparison]:
    """All paths of a study that have a run in common with the baseline."""
    results = files.results()
    done = {
        (run.setting, run.path, run.seed): results[run.key]
        for run in study.runs()
        if run.key in results
    }
    comparisons = []
    for setting in study.settings:
        for path in study.paths:
            pairs = [
                (done[setting, path, seed], done[setting, study.baseline, seed])
                for seed in range(study.seeds)
                if (setting, path, seed) in done and (setting, study.baseline, seed) in done
            ]
            if not pairs:
                continue
            comparisons.append(
                Comparison(
                    setting,
                    path,
                    [mine.val_loss for mine, _ in pairs],
                    [mine.val_loss - stock.val_loss for mine, stock in pairs],
                    pairs[0][1].gradient_bytes_sent / pairs[0][0].gradient_bytes_sent,
                )
            )
    return comparisons


def comparison_table(study: Study, comparisons: Sequence[Comparison]) -> Table:
    """As Markdown: losses in nats, differences to the baseline in thousandths of that."""
    table = Table(box=box.MARKDOWN)
    table.add_column("gradients", no_wrap=True)
    columns = ("seeds", "validation loss", "difference (1e-3)", "standard error (1e-3)", "bytes")
    for column in columns:
        table.add_column(column, justify="right")
    for comparison in comparisons:
        is_baseline = comparison.path == study.baseline
        table.add_row(
            comparison.name,
            str(len(comparison.differences)),
            f"{mean(comparison.val_losses):.4f}",
            "" if is_baseline else _milli(comparison.mean_difference, "+.2f"),
            "" if is_baseline else _milli(comparison.standard_error, ".2f"),
            f"1 / {comparison.bytes_ratio:.2f}",
        )
    return table


def _milli(value: float, form: str) -> str:
    """In thousandths; a dash if it is not known."""
    return format(1e3 * value, form) if math.isfinite(value) else "-"


def draw_curves(study: Study, curves: dict[str, list[CurvePoint]], path: Path) -> None:
    """Validation loss over steps, the mean over seeds, one panel for each setting."""
    runs: dict[tuple[str, str], list[Run]] = {}
    for run in study.runs():
        if run.key in curves:
            runs.setdefault((run.setting, run.path), []).append(run)
    figure, panels = plt.subplots(
        1, len(study.settings), figsize=(6.5 * len(study.settings), 5), squeeze=False
    )
    colors = plt.get_cmap("tab20")
    for axes, setting in zip(panels[0], study.settings, strict=True):
        for index, name in enumerate(study.paths):
            mine = [curves[run.key] for run in runs.get((setting, name), [])]
            points = list(zip(*mine, strict=False))
            axes.plot(
                [column[0].step for column in points],
                [mean(point.val_loss for point in column) for column in points],
                label=name,
                color=colors(index % 20),
                linewidth=3 if name == study.baseline else 1.3,
            )
        axes.set(title=setting, xlabel="step", ylabel="validation loss (nats)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="small")
    _save(figure, path)


def draw_differences(study: Study, comparisons: Sequence[Comparison], path: Path) -> None:
    """The difference of each path: every seed as a dot, their mean with its standard error."""
    shown = [comparison for comparison in comparisons if comparison.path != study.baseline]
    figure, axes = plt.subplots(figsize=(7, 1.2 + 0.4 * len(shown)))
    for row, comparison in enumerate(shown):
        milli = [1e3 * difference for difference in comparison.differences]
        axes.plot(milli, [row] * len(milli), "o", color="#9db7d5", markersize=5)
        axes.errorbar(
            mean(milli), row, xerr=standard_error(milli), fmt="D", color="#b3400e", capsize=4
        )
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(shown)), [comparison.name for comparison in shown])
    axes.invert_yaxis()
    beyond = max(map(abs, axes.get_xlim())) > _LINEAR
    if beyond:
        axes.set_xscale("symlog", linthresh=_LINEAR)
    axes.set_xlabel(
        f"validation loss minus that of {study.baseline} (1e-3 nats)\n"
        "dots: seeds; diamonds: mean and standard error"
        + (f"; logarithmic beyond {_LINEAR}" if beyond else "")
    )
    axes.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_report(study: Study, files: ResultFiles, stem: Path) -> None:
    """Prints the table, and draws `stem`_curves.png and `stem`_differences.png.

    Raises:
        ValueError: no path of the study has a run in common with its baseline.
    """
    comparisons = compare(study, files)
    if not comparisons:
        raise ValueError(f"{files.results_file} has no run of {study.baseline!r} in this study")
    Console(width=120).print(comparison_table(study, comparisons))
    draw_curves(study, files.curves(), stem.with_name(f"{stem.name}_curves.png"))
    draw_differences(study, comparisons, stem.with_name(f"{stem.name}_differences.png"))
    print(f"Plots: {stem.resolve()}_*.png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    arguments = parser.parse_args(argv)
    write_report(
        load_study(arguments.study),
        ResultFiles(arguments.out),
        arguments.out / arguments.study.stem,
    )


if __name__ == "__main__":
    main()
