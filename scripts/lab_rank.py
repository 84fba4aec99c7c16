"""One rank of the bandwidth lab: trains the lab's model in every way of reducing, in turns.

`lab.py` starts it on a node. It reads lines from stdin, `measure` or `probe SECONDS` (of a step
without communication), answers each with one line of JSON on stdout, and ends when stdin closes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lab_replicas import (
    MEGATRON,
    REPLICAS,
    DDPTrainee,
    MegatronTrainee,
    loco_config,
    replica_trainee,
    surroundings,
)
from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from loco_fsdp.frontends.fsdp2 import fsdp_units
from loco_fsdp.frontends.fsdp2_hooks import ReplicaAllReduce
from loco_fsdp.planning.cluster import FRAMEWORKS, Job
from loco_fsdp.planning.rates import measure_rates
from loco_fsdp.probe import measure_cluster
from loco_fsdp.reduction.exchange import exchange

_INTERFACES = Path("/sys/class/net")

# No way to reduce, but a step in which each rank shards over itself only, and sends nothing.
COMPUTE = "compute"

# With `reshard_after_forward` at the ranks of a node, and with parameters in low bits.
RESHARDED = ("ring-bf16-reshard", "loco-hierarchical-reshard", "loco-int8")
WEIGHT_BITS = {"loco-int8": 8, "loco-differences": 4}


@dataclass(frozen=True)
class RankSpec:
    """What all ranks are told; see the options of `lab.py`."""

    num_nodes: int
    ranks_per_node: int
    ways: list[str]
    num_layers: int
    dim: int
    batch_size: int
    param_dtype: str
    reduce_dtype: str
    lean: bool
    loco: dict[str, Any]
    warmup: int
    steps: int
    timeout_s: float
    store: str

    @property
    def framework(self) -> str:
        """Whose ways the planner is asked about; the first way that it knows decides."""
        of_way = {way: name for name, ways in FRAMEWORKS.items() for way in ways}
        return next((of_way[way] for way in self.ways if way in of_way), "fsdp2")

    def job(self, compute_s: float) -> Job:
        """What the planner is told of a step that computes for `compute_s`."""
        return Job(
            num_parameters=self.num_layers * self.dim**2,
            compute_s=compute_s,
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            loco=LoCoConfig.from_dict({**self.loco, "node_size": self.ranks_per_node}),
            num_units=self.num_layers,
            framework=self.framework,
            overlap=0.0,  # gloo's collectives keep the CPU from computing
        )


def _mesh(num_replicas: int, num_shards: int) -> DeviceMesh:
    shape = (num_replicas, num_shards)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


class Stopwatch:
    """Seconds spent inside the functions it times; a call inside another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.perf_counter() - start

        return call


class AllToAllReduceScatter:
    """An all-to-all of the gradient as it is, and a float32 sum: 16 bits without feedback.

    1. Exchange of `input_tensor` `[world_size * shard]` in its dtype.
    2. Sum over ranks in float32, into `output_tensor` `[shard]`.
    """

    def __init__(self) -> None:
        self._received: Tensor | None = None

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if self._received is None or self._received.numel() != input_tensor.numel():
            self._received = torch.empty_like(input_tensor)
        exchange(self._received, input_tensor, group)
        rows = self._received.view(group.size(), -1)
        output_tensor.copy_(rows.sum(dim=0, dtype=torch.float32))


