"""Anything that may be done with LoCo, in any order: after each step the books balance.

What ranks send, summed up, is what they wanted to send less the growth of their errors. With the
moving average of errors that is `sum(d) = sum(g - (e' - e) / (1 - beta))` over ranks, element by
element, wherever all gradients of a block are finite. A reduction in full precision sends `g` and
leaves the error alone, so that the same holds for any window of reductions of either kind.

LOCO_SEQUENCES sets how many sequences are drawn, LOCO_SEED another seed.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from ranks import RankPool
from toy import Given, backward, cpu_mesh, reduced

Ranks = Callable[[int], RankPool]

BLOCK, BETA, SHARDS = 32, 0.75, 2
SIZES = {"a": 40, "b": 72}
# How far storing the error may take it from the definition, in parts of the block's largest value.
STORAGES = {"float32": 2.0**-20, "float16": 2.0**-9, "bfloat16": 2.0**-6}

KINDS = {
    "normal": 1.0,
    "tiny": 1e-30,
    "huge": 1e15,
    "zero": 0.0,
    "inf": math.inf,
    "nan": math.nan,
}

# Ranks, and what an error is worth in the sum over all ranks: inside of a replica FSDP2 has
# averaged before `LoCoFSDP` compresses.
WAYS = {"fsdp": (2, 1), "hsdp": (4, 1), "replicas": (4, SHARDS)}


@dataclass
class Microbatch:
    """One backward: kinds of gradients by parameter, and what is done before and around it."""

    kinds: dict[str, str]
    paused: bool = False
    before: str | None = None


@dataclass
class Books:
    """What a rank saw in one window, by parameter."""

    gradient: dict[str, Tensor] = field(default_factory=dict)
    compressed: dict[str, Tensor] = field(default_factory=dict)  # the part that was sent so
    largest: dict[str, float] = field(default_factory=dict)  # sum of largest gradients
    growth: dict[str, Tensor] = field(default_factory=dict)  # of the errors
    error: float = 0.0  # the largest met
    output: dict[str, Tensor] = field(default_factory=dict)
    seen: float = 0.0  # sum of what the hook saw
    local: float = 0.0  # sum of this rank's shards of the output
    reductions: int = 0  # compressed
    bypassed: int = 0
    dropped: bool = False  # errors were lost: a spike, or a guard that gave up
    stats: dict[str, float] = field(default_factory=dict)


# --- what ranks do ---------------------------------------------------------------------------

held: dict[str, Any] = {}  # of this rank, from one call to the next


def start(way: str, options: dict[str, Any]) -> None:
    held.clear()
    held["way"], held["hook"], held["seen"] = way, False, []
    model = held["model"] = Given(**{k: (n,) for k, n in SIZES.items()})
    if way == "replicas":
        LoCoFSDP(model, config(options), mesh=cpu_mesh(2, SHARDS))
        held["loco"] = model.loco
        return
    fully_shard(model, mesh=cpu_mesh(2, SHARDS) if way == "hsdp" else cpu_mesh())
    held["loco"] = attach(model, config(options))


def config(options: dict[str, Any]) -> LoCoConfig:
    return LoCoConfig(block_size=BLOCK, beta=BETA, **options)


def let_go() -> None:
    held["loco"].detach()


def attach_anew(options: dict[str, Any]) -> None:
    if held["loco"].attached:
        let_go()
    held["loco"] = attach(held["model"], config(options))


def switch_hook() -> None:
    """A hook that looks, and one that is none."""
    held["hook"] = not held["hook"]
    seen = held["seen"]
    hook = (lambda gradient: seen.append(gradient.double().sum().item())) if held["hook"] else None
    held["model"].set_all_reduce_hook(hook)


def errors() -> dict[str, Tensor]:
    """The error of each parameter, in the order of its elements; 0 where it is not kept here."""
    found = {name: torch.zeros(size) for name, size in SIZES.items()}
    if not held["loco"].attached:
        return found
    (blob,) = held["loco"].state_dict().values()
    for _, name, _, payload, scale in torch.load(io.BytesIO(blob))["errors"]:
        part = SIZES[name] // SHARDS
        values = (payload.float() * scale.unsqueeze(-1)).flatten(1)[:, :part].flatten()
        first = 0 if len(values) > part else dist.get_rank() % SHARDS * part
        found[name][first : first + len(values)] = values
    return found


def draw(name: str, kind: str, number: int) -> Tensor:
    """A gradient: another for each rank and number; what is not finite is on rank 1 only."""
    generator = torch.Generator().manual_seed(100 * number + 10 * dist.get_rank() + ord(name))
    values = torch.randn(SIZES[name], generator=generator)
    if math.isfinite(KINDS[kind]):
        return values * KINDS[kind]
    if dist.get_rank() == 1:
        values[number % SIZES[name]] = KINDS[kind]
    return values


def counts() -> tuple[float, float, float, bool]:
    """Compressed and full reductions and spikes so far, and whether anything is compressed."""
    stats = held["loco"].stats()
    active = held["loco"].units[0].bits is not None
    return stats["reductions"], stats["bypassed_reductions"], stats["spikes"], active


def window(
    microbatches: list[Microbatch], number: int, mode: str, options: dict[str, Any]
) -> Books:
    model = held["model"]
    books = Books(growth={name: torch.zeros(size) for name, size in SIZES.items()})
    held["seen"].clear()
    # Ways of accumulating in which stock FSDP2, or the hook that is left, reduces each microbatch.
    reduces = ["every microbatch", *(["no all-reduce"] if held["way"] != "replicas" else [])]
    pending: dict[str, Tensor] = {}
    for index, microbatch in enumerate(microbatches):
        last = index == len(microbatches) - 1
        if microbatch.before == "detach" and held["loco"].attached:
            let_go()
        elif microbatch.before == "attach" and not held["loco"].attached:
            attach_anew(options)
        model.set_requires_gradient_sync(last or mode != "no sync")
        model.set_requires_all_reduce(last or mode != "no all-reduce")
        loco = held["loco"]
        before, counted = errors(), counts()
        gradients = {n: draw(n, kind, number + index) for n, kind in microbatch.kinds.items()}
        with loco.paused() if microbatch.paused else nullcontext():
            backward(model, **gradients)
        after, now = errors(), counts()
        books.reductions += int(now[0] - counted[0])
        books.bypassed += int(now[1] - counted[1])
        books.dropped |= now[2] > counted[2] or (counted[3] and not now[3])
        for name, gradient in gradients.items():
            if not getattr(model, name).requires_grad:
                continue
            for sums in (books.gradient, pending):
                sums[name] = sums[name] + gradient if name in sums else gradient
            largest = gradient.nan_to_num(0, 0, 0).abs().max().item()
            books.largest[name] = books.largest.get(name, 0.0) + largest
        for name in SIZES:
            books.growth[name] += after[name] - before[name]
            books.error = max(books.error, *(e[name].abs().max().item() for e in (before, after)))
            assert after[name].isfinite().all()
        if now[0] > counted[0]:
            for name, gradient in pending.items():
                sums = books.compressed
                sums[name] = sums[name] + gradient if name in sums else gradient
            pending = {}
        elif now[1] > counted[1] or (not loco.attached and (last or mode in reduces)):
            pending = {}
    books.output = {name: reduced(getattr(model, name)) for name in books.gradient}
    books.seen = math.fsum(held["seen"])
    books.local = math.fsum(
        getattr(model, name).grad.to_local().double().sum().item() for name in books.output
    )
    assert all(p.grad is None for n, p in model.named_parameters() if n not in books.output)
    model.zero_grad()
    books.stats = held["loco"].stats()
    return books


def freeze(name: str, frozen: bool) -> None:
    getattr(held["model"], name).requires_grad_(not frozen)


def save() -> dict[str, Tensor]:
    held["saved"] = held["loco"].state_dict()
    return errors()


def load() -> dict[str, Tensor]:
    held["loco"].load_state_dict(held["saved"])
    return errors()


def reset() -> dict[str, Tensor]:
    held["loco"].reset_error()
    return errors()


# --- what is drawn, and what has to hold -----------------------------------------------------

used = st.sets(st.sampled_from(sorted(SIZES)), min_size=1)
kinds = st.sampled_from(sorted(KINDS))
configs = st.fixed_dictionaries(
    {
        "bits": st.sampled_from([8, 4, 2, 1]),
        "error_dtype": st.sampled_from(sorted(STORAGES)),
        "warmup_steps": st.sampled_from([0, 0, 2]),
        "guard": st.sampled_from([None, None, 1e-6]),
        "spike_limit": st.sampled_from([None, 10.0]),
    }
)
modes = st.sampled_from(["no sync", "no all-reduce", "every microbatch"])
actions = st.sampled_from([None, None, None, "detach", "attach"])


class Machine(RuleBasedStateMachine):
    """A model of two parameters, and what is known of it here."""

    pool: RankPool
    way: str

    @initialize(config=configs)
    def start(self, config: dict[str, Any]) -> None:
        self.pool.run(start, self.way, config)
        self.config = config
        self.number = 0
        self.attached, self.hooked = True, False
        self.frozen: set[str] = set()
        self.saved: tuple[dict[str, Any], list[dict[str, Tensor]]] | None = None

    @rule(data=st.data(), number=st.integers(1, 3), mode=modes)
    def window(self, data: st.DataObject, number: int, mode: str) -> None:
        microbatches = [
            Microbatch(
                {name: data.draw(kinds) for name in sorted(data.draw(used))},
                data.draw(st.booleans()),
                data.draw(actions),
            )
            for _ in range(number)
        ]
        if self.way == "hsdp" and mode == "no all-reduce":
            # FSDP2 itself adds flat gradients here, of whatever parameters.
            microbatches = [replace(m, kinds=microbatches[0].kinds) for m in microbatches]
        if any(not set(m.kinds) - self.frozen for m in microbatches):
            return  # nothing to differentiate
        books = self.pool.run(window, microbatches, self.number, mode, self.config)
        self.number += number
        for microbatch in microbatches:
            self.attached = {"attach": True, "detach": False}.get(
                microbatch.before or "", self.attached
            )
        trained = {name for m in microbatches for name in m.kinds} - self.frozen
        assert set(books[0].output) == trained
        for name in SIZES:
            self.check(name, books)
        finite = all(output.isfinite().all() for output in books[0].output.values())
        for rank in books:
            assert all(math.isfinite(value) for value in rank.stats.values())
            assert rank.reductions == books[0].reductions
            if self.hooked and finite:
                scale = sum(rank.largest.values()) + rank.error / (1 - BETA)
                assert abs(rank.seen - rank.local) <= 1e-4 * scale + 1e-30
        if (
            not self.config["warmup_steps"]
            and self.attached
            and not any(m.paused or m.before for m in microbatches)
            and self.config["guard"] is None
        ):
            assert books[0].bypassed == 0

    def check(self, name: str, books: list[Books]) -> None:
        if name not in books[0].output:
            assert not any(rank.growth[name].any() for rank in books if not rank.dropped)
            return
        output = books[0].output[name]
        world_size = len(books)
        for rank in books[1:]:
            assert torch.equal(output.nan_to_num(7, 8, 9), rank.output[name].nan_to_num(7, 8, 9))
        gradients = torch.stack([rank.gradient[name] for rank in books]).double()
        compressed = torch.stack(
            [rank.compressed.get(name, torch.zeros(SIZES[name])) for rank in books]
        )
        growth = torch.stack([rank.growth[name] for rank in books]).double().sum(0)
        worth = WAYS[self.way][1]
        number = max(1, books[0].reductions)
        largest = sum(rank.largest[name] for rank in books)
        largest += worth * sum(rank.error for rank in books)
        storage = STORAGES[self.config["error_dtype"]] if books[0].reductions else 0
        tolerance = number * worth * (storage / (1 - BETA) + 2**-18) * largest
        for first, last in blocks(SIZES[name]):
            sent = output[first:last].double() * world_size
            part = gradients[:, first:last]
            if not compressed[:, first:last].isfinite().all():
                if self.way != "replicas":
                    assert output[first:last].isnan().all()
                else:  # inside of a replica FSDP2 has summed: no blocks of one parameter's own
                    assert output[first:last].isnan().any()
            elif not part.isfinite().all():
                assert not output[first:last].isfinite().all()
            elif not any(rank.dropped for rank in books):
                wanted = part.sum(0) - worth * growth[first:last] / (1 - BETA)
                assert ((sent - wanted).abs() <= tolerance + 1e-36).all()

    @rule(name=st.sampled_from(sorted(SIZES)))
    def freeze_or_thaw(self, name: str) -> None:
        self.frozen ^= {name}
        self.pool.run(freeze, name, name in self.frozen)

    @rule()
    def hook(self) -> None:
        self.hooked = not self.hooked
        self.pool.run(switch_hook)

    @precondition(lambda self: self.attached)
    @rule()
    def save(self) -> None:
        self.saved = (self.config, self.pool.run(save))

    @precondition(lambda self: self.attached and self.saved is not None)
    @rule()
    def load(self) -> None:
        assert self.saved is not None
        config, expected = self.saved
        for rank, found in enumerate(self.pool.run(load)):
            for name in SIZES:
                assert found[name].isfinite().all()
                if config == self.config:
                    assert torch.equal(found[name], expected[rank][name])
                elif any(config[k] != self.config[k] for k in ("bits", "error_dtype")):
                    # Another width or storage: the errors start at 0.
                    assert config["guard"] != self.config["guard"] or not found[name].any()

    @rule(config=configs)
    def attach_anew(self, config: dict[str, Any]) -> None:
        self.pool.run(attach_anew, config)
        self.config, self.attached = config, True

    @precondition(lambda self: self.attached)
    @rule()
    def detach(self) -> None:
        self.pool.run(let_go)
        self.attached = False

    @precondition(lambda self: self.attached)
    @rule()
    def reset(self) -> None:
        for found in self.pool.run(reset):
            assert not any(error.any() for error in found.values())


def blocks(size: int) -> list[tuple[int, int]]:
    """First and last element of each block: no block straddles two ranks' parts."""
    part = size // SHARDS
    return [
        (rank * part + first, rank * part + min(first + BLOCK, part))
        for rank in range(SHARDS)
        for first in range(0, part, BLOCK)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_any_sequence_keeps_the_books_balanced(ranks: Ranks, way: str) -> None:
    machine = type("Machine", (Machine,), {"pool": ranks(WAYS[way][0]), "way": way})
    chosen = settings(
        max_examples=int(os.environ.get("LOCO_SEQUENCES", "60")),
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="LOCO_SEED" not in os.environ,
    )
    if "LOCO_SEED" in os.environ:
        machine = seed(int(os.environ["LOCO_SEED"]))(machine)
    run_state_machine_as_test(machine, settings=chosen)
