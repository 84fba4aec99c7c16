"""Trains the same model by several gradient paths and compares their losses, paired over seeds.

    torchrun --standalone --nproc-per-node 2 scripts/compare.py configs/compare_paths.toml

Paths of one seed start from the same weights and draw the same batches. Finished runs are rows of
a CSV file, by their whole configuration: a study that was interrupted does only what is left, and
studies share the runs they have in common. See study.py for what a study says, and
compare_report.py for the tables and plots.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import mean

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compare_report import write_report
from data import Digits, Text, load_data
from study import CurvePoint, Result, ResultFiles, Run, Study, full_name, load_study
from traffic import GradientTraffic
from train import Trainer, check_environment, distributed_mesh
from train_config import Config
from train_megatron import MegatronTrainer, check_megatron, where_megatron_runs

logger = logging.getLogger("compare")


def check_study(study: Study) -> None:
    """Refuses, on every rank and before any of them waits for another, what cannot run here."""
    for config in {run.config for run in study.runs()}:
        check_environment(config)
        if config.train.framework == "megatron":
            check_megatron(config)
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != study.ranks:
        raise ValueError(
            f"the study is for {study.ranks} ranks and these are {world_size}: run it under "
            f"torchrun --nproc-per-node {study.ranks}"
        )


@contextmanager
def new_trainer(config: Config, data: Text | Digits, mesh: DeviceMesh) -> Iterator[Trainer]:
    """The trainer of the framework that `config` names."""
    if config.train.framework == "megatron":
        with where_megatron_runs():
            yield MegatronTrainer(config, data, mesh)
    else:
        yield Trainer(config, data, mesh)


def train_run(run: Run, data: Text | Digits, mesh: DeviceMesh) -> tuple[Result, list[CurvePoint]]:
    """One run, from new weights to its last validation."""
    train = run.config.train
    losses: list[float] = []
    curve: list[CurvePoint] = []
    with new_trainer(run.config, data, mesh) as trainer, GradientTraffic() as traffic:
        try:
            for step in range(1, train.steps + 1):
                losses.append(trainer.train_step(step - 1).loss)
                if step % train.eval_interval == 0 or step == train.steps:
                    curve.append(CurvePoint(run.key, step, mean(losses), trainer.validate()))
                    losses.clear()
            val_loss = curve[-1].val_loss
        except FloatingPointError as error:  # on all ranks alike
            logger.warning("%s", error)
            val_loss = math.nan
    stats = trainer.loco_stats().get("loco", {"relative_error": 0.0})
    result = Result(
        run.key,
        run.seed,
        run.ranks,
        run.arguments,
        val_loss,
        traffic.bytes_sent,
        stats["relative_error"],
    )
    return result, curve


def do_runs(study: Study, files: ResultFiles, mesh: DeviceMesh) -> int:
    """Trains what `files` do not have yet, and returns how many runs that were."""
    runs = {run.key: run for run in study.runs()}
    # Rank 0 alone writes, so it alone says what is there.
    done = [set(files.results())]
    dist.broadcast_object_list(done, src=0)
    load = cache(load_data)  # runs of a study mostly share their data
    left = [run for key, run in runs.items() if key not in done[0]]
    for number, run in enumerate(left, 1):
        result, curve = train_run(run, load(run.config.data), mesh)
        if mesh.get_rank() == 0:
            files.append(result, curve)
            name = full_name(run.setting, run.path)
            print(
                f"{number}/{len(left)}: {name}, seed {run.seed}: {result.val_loss:.4f}", flush=True
            )
    return len(left)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", type=Path, help="a TOML file, as study.py describes it")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        help="directory for results.csv, curves.csv and the plots (%(default)s)",
    )
    arguments = parser.parse_args(argv)
    study, files = load_study(arguments.study), ResultFiles(arguments.out)
    check_study(study)
    with distributed_mesh() as mesh:
        do_runs(study, files, mesh)
        if mesh.get_rank() == 0:
            write_report(study, files, arguments.out / arguments.study.stem)


if __name__ == "__main__":
    main()
