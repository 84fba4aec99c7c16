"""Experts that go unused on some steps: the error of each is its own, bitwise."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from loco_fsdp import LoCoConfig, attach
from loco_fsdp.codec import BlockLayout, EncodeStats, ErrorState, eager
from loco_fsdp.frontends.fsdp2_hooks import FSDPReduceScatter
from ranks import RankPool
from toy import cpu_mesh

Ranks = Callable[[int], RankPool]
WIDTH, NUM_EXPERTS, STEPS = 8, 4, 12
CONFIG = LoCoConfig(block_size=32, reset_interval=5)


class Experts(nn.Module):
    """Equal-sized experts, of which each step uses some; the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = self.router(x)
        return torch.stack([self.experts[index](x).tanh() for index in used]).sum(0)


def experts_of(step: int) -> list[int]:
    """From none of the later ones to all: {0}, {1}, {0, 1}, {2}, ..."""
    mask = step % (2**NUM_EXPERTS - 1) + 1
    return [index for index in range(NUM_EXPERTS) if mask >> index & 1]


class Reference:
    """LoCo on one parameter alone, and the gradients that reach it."""

    def __init__(self, shape: torch.Size) -> None:
        world_size = dist.get_world_size()
        self.rows = -(-shape[0] // world_size)  # of a shard, with FSDP2's padding
        numel = self.rows * shape[1:].numel()
        layout = BlockLayout((numel,), CONFIG.bits, CONFIG.block_size)
        self.table = layout.place(torch.device("cpu"))
        blocks = world_size, layout.num_blocks
        payload = torch.zeros(*blocks, CONFIG.block_size, dtype=torch.float16)
        self.error = ErrorState(payload, torch.zeros(blocks))
        self.stats = EncodeStats(torch.zeros(*blocks, 2), torch.zeros(1, dtype=torch.int64))
        self.wire = torch.zeros(world_size, layout.bytes_per_shard, dtype=torch.uint8)

    def send(self, gradient: Tensor) -> None:
        padded = gradient.new_zeros(self.rows * len(self.wire), *gradient.shape[1:])
        padded[: len(gradient)] = gradient
        flat = padded.view(len(self.wire), -1)
        eager.encode(flat, self.wire, self.table, self.stats, self.error, CONFIG.beta)


def train() -> list[str]:
    """Names of parameters whose error differs from the reference after any step."""
    torch.manual_seed(0)
    model, local = Experts(), Experts()
    local.load_state_dict(model.state_dict())
    references = {name: Reference(p.shape) for name, p in local.named_parameters()}
    fully_shard(model, mesh=cpu_mesh())
    attach(model, CONFIG)
    assert isinstance(model, FSDPModule)
    comm = model._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm
    assert isinstance(comm, FSDPReduceScatter)
    wrong = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        x = torch.randn(3, WIDTH, generator=generator)
        for module in (model, local):
            module.zero_grad()
            module(x, experts_of(step)).square().sum().backward()
        for name, parameter in local.named_parameters():
            if parameter.grad is not None:
                references[name].send(parameter.grad)
        if (step + 1) % 5 == 0:
            for reference in references.values():
                reference.error.payload.zero_()
        (hop,) = comm.reducer.hops
        assert hop.error.state is not None
        for index, rows in hop.error.rows.items():
            name = comm.reducer.unit.parameter_names[index]
            ours = hop.error.state.payload[:, rows.start : rows.stop]
            if not torch.equal(ours, references[name].error.payload):
                wrong.append(f"{name} after step {step}")
    assert len(hop.error.rows) == 2 * (NUM_EXPERTS + 1)
    return wrong


def test_errors_equal_those_of_each_parameter_alone(ranks: Ranks) -> None:
    assert ranks(3).run(train) == [[]] * 3
