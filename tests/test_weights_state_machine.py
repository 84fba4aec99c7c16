"""Anything that may change parameters, in any order: nobody computes with old ones.

`weights_sequences` has what is done and what has to hold after each forward.

LOCO_SEQUENCES sets how many sequences are drawn, LOCO_SEED another seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

import weights_sequences as ways
from ranks import RankPool
from weights_sequences import MODES, OPTIMIZERS, PLAIN, SHAPES, UNITS, Microbatch, Start

Ranks = Callable[[int], RankPool]

modes = st.sampled_from(sorted(MODES))
sometimes = st.sampled_from([None, None, *sorted(MODES)])
looks = st.sampled_from([None, "look", *sorted(MODES)])
bits = st.sampled_from([4, 4, 4, 8])
starts = st.builds(
    Start,
    bits,
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from([0.05, 0.1, 0.5]),
    st.booleans(),
)
zeros = st.sampled_from(["after the step", "before the forward", "before the backward", "to zeros"])
last = st.builds(
    Microbatch,
    st.just(True),
    st.sampled_from([None, None, None, "forward", "both"]),
    sometimes,
    sometimes,
    st.booleans(),
)


class Machine(RuleBasedStateMachine):
    """A model of two units, and what is known of it here."""

    pool: RankPool

    def do(self, function: Callable[..., None], *args: Any) -> None:
        """`function(*args)` on all ranks, after which everything holds."""
        for rank, wrong in enumerate(self.pool.run(ways.call, function, *args)):
            assert not wrong, f"rank {rank}: {wrong}"

    @initialize(options=starts)
    def start(self, options: Start) -> None:
        self.attached = True
        self.frozen: set[tuple[int, str | None]] = set()
        self.do(ways.start, options)
        # What FSDP2 makes in inference mode it cannot train with.
        self.do(ways.train, [PLAIN], "after the step", None)
        self.do(ways.save)

    @rule(
        microbatches=st.lists(last, min_size=1, max_size=3),
        syncs=st.booleans(),
        zero=zeros,
        before_step=looks,
    )
    def train(
        self, microbatches: list[Microbatch], syncs: bool, zero: str, before_step: str | None
    ) -> None:
        for microbatch in microbatches[:-1]:
            microbatch.sync = syncs
        self.do(ways.train, microbatches, zero, before_step)

    @rule(zero=zeros, before_step=looks)
    def step(self, zero: str, before_step: str | None) -> None:
        self.do(ways.train, [PLAIN], zero, before_step)

    @rule(kind=st.sampled_from(["forward", "look", "evaluate", "paused", "averages"]), mode=modes)
    def compute(self, kind: str, mode: str) -> None:
        if kind == "forward":
            self.do(ways.drop_a_forward)
        elif kind == "look":
            self.do(ways.look)
        elif kind == "averages":
            self.do(ways.evaluate_averages, mode)
        else:
            self.do(ways.evaluate, mode, kind == "paused")

    @precondition(lambda self: self.attached)
    @rule()
    def edit(self) -> None:
        self.do(ways.edit)

    @rule(number=st.sampled_from(UNITS), name=st.sampled_from([None, *sorted(SHAPES)]))
    def freeze_or_thaw(self, number: int, name: str | None) -> None:
        self.frozen ^= {(number, name)}
        self.do(ways.freeze, number, name, (number, name) in self.frozen)

    @precondition(lambda self: self.attached)
    @rule()
    def save(self) -> None:
        self.do(ways.save)

    @rule()
    def load_model(self) -> None:
        self.do(ways.load_model)

    @precondition(lambda self: self.attached)
    @rule(
        order=st.sampled_from(["model first", "LoCo first"]),
        between=sometimes,
        zero=st.booleans(),
    )
    def load(self, order: str, between: str | None, zero: bool) -> None:
        self.do(ways.load, order, between, zero)

    @precondition(lambda self: self.attached)
    @rule()
    def detach(self) -> None:
        self.attached = False
        self.do(ways.detach)

    @precondition(lambda self: not self.attached)
    @rule(bits=bits)
    def attach_anew(self, bits: int) -> None:
        self.attached = True
        self.do(ways.attach_anew, bits)


def test_any_sequence_computes_with_the_parameters(ranks: Ranks) -> None:
    machine = type("Machine", (Machine,), {"pool": ranks(4)})
    chosen = settings(
        max_examples=int(os.environ.get("LOCO_SEQUENCES", "40")),
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize="LOCO_SEED" not in os.environ,
    )
    if "LOCO_SEED" in os.environ:
        machine = seed(int(os.environ["LOCO_SEED"]))(machine)
    run_state_machine_as_test(machine, settings=chosen)


# --- what did not always hold ----------------------------------------------------------------

Call = tuple[Any, ...]

STEP: Call = (ways.train, [PLAIN], "after the step", None)
ZEROS: Call = (ways.train, [PLAIN], "to zeros", None)

MET: dict[str, tuple[Start, list[Call]]] = {
    "paused forward, evaluation, backward": (
        Start(8, "SGD", 0.1, False),
        [(ways.train, [Microbatch(True, "forward", "no_grad", None, alike=False)], STEP[2], None)],
    ),
    "averages of what is frozen, after a step of the rest of its unit": (
        Start(4, "SGD", 0.1, False),
        [
            STEP,
            (ways.freeze, 0, "weight", True),
            STEP,
            STEP,
            (ways.evaluate_averages, "no_grad"),
        ],
    ),
    "steps of an optimizer without a gradient, beside a step of the rest of its unit": (
        Start(4, "momentum", 0.1, False),
        [STEP, ZEROS, (ways.freeze, 0, "weight", True), ZEROS, ZEROS, ZEROS],
    ),
    "a part that freezes after a step that nothing announces": (
        Start(4, "SGD", 0.1, False),
        [
            (ways.train, [PLAIN], STEP[2], "look"),
            (ways.freeze, 0, "weight", True),
            (ways.train, [Microbatch(True, "forward", None, "no_grad")], STEP[2], None),
        ],
    ),
}


@pytest.mark.parametrize("name", MET)
def test_sequences_that_were_met(ranks: Ranks, name: str) -> None:
    options, calls = MET[name]
    wrong = [ranks(4).run(ways.call, *each) for each in [(ways.start, options), STEP, *calls]]
    assert not any(any(found) for found in wrong), wrong
