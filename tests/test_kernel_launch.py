"""How kernels are launched: on the device of their tensors, and with no 32-bit offset."""

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton

import loco_kernels
from kernel_cases import Case, Outcome, columns, place_on_wire, rows_of_wire
from loco_kernels.launch import device_of

KERNELS = (
    "compensate_quantize_pack",
    "unpack_dequantize_reduce",
    "unpack_reduce_requantize",
    "subtract_quantize_pack",
    "unpack_dequantize_rows",
)


def launch(kernel: str) -> None:
    case = Case()
    table, outcome = case.table(), Outcome.blank(case, peers=1)
    place, rows = place_on_wire(table), rows_of_wire(table)
    flat = torch.zeros(1, table.shard_numel)
    function = getattr(importlib.import_module(f"loco_kernels.{kernel}"), kernel)
    if kernel == "drop_spike":
        usual, scale = torch.zeros(70, dtype=torch.float64), torch.zeros(1, 8)
        squares = torch.zeros(1, table.num_blocks, 2)
        function(squares, usual, scale, table.rows, limit=10.0, decay=0.99)
    elif kernel == "compensate_quantize_pack":
        function(flat, outcome.wire, *columns(table), **place, **rows, **outcome.keywords())
    elif kernel == "unpack_dequantize_reduce":
        function(outcome.wire, flat[0], table.starts, table.lengths, **place, **rows)
    elif kernel == "subtract_quantize_pack":
        outcome = Outcome.blank(replace(case, error_dtype=None), peers=1)
        place |= {"shard_numel": table.shard_numel, **outcome.keywords()}
        function(flat[0], flat[0], outcome.wire, table.starts, table.lengths, **place)
    elif kernel == "unpack_dequantize_rows":
        place |= {"shard_numel": table.shard_numel, "add": True}
        row = torch.zeros(1, dtype=torch.int64)
        function(outcome.wire, flat, table.starts, table.lengths, row, **place)
    else:
        function(outcome.wire, outcome.wire, *columns(table), **place, **outcome.keywords())


@pytest.mark.parametrize("kernel", ("drop_spike", *KERNELS))
def test_a_launch_is_on_the_device_of_its_tensors(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current device, which a user need not have set."""
    module = importlib.import_module(f"loco_kernels.{kernel}")
    events: list[str] = []

    @contextmanager
    def recorded(x: torch.Tensor) -> Iterator[None]:
        events.append("enter")
        yield
        events.append("exit")

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> "Recorder":
            return self

        def __call__(self, **arguments: object) -> None:
            events.append("launch")

    monkeypatch.setattr(module, "device_of", recorded)
    kernels = [name for name in vars(module) if re.fullmatch("_.*_kernel", name)]
    for name in kernels:
        monkeypatch.setattr(module, name, Recorder())
    launch(kernel)
    assert kernels and events == ["enter", *["launch"] * len(kernels), "exit"]


def test_the_device_of_a_tensor_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextmanager
    def device(index: torch.device) -> Iterator[None]:
        entered.append(index)
        yield

    monkeypatch.setattr(torch.cuda, "device", device)
    with device_of(SimpleNamespace(device=torch.device("cuda:1"))):  # type: ignore[arg-type]
        assert entered == [torch.device("cuda:1")]


def test_a_cpu_tensor_outside_the_interpreter_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(
        RuntimeError, match='on cpu: use backend="compiled", or set TRITON_INTERPRET'
    ):
        device_of(torch.zeros(1))


@pytest.mark.parametrize("kernel", ("blocks", "drop_spike", *KERNELS))
def test_program_ids_are_64_bits_wide_before_any_product(kernel: str) -> None:
    source = importlib.import_module(f"loco_kernels.{kernel}").__file__
    assert source is not None
    with open(source) as file:
        uses = re.findall(r"tl\.program_id\(\d\)(\.to\(tl\.int64\))?", file.read())
    assert all(uses)


def test_the_package_imports_nothing() -> None:
    """So that it can be imported, and found missing nothing, where Triton is not installed."""
    assert loco_kernels.__file__ is not None
    with open(loco_kernels.__file__) as file:
        assert "import" not in file.read()
