"""The operators of torch that run the codec, and the choice of a backend."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from loco_fsdp.codec import (
    BlockLayout,
    BlockTable,
    EncodeStats,
    ErrorState,
    backends,
    choose_backend,
    decode,
    decode_encode,
    eager,
    encode,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
LAYOUT = BlockLayout((70, 3), bits=4, block_size=32)


def tensors(peers: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "gradient": torch.randn(peers, LAYOUT.shard_numel, generator=generator),
        "wire": torch.zeros(peers, LAYOUT.bytes_per_shard, dtype=torch.uint8),
        "table": LAYOUT.place(CPU),
        "stats": EncodeStats(
            torch.zeros(peers, LAYOUT.num_blocks, 2), torch.zeros(1, dtype=torch.int64)
        ),
        "error": ErrorState(
            torch.zeros(peers, LAYOUT.num_blocks, 32, dtype=torch.float16),
            torch.zeros(peers, LAYOUT.num_blocks),
        ),
    }


def test_operators_do_what_eager_does() -> None:
    ours, theirs = tensors(2), tensors(2)
    encode(**ours, beta=0.9, backend="eager")
    eager.encode(**theirs, beta=0.9)
    for name in ("wire", "stats", "error"):
        assert all(map(torch.equal, ours[name], theirs[name]))
    outputs = torch.empty(LAYOUT.shard_numel), torch.empty(LAYOUT.shard_numel)
    decode(ours["wire"], outputs[0], ours["table"], 0.5, backend="eager")
    eager.decode(theirs["wire"], outputs[1], theirs["table"], 0.5)
    assert torch.equal(*outputs)
    middles = tensors(1), tensors(1)
    for middle in middles:
        del middle["gradient"]
    decode_encode(ours["wire"], **middles[0], beta=0.9, factor=0.5, backend="eager")
    eager.decode_encode(theirs["wire"], **middles[1], beta=0.9, factor=0.5)
    for name in ("wire", "stats", "error"):
        assert all(map(torch.equal, middles[0][name], middles[1][name]))


def flat_table(table: BlockTable) -> tuple[Any, ...]:
    columns = table.starts, table.lengths, table.rows, table.row_starts
    return (*columns, LAYOUT.num_blocks, LAYOUT.bits, LAYOUT.block_size, LAYOUT.shard_numel, False)


def flat(arguments: dict[str, Any]) -> tuple[Any, ...]:
    table = arguments["table"]
    return (
        arguments["gradient"],
        arguments["wire"],
        *flat_table(table),
        *arguments["stats"],
        *arguments["error"],
        0.9,
        "eager",
    )


def test_operators_pass_the_checks_of_torch() -> None:
    arguments = tensors(2)
    torch.library.opcheck(torch.ops.loco_fsdp.encode, flat(arguments))
    wire, table = arguments["wire"], arguments["table"]
    head = (wire, torch.empty(LAYOUT.shard_numel), *flat_table(table))
    torch.library.opcheck(torch.ops.loco_fsdp.decode, (*head, 1.0, "eager"))
    middle = tensors(1)
    *rest, beta, backend = flat(middle)[1:]
    torch.library.opcheck(torch.ops.loco_fsdp.decode_encode, (wire, *rest, beta, 1.0, backend))


def test_fake_tensors_go_through() -> None:
    with FakeTensorMode():
        arguments = tensors(2)
        encode(**arguments, beta=0.9, backend="triton")
        decode(arguments["wire"], torch.empty(73), arguments["table"], backend="triton")


def test_auto_picks_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert choose_backend("auto", CPU) == "compiled"
    assert choose_backend("auto", GPU) == "triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_backend("auto", CPU) == "compiled"
    assert choose_backend("auto", GPU) == "eager"


@pytest.fixture
def fresh_warnings() -> Iterator[None]:
    backends._warn_once.cache_clear()
    yield
    backends._warn_once.cache_clear()


@pytest.mark.usefixtures("fresh_warnings")
@pytest.mark.parametrize(
    ("device", "has_triton", "remedy"),
    [
        ("xpu", True, "no kernels"),
        ("mps", True, "no kernels"),
        ("mps", False, "no kernels"),
        ("hpu", True, "no kernels"),
        ("cuda", False, "install Triton"),
    ],
)
def test_auto_is_eager_where_there_are_no_kernels_and_says_so_once(
    device: str,
    has_triton: bool,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Triton on such a device would fail in the first backward."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if has_triton else None)
    for index in (0, 1):
        assert choose_backend("auto", torch.device(device, index)) == "eager"
    (record,) = caplog.records
    assert record.name == "loco_fsdp" and record.levelname == "WARNING"
    assert f"on {device} in eager PyTorch" in record.getMessage()
    assert "many times slower" in record.getMessage() and remedy in record.getMessage()


@pytest.mark.usefixtures("fresh_warnings")
def test_nothing_is_said_where_there_are_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    for name, device in (("auto", CPU), ("auto", GPU), ("eager", torch.device("xpu"))):
        choose_backend(name, device)
    assert not caplog.records


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_triton_elsewhere_than_on_cuda_names_the_remedy(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(ValueError, match=rf'on {device}: use backend="auto" or "eager"'):
        choose_backend("triton", torch.device(device))


def test_a_backend_that_cannot_run_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match='use backend="auto", or set TRITON_INTERPRET=1'):
        choose_backend("triton", CPU)
    with pytest.raises(ValueError, match=r'runs on the CPU.*on cuda: use backend="auto"'):
        choose_backend("compiled", GPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_backend("triton", CPU) == "triton"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install triton"):
        choose_backend("triton", GPU)


def test_everything_but_its_kernels_works_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None  # what import finds if it is not installed
import torch, loco_fsdp, loco_kernels
assert loco_fsdp.quantize(torch.ones(4)).dequantize().tolist() == [1.0] * 4
"""
    subprocess.run([sys.executable, "-c", code], check=True)
