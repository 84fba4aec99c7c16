"""A loss study: which runs it consists of, and the files that keep what they gave.

A study is a TOML file:

    arguments = "--config configs/small.toml"     of scripts/train.py, for all runs
    baseline = "stock, fp32"                      what the other paths are compared with
    ranks = 2
    seeds = 3

    [paths]                                       arguments on top of those, for each path
    "stock, fp32" = "--train.reduce stock"
    "LoCo, 4 bits" = "--loco.bits 4"

    [settings]                                    optional: repeat it all in each of these
    "SGD" = "--optim.name sgd --optim.lr 0.1"
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import shlex
from collections.abc import Iterable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from train_config import Config, load_config

# Of Config, what decides the loss: these tables, without where files are written and when.
TRAINED_TABLES = ("model", "data", "optim", "train", "loco")
NOT_TRAINED = {
    "metrics",
    "tensorboard",
    "checkpoints",
    "checkpoint_interval",
    "keep_checkpoints",
}


def full_name(setting: str, path: str) -> str:
    """What a path is called where settings are side by side."""
    return ", ".join(filter(None, (setting, path)))


@dataclass(frozen=True)
class Run:
    """One training: its place in the study, and its configuration."""

    setting: str
    path: str
    seed: int
    ranks: int
    arguments: str
    config: Config

    @property
    def key(self) -> str:
        """The same for the same training, whatever study it is in and what it is called there."""
        # A field that is None is one that is not used: left out, so that results stay valid when
        # the configuration gets new ones.
        values = {
            f"{table}.{name}": value
            for table in TRAINED_TABLES
            for name, value in dataclasses.asdict(getattr(self.config, table)).items()
            if name not in NOT_TRAINED and value is not None
        }
        text = json.dumps([self.ranks, values], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Study:
    """What a study's TOML file holds.

    Raises:
        ValueError: a field holds a value it does not allow.
    """

    arguments: str
    baseline: str
    paths: dict[str, str]
    settings: dict[str, str] = field(default_factory=lambda: {"": ""})
    ranks: int = 2
    seeds: int = 3

    def __post_init__(self) -> None:
        if self.baseline not in self.paths:
            raise ValueError(
                f"baseline={self.baseline!r}: it must be one of the paths, "
                f"{', '.join(map(repr, self.paths))}"
            )
        for name in ("ranks", "seeds"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: it must be an integer >= 1")

    def runs(self) -> list[Run]:
        """All runs, seed by seed: stopped early, a study has all paths for the seeds it got to.

        Raises:
            ValueError: scripts/train.py would refuse the arguments of a run.
        """
        return [
            self._run(setting, path, seed)
            for seed in range(self.seeds)
            for setting in self.settings
            for path in self.paths
        ]

    def _run(self, setting: str, path: str, seed: int) -> Run:
        parts = (self.arguments, self.settings[setting], self.paths[path])
        arguments = " ".join(part for part in parts if part)
        argv = [*shlex.split(arguments), "--train.seed", str(seed)]
        message = StringIO()
        try:
            with redirect_stderr(message):
                config = load_config(argv)
        except SystemExit:
            reason = message.getvalue().strip().splitlines()[-1]
            raise ValueError(f"path {path!r}: {reason}") from None
        return Run(setting, path, seed, self.ranks, arguments, config)


def load_study(file: Path) -> Study:
    """Reads a study from its TOML file.

    Raises:
        ValueError: the file is no TOML, lacks a field or has one too many, or a value is wrong.
    """
    parser = ArgumentParser(parser_mode="toml", exit_on_error=False)
    parser.add_class_arguments(Study)
    try:
        return Study(**parser.parse_path(str(file)))
    except (ArgumentError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


@dataclass(frozen=True)
class Result:
    """What a run gave: a row of results.csv."""

    key: str
    seed: int
    ranks: int
    arguments: str
    val_loss: float
    """At the end, in nats; nan if the run diverged."""

    gradient_bytes_sent: int
    """By rank 0."""

    relative_error: float
    """Of the last reductions, as LoCo.stats() has it; 0 for stock FSDP2."""


@dataclass(frozen=True)
class CurvePoint:
    """One validation of a run: a row of curves.csv."""

    key: str
    step: int
    loss: float
    """Training loss: the mean over the steps since the last validation."""

    val_loss: float


class ResultFiles:
    """results.csv and curves.csv in a directory; rows are only ever appended."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.results_file = directory / "results.csv"
        self.curves_file = directory / "curves.csv"

    def results(self) -> dict[str, Result]:
        """By key."""
        rows = _read(self.results_file, Result)
        return {row.key: row for row in rows}

    def curves(self) -> dict[str, list[CurvePoint]]:
        """By key, in the order of steps."""
        curves: dict[str, dict[int, CurvePoint]] = {}
        for row in _read(self.curves_file, CurvePoint):
            curves.setdefault(row.key, {})[row.step] = row
        return {key: [curve[step] for step in sorted(curve)] for key, curve in curves.items()}

    def append(self, result: Result, curve: Iterable[CurvePoint]) -> None:
        """Adds a run. The result comes last: without it, the run counts as not done."""
        append_rows(self.curves_file, curve)
        append_rows(self.results_file, [result])


def _read(file: Path, row_type: type[Any]) -> list[Any]:
    if not file.exists():
        return []
    converters = {"int": int, "float": float, "str": str}
    types = {column.name: converters[column.type] for column in dataclasses.fields(row_type)}
    with file.open(newline="") as lines:
        return [
            row_type(**{name: convert(row[name]) for name, convert in types.items()})
            for row in csv.DictReader(lines)
        ]


def append_rows(file: Path, rows: Iterable[Any]) -> None:
    """Adds dataclasses of one type to a CSV file, below a header if it is new."""
    values = [dataclasses.asdict(row) for row in rows]
    if not values:
        return
    text = StringIO(newline="")
    writer = csv.DictWriter(text, values[0].keys(), lineterminator="\n")
    if not file.exists():
        writer.writeheader()
    writer.writerows(values)
    with file.open("a", newline="") as lines:  # in one write, for studies that run side by side
        lines.write(text.getvalue())
