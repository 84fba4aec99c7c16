"""Trains a small decoder of Megatron-LM's, its gradients reduced by loco-fsdp or as it stands.

    torchrun --standalone --nproc-per-node 2 scripts/train_megatron.py --config configs/demo.toml

Layers, optimizer and data parallel are megatron-core's: GPTModel, and its distributed optimizer.
Data, configuration and metrics are those of train.py. Without a GPU it runs on stand-ins for what
megatron-core calls of `torch.cuda`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from data import DIGITS, load_data
from loco_fsdp import attach
from megatron_on_cpu import on_cpu
from model import VOCAB_SIZE
from optimizers import ADAM_BETAS
from train import Trainer, check_environment, distributed_mesh, lr_factor, train
from train_config import Config, load_config


def check_megatron(config: Config) -> None:
    """Refuse what this script cannot train."""
    if find_spec("megatron") is None:
        raise ValueError("megatron-core is not installed: pip install 'loco-fsdp[megatron]'")
    for name, value, only in (
        ("train.framework", config.train.framework, "megatron"),
        ("train.param_dtype", config.train.param_dtype, "float32"),
        ("train.reduce_dtype", config.train.reduce_dtype, "float32"),
        ("train.checkpoints", config.train.checkpoints, None),
        ("train.start_from", config.train.start_from, None),
        ("model.num_experts", config.model.num_experts, 0),
    ):
        if value != only:
            raise ValueError(
                f"{name}={value!r}: scripts/train_megatron.py has no choice there, leave it out"
            )
    if config.data.path == DIGITS:
        raise ValueError(f"data.path={DIGITS!r}: Megatron-LM's decoder reads text, give a file")
    if config.optim.name == "muon":
        raise ValueError("optim.name='muon': take 'adamw', 'adam' or 'sgd'")


@contextmanager
def where_megatron_runs() -> Iterator[None]:
    """megatron-core is imported and called inside of this."""
    with warnings.catch_warnings():
        # Each rank says many times what megatron-core does without Apex and Transformer Engine,
        # and that it calls torch by names that torch has renamed since.
        for message in (".*Apex", "full scope is deprecated", "`torch.distributed"):
            warnings.filterwarnings("ignore", message)
        with nullcontext() if torch.cuda.is_available() else on_cpu():
            yield


class MegatronTrainer(Trainer):
    """As Trainer, with a model and an optimizer of Megatron-LM's."""

    def _build(self, mesh: DeviceMesh) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import get_megatron_optimizer

        instances = self.config.train.optimizer_instances or 1
        _initialize(instances, self.config.train.seed)
        model = _gpt_model(self.config).to(self.device)
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.model = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True, num_distributed_optimizer_instances=instances
            ),
            model,
        )
        is_loco = self.config.train.reduce == "loco"
        self.loco = attach(self.model, self.config.loco) if is_loco else None
        self.optimizer = get_megatron_optimizer(_optimizer_config(self.config), [self.model])
        self._steps = 0
        self._set_lr()
        # Of the tokens at every place, which the others may not look at: those after it.
        seq_len = self.config.data.seq_len
        self._mask = torch.ones(1, 1, seq_len, seq_len, device=self.device).tril() < 0.5
        self._places = torch.arange(seq_len, device=self.device)

    def _logits(self, inputs: Tensor) -> Tensor:
        return self.model(inputs, self._places.expand_as(inputs), self._mask)

    def _optimizer_step(self) -> float:
        self.model.finish_grad_sync()
        _, grad_norm, _ = self.optimizer.step()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._steps += 1
        self._set_lr()
        return float(grad_norm)

    def _set_lr(self) -> None:
        """The learning rate of the coming step; Megatron's optimizer is none of torch's."""
        config = self.config
        factor = lr_factor(self._steps, config.optim.warmup_steps, config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = config.optim.lr * factor


def _initialize(instances: int, seed: int) -> None:
    """Megatron's groups of ranks, and the seed of its weights."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def _gpt_model(config: Config) -> nn.Module:
    """Of the shape of model.py's decoder, from megatron-core's own layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    model = config.model
    return GPTModel(
        TransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.dim,
            num_attention_heads=model.num_heads,
            ffn_hidden_size=model.hidden_dim,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            embedding_init_method_std=1.0,  # as in model.py, which says why
            use_cpu_initialization=True,  # the same weights on every machine
            # Fusions that need kernels of Apex or Transformer Engine.
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
        ),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=config.data.seq_len,
        position_embedding_type="rope",
    )


def _optimizer_config(config: Config) -> object:
    from megatron.core.optimizer import OptimizerConfig

    optim = config.optim
    return OptimizerConfig(
        optimizer="sgd" if optim.name == "sgd" else "adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        decoupled_weight_decay=optim.name == "adamw",
        adam_beta1=ADAM_BETAS[0],
        adam_beta2=ADAM_BETAS[1],
        sgd_momentum=optim.momentum,
        clip_grad=optim.max_grad_norm or 0.0,
        use_distributed_optimizer=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    config = load_config(argv)
    if config.train.framework is None:
        settings = dataclasses.replace(config.train, framework="megatron")
        config = dataclasses.replace(config, train=settings)
    check_environment(config)
    check_megatron(config)
    data = load_data(config.data)
    with distributed_mesh() as mesh, where_megatron_runs():
        train(MegatronTrainer(config, data, mesh))


if __name__ == "__main__":
    main()
