import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from ranks import RankPool

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, if this is set before anybody imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"

# Machines that run tests are slow and noisy; a deadline would test them.
settings.register_profile("loco", deadline=None, derandomize=True)
settings.load_profile("loco")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: the pool of n ranks."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        if world_size not in pools:
            pools[world_size] = RankPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.stop()
