"""Kernels compiled ahead of time, for GPUs that this machine need not have.

The launchers run with a recorder in place of the kernel; what they would launch is then compiled,
in other processes, since this one may interpret its kernels. A variant takes seconds, so not every
product of options is compiled. For sm_90: every pair of width and error dtype, with the gradient
dtypes by turns; every block size, unaligned parts, and rows of the wire that hold a part of the
blocks, with the default options; every width of the other kernels. For sm_80, sm_100 and gfx942:
each kernel, with the error dtype that none of them converts alike (float8) and with a float one.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch

GRADIENT_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
ERROR_DTYPES = (
    torch.float16,
    None,
    torch.float32,
    torch.bfloat16,
    torch.int8,
    torch.float8_e4m3fn,
)
# Files of kernels that are not named after them.
MODULES = {"sum_squares": "drop_spike", "drop_spike": "drop_spike"}
# Kernels that sum over peers, in a loop that is unrolled.
SUMMING = ("unpack_dequantize_reduce", "unpack_reduce_requantize")
SPAWN = multiprocessing.get_context("spawn")
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int64: "*i64",
    torch.float64: "*fp64",
}


@dataclass(frozen=True)
class Variant:
    """One kernel as a launcher would launch it, and the GPU to compile it for."""

    kernel: str
    gradient: torch.dtype = torch.bfloat16
    error: torch.dtype | None = torch.float16
    bits: int = 4
    block_size: int = 256
    aligned: bool = True
    split: bool = False
    add: bool = False
    target: str = "sm_90"

    def __str__(self) -> str:
        gradient, error = (
            str(dtype).removeprefix("torch.") for dtype in (self.gradient, self.error)
        )
        aligned = "aligned" if self.aligned else "unaligned"
        split = "-split" * self.split + "-add" * self.add
        width = f"{self.bits}bit"
        options = f"{width}-{self.block_size}-{aligned}{split}"
        return f"{self.kernel}-{gradient}-{error}-{options}-{self.target}"


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant."""

    variant: Variant
    registers: int
    spilled_bytes: int
    assembly: str
    ttir: str


