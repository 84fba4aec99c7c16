"""Streams, memory and synchronisation of a reduction: what only shows on a GPU, run on the CPU too
where it means something.

The group is a stand-in whose exchange gives every rank back what it sent: what is under test is
this side of the wire.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from loco_fsdp import LoCoConfig
from loco_fsdp.codec import choose_backend
from loco_fsdp.reduction.notices import Notices
from loco_fsdp.reduction.reduce_scatter import LoCoReduceScatter
from loco_fsdp.reduction.workspace import Workspace

WORLD_SIZE, SHARD_NUMELS = 4, (1000, 24, 513)
SHARD = sum(SHARD_NUMELS)
GROUP: Any = SimpleNamespace(size=lambda: WORLD_SIZE, rank=lambda: 0)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, gpu])]


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An exchange that returns what was sent, on the current stream."""

    def exchange(receive: Tensor, send: Tensor, group: Any) -> None:
        receive.copy_(send)

    monkeypatch.setattr("loco_fsdp.reduction.reduce_scatter.exchange", exchange)
    monkeypatch.setattr("loco_fsdp.reduction.reduce_scatter.remote_peers", lambda *_: 0)
    yield


def reduce_scatter(device: str, config: LoCoConfig) -> LoCoReduceScatter:
    unit: Any = SimpleNamespace(
        name="unit",
        label="unit",
        world_size=WORLD_SIZE,
        process_groups=[],
        spans=None,
        reduce_dtype=torch.float32,
        active=tuple(range(len(SHARD_NUMELS))),
        shard_numels=SHARD_NUMELS,
    )
    backend = choose_backend(config.backend, torch.device(device))
    return LoCoReduceScatter(
        unit,
        config,
        None,
        backend=backend,
        groups=None,
        node_size=1,
        workspace=Workspace(),
        notices=Notices(),
    )


def gradient(device: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(WORLD_SIZE * SHARD, generator=generator).to(device)


def reduce(comm: LoCoReduceScatter, output: Tensor, given: Tensor) -> None:
    comm.reduce(output, given, GROUP, lambda: 1.0, lambda: None)


def run(comm: LoCoReduceScatter, given: Tensor) -> Tensor:
    output = torch.empty(SHARD, device=given.device)
    reduce(comm, output, given)
    return output


@pytest.mark.parametrize("device", DEVICES)
def test_buffers_are_made_once(device: str) -> None:
    comm = reduce_scatter(device, LoCoConfig(block_size=64))

    def addresses() -> list[int]:
        (hop,) = comm.hops
        assert hop.error.state is not None and hop._squares is not None
        buffers = list(comm._workspace._buffers.values())
        return [t.data_ptr() for t in (*hop.error.state, hop._squares, *buffers)]

    run(comm, gradient(device, 0))
    first = addresses()
    assert len(first) == 5
    for step in range(1, 4):
        run(comm, gradient(device, step))
        assert addresses() == first


@pytest.mark.gpu
@gpu
def test_nothing_is_allocated_or_synchronised_from_the_second_step_on() -> None:
    comm = reduce_scatter("cuda", LoCoConfig(block_size=64, reset_interval=3))
    gradients = [gradient("cuda", step) for step in range(6)]
    outputs = [torch.empty(SHARD, device="cuda") for _ in gradients]
    reduce(comm, outputs[0], gradients[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for output, given in zip(outputs[1:], gradients[1:], strict=True):
            reduce(comm, output, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def on_side_stream(make_state: Callable[[LoCoReduceScatter], None]) -> list[Tensor]:
    """Reductions on a busy side stream, while freed memory is overwritten on the default one."""
    comm = reduce_scatter("cuda", LoCoConfig(block_size=64))
    make_state(comm)
    stream = torch.cuda.Stream()
    results = []
    for step in range(50):
        given = gradient("cuda", step)
        output = torch.empty(SHARD, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)
            reduce(comm, output, given)
        given.record_stream(stream)
        output.record_stream(stream)
        del given
        noise = [torch.full((WORLD_SIZE * SHARD,), torch.nan, device="cuda") for _ in range(4)]
        torch.cuda.current_stream().wait_stream(stream)
        results.append(output)
        del noise
    return results


def no_state(_: LoCoReduceScatter) -> None:
    pass


def state_on_the_default_stream(comm: LoCoReduceScatter) -> None:
    """Rows made where a checkpoint would be loaded."""
    (hop,) = comm.hops
    device = torch.device("cuda")
    hop.error.add({index: -(-n // 64) for index, n in enumerate(SHARD_NUMELS)}, device)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("make_state", [no_state, state_on_the_default_stream])
def test_memory_is_used_on_the_stream_it_belongs_to(
    make_state: Callable[[LoCoReduceScatter], None],
) -> None:
    comm = reduce_scatter("cuda", LoCoConfig(block_size=64))
    expected = []
    for step in range(50):
        expected.append(run(comm, gradient("cuda", step)))
        torch.cuda.synchronize()
    for result, right in zip(on_side_stream(make_state), expected, strict=True):
        assert torch.equal(result, right)


@pytest.mark.gpu
@gpu
def test_more_than_two_billion_elements() -> None:
    """Offsets are 64-bit: 2**31 + 128 elements of bfloat16, all but the last 128 zero."""
    from loco_fsdp.codec import BlockLayout, EncodeStats, decode, encode

    numel = 2**31 + 128
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of GPU memory")
    device = torch.device("cuda")
    layout = BlockLayout((numel,), 4, 256)
    table = layout.place(device)
    x = torch.zeros(1, numel, dtype=torch.bfloat16, device=device)
    x[:, -128:] = 7.0
    wire = torch.zeros(1, layout.bytes_per_shard, dtype=torch.uint8, device=device)
    stats = EncodeStats(
        torch.zeros(1, layout.num_blocks, 2, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    encode(x, wire, table, stats, backend="triton")
    x.fill_(1)
    decode(wire, x[0], table, backend="triton")
    assert (x[:, -128:] == 7).all() and (x[:, :128] == 0).all()
    assert x.count_nonzero().item() == 128
