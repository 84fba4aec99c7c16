"""The data parallel that scripts/train.py can be told to use: FSDP2, FSDP1, DDP.

They wrap the same model, and differ in how a microbatch is told to communicate nothing, and in how
a gradient is clipped. Megatron-LM has a model and an optimizer of its own: train_megatron.py.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from loco_fsdp import LoCo, LoCoFSDP, attach
from train_config import Config, torch_dtype


def check_framework(config: Config) -> None:
    """Raise a ValueError for what the framework of `config` cannot do."""
    train, framework = config.train, config.train.framework
    if train.optimizer_instances is not None and framework != "megatron":
        raise ValueError(
            f"train.optimizer_instances={train.optimizer_instances}: only Megatron-LM's optimizer "
            "has instances, leave it out"
        )
    if framework == "ddp" and (train.param_dtype, train.reduce_dtype) != ("float32", "float32"):
        raise ValueError(
            f"train.param_dtype={train.param_dtype!r}, train.reduce_dtype={train.reduce_dtype!r}: "
            "DDP has neither, leave both at 'float32'"
        )
    if framework == "fsdp1" and config.optim.name == "muon":
        raise ValueError(
            "optim.name='muon': FSDP1 cuts matrices into flat pieces, which Muon cannot step: take "
            "'adamw', 'adam' or 'sgd'"
        )
    if (
        framework is None
        and config.model.num_experts
        and not hasattr(FSDPModule, "set_reduce_scatter_unused_params")
    ):
        raise ValueError(
            f"model.num_experts={config.model.num_experts} needs torch 2.13 or newer, this is "
            f"{torch.__version__}; update torch, or set model.num_experts to 0"
        )


def data_parallel(
    model: nn.Module, config: Config, mesh: DeviceMesh
) -> tuple[nn.Module, LoCo | None]:
    """`model`, whose layers are `model.blocks`, in the framework of `config`, and its LoCo."""
    wrap = {None: _fsdp2, "fsdp1": _fsdp1, "ddp": _ddp}[config.train.framework]
    return wrap(model, config, mesh)


def _fsdp2(model: nn.Module, config: Config, mesh: DeviceMesh) -> tuple[nn.Module, LoCo | None]:
    """Each block and the rest of the model are one FSDP unit."""
    mp_policy = MixedPrecisionPolicy(
        param_dtype=torch_dtype(config.train.param_dtype),
        reduce_dtype=torch_dtype(config.train.reduce_dtype),
    )
    loco = None
    if config.train.reduce == "loco":
        block_type = type(model.blocks[0])
        model = LoCoFSDP(model, config.loco, mesh=mesh, wrap=block_type, mp_policy=mp_policy)
        loco = model.loco
    else:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=mp_policy)
        fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    if config.model.num_experts:
        # Ranks leave different experts without a token. Their gradient is zero then; left out, as
        # by default, the ranks' reduce-scatters would differ in size.
        model.set_reduce_scatter_unused_params(True)
    return model, loco


def _fsdp1(model: nn.Module, config: Config, mesh: DeviceMesh) -> tuple[nn.Module, LoCo | None]:
    wrapped = FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
        mixed_precision=MixedPrecision(
            param_dtype=torch_dtype(config.train.param_dtype),
            reduce_dtype=torch_dtype(config.train.reduce_dtype),
        ),
        device_id=_device(mesh),
        use_orig_params=True,
    )
    return wrapped, _attach(wrapped, config)


def _ddp(model: nn.Module, config: Config, mesh: DeviceMesh) -> tuple[nn.Module, LoCo | None]:
    wrapped = DistributedDataParallel(
        model,
        process_group=mesh.get_group(),
        find_unused_parameters=config.model.num_experts > 0,
    )
    if config.train.reduce == "stock":
        # What DDP does without a hook, but called from Python, where traffic.py can count it.
        wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped, _attach(wrapped, config)


def _attach(model: nn.Module, config: Config) -> LoCo | None:
    return attach(model, config.loco) if config.train.reduce == "loco" else None


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def microbatch(model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Inside of it, a backward communicates gradients if it is that of the last microbatch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
        return nullcontext()
    return nullcontext() if is_last else model.no_sync()


def clip_grad_norm(model: nn.Module, max_norm: float | None) -> float:
    """Clip the gradient to this norm, and return the norm that it had."""
    limit = math.inf if max_norm is None else max_norm
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(limit).item()
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
