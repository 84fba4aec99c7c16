"""Checkpoints of a run: the last few, each complete or not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler

from loco_fsdp import LoCo

UNFINISHED = ".tmp"


class Checkpoints:
    """Folders `step-N` in `train.checkpoints`; none where that is null.

    A folder gets this name once all ranks have written all of it, and loses it before anything in
    it is deleted. A run that is killed at any moment leaves complete checkpoints, and perhaps a
    folder whose name ends in ".tmp", which the next save deletes.
    """

    def __init__(self, directory: str | None, keep: int) -> None:
        self.directory = None if directory is None else Path(directory)
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps after which there is a complete checkpoint, oldest first."""
        if self.directory is None:
            return []
        names = [path.name for path in self.directory.glob("step-*")]
        return sorted(int(name[5:]) for name in names if name[5:].isdecimal())

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write `state` of all ranks, then delete what is older than the last few."""
        if self.directory is None:
            return
        unfinished = self.folder(step).with_suffix(UNFINISHED)
        if dist.get_rank() == 0:
            self._delete_unfinished()
        dist.barrier()
        dcp.save(state, checkpoint_id=unfinished)
        dist.barrier()
        if dist.get_rank() == 0:
            unfinished.rename(self.folder(step))
            for old in self.steps()[: -self.keep]:
                self.folder(old).rename(self.folder(old).with_suffix(UNFINISHED))
            self._delete_unfinished()
        dist.barrier()

    def load(self, step: int, state: dict[str, Any], loco: LoCo | None) -> None:
        """Fill `state` with what was saved after `step`, and `loco` with what fits."""
        dcp.load(state, checkpoint_id=self.folder(step))
        if loco is not None:
            # The run that saved may have had fewer ranks, or no LoCo.
            planner = DefaultLoadPlanner(allow_partial_load=True)
            dcp.load({"loco": loco}, checkpoint_id=self.folder(step), planner=planner)

    def folder(self, step: int) -> Path:
        """Of the checkpoint after `step`."""
        assert self.directory is not None
        return self.directory / f"step-{step}"

    def _delete_unfinished(self) -> None:
        assert self.directory is not None
        for path in self.directory.glob(f"*{UNFINISHED}"):
            shutil.rmtree(path)


def load_weights(directory: str, model: nn.Module) -> None:
    """Give `model` the weights of the newest checkpoint of another run, and nothing else of it.

    Raises:
        ValueError: there is no checkpoint.
    """
    checkpoints = Checkpoints(directory, keep=1)
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(
            f"train.start_from={directory!r} has no checkpoint: give the train.checkpoints of a "
            "run that has saved one"
        )
    weights = get_model_state_dict(model)
    # As TrainingState saves them.
    dcp.load({"training": {"model": weights}}, checkpoint_id=checkpoints.folder(steps[-1]))
    set_model_state_dict(model, weights)


class TrainingState:
    """Model, optimizer and learning rate, as `torch.distributed.checkpoint` wants them."""

    def __init__(self, model: nn.Module, optimizer: Any, scheduler: LRScheduler) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
