"""Trainees of the bandwidth lab whose parameters are whole on every rank: DDP and Megatron-LM.

Megatron's take its distributed optimizer: gradients are reduced to a shard on each rank, SGD takes
its step there, and parameters are gathered. With `instances` every node is an instance of it, which
keeps that inside of the node, and shards are all-reduced between nodes.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from loco_fsdp import LoCoConfig, attach

if TYPE_CHECKING:
    from lab_rank import RankSpec, Stopwatch

REPLICAS = ("ddp-fp32", "ddp-bf16", "ddp-loco")
MEGATRON = ("megatron-bf16", "megatron-loco", "megatron-instances-bf16", "megatron-instances-loco")
_LR = 1e-3
_NO_LIMIT = 2**40  # elements of a bucket


class DDPTrainee:
    """A model in torch's DDP, in float32 or, with "bf16", all of it in bfloat16."""

    def __init__(self, way: str, spec: RankSpec, model: nn.Module, batch: Tensor) -> None:
        self.way = way
        self._batch = batch
        self._model = DistributedDataParallel(model.bfloat16() if way.endswith("bf16") else model)
        if way.endswith("loco"):
            attach(self._model, loco_config(spec))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=_LR)

    def time_reductions(self, stopwatch: Stopwatch) -> None:
        """DDP reduces in the middle of backward, where nobody can take the time of it."""

    def step(self) -> None:
        """One training step."""
        self._model(self._batch).float().square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


class MegatronTrainee:
    """A model in Megatron's DDP, all of it in bfloat16."""

    def __init__(self, way: str, spec: RankSpec, model: nn.Module, batch: Tensor) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel as MegatronDDP
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        self.way = way
        self._batch = batch
        instances = spec.num_nodes if "instances" in way else 1
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        self._model = MegatronDDP(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                num_distributed_optimizer_instances=instances,
                bucket_size=_NO_LIMIT,
            ),
            model.bfloat16(),
        )
        parallel_state.destroy_model_parallel()  # the model keeps its groups
        if way.endswith("loco"):
            attach(self._model, loco_config(spec))

    def time_reductions(self, stopwatch: Stopwatch) -> None:
        """All reductions are between the end of backward and the optimizer."""
        self._reduce = stopwatch.timed(self._model.finish_grad_sync)

    def step(self) -> None:
        """One training step."""
        self._model.zero_grad_buffer()
        self._model(self._batch).float().square().mean().backward()
        self._reduce()
        for group in self._model.bucket_groups:
            shards = group.intra_distributed_optimizer_instance_size
            own = group.intra_distributed_optimizer_instance_rank
            for bucket in group.buckets:
                parameters = bucket.param_data.chunk(shards)[own]
                parameters.sub_(bucket.grad_data.chunk(shards)[own], alpha=_LR)
        self._model.start_param_sync(force_sync=True)


def loco_config(spec: RankSpec) -> LoCoConfig:
    """How LoCo reduces; ranks of one machine are told which of them share a node."""
    return LoCoConfig.from_dict({**spec.loco, "node_size": spec.ranks_per_node})


def replica_trainee(
    way: str, spec: RankSpec, model: nn.Module, batch: Tensor
) -> DDPTrainee | MegatronTrainee:
    """The trainee of one of `REPLICAS` or `MEGATRON`."""
    if way in MEGATRON:
        return MegatronTrainee(way, spec, model, batch)
    return DDPTrainee(way, spec, model, batch)


def surroundings(ways: list[str]) -> Any:
    """Where the lab trains: megatron-core asks for GPUs by name, which it is given in CPUs."""
    if not set(ways) & set(MEGATRON):
        return nullcontext()
    from megatron_on_cpu import on_cpu

    return on_cpu()