def compile_variant(variant: Variant) -> Compiled:
    """Compile what the launcher would launch; runs in a process that does not interpret."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, arguments = _record(variant)
    constants = {name for name in arguments if name.isupper()}
    options = {name: arguments.pop(name) for name in set(arguments) - set(kernel.arg_names)}
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if name in constants or value is None:
            signature[name], constexprs[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    target = GPUTarget("cuda", int(variant.target[3:]), 32)
    if variant.target == "gfx942":
        target = GPUTarget("hip", variant.target, 64)
        options = {"num_warps": 2, "enable_fp_fusion": False}
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=target, options=options)
    if target.backend == "hip":
        return _read_amd(variant, compiled)
    return _read_cuda(variant, compiled, Path(triton.__file__).parent)


class _Recorder:
    def __init__(self) -> None:
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **arguments: self.arguments.update(arguments)


def _record(variant: Variant) -> tuple[Any, dict[str, Any]]:
    """The kernel and the arguments by which its launcher launches it."""
    import importlib

    from loco_fsdp.codec.layout import BlockLayout

    module = importlib.import_module(f"loco_kernels.{MODULES.get(variant.kernel, variant.kernel)}")
    name = f"_{variant.kernel}_kernel"
    kernel, recorder = getattr(module, name), _Recorder()
    setattr(module, name, recorder)
    module.device_of = lambda x: nullcontext()

    layout = BlockLayout((1024,), variant.bits, variant.block_size)
    table = layout.place(torch.device("cpu"))
    if variant.split:
        table = table.in_rows(torch.tensor([0, table.num_blocks]))
    wire = torch.zeros(1, layout.bytes_per_shard, dtype=torch.uint8)
    flat = torch.zeros(1, 1024, dtype=variant.gradient)
    error = {}
    if variant.error is not None:
        shape = (1, layout.num_blocks, variant.block_size)
        error["payload"] = torch.zeros(shape, dtype=variant.error)
        error["error_scale"] = torch.zeros(1, layout.num_blocks)
    common = {
        "scales_offset": layout.wire.scales_offset,
        "bits": variant.bits,
        "block_size": variant.block_size,
    }
    columns = (table.starts, table.lengths, table.rows)
    rows = {"row_starts": table.row_starts, "wire_blocks": table.wire.num_blocks}
    stats = {
        "squares": torch.zeros(1, layout.num_blocks, 2),
        "nonfinite": torch.zeros(1, dtype=torch.int64),
    }
    if MODULES.get(variant.kernel) == "drop_spike":
        other = "_sum_squares_kernel" if name == "_drop_spike_kernel" else "_drop_spike_kernel"
        others = getattr(module, other)
        setattr(module, other, _Recorder())
        usual = torch.zeros(6 + module.NUM_PARTS, dtype=torch.float64)
        scale = torch.zeros(1, layout.num_blocks)
        module.drop_spike(stats["squares"], usual, scale, table.rows, limit=10.0, decay=0.99)
        setattr(module, name, kernel)
        setattr(module, other, others)
        return kernel, recorder.arguments
    launch = getattr(module, variant.kernel)
    if variant.kernel == "compensate_quantize_pack":
        launch(flat, wire, *columns, **common, **rows, **stats, **error, aligned=variant.aligned)
    elif variant.kernel == "unpack_dequantize_reduce":
        launch(wire, flat[0], *columns[:2], **common, **rows, aligned=variant.aligned)
    elif variant.kernel == "subtract_quantize_pack":
        common |= {"shard_numel": flat.shape[1], "aligned": variant.aligned}
        launch(flat[0], flat[0], wire, *columns[:2], **common, **stats)
    elif variant.kernel == "unpack_dequantize_rows":
        common |= {"shard_numel": flat.shape[1], "aligned": variant.aligned}
        row = torch.zeros(1, dtype=torch.int64)
        launch(wire, flat, *columns[:2], row, **common, add=variant.add)
    else:
        launch(wire, wire, *columns, **common, **stats, **error)
    setattr(module, name, kernel)
    return kernel, recorder.arguments


def _read_cuda(variant: Variant, compiled: Any, triton_folder: Path) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        cuobjdump = triton_folder / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run(
            [cuobjdump, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", usage)[1])  # type: ignore[index]
        for name in ("REG", "STACK", "LOCAL")
    )
    return Compiled(variant, registers, stack + local, compiled.asm["ptx"], compiled.asm["ttir"])


def _read_amd(variant: Variant, compiled: Any) -> Compiled:
    assembly = compiled.asm["amdgcn"]
    registers, spilled = (
        int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])  # type: ignore[index]
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    return Compiled(variant, registers, spilled, assembly, compiled.asm["ttir"])


def _start(barrier: Barrier | None) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    globals()["_barrier"] = barrier


def compile_into(variant: Variant, cache: Path) -> Compiled:
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    return compile_variant(variant)


def compile_together(variant: Variant, cache: Path) -> Compiled:
    """As `compile_into`, once all processes are here."""
    globals()["_barrier"].wait(timeout=300)
    return compile_into(variant, cache)


def other_processes(num_processes: int, barrier: Barrier | None = None) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(num_processes, SPAWN, initializer=_start, initargs=(barrier,))


DEFAULT = Variant("compensate_quantize_pack")
DIFFERENCE = Variant("subtract_quantize_pack", error=None)
ROWS = Variant("unpack_dequantize_rows", error=None, add=True)
SPIKES = [
    Variant(kernel, torch.float32, torch.float16, target=target)
    for kernel in ("sum_squares", "drop_spike")
    for target in ("sm_90", "sm_80", "gfx942")
]


def variants() -> list[Variant]:
    dtypes = itertools.cycle(GRADIENT_DTYPES)
    pairs = itertools.product(ERROR_DTYPES, (8, 4, 2, 1))
    found = [
        replace(DEFAULT, gradient=next(dtypes), error=error, bits=bits) for error, bits in pairs
    ]
    found += [replace(DEFAULT, gradient=dtype) for dtype in GRADIENT_DTYPES]
    found += [replace(DEFAULT, block_size=size) for size in (32, 64, 128, 512, 1024)]
    found += [replace(DEFAULT, aligned=False)]
    for bits, error in zip((8, 4, 2, 1), ERROR_DTYPES, strict=False):
        found += [
            Variant("unpack_dequantize_reduce", next(dtypes), None, bits),
            Variant("unpack_reduce_requantize", torch.float32, error, bits),
        ]
    splits = [replace(DEFAULT, split=True), replace(DEFAULT, split=True, aligned=False)]
    found += splits
    found += [replace(DEFAULT, split=True, target=target) for target in ("sm_80", "gfx942")]
    found += [replace(variant, kernel="unpack_dequantize_reduce", error=None) for variant in splits]
    for variant in (DIFFERENCE, ROWS):
        found += [replace(variant, gradient=dtype) for dtype in GRADIENT_DTYPES]
        found += [replace(variant, gradient=next(dtypes), bits=bits) for bits in (8, 2, 1)]
        found += [replace(variant, block_size=size) for size in (32, 1024)]
        found += [replace(variant, aligned=False)]
        found += [replace(variant, target=target) for target in ("sm_80", "sm_100", "gfx942")]
    found += [replace(ROWS, add=False)]
    for target, bits in (("sm_80", 4), ("sm_100", 8), ("gfx942", 2)):
        float8 = replace(DEFAULT, error=torch.float8_e4m3fn, bits=bits, target=target)
        found += [
            float8,
            replace(float8, kernel="unpack_reduce_requantize", error=torch.bfloat16, bits=4),
            replace(float8, kernel="unpack_dequantize_reduce", error=None),
        ]
    return list(dict.fromkeys(found + SPIKES))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[Variant, Compiled]:
    cache = tmp_path_factory.mktemp("triton")
    with other_processes(2) as pool:
        results = list(pool.map(compile_into, variants(), itertools.repeat(cache)))
    return {result.variant: result for result in results}


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_every_variant_compiles_and_keeps_to_registers(
    variant: Variant, compiled: dict[Variant, Compiled]
) -> None:
    result = compiled[variant]
    assert result.spilled_bytes == 0
    few = variant.bits >= 4 and variant.aligned and variant.target.startswith("sm_")
    assert result.registers <= (120 if few else 168)


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_gradient_and_error_move_in_vectors(
    dtype: torch.dtype, compiled: dict[Variant, Compiled]
) -> None:
    """Of a thread's 32 elements: 16 bytes at once, or 8 of the narrower of two dtypes."""
    assembly = compiled[replace(DEFAULT, gradient=dtype)].assembly
    loads = Counter(re.findall(r"ld\.global\.v\d\.b32", assembly))
    if dtype.itemsize == 2:
        assert loads == {"ld.global.v4.b32": 8}  # 4 of the gradient, 4 of the error
    else:
        assert loads == {"ld.global.v4.b32": 8, "ld.global.v2.b32": 8}


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES, ids=str)
def test_parameter_and_replica_move_in_vectors(
    dtype: torch.dtype, compiled: dict[Variant, Compiled]
) -> None:
    """Of a thread's 32 elements: 16 bytes at once, also where a replica is updated in place."""
    vectors = 32 * dtype.itemsize // 16
    difference, rows = (
        compiled[replace(variant, gradient=dtype)].assembly for variant in (DIFFERENCE, ROWS)
    )
    assert difference.count("ld.global.v4.b32") == 2 * vectors
    assert rows.count("ld.global.v4.b32") == vectors
    assert rows.count("st.global.v4.b32") == vectors


