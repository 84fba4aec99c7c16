"""Runs PyTorch's own tests of FSDP2 on CPU: on stock FSDP2, and then with LoCo attached.

    python scripts/upstream_tests.py PYTORCH/test/distributed/_composable/fsdp [-k NAME ...]

The tests come from a checkout of PyTorch, at the release that is installed; they need expecttest.
Those that pass on stock FSDP2 run again with LoCo on every root module, and with a codec that sends
float32: results must be those of stock FSDP2. Each reduction is also checked to hold the gradients
of the parameters that LoCo takes them for. With LoCo, tests fail that count reduce-scatters, expect
16-bit sums or replace functions inside FSDP2: the last column says why.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.testing._internal import common_distributed, common_fsdp, common_utils

from loco_fsdp import LoCo, LoCoConfig, attach
from loco_fsdp.codec import WireLayout, eager
from loco_fsdp.frontends import fsdp2
from loco_fsdp.frontends.fsdp2_hooks import FSDPReduceScatter

# Reductions by LoCo and by stock FSDP2 in its place, over all ranks of the test that runs.
fork = multiprocessing.get_context("fork")
done = fork.Array("q", 2)


def pretend_accelerators(max_ranks: int) -> None:
    """Let tests that ask for GPUs have CPU "devices", and start their ranks by fork."""
    cpu = torch.device("cpu")
    patch(torch.accelerator, device_count=lambda: max_ranks, current_device_index=lambda: 0)
    patch(torch.accelerator, current_accelerator=lambda check_available=False: cpu)
    patch(torch.accelerator, set_device_index=lambda *_: None, synchronize=lambda *_: None)
    patch(torch.cpu, device_count=lambda: max_ranks, _sleep=lambda cycles: None)
    patch(common_utils, get_cycles_per_ms=lambda *_: 1)
    patch(common_fsdp, has_triton=lambda: False)  # else tests run with torch.compile, too

    def skip_if_lt_x_gpu(needed: int, **_: Any) -> Any:
        return unittest.skipIf(needed > max_ranks, f"needs {needed} ranks")

    patch(common_distributed, skip_if_lt_x_gpu=skip_if_lt_x_gpu)
    ranks = common_distributed.MultiProcessTestCase
    patch(ranks, _spawn_processes=lambda test: test._start_processes(fork.Process))


def patch(target: Any, **values: Any) -> None:
    """Set attributes of something that is not ours."""
    for name, value in values.items():
        setattr(target, name, value)


def limit_ranks(case: Any, max_ranks: int) -> None:
    """Run a class of tests on so many ranks at most."""
    if isinstance(world_size := vars(case)["world_size"], property):
        case.world_size = property(lambda self: min(max_ranks, world_size.__get__(self)))


def send_exactly(gradient: Tensor, wire: Tensor, table: Any, stats: Any, *_: Any) -> None:
    """Stands for `eager.encode`: puts the gradient on the wire in float32."""
    sent = gradient.to(torch.float32).contiguous().view(torch.uint8)
    wire[:, : sent.shape[1]].copy_(sent)
    stats.squares.zero_()


def sum_exactly(wire: Tensor, output: Tensor, table: Any, factor: float = 1.0) -> None:
    """Stands for `eager.decode`: sums over ranks in float32, in their order."""
    parts = wire[:, : 4 * output.numel()].contiguous().view(torch.float32)
    output.copy_(functools.reduce(torch.add, parts.unbind()) * factor)


def check_reductions() -> None:
    """Count reductions, and compare each input with the gradients that it is said to hold."""
    has_gradient, call = fsdp2._has_gradient, FSDPReduceScatter.__call__
    seen: dict[int, Any] = {}

    def watched_has_gradient(group: Any, param: Any) -> bool:
        if found := has_gradient(group, param):
            grad = param.unsharded_accumulated_grad
            seen[id(param)] = param._unsharded_param.grad if grad is None else grad
        return found

    def checked_call(self: Any, group: Any, **others: Any) -> Any:
        unit, gradient = self._unit, others["input_tensor"].view(group.size(), -1)
        with done.get_lock():
            done[int(self.reducer.bypassed)] += 1
        numels = [unit.shard_numels[index] for index in unit.active]
        assert sum(numels) == gradient.shape[1], f"{unit.name}: {unit.active} do not add up"
        parts = torch.split(gradient, numels, dim=1)
        for index, part in zip(unit.active, parts, strict=True):
            param, name = unit._group.fsdp_params[index], unit.parameter_names[index]
            grad = seen.pop(id(param))
            if grad is None:  # an unused parameter, reduced as zeros
                assert not part.any(), f"{name} is unused, but not zero"
            elif gradient.dtype in (torch.float32, torch.bfloat16):  # others are divided already
                grad = param._get_grad_inner_tensor(grad).to(gradient.dtype)
                packed, expected = (x[x != 0].sort().values for x in (part, grad))
                assert torch.equal(packed, expected), f"this is not the gradient of {name}"
        return call(self, group=group, **others)

    patch(fsdp2, _has_gradient=watched_has_gradient)
    patch(FSDPReduceScatter, __call__=checked_call)


def attach_on_first_forward(config: LoCoConfig) -> None:
    """Attach LoCo to a root module when FSDP2 finds out that it is one."""
    lazy_init = FSDPState._lazy_init

    def replaced(state: Any) -> None:
        was_known = state._is_root is not None
        lazy_init(state)
        if not was_known and any(fsdp2.fsdp_units(state._modules[0])):
            attach(state._modules[0], config)

    patch(FSDPState, _lazy_init=replaced)


def attach_on_fully_shard(config: LoCoConfig) -> None:
    """Attach LoCo at every `fully_shard`, and detach what is attached inside of the module."""
    attached: dict[int, LoCo] = {}
    fully_shard = torch_fsdp.fully_shard

    @functools.wraps(fully_shard)
    def replaced(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = fully_shard(module, *args, **kwargs)
        root = nn.ModuleList(module) if isinstance(module, list | tuple) else module
        states = [id(m._get_fsdp_state()) for m in root.modules() if isinstance(m, FSDPModule)]
        for state in set(states) & set(attached):
            attached.pop(state).detach()
        if any(fsdp2.fsdp_units(root)):
            attached[states[0]] = attach(root, config)
        return sharded

    for module in list(sys.modules.values()):
        if vars(module).get("fully_shard") is fully_shard:
            patch(module, fully_shard=replaced)


def use_loco(config: LoCoConfig, early: bool) -> None:
    """Attach LoCo, with a codec that loses nothing, to whatever is sharded in this process."""
    patch(eager, encode=send_exactly, decode=sum_exactly)
    patch(WireLayout, num_bytes=property(lambda self: 4 * self.num_blocks * self.block_size))
    check_reductions()
    (attach_on_fully_shard if early else attach_on_first_forward)(config)


def run_alone(test: unittest.TestCase, prepare: Callable[[], None], timeout: float) -> str:
    """Run a test in a process of its own: "passed", "skipped: ..." or what went wrong."""
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=_run, args=(test, prepare, sender))
    child.start()
    assert child.pid is not None
    sender.close()
    outcome = f"died, or did not end in {timeout:.0f} s"
    with contextlib.suppress(EOFError):
        outcome = receiver.recv() if receiver.poll(timeout) else outcome
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # with the ranks that it started
    child.join()
    return outcome


def _run(test: unittest.TestCase, prepare: Callable[[], None], sender: Any) -> None:
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    result = unittest.TestResult()
    try:
        prepare()
        test.run(result)
    except BaseException:
        result.addError(test, sys.exc_info())
    outcomes = [text for _, text in result.failures + result.errors]
    outcomes += [f"skipped: {why}" for _, why in result.skipped]
    sender.send((outcomes or ["passed"])[0])


def in_short(outcome: str) -> tuple[str, str]:
    """What a table says of an outcome: "passed", "skipped" or "FAILED", and why."""
    word, _, rest = outcome.partition(": ")
    if word in ("passed", "skipped"):
        return word, rest
    lines = [line.strip() for line in outcome.splitlines() if line.strip()]
    # The error of a rank, not the one that says that a rank had an error.
    errors = [x for x in lines if x.split(":")[0].endswith("Error") and "exited with" not in x]
    return "FAILED", (errors[:1] or lines[-1:])[0][:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("path", type=Path, help="directory with files test_*.py, or one such file")
    parser.add_argument("-k", action="append", default=[], help="only tests with this in the name")
    parser.add_argument("--stock", action="store_true", help="stock FSDP2 only")
    parser.add_argument("--early", action="store_true", help="attach at fully_shard, not later")
    parser.add_argument("--ranks", type=int, default=4, help="at most so many for a test")
    parser.add_argument("--node-size", type=int, help="let LoCo take so many ranks for a node")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for a test")
    parser.add_argument("--log", type=Path, help="file to add tracebacks to")
    args = parser.parse_args()

    pretend_accelerators(args.ranks)
    tests: list[unittest.TestCase] = []
    for path in [args.path] if args.path.is_file() else sorted(args.path.glob("test_*.py")):
        sys.path.insert(0, str(path.parent))
        suites: Any = unittest.defaultTestLoader.loadTestsFromName(path.stem)
        found = [test for suite in suites for test in suite]
        tests += [t for t in found if not args.k or any(k in t.id() for k in args.k)]
    for case in {c for t in tests for c in type(t).__mro__ if "world_size" in vars(c)}:
        limit_ranks(case, args.ranks)

    config = LoCoConfig(backend="eager", node_size=args.node_size)
    prepare = functools.partial(use_loco, config, args.early)
    totals: Counter[str] = Counter()
    for test in tests:
        outcome = run_alone(test, lambda: None, args.timeout)
        status, reason = in_short(outcome)
        row = [f"stock {status}"]
        if status == "passed" and not args.stock:
            done[:] = [0, 0]
            outcome = run_alone(test, prepare, args.timeout)
            status, reason = in_short(outcome)
            row += [f"LoCo {status}", f"{done[0]} reductions by LoCo, {done[1]} by FSDP2"]
        totals[", ".join(row[:2])] += 1
        print(" | ".join([test.id(), *row, reason]), flush=True)
        if args.log and status != "passed":
            with args.log.open("a") as log:
                log.write(f"==== {test.id()} | {' | '.join(row)}\n{outcome}\n")
    print(*(f"{count} {name}" for name, count in sorted(totals.items())), sep="\n")
    sys.exit(any("LoCo FAILED" in name for name in totals))


if __name__ == "__main__":
    main()
