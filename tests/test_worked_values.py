"""All topologies against values worked out by hand: what comes out, and what is kept for later.

8 bits, blocks of 32, beta 0.9, gradients that stay the same for six steps. In each block rank r has

    127 (r + 1)      which makes the scale r + 1, and that of a sum of ranks the sum of theirs
    2.375 (r + 1)    sent as 2 (r + 1) until the error, which grows by 0.0375 (r + 1) a step, makes
                     it 2.525 (r + 1) in step 5; that is sent as 3 (r + 1)
    r + 1            on ranks of the first node, 0 on others: sent as it is, but not in the mean of
                     three replicas, which is less than half of a scale and stays in the error of
                     sums

So the second element sends 13 (r + 1) in six steps, of 14.25 (r + 1) that it had; 1.25 (r + 1) are
in the error 0.125 (r + 1), over 1 - beta.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from loco_fsdp import LoCoConfig, LoCoFSDP, attach
from ranks import RankPool
from toy import Given, backward, cpu_mesh, reduced

Ranks = Callable[[int], RankPool]

BLOCK, STEPS = 32, 6
SENT = [2, 2, 2, 2, 3, 2]
SHAPES = [(2, 2), (3, 2), (2, 3)]  # nodes, ranks of each


def given(local: int) -> Tensor:
    """The gradient of this rank, one block for each rank."""
    weight = dist.get_rank() + 1.0
    blocks = torch.zeros(dist.get_world_size(), BLOCK)
    blocks[:, 0], blocks[:, 1] = 127 * weight, 2.375 * weight
    if dist.get_rank() < local:
        blocks[:, 2] = weight
    return blocks.flatten()


def train(topology: str, nodes: int, local: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """First elements of the result of each step, and of the errors after the last by hop."""
    model = Given(weight=(nodes * local * BLOCK,))
    options = {"bits": 8, "block_size": BLOCK, "error_dtype": "float32", "node_size": local}
    if topology == "hsdp":
        LoCoFSDP(model, LoCoConfig(**options), mesh=cpu_mesh(nodes, local))
        loco = model.loco
    else:
        fully_shard(model, mesh=cpu_mesh())
        loco = attach(model, LoCoConfig(topology=topology, **options))
    results = []
    for _ in range(STEPS):
        model.zero_grad()
        backward(model, weight=given(local))
        blocks = reduced(model.weight).view(-1, BLOCK)
        assert not blocks[:, 3:].any()
        (same,) = blocks[:, :3].unique(dim=0)
        results.append(same)
    errors = {}
    for kind, _, _, payload, scale in torch.load(io.BytesIO(loco.state_dict().popitem()[1]))[
        "errors"
    ]:
        blocks = (payload * scale.unsqueeze(-1)).view(-1, BLOCK)
        assert not blocks[:, 3:].any()
        (errors[kind],) = blocks[:, :3].unique(dim=0)
    return results, errors


@pytest.mark.parametrize(("nodes", "local"), SHAPES)
@pytest.mark.parametrize("topology", ["flat", "hierarchical", "hsdp"])
def test_worked_out_by_hand(ranks: Ranks, topology: str, nodes: int, local: int) -> None:
    world_size = nodes * local
    total = world_size * (world_size + 1) / 2
    of_first_node = local * (local + 1) / 2
    twice = topology == "hsdp" and nodes > 2  # two replicas do not quantize what they have summed
    for rank, (results, errors) in enumerate(ranks(world_size).run(train, topology, nodes, local)):
        for result, sent in zip(results, SENT, strict=True):
            third = 0.0 if twice else of_first_node
            expected = torch.tensor([127 * total, sent * total, third]) / world_size
            torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)
        first = rank // local * local
        of_node = sum(range(first + 1, first + local + 1))
        weight = {"flat": rank + 1, "hierarchical": of_node, "hsdp": of_node / local}[topology]
        kept = {
            {"flat": "flat", "hierarchical": "inter-node", "hsdp": "replicas"}[topology]: [
                *(0.0, 0.125 * weight, 0.0)
            ]
        }
        if twice:  # the means are sent as they are, but for the third: never
            kept["sums"] = [0.0, 0.0, 0.1 * STEPS * of_first_node / world_size]
        assert errors.keys() == kept.keys()
        for kind, error in errors.items():
            torch.testing.assert_close(error, torch.tensor(kept[kind]), rtol=1e-4, atol=1e-5)
