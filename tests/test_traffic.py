"""The bytes that scripts count at collectives are those that LoCo itself reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from ranks import RankPool
from toy import Given, backward, cpu_mesh
from traffic import GradientTraffic

SHAPES = {"a": (40, 64), "b": (24,)}


def count(options: dict[str, Any] | None, mesh_shape: tuple[int, ...]) -> tuple[int, float]:
    """Bytes counted in one backward, and `wire_bytes`; without options of stock FSDP2."""
    model = Given(**SHAPES)
    loco = None
    if len(mesh_shape) == 2:
        LoCoFSDP(model, LoCoConfig(**(options or {})), mesh=cpu_mesh(*mesh_shape))
        loco = model.loco
    else:
        fully_shard(model, mesh=cpu_mesh())
        if options is not None:
            loco = attach(model, LoCoConfig(**options))
    with GradientTraffic() as traffic:
        backward(model, **{name: torch.ones(shape) for name, shape in SHAPES.items()})
    return traffic.bytes_sent, 0 if loco is None else loco.stats()["wire_bytes"]


@pytest.mark.parametrize(
    ("options", "mesh_shape"),
    [
        ({}, (4,)),
        ({"topology": "hierarchical", "node_size": 2}, (4,)),
        ({"topology": "hierarchical", "node_size": 2, "intra_node_bits": 8}, (4,)),
        ({}, (4, 1)),
    ],
    ids=["flat", "hierarchical", "8-bits-inside", "replicas"],
)
def test_counted_bytes_are_those_of_stats(
    ranks: Callable[[int], RankPool], options: dict[str, Any], mesh_shape: tuple[int, ...]
) -> None:
    for counted, reported in ranks(4).run(count, options, mesh_shape):
        assert counted == reported > 0


def test_stock_sends_all_but_its_own_part(ranks: Callable[[int], RankPool]) -> None:
    # 40 x 64 and 24 elements in float32, of which a rank keeps a quarter
    assert ranks(4).run(count, None, (4,)) == [((2560 + 24) * 4 * 3 // 4, 0)] * 4
