"""Trains a small model with FSDP2, its gradients reduced by loco-fsdp or as FSDP2 does it.

    torchrun --standalone --nproc-per-node 2 scripts/train.py --config configs/demo.toml

The model is a decoder over bytes or, with `data.path = "digits"`, a convolutional network. Both
ways start from the same weights and draw the same batches. See train_config.py for what can be set.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR

from checkpointing import Checkpoints, TrainingState, load_weights
from convnet import build_convnet
from data import DIGITS, Batch, Digits, Text, load_data
from frameworks import check_framework, clip_grad_norm, data_parallel, microbatch
from model import build_model
from optimizers import build_optimizer
from reporting import Reporter
from traffic import GradientTraffic
from train_config import Config, load_config


class StepResult(NamedTuple):
    """What an optimizer step reports; the same on all ranks."""

    loss: float
    grad_norm: float


def check_environment(config: Config) -> None:
    """Refuses, on every rank and before any of them waits for another, what cannot work here."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        raise ValueError("run it under torchrun: torchrun --nproc-per-node 2 scripts/train.py ...")
    num_ranks, num_gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if torch.cuda.is_available() and num_ranks > num_gpus:
        raise ValueError(
            f"{num_ranks} ranks here, but {num_gpus} GPUs: pass torchrun --nproc-per-node "
            f"{num_gpus}, or hide the GPUs by CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    check_framework(config)
    if config.train.tensorboard is not None and find_spec("tensorboard") is None:
        raise ValueError(
            f"train.tensorboard={config.train.tensorboard!r}: pip install 'loco-fsdp[tensorboard]'"
        )
    if config.data.path == DIGITS and find_spec("sklearn") is None:
        raise ValueError(f"data.path={DIGITS!r}: pip install 'loco-fsdp[vision]'")
    metrics = Path(config.train.metrics)
    metrics.parent.mkdir(parents=True, exist_ok=True)
    if metrics.is_dir() or not os.access(metrics.parent, os.W_OK):
        raise ValueError(f"train.metrics={str(metrics)!r}: give a file that can be written")


@contextmanager
def distributed_mesh() -> Iterator[DeviceMesh]:
    """The 1-D mesh of all ranks: NCCL where there are GPUs, else gloo."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        yield init_device_mesh(
            "cuda" if has_gpu else "cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)
        )
    finally:
        dist.destroy_process_group()


def new_model(config: Config, mesh: DeviceMesh) -> nn.Module:
    """The model that the seed gives, on the device of `mesh`."""
    model: nn.Module
    if config.data.path == DIGITS:
        model = build_convnet(config.model, config.train.seed)
    else:
        model = build_model(config.model, config.data.seq_len, config.train.seed)
    return model.to(torch.device(mesh.device_type))


def lr_factor(step: int, warmup_steps: int, steps: int) -> float:
    """Linear warm-up to 1, then cosine decay to 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def mean_over_ranks(value: Tensor) -> float:
    """The mean of one number per rank."""
    total = value.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


class Trainer:
    """Model, optimizer and data of one run, on one rank."""

    def __init__(self, config: Config, data: Text | Digits, mesh: DeviceMesh) -> None:
        self.config = config
        self.data = data
        self.rank = mesh.get_rank()
        self.world_size = mesh.size()
        self.device = torch.device(mesh.device_type)
        self._build(mesh)

    def _build(self, mesh: DeviceMesh) -> None:
        """Model, LoCo, optimizer and learning rate."""
        config = self.config
        model = new_model(config, mesh)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model, self.loco = data_parallel(model, config, mesh)
        if config.train.start_from is not None:
            load_weights(config.train.start_from, self.model)
        self.optimizer = build_optimizer(config.optim, self.model)
        self.scheduler = LambdaLR(
            self.optimizer,
            lambda step: lr_factor(step, config.optim.warmup_steps, config.train.steps),
        )

    @property
    def lr(self) -> float:
        """The learning rate of the coming step."""
        return self.optimizer.param_groups[0]["lr"]

    def train_step(self, step: int) -> StepResult:
        """One optimizer step.

        Raises:
            FloatingPointError: the loss or the gradient is not finite; on all ranks.
        """
        loss = mean_over_ranks(self._accumulate_gradients(step))
        result = StepResult(loss, self._optimizer_step())
        if not all(map(math.isfinite, result)):
            raise FloatingPointError(
                f"step {step}: {result} is not finite; try a lower optim.lr or more "
                "optim.warmup_steps"
            )
        return result

    def _optimizer_step(self) -> float:
        """Clips, steps and empties the gradient; returns the norm that it had."""
        grad_norm = clip_grad_norm(self.model, self.config.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return grad_norm

    def _accumulate_gradients(self, step: int) -> Tensor:
        """Runs the microbatches; only the last one communicates gradients."""
        config, count = self.config, self.config.train.accumulation_steps
        total = torch.zeros((), device=self.device)
        for number in range(count):
            key = (config.train.seed, self.rank, step, number)
            batch = self.data.training_batch(config.data, key)
            with microbatch(self.model, is_last=number == count - 1):
                loss = self._loss(batch) / count
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def validate(self) -> float:
        """Loss on what is held out, averaged over all ranks."""
        batches = self.data.validation_batches(
            self.config.data, self.config.train.eval_batches, self.rank, self.world_size
        )
        losses = [self._loss(batch) for batch in batches]
        return mean_over_ranks(torch.stack(losses).mean())

    def _loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy of the predictions, in nats."""
        logits = self._logits(batch.inputs.to(self.device))
        targets = batch.targets.flatten().to(self.device)
        return F.cross_entropy(logits.float().flatten(0, -2), targets)

    def _logits(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def loco_stats(self) -> dict[str, Any]:
        """What loco-fsdp counted, if it is on: as fields of the metrics."""
        if self.loco is None:
            return {}
        units = {
            name: {key: stats[key] for key in ("relative_error", "error_norm")}
            for name, stats in self.loco.unit_stats().items()
        }
        return {"loco": self.loco.stats(), "loco_units": units}

    def save(self, checkpoints: Checkpoints, step: int, bytes_sent: int) -> None:
        """Save all that the run needs to go on after `step`, if it is to have checkpoints."""
        if checkpoints.directory is None:
            return
        state = {**self._state(), "step": step, "bytes_sent": bytes_sent}
        checkpoints.save(step, state if self.loco is None else {**state, "loco": self.loco})

    def load(self, checkpoints: Checkpoints, step: int) -> int:
        """Go on from the checkpoint after `step`; returns the bytes that were sent until then."""
        state = {**self._state(), "bytes_sent": 0}
        checkpoints.load(step, state, self.loco)
        return int(state["bytes_sent"])

    def _state(self) -> dict[str, Any]:
        return {"training": TrainingState(self.model, self.optimizer, self.scheduler)}


def train(trainer: Trainer) -> None:
    """The whole run."""
    config, data = trainer.config, trainer.data
    tokens_per_step = (
        config.train.accumulation_steps
        * config.data.batch_size
        * (1 if isinstance(data, Digits) else config.data.seq_len)
        * trainer.world_size
    )
    checkpoints = Checkpoints(config.train.checkpoints, config.train.keep_checkpoints)
    first_step = max(checkpoints.steps(), default=0)
    if first_step >= config.train.steps:
        if trainer.rank == 0:
            print(f"{config.train.checkpoints} holds step {first_step}: nothing is left to do")
        return
    step_ms: list[float] = []
    with Reporter(config.train, trainer.rank, first_step) as reporter, GradientTraffic() as traffic:
        if first_step:
            traffic.bytes_sent = trainer.load(checkpoints, first_step)
            reporter.say(f"goes on from {config.train.checkpoints} after step {first_step}")
        for step in range(first_step, config.train.steps):
            lr, started = trainer.lr, time.perf_counter()
            result = trainer.train_step(step)
            if trainer.device.type == "cuda":
                torch.cuda.synchronize()
            step_ms.append(1e3 * (time.perf_counter() - started))
            metrics: dict[str, Any] = {
                "step": step + 1,
                "loss": result.loss,
                "lr": lr,
                "grad_norm": result.grad_norm,
                "step_ms": step_ms[-1],
                "tokens_per_s": 1e3 * tokens_per_step / step_ms[-1],
                "gradient_bytes_sent": traffic.bytes_sent,
            }
            is_last = step + 1 == config.train.steps
            if is_last or (step + 1) % config.train.eval_interval == 0:
                metrics |= {"val_loss": trainer.validate(), **trainer.loco_stats()}
            reporter.step(metrics)
            if is_last or (step + 1) % config.train.checkpoint_interval == 0:
                trainer.save(checkpoints, step + 1, traffic.bytes_sent)
        reporter.write(
            {
                "summary": True,
                "reduce": config.train.reduce,
                "bits": config.loco.bits if config.train.reduce == "loco" else None,
                "world_size": trainer.world_size,
                "num_parameters": trainer.num_parameters,
                "steps": config.train.steps,
                "val_loss": metrics["val_loss"],
                "median_step_ms": statistics.median(step_ms),
                "gradient_bytes_sent": traffic.bytes_sent,
                **trainer.loco_stats(),
            }
        )


def main(argv: Sequence[str] | None = None) -> None:
    config = load_config(argv)
    check_environment(config)
    if config.train.framework == "megatron":
        raise ValueError("train.framework='megatron': run scripts/train_megatron.py")
    data = load_data(config.data)
    with distributed_mesh() as mesh:
        train(Trainer(config, data, mesh))


if __name__ == "__main__":
    main()
