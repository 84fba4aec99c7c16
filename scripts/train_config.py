"""The configuration of scripts/train.py: one tree of dataclasses, a TOML file, dotted overrides.

    --config configs/demo.toml --data.path text.txt --loco.bits 8

A key or a flag that is no field, and a value that a field does not allow, is an error. None is
written null on the command line and "null" in TOML, which has no word for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from jsonargparse import ArgumentParser

from loco_fsdp import LoCoConfig

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder over bytes; of images `dim` and `num_layers` alone count."""

    dim: int = 128
    """Width of the residual stream; channels of images."""

    num_layers: int = 4

    num_heads: int = 4

    hidden_dim: int = 352
    """Inner width of a SwiGLU, of each expert where there are experts."""

    num_experts: int = 0
    """Experts of a mixture-of-experts layer; 0: one dense SwiGLU."""

    top_k: int = 2
    """Experts that a token is sent to."""

    def __post_init__(self) -> None:
        _require_positive(self, "dim", "num_layers", "num_heads", "hidden_dim")
        if self.dim % (2 * self.num_heads):
            _refuse(self, "dim", f"a multiple of 2 * num_heads = {2 * self.num_heads}")
        if self.num_experts < 0:
            _refuse(self, "num_experts", "0 or more")
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            _refuse(self, "top_k", f"between 1 and num_experts = {self.num_experts}")


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it a rank sees at once."""

    path: str | None = None
    """A file to train on, byte by byte; null: the source text of Python's standard library;
    "digits": the images of digits that scikit-learn ships, for the extra "vision"."""

    seq_len: int = 128

    batch_size: int = 8
    """Sequences or images of a rank in one microbatch."""

    def __post_init__(self) -> None:
        _require_positive(self, "seq_len", "batch_size")


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer, its learning rate over time, and gradient clipping."""

    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    """With "muon", what is no matrix, the embedding and the head take AdamW."""

    lr: float = 3e-3
    """Peak of the learning rate: linear warm-up to it, then cosine decay to zero."""

    warmup_steps: int = 20
    """Steps of the learning rate's warm-up."""

    weight_decay: float = 0.1
    """Decoupled from the gradient, but for "adam" and "sgd", which add it to the gradient."""

    momentum: float = 0.9
    """Momentum of "sgd"."""

    max_grad_norm: float | None = 1.0
    """Gradients are clipped to this norm; null: never."""

    def __post_init__(self) -> None:
        _require_positive(self, "lr")
        if self.max_grad_norm is not None:
            _require_positive(self, "max_grad_norm")
        if self.warmup_steps < 0:
            _refuse(self, "warmup_steps", "0 or more")


@dataclass(frozen=True)
class TrainConfig:
    """The run."""

    seed: int = 0
    """Fixes the initial weights and every batch."""

    start_from: str | None = None
    """The `checkpoints` of another run, whose newest weights this one starts from; null: weights
    drawn from the seed."""

    steps: int = 200
    """Optimizer steps."""

    accumulation_steps: int = 1
    """Microbatches of one optimizer step; only the last one communicates gradients."""

    param_dtype: Dtype = "float32"
    """What parameters are gathered and computed in."""

    reduce_dtype: Dtype = "float32"
    """What gradients are reduced in."""

    framework: Literal["ddp", "fsdp1", "megatron"] | None = None
    """What trains on several ranks; null: FSDP2. "megatron" is for scripts/train_megatron.py, which
    trains Megatron-LM's own decoder by its distributed optimizer."""

    optimizer_instances: int | None = None
    """Instances of Megatron-LM's distributed optimizer; null: one."""

    reduce: Literal["loco", "stock"] = "loco"
    """How gradients are reduced: by loco-fsdp, or by the framework as it stands."""

    eval_interval: int = 50
    """Steps from one validation to the next; the last step is always followed by one."""

    eval_batches: int = 8
    """Batches of a rank in one validation."""

    metrics: str = "runs/metrics.jsonl"
    """The file for metrics, one JSON object a line, written by rank 0."""

    tensorboard: str | None = None
    """The folder for TensorBoard, which needs the extra "tensorboard"; null: none."""

    checkpoints: str | None = None
    """The folder for checkpoints. A run goes on from the newest that is there. null: none."""

    checkpoint_interval: int = 50
    """Steps from one checkpoint to the next; the last step is always followed by one."""

    keep_checkpoints: int = 2
    """Checkpoints that are kept, the newest ones."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            _refuse(self, "seed", "0 or more")
        _require_positive(self, "steps", "accumulation_steps", "eval_interval", "eval_batches")
        _require_positive(self, "checkpoint_interval", "keep_checkpoints")
        if self.optimizer_instances is not None:
            _require_positive(self, "optimizer_instances")


@dataclass(frozen=True)
class Config:
    """All of it; a field is a table of the TOML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loco: LoCoConfig = field(default_factory=LoCoConfig)


def load_config(argv: Sequence[str] | None = None) -> Config:
    """Reads the command line and the TOML file it names; exits with a message if one is wrong."""
    parser = ArgumentParser(
        description="Trains a small model; run it under torchrun.",
        parser_mode="toml",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Config)
    parsed = parser.parse_args(argv)
    try:
        tables = parser.instantiate(parsed)
    except ValueError as error:
        parser.error(str(error))
    return Config(**{table.name: tables[table.name] for table in dataclasses.fields(Config)})


def torch_dtype(name: Dtype) -> torch.dtype:
    """The dtype of that name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            _refuse(config, name, "greater than 0")


def _refuse(config: object, name: str, allowed: str) -> None:
    owner = type(config).__name__
    raise ValueError(f"{owner}.{name}={getattr(config, name)!r}: it must be {allowed}")