def test_no_product_of_offsets_is_32_bits_wide(compiled: dict[Variant, Compiled]) -> None:
    """Programs and strides multiply to more than 2**31 on large models."""
    for variant, result in compiled.items():
        types = set(re.findall(r"arith\.muli .* : (\S+) loc", result.ttir))
        if variant.kernel in SUMMING:
            types.discard("i32")  # of the number of peers, when the loop over them is unrolled
        assert types and all(type.rstrip(">").endswith("i64") for type in types), variant


def test_rounding_is_that_of_the_definition(compiled: dict[Variant, Compiled]) -> None:
    """No contraction beyond `tl.fma`, no flush to zero, no approximate division or root.

    Triton 3.5 flushes in divisions and roots, which is harmless: a scale below the normal numbers
    is 0 by definition, and all that is divided beside it is near 1 or larger.
    """
    for variant, result in compiled.items():
        if variant.target.startswith("sm_"):
            assembly = re.sub(r"\b(div|sqrt)\.rn\.ftz", r"\1.rn", result.assembly)
            assert not re.findall(r"\.ftz|\.approx|\bdiv\.full", assembly), variant
    # Of 32 elements: 2 for each quotient, and 1 for each square but those of the first chunk.
    assert compiled[DEFAULT].assembly.count("fma.rn.f32") == 2 * 32 + 2 * 24
    decoded = compiled[Variant("unpack_dequantize_reduce", bits=4, error=None, target="sm_80")]
    assert "fma" not in decoded.assembly
    assert "fma" not in compiled[ROWS].assembly


def test_what_is_usual_is_weighed_in_float64(compiled: dict[Variant, Compiled]) -> None:
    """The weight of 0.99 and the limit are not those nearest in float32."""
    for variant in SPIKES:
        ttir = compiled[variant].ttir
        assert not re.search(r"arith\.(mulf|divf|addf) .* : (tensor<\S*)?f32", ttir)
        if variant.kernel == "drop_spike":
            assert "arith.constant 0.98999999999999999 : f64" in ttir


def test_processes_may_compile_into_one_cache_at_once(tmp_path: Path) -> None:
    """As the ranks of a node do at their first step; a race fails one of them."""
    variant = Variant("unpack_dequantize_reduce", error=None, bits=1)
    with other_processes(4, SPAWN.Barrier(4)) as pool:
        for attempt in range(2):
            caches = itertools.repeat(tmp_path / str(attempt))
            results = list(pool.map(compile_together, [variant] * 4, caches))
            assert len({result.assembly for result in results}) == 1
