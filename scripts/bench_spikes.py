"""What spikes cost in loss, and which `LoCoConfig.spike_limit` keeps that from happening.

Trains a small network to read digits on 4 simulated ranks, whose gradients go through the codec
with error feedback. One rank's gradient is now and then multiplied by 10 to 10,000; the step is
clipped to a norm of 1, as all steps are, or left out. Prints the mean loss over the last 50 steps,
over seeds, less that of the same training in full precision, in 1e-3 nats, and how many errors were
dropped. Needs the extra `vision`.

    python scripts/bench_spikes.py
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn

from loco_fsdp import LoCoConfig
from loco_fsdp.codec import BlockLayout
from loco_fsdp.reduction.hop import Hop

RANKS, STEPS, BATCH, LAST = 4, 300, 32, 50
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Spikes:
    """How many times larger every 25th gradient of a rank is, and what is done about the step."""

    size: float
    skipped: bool

    def hits(self, step: int, rank: int) -> bool:
        return step % 25 == 20 and rank == step // 25 % RANKS


class Reduction:
    """The mean over ranks of gradients `[numel]`, in low bits unless `config` is None."""

    def __init__(self, numels: tuple[int, ...], config: LoCoConfig | None) -> None:
        self._hops: list[Hop] = []
        if config is None:
            return
        layout = BlockLayout(numels, config.bits, config.block_size)
        for _ in range(RANKS):
            hop = Hop("flat", "(root)", list(range(RANKS)), 1, config, "compiled")
            hop.error.add(dict(enumerate(layout.blocks_per_part)), CPU)
            hop.begin(layout.num_blocks, CPU)
            self._hops.append(hop)
            self._table = layout.place(CPU, hop.error.rows_of(tuple(range(len(numels)))))
        self._wire = torch.zeros(RANKS, layout.bytes_per_shard, dtype=torch.uint8)

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        if not self._hops:
            return torch.stack(gradients).mean(0)
        for hop, gradient, row in zip(self._hops, gradients, self._wire, strict=True):
            hop.encode(gradient.view(1, -1), row.view(1, -1), self._table, feedback=True)
            hop.end()
        mean = torch.empty_like(gradients[0])
        self._hops[0].decode(self._wire, mean, self._table, 1 / RANKS)
        return mean

    @property
    def dropped(self) -> int:
        return sum(int(hop.measured().spikes) for hop in self._hops)


def train(seed: int, config: LoCoConfig | None, spikes: Spikes) -> tuple[float, int]:
    """Mean loss over the last steps, and errors that were dropped."""
    torch.manual_seed(seed)
    data = load_digits()
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    labels = torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU())
    model.append(nn.Linear(128, 10))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    reduction = Reduction(tuple(p.numel() for p in parameters), config)
    losses = []
    for step in range(STEPS):
        gradients, loss = [], 0.0
        for rank in range(RANKS):
            chosen = torch.randint(len(images), (BATCH,))
            value = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            flat = torch.cat([g.flatten() for g in torch.autograd.grad(value, parameters)])
            gradients.append(flat * (spikes.size if spikes.hits(step, rank) else 1.0))
            loss += value.item() / RANKS
        losses.append(loss)
        mean = reduction(gradients)
        if spikes.skipped and any(spikes.hits(step, rank) for rank in range(RANKS)):
            continue
        mean *= min(1.0, 1.0 / mean.norm().item())
        for parameter, part in zip(
            parameters, mean.split_with_sizes([p.numel() for p in parameters]), strict=True
        ):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    return statistics.mean(losses[-LAST:]), reduction.dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--limits", type=float, nargs="+", default=[3.0, 5.0, 10.0, 30.0])
    arguments = parser.parse_args()
    limits: list[float | None] = [None, *arguments.limits]
    print(f"{'spikes':>8} {'step':>8}" + "".join(f"{f'limit {x}':>20}" for x in limits))
    for size in (1.0, 10.0, 100.0, 1e4):
        for skipped in (False, True) if size > 1 else (False,):
            spikes = Spikes(size, skipped)
            full = [train(seed, None, spikes)[0] for seed in range(arguments.seeds)]
            cells = []
            for limit in limits:
                config = LoCoConfig(bits=arguments.bits, spike_limit=limit)
                runs = [train(seed, config, spikes) for seed in range(arguments.seeds)]
                extra = [1e3 * (run[0] - base) for run, base in zip(runs, full, strict=True)]
                error = statistics.stdev(extra) / len(extra) ** 0.5 if len(extra) > 1 else 0.0
                dropped = statistics.mean(run[1] for run in runs)
                cells.append(f"{statistics.mean(extra):+.1f} +- {error:.1f} ({dropped:.0f})")
            step = "skipped" if skipped else "clipped" if size > 1 else "-"
            print(f"{size:>8g} {step:>8}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
