"""Anything that may be done with LoCo, in any order: after each step the books balance.

What ranks send, summed up, is what they wanted to send less the growth of their errors. With the
moving average of errors that is `sum(d) = sum(g - (e' - e) / (1 - beta))` over ranks, element by
element, wherever all gradients of a block are finite.

LOCO_SEQUENCES sets how many sequences are drawn, LOCO_SEED another seed.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

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

from loco_fsdp import LoCoConfig, attach
from ranks import RankPool
from toy import Given, backward, cpu_mesh, reduced

Ranks = Callable[[int], RankPool]

BLOCK, BETA, WORLD = 32, 0.75, 2
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


class Books(NamedTuple):
    """What a rank saw in one step, by parameter."""

    gradient: dict[str, Tensor]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    output: dict[str, Tensor]
    stats: dict[str, float]


# --- what ranks do ---------------------------------------------------------------------------

held: dict[str, Any] = {}  # of this rank, from one call to the next


def start(options: dict[str, Any]) -> None:
    held.clear()
    held["model"] = fully_shard(Given(**{k: (n,) for k, n in SIZES.items()}), mesh=cpu_mesh())
    attach_anew(options)


def attach_anew(options: dict[str, Any]) -> None:
    if "loco" in held:
        held["loco"].detach()
    held["loco"] = attach(held["model"], LoCoConfig(block_size=BLOCK, beta=BETA, **options))


def errors() -> dict[str, Tensor]:
    """The error of each parameter, in the order of its elements."""
    (blob,) = held["loco"].state_dict().values()
    found = {name: torch.zeros(size) for name, size in SIZES.items()}
    for _, name, _, payload, scale in torch.load(io.BytesIO(blob))["errors"]:
        values = payload.float() * scale.unsqueeze(-1)
        found[name] = values.flatten(1)[:, : SIZES[name] // WORLD].flatten()
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


def step(microbatches: list[dict[str, str]], number: int, paused: bool) -> Books:
    model, loco = held["model"], held["loco"]
    before = errors()
    total: dict[str, Tensor] = {}
    for index, kinds in enumerate(microbatches):
        gradients = {name: draw(name, kind, number + index) for name, kind in kinds.items()}
        model.set_requires_gradient_sync(index == len(microbatches) - 1)
        if paused:
            with loco.paused():
                backward(model, **gradients)
        else:
            backward(model, **gradients)
        for name, gradient in gradients.items():
            if getattr(model, name).requires_grad:
                total[name] = total[name] + gradient if name in total else gradient
    output = {name: reduced(getattr(model, name)) for name in total}
    model.zero_grad()
    return Books(total, before, errors(), output, loco.stats())


def freeze(name: str, frozen: bool) -> None:
    getattr(held["model"], name).requires_grad_(not frozen)


def save() -> dict[str, Tensor]:
    held["saved"] = held["loco"].state_dict()
    return errors()


def load() -> tuple[dict[str, Tensor], float]:
    held["loco"].load_state_dict(held["saved"])
    return errors(), held["loco"].stats()["reductions"]


def reset() -> dict[str, Tensor]:
    held["loco"].reset_error()
    return errors()


# --- what is drawn, and what has to hold -----------------------------------------------------

used = st.sets(st.sampled_from(sorted(SIZES)), min_size=1)
kinds = st.sampled_from(sorted(KINDS))
configs = st.fixed_dictionaries(
    {"bits": st.sampled_from([8, 4, 2, 1]), "error_dtype": st.sampled_from(sorted(STORAGES))}
)


class Machine(RuleBasedStateMachine):
    """A model of two parameters on two ranks, and what is known of it here."""

    pool: RankPool

    @initialize(config=configs)
    def start(self, config: dict[str, Any]) -> None:
        self.pool.run(start, config)
        self.config = config
        self.number = 0
        self.frozen: set[str] = set()
        self.reductions = 0
        self.saved: tuple[dict[str, Any], int, list[dict[str, Tensor]]] | None = None

    @rule(names=used, data=st.data(), microbatches=st.integers(1, 3), paused=st.booleans())
    def step(self, names: set[str], data: st.DataObject, microbatches: int, paused: bool) -> None:
        if not names - self.frozen:
            return  # nothing to differentiate
        drawn = [{name: data.draw(kinds) for name in sorted(names)} for _ in range(microbatches)]
        books = self.pool.run(step, drawn, self.number, paused)
        self.number += microbatches
        self.reductions += not paused
        assert set(books[0].output) == names - self.frozen
        for name in SIZES:
            self.check(name, books, paused)
        for rank in books:
            assert rank.stats["reductions"] == self.reductions
            assert all(math.isfinite(value) for value in rank.stats.values())

    def check(self, name: str, books: list[Books], paused: bool) -> None:
        for rank in books:
            assert rank.after[name].isfinite().all()
        if name not in books[0].output or paused:
            for rank in books:
                assert torch.equal(rank.before[name], rank.after[name])
        if name not in books[0].output:
            return
        output = books[0].output[name]
        assert torch.equal(output.nan_to_num(7, 8, 9), books[1].output[name].nan_to_num(7, 8, 9))
        gradients = torch.stack([rank.gradient[name] for rank in books])
        if paused:
            torch.testing.assert_close(output, gradients.sum(0) / WORLD, equal_nan=True)
            return
        for first, last in blocks(SIZES[name]):
            part = gradients[:, first:last].double()
            if not part.isfinite().all():
                assert output[first:last].isnan().all()
                continue
            before, after = (
                torch.stack([error[name][first:last].double() for error in both])
                for both in zip(*((rank.before, rank.after) for rank in books), strict=True)
            )
            wanted = (part - (after - before) / (1 - BETA)).sum(0)
            largest = (part.abs().amax() + before.abs().amax()).item()
            tolerance = (STORAGES[self.config["error_dtype"]] / (1 - BETA) + 2**-20) * largest
            sent = output[first:last].double() * WORLD
            assert ((sent - wanted).abs() <= tolerance + 1e-37).all()

    @rule(name=st.sampled_from(sorted(SIZES)))
    def freeze_or_thaw(self, name: str) -> None:
        self.frozen ^= {name}
        self.pool.run(freeze, name, name in self.frozen)

    @rule()
    def save(self) -> None:
        self.saved = (self.config, self.reductions, self.pool.run(save))

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        assert self.saved is not None
        config, self.reductions, expected = self.saved
        for rank, (found, reductions) in enumerate(self.pool.run(load)):
            assert reductions == self.reductions
            for name in SIZES:
                # Another width or storage: the errors start at 0.
                kept = expected[rank][name] if config == self.config else torch.zeros(SIZES[name])
                assert torch.equal(found[name], kept)

    @rule(config=configs)
    def attach_anew(self, config: dict[str, Any]) -> None:
        self.pool.run(attach_anew, config)
        self.config, self.reductions = config, 0

    @rule()
    def reset(self) -> None:
        for found in self.pool.run(reset):
            assert not any(error.any() for error in found.values())


def blocks(size: int) -> list[tuple[int, int]]:
    """First and last element of each block: no block straddles two ranks' parts."""
    part = size // WORLD
    return [
        (rank * part + first, rank * part + min(first + BLOCK, part))
        for rank in range(WORLD)
        for first in range(0, part, BLOCK)
    ]


def test_any_sequence_keeps_the_books_balanced(ranks: Ranks) -> None:
    machine = type("Machine", (Machine,), {"pool": ranks(WORLD)})
    chosen = settings(
        max_examples=int(os.environ.get("LOCO_SEQUENCES", "200")),
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="LOCO_SEED" not in os.environ,
    )
    if "LOCO_SEED" in os.environ:
        machine = seed(int(os.environ["LOCO_SEED"]))(machine)
    run_state_machine_as_test(machine, settings=chosen)