class RingReduceScatter(AllToAllReduceScatter):
    """A ring in the dtype of the gradient: what NCCL sends, where gloo all-reduces instead.

    Each rank passes on, to the next one, the sum so far of a shard `[shard]` of `input_tensor`,
    which ends at its owner after `world_size - 1` steps.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        world_size, rank = group.size(), group.rank()
        rows = input_tensor.view(world_size, -1)
        following, previous = ((rank + step) % world_size for step in (1, -1))
        total = rows[previous]
        for step in range(2, world_size + 1):
            received = torch.empty_like(total)
            # In this order: gloo tells a peer that it may send behind what it is sending itself.
            receiving = dist.irecv(received, group=group, group_src=previous)
            sending = dist.isend(total, group=group, group_dst=following)
            receiving.wait()
            sending.wait()
            total = received.add_(rows[(rank - step) % world_size])
        output_tensor.copy_(total)


class Layer(nn.Linear):
    """A linear layer that multiplies in float32, whatever its parameters are gathered in.

    CPUs without instructions for bf16 take ten times as long to multiply it, which would hide the
    communication that is to be measured.
    """

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float())


class Trainee:
    """A model in FSDP2, and the way in which its gradients are reduced."""

    def __init__(self, way: str, spec: RankSpec, model: nn.Module, batch: Tensor) -> None:
        self.way = way
        self._model = model
        self._batch = batch
        self._shard(spec)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)

    def _shard(self, spec: RankSpec) -> None:
        scheme, _, reduction = self.way.removesuffix("-reshard").partition("-")
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "alltoall": torch.bfloat16}
        reduce_dtype = dtypes.get(reduction, getattr(torch, spec.reduce_dtype))
        arguments: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=getattr(torch, spec.param_dtype),
                reduce_dtype=reduce_dtype,
            ),
            "reshard_after_forward": not spec.lean,
        }
        if self.way in RESHARDED and spec.ranks_per_node > 1:
            arguments["reshard_after_forward"] = spec.ranks_per_node
        if scheme == "hsdp":
            arguments["mesh"] = _mesh(spec.num_nodes, spec.ranks_per_node)
        elif self.way == COMPUTE:
            arguments["mesh"] = _mesh(spec.num_nodes * spec.ranks_per_node, 1)["shard"]
        config = loco_config(spec)
        if self.way == "hsdp-loco":
            LoCoFSDP(self._model, config, wrap=Layer, **arguments)
        else:
            for layer in self._model:
                fully_shard(layer, **arguments)
            fully_shard(self._model, **arguments)
        ring = scheme == "ring" or (scheme == "hsdp" and spec.lean)
        if scheme == "loco":
            topology = "flat" if reduction == "flat" else "hierarchical"
            weight_bits = WEIGHT_BITS.get(self.way)
            attach(self._model, replace(config, topology=topology, weight_bits=weight_bits))
        elif ring or reduction == "alltoall":
            comm = RingReduceScatter() if ring else AllToAllReduceScatter()
            for layer in self._model:
                layer.set_custom_reduce_scatter(comm)
                layer.set_force_sum_reduction_for_comms(True)

    def time_reductions(self, stopwatch: Stopwatch) -> None:
        """Take the time of what reduces gradients inside of shard groups."""
        for kind in {type(unit.reduce_scatter) for unit in fsdp_units(self._model)}:
            kind.__call__ = stopwatch.timed(kind.__call__)

    def step(self) -> None:
        """One training step."""
        hidden = self._batch
        hidden = self._model(hidden)
        hidden.float().square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


AnyTrainee: TypeAlias = Trainee | DDPTrainee | MegatronTrainee


def make_trainee(way: str, spec: RankSpec) -> AnyTrainee:
    """The trainee of `way`; all start from the same model and have the same batch."""
    torch.manual_seed(0)
    layers = (Layer(spec.dim, spec.dim, bias=False) for _ in range(spec.num_layers))
    model = nn.Sequential(*layers)
    batch = torch.randn(spec.batch_size, spec.dim)
    if way in (*REPLICAS, *MEGATRON):
        return replica_trainee(way, spec, model, batch)
    return Trainee(way, spec, model, batch)


def measure(trainees: list[AnyTrainee], stopwatch: Stopwatch, spec: RankSpec) -> dict[str, Any]:
    """Steps of all trainees in turns; seconds and bytes of each step, by way.

    Bytes are what the interfaces of this node counted, loopback (`local`) and link (`link`).
    """
    results: dict[str, Any] = {
        trainee.way: {"step_s": [], "reduce_s": [], "link": [], "local": []} for trainee in trainees
    }
    for step in range(spec.warmup + spec.steps):
        for trainee in trainees:
            stopwatch.seconds = 0.0
            dist.barrier()
            link, local = sent_bytes("eth0"), sent_bytes("lo")
            dist.barrier()  # nobody sends before all have read
            start = time.perf_counter()
            trainee.step()
            seconds = time.perf_counter() - start
            dist.barrier()
            if step >= spec.warmup:
                values = {
                    "step_s": seconds,
                    "reduce_s": stopwatch.seconds,
                    "link": sent_bytes("eth0") - link,
                    "local": sent_bytes("lo") - local,
                }
                for name, value in values.items():
                    results[trainee.way][name].append(value)
    return results


def probe(compute_s: float, spec: RankSpec) -> dict[str, Any]:
    """What the planner wants to know, of a step that computes for `compute_s`."""
    job, cpu = spec.job(compute_s), torch.device("cpu")
    cluster = measure_cluster(job, cpu)
    comm = RingReduceScatter()
    ring = measure_rates(
        cluster,
        job,
        cpu,
        max_bytes=4 * spec.dim**2,
        repeats=5,
        collectives={
            "reduce-scatter": lambda whole, other, group: comm(other[0], whole, group, None)
        },
    )
    return {"cluster": asdict(cluster), "ring_rates": ring, "compute_s": compute_s}


def sent_bytes(interface: str) -> int:
    """Bytes that an interface of this node has sent, by its own counter."""
    return int((_INTERFACES / interface / "statistics" / "tx_bytes").read_text())


def commands() -> queue.Queue[str]:
    """Lines of stdin; when it closes, also in the middle of a step, this process ends."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line.strip())
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> None:
    rank, spec = int(sys.argv[1]), RankSpec(**json.loads(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints to stdout in some versions of torch
    lines = commands()
    torch.set_num_threads(1)
    world_size = spec.num_nodes * spec.ranks_per_node
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(spec.store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=spec.timeout_s),
    )
    with surroundings(spec.ways):
        serve(spec, lines, answers)


def serve(spec: RankSpec, lines: queue.Queue[str], answers: TextIO) -> None:
    """Answer what is asked, for as long as this process lives."""
    trainees = [make_trainee(way, spec) for way in spec.ways]
    stopwatch = Stopwatch()
    # Stock FSDP2 reduces over replicas by dist.all_reduce, and no other step here calls it.
    dist.all_reduce = stopwatch.timed(dist.all_reduce)
    ReplicaAllReduce.__call__ = stopwatch.timed(ReplicaAllReduce.__call__)  # type: ignore[method-assign]
    for trainee in trainees:
        trainee.time_reductions(stopwatch)
    while True:
        command, *arguments = lines.get().split()
        if command == "probe":
            answer = probe(float(arguments[0]), spec)
        else:
            answer = measure(trainees, stopwatch, spec)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
