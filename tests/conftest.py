from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from ranks import RankPool

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
