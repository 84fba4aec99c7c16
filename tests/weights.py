"""A model that shows the parameters it was given, and what they have to be with `weight_bits`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from definition import sent
from loco_fsdp import LoCo, LoCoConfig, attach
from loco_fsdp.gather.differences import DifferenceGather
from toy import cpu_mesh

BLOCK = 32


class _Show(torch.autograd.Function):
    """The sum of a parameter times its gradient; notes what the parameter is in both passes."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, gradient: Tensor, module: Shown, name: str) -> Tensor:
        ctx.save_for_backward(parameter, gradient)
        ctx.module, ctx.name = module, name
        module.seen[name] = parameter.detach().clone()
        return (parameter.float() * gradient).sum()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        parameter, gradient = ctx.saved_tensors
        ctx.module.seen_in_backward[ctx.name] = parameter.detach().clone()
        return (outputs[0] * gradient).to(parameter.dtype), None, None, None


class Shown(nn.Module):
    """Parameters that are given gradients of their own, another one on each rank and each time.

    Attributes:
        seen, seen_in_backward: the parameters that the last forward and backward computed with.
    """

    def __init__(self, seed: int, shapes: dict[str, tuple[int, ...]], scale: float = 1.0) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.seen_in_backward: dict[str, Tensor] = {}
        self._draws = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        values = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            value = scale * torch.randn(shape, generator=values)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        for name, parameter in self.named_parameters():
            gradient = torch.zeros(parameter.shape)
            if torch.is_grad_enabled():  # an evaluation draws none
                gradient = torch.randn(parameter.shape, generator=self._draws)
            x = x + _Show.apply(parameter, gradient, self, name)
        return x


class Chain(nn.Module):
    """Units in a row."""

    def __init__(self, number: int, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.units = nn.ModuleList(Shown(seed, shapes) for seed in range(number))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


SHAPES = {"weight": (24, 12), "bias": (24,)}


def sharded(
    weight_bits: int | None,
    number: int = 2,
    dtype: torch.dtype | None = torch.bfloat16,
    node_size: int = 2,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    options: dict[str, Any] | None = None,
    **fsdp: Any,
) -> tuple[Chain, LoCo]:
    """A chain over all ranks, in nodes of `node_size`, with LoCo."""
    model = Chain(number, **shapes)
    fsdp = {"mesh": cpu_mesh(), "mp_policy": MixedPrecisionPolicy(param_dtype=dtype), **fsdp}
    for unit in model.units:
        fully_shard(unit, **fsdp)
    fully_shard(model, **fsdp)
    return model, attach(model, config(weight_bits, node_size, **(options or {})))


def config(weight_bits: int | None, node_size: int = 2, **options: Any) -> LoCoConfig:
    options = {"block_size": BLOCK, "bits": 8, **options}
    return LoCoConfig(weight_bits=weight_bits, node_size=node_size, **options)


def forward(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.zeros((), requires_grad=True))
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step."""
    forward(model).backward()
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def swapped(model: nn.Module, averages: list[Tensor]) -> Iterator[None]:
    """As trainers evaluate averages: under autograd's radar, and back again."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter, average in zip(model.parameters(), averages, strict=True):
        parameter.data.copy_(average)
    try:
        yield
    finally:
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.data.copy_(value)


def whole(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole of a sharded parameter, as FSDP2 gathers it."""
    return parameter.detach().full_tensor().to(dtype)  # type: ignore[attr-defined, no-any-return]


def shards(tensor: Tensor) -> list[Tensor]:
    """What FSDP2 gives each rank of a tensor, flat, without padding."""
    world_size = dist.get_world_size()
    parts = [part.flatten() for part in tensor.chunk(world_size)]
    return parts + [tensor.new_empty(0)] * (world_size - len(parts))


class Replicas:
    """What all ranks have to see: parameters as they were sent, and differences since.

    In plain tensor arithmetic, of whole parameters; a shard's difference is quantized by itself.
    """

    def __init__(self, model: Chain, dtype: torch.dtype = torch.bfloat16) -> None:
        self._model = model
        self._dtype = dtype
        self.values: dict[str, Tensor] = {}
        self.send_whole()

    def send_whole(
        self, units: Iterable[int] | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        """Parameters of these ranks are sent as they are, rounded to the dtype of the gather."""
        self._send(units, ranks, lambda new, old: new)

    def send_differences(
        self, units: Iterable[int] | None = None, ranks: Iterable[int] | None = None
    ) -> None:
        """The difference of each shard in 4 bits; replicas are rounded to their dtype."""

        def difference(new: Tensor, old: Tensor) -> Tensor:
            return (old.float() + sent(new.float() - old.float(), 4, BLOCK)).to(self._dtype)

        self._send(units, ranks, difference)

    def _send(
        self,
        units: Iterable[int] | None,
        ranks: Iterable[int] | None,
        arrives: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        chosen = set(range(dist.get_world_size()) if ranks is None else ranks)
        for name, parameter in self._parameters(units):
            wanted = whole(parameter, self._dtype)
            replica = self.values.get(name, wanted)
            rows = [
                arrives(new, old) if rank in chosen and new.numel() else old
                for rank, (new, old) in enumerate(zip(shards(wanted), shards(replica), strict=True))
            ]
            self.values[name] = torch.cat(rows).view(replica.shape)

    def _parameters(self, units: Iterable[int] | None) -> list[tuple[str, Tensor]]:
        chosen = range(len(self._model.units)) if units is None else units
        return [
            (f"{number}.{name}", parameter)
            for number in chosen
            for name, parameter in self._model.units[number].named_parameters()
        ]

    def check(self, *, backward: bool = False) -> None:
        """The last forward, or backward, has seen these, bit by bit."""
        assert self.values
        for name, value in self.values.items():
            number, parameter = name.split(".")
            unit = self._model.units[int(number)]
            seen = (unit.seen_in_backward if backward else unit.seen)[parameter]
            assert torch.equal(seen, value), f"{name}: {(seen - value).abs().max()}"

    def differ_from_parameters(self) -> None:
        """They are not simply what the parameters are: else a test could not fail."""
        for name, parameter in self._parameters(None):
            if parameter.ndim == 1:  # a few elements, which may be sent as they are
                continue
            assert not torch.equal(self.values[name], whole(parameter, self._dtype)), name


def rows_are_their_owners(loco: LoCo) -> None:
    """Each row of a replica is, bit by bit, the own row of the rank that it is of."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for gatherer in loco._gatherers:
        assert isinstance(gatherer, DifferenceGather) and gatherer._replica is not None
        replica = gatherer._replica
        own: list[Tensor] = [torch.empty_like(replica[0]) for _ in range(world_size)]
        dist.all_gather(own, replica[rank // 2].clone())
        assert len(replica) == world_size // 2
        for node, row in enumerate(replica):
            assert torch.equal(row, own[2 * node + rank % 2])
            assert row.any()


def sgd(model: Chain) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def sent_across(loco: LoCo) -> float:
    """Bytes of parameters to other nodes so far."""
    return loco.stats()["weight_inter_node_bytes"]


# Of a unit of 24 x 12 and 24 on 4 ranks: 72 + 6 elements a rank, 3 + 1 blocks of 32. In 4 bits with
# room for one block more 80 bytes of codes and 20 of scales, in multiples of 16; whole 2 each.
DIFFERENCE, WHOLE = 80 + 32, 2 * 78
