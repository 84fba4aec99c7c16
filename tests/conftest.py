import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import settings

from ranks import RankPool, rank_pools

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter, if this is set before anybody imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"

# Machines that run tests are slow and noisy; a deadline would test them.
settings.register_profile("loco", deadline=None, derandomize=True)
settings.load_profile("loco")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(n)`: the pool of n ranks."""
    with rank_pools() as pools:
        yield pools
