"""Ranks that run functions: one pool per world size for the whole test session.

Starting a rank costs seconds, so tests share them. A function that raises, or ranks that wait for
each other for ever, fail their test; the pool is then started anew for the next one.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT_S = 120
_GRACE_S = 5


class RankPool:
    """`world_size` processes of a gloo group.

    timeout_s: of the group's collectives
    grace_s: for the other ranks to answer, once one has failed
    """

    def __init__(
        self, world_size: int, *, timeout_s: int = _TIMEOUT_S, grace_s: int = _GRACE_S
    ) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on all ranks at once; what it returned, by rank."""
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        results: list[Any] = []
        failures: list[str] = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(self.grace_s if failures else _TIMEOUT_S):
                failures.append(f"rank {rank} did not answer")
                continue
            try:
                failed, result = connection.recv()
            except EOFError:
                failed, result = True, "died"
            results.append(result)
            if failed:
                failures.append(f"rank {rank}:\n{result}")
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self) -> None:
        # Ranks are forked from a process that has imported torch once, and done nothing with it.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.fsdp", "hypothesis", "pytest"])
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, self.world_size, store, self.timeout_s, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def stop(self) -> None:
        """End all ranks; the next `run` starts them again."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._connections = [], []


@contextmanager
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    """`pools(n)`: the pool of n ranks, always the same one."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    try:
        yield get
    finally:
        for pool in pools.values():
            pool.stop()


def _serve(rank: int, world_size: int, store: str, timeout_s: int, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            answer = (False, function(*args))
        except BaseException:
            answer = (True, traceback.format_exc())
        connection.send(answer)


def raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The error that a call raises, as "Type: message"; for functions that ranks run."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function} raised nothing")


def heard(function: Callable[[], Any]) -> list[str]:
    """What the library warns of on this rank while `function` runs."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("loco_fsdp")
    logger.addHandler(handler)
    try:
        function()
    finally:
        logger.removeHandler(handler)
    return messages
